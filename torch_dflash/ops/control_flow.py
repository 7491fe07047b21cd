"""Control flow for both runtimes: a branch on data, loops over trips and chunks, a call of the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torch_dflash.ops.lowerable import lowerable


@lowerable
def branch(condition: Tensor, then: Callable, otherwise: Callable, *operands: Any) -> Any:
    """``then(*operands)`` if the scalar ``condition`` holds, else ``otherwise(*operands)``.

    Operands are tensors or pytrees of them. Eagerly this reads one scalar. Under XLA `jax_bridge.ops` lowers
    it to a conditional on the device, and only the chosen side runs; both sides must return tensors of the
    same shapes and dtypes.
    """
    return then(*operands) if bool(condition) else otherwise(*operands)


@lowerable
def repeat(step: Callable, trips: int, *carried: Any) -> Any:
    """``carried`` after ``trips`` calls of ``carried = step(number, *carried)``; numbers begin at 0.

    Values are tensors or pytrees of them, whose shapes and dtypes stay. Under XLA the program holds ``step``
    once, in a loop on the device, and the number is a tensor.
    """
    for number in range(trips):
        carried = step(number, *carried)
    return carried


@lowerable
def chunked(step: Callable, size: int, *rows: Tensor, recompute: bool = False) -> tuple[Tensor, ...]:
    """``step`` over ``rows`` [R, ...] in chunks of ``size``; inner values exist for one chunk at a time.

    For steps that are independent per row and have large inner values (logits over a vocabulary). ``step``
    returns a tuple of tensors [r, ...], which are joined along the rows. Gradients flow through outputs of
    one number a row, and to ``rows`` alone; with ``recompute`` also to the weights that ``step`` closes
    over, and the inner values are computed a second time.
    """
    pieces = list(zip(*(tensor.split(size) for tensor in rows), strict=True))
    if recompute:
        outputs = [
            checkpoint(step, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces
        ]
    else:
        outputs = [_Chunk.apply(step, *piece) for piece in pieces]
    return tuple(torch.cat(pieces) for pieces in zip(*outputs, strict=True))


class _Chunk(torch.autograd.Function):
    """A chunk whose rows' gradients are computed in the forward, while the inner values exist.

    A row's outputs depend on that row alone, so the gradient of a row is its own gradient times the gradient
    of its output: the backward computes nothing a second time.
    """

    @staticmethod
    def forward(ctx, step, *rows):
        needed = ctx.needs_input_grad[1:]
        with torch.set_grad_enabled(any(needed)):
            given = [row.detach().requires_grad_(need) for row, need in zip(rows, needed, strict=True)]
            outputs = step(*given)
            wanted = [row for row, need in zip(given, needed, strict=True) if need]
            live = [k for k, output in enumerate(outputs) if output.requires_grad]
            saved = []
            for k in live:
                saved += torch.autograd.grad(outputs[k].sum(), wanted, retain_graph=k != live[-1])
        ctx.needed, ctx.live = needed, live
        ctx.save_for_backward(*saved)
        outputs = tuple(output.detach() for output in outputs)
        ctx.mark_non_differentiable(*(output for k, output in enumerate(outputs) if k not in live))
        return outputs

    @staticmethod
    def backward(ctx, *given):
        saved, count = ctx.saved_tensors, sum(ctx.needed)
        sums: list[Any] = [None] * count
        for place, k in enumerate(ctx.live):
            for i, gradient in enumerate(saved[place * count : (place + 1) * count]):
                flow = gradient * given[k].view(-1, *[1] * (gradient.ndim - 1)).to(gradient.dtype)
                sums[i] = flow if sums[i] is None else sums[i] + flow
        found = iter(sums)
        return None, *(next(found) if need else None for need in ctx.needed)


@lowerable
def on_host(*given: Tensor, function: Callable[..., Any], shape: tuple[int, ...]) -> Tensor:
    """Call ``function`` on the host: numpy arrays of ``given`` -> an int32 array of ``shape``.

    ``function`` must be pure: a compiled program may call it again, or not at all where nothing reads its
    result.
    """
    found = function(*(tensor.numpy(force=True) for tensor in given))
    assert found.shape == shape, f"{function} made {found.shape}, not {shape}"
    return torch.from_numpy(found).to(given[0].device)
