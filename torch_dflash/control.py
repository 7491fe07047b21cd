"""Control flow that both runtimes understand: a branch on data, and a loop over chunks of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.checkpoint import checkpoint


def branch(condition: Tensor, then: Callable, otherwise: Callable, *operands: Tensor) -> Any:
    """``then(*operands)`` if the scalar ``condition`` holds, else ``otherwise(*operands)``.

    Eagerly this reads one scalar. Under XLA `jax_bridge.ops` makes it a device-side conditional, of
    which only the chosen side runs; both sides must return tensors of the same shapes and dtypes.
    """
    if has_torch_function((condition, *operands)):
        return handle_torch_function(branch, (condition, *operands), condition, then, otherwise, *operands)
    return then(*operands) if bool(condition) else otherwise(*operands)


def chunked(step: Callable, size: int, *rows: Tensor) -> tuple[Tensor, ...]:
    """``step`` over ``rows`` [R, ...] in chunks of ``size``; inner values are recomputed in the backward.

    For steps that are independent per row and much larger inside than outside (logits over a vocabulary).
    ``step`` returns a tuple of tensors [r, ...]; so does this, joined along the rows.
    """
    if has_torch_function(rows):
        return handle_torch_function(chunked, rows, step, size, *rows)
    outputs = [
        checkpoint(step, *piece, use_reentrant=False)
        for piece in zip(*(tensor.split(size) for tensor in rows), strict=True)
    ]
    return tuple(torch.cat(pieces) for pieces in zip(*outputs, strict=True))
