"""An independent pure-JAX forward of the DFlash v1 drafter, for comparison only.

It shares no code with ``torch_dflash`` and uses neither torch nor torchax, so an error common to
the eager and the lowered drafter still shows as a difference from this one. It favours being
checkable over being fast: the cache grows by concatenation and every new length recompiles.

Method: DFlash, arXiv 2602.06036, with the mask and output switches that published checkpoints
added since. DFlash2 checkpoints (convolutions, candidate selector) are refused by name.

Shapes: B batch, W block width (anchor included), S context rows, H hidden, Q query heads, G kv
heads, D head dim, V vocab, n tapped target layers.
"""

from jax_bridge.reference.checkpoint import load, load_target
from jax_bridge.reference.config import DrafterConfig, LayerMask, default_taps
from jax_bridge.reference.drafter import forward, logits, noise_embeddings
from jax_bridge.reference.loop import Models, State, Weights, decode, decode_round, start

__all__ = [
    "DrafterConfig",
    "LayerMask",
    "default_taps",
    "forward",
    "load",
    "logits",
    "noise_embeddings",
]
