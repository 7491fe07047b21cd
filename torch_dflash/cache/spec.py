"""What a layer of the target needs from its cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerSpec:
    """One target layer's cache needs, as seen in a traced forward (`torch_dflash.target.trace.trace_layers`).

    ``kind``: "attention" where the cached rows are what is attended to, "latent" where the model expands
    what it has cached (multi-head latent attention).
    """

    kind: str
    heads: int
    k_dim: int
    v_dim: int
    window: int | None
