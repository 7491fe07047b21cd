"""The largest logits, and the sum by which they are probabilities."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from torch_dflash.ops.lowerable import lowerable


@lowerable
def likeliest(
    logits: Float[Tensor, "B *N V"], scale: Float[Tensor, "B *ones"], most: int
) -> tuple[Float[Tensor, "B *N K"], Int[Tensor, "B *N K"], Float[Tensor, "B *N"]]:
    """The K = min(``most``, V) largest of ``logits`` in falling order, their places, and a sum of all.

    The sum is the logarithm of that of ``exp((logits - the largest) / scale)``, so a value's log-probability
    is ``(value - values[..., :1]) / scale - sum``.

    On a slice `jax_bridge.mesh` gathers each chip's best entries and its sum, all at once.
    """
    values, places = logits.topk(min(most, logits.shape[-1]), dim=-1)
    return values, places, torch.logsumexp((logits - values[..., :1]) / scale, dim=-1)
