"""Mixed precision of lowered torch code: products in bfloat16, other operations in their own types."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torch_dflash.ops.control_flow import chunked

# The operations that torch's autocast casts, as far as the drafter uses them. torchax's autocast knows only
# the operators that they decompose into, and never sees those.
PRODUCTS = {
    torch.nn.functional.linear,
    torch.matmul,
    torch.bmm,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.Tensor.bmm,
}


class Bfloat16Products(TorchFunctionMode):
    """Casts float32 inputs of products to bfloat16, as ``torch.autocast`` does; results are bfloat16 too.

    Weights and their gradients stay float32 outside. Norms, the residual stream, softmaxes and losses are
    float32: they compute in it, or promote a product's bfloat16 result with a float32 operand.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        kwargs = kwargs or {}
        if func is chunked:
            # Its step runs later, when this mode is not on the stack.
            step, *rest = args
            args = (self._inside(step), *rest)
        elif func in PRODUCTS:
            args = tuple(map(_lowered, args))
            kwargs = {name: _lowered(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)

    def _inside(self, step):
        def run(*rows):
            with self:
                return step(*rows)

        return run


def _lowered(value: Any) -> Any:
    floats = isinstance(value, torch.Tensor) and value.dtype == torch.float32
    return value.to(torch.bfloat16) if floats else value
