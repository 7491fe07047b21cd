"""DFlash in pure JAX, for comparison only: drafter, Llama and Qwen3 targets, greedy loop.

The reference shares no code with ``torch_dflash`` and uses neither torch nor torchax: an error common to the
eager and the lowered path shows as a difference from the reference, and so does the cost of lowering.
``forward`` is the drafter on a cache that grows by concatenation: easy to check, not fast. ``decode_round``
is a whole round on static arrays in the layout of ``torch_dflash``; the target's cache may also be pages,
from ``empty_pages``.

Method: DFlash, arXiv 2602.06036, with the mask and output switches that published checkpoints
added since, and DFlash2's convolutions and candidate selector.

Shapes: B batch, W block width (anchor included), S context rows, H hidden, Q query heads, G kv
heads, D head dim, V vocab, n tapped target layers.
"""

from jax_bridge.reference.checkpoint import load_drafter, load_target
from jax_bridge.reference.config import DrafterConfig, LayerMask, default_taps
from jax_bridge.reference.drafter import forward, logits, noise_embeddings
from jax_bridge.reference.loop import Models, PairParams, State, decode, decode_round, start
from jax_bridge.reference.paged import PagedLayer, empty_pages

__all__ = [
    "DrafterConfig",
    "LayerMask",
    "Models",
    "PagedLayer",
    "PairParams",
    "State",
    "decode",
    "decode_round",
    "default_taps",
    "empty_pages",
    "forward",
    "load_drafter",
    "load_target",
    "logits",
    "noise_embeddings",
    "start",
]
