"""`lowerable`: an operation that other kinds of tensors may implement themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

OPERATIONS: list[Callable] = []
"""Every lowerable operation; a backend implements these, as `jax_bridge.ops` does."""


def lowerable(plain: Callable) -> Callable:
    """Let the first tensor among the positional arguments choose ``plain`` or the form of its type.

    ``operation.plain`` is the decorated function, for every type of tensor.
    """

    @wraps(plain)
    def operation(*args: Any, **kwargs: Any) -> Any:
        chooser = (_first_tensor(args),)
        if has_torch_function(chooser):
            return handle_torch_function(operation, chooser, *args, **kwargs)
        return plain(*args, **kwargs)

    operation.plain = plain  # pyright: ignore[reportAttributeAccessIssue]
    OPERATIONS.append(operation)
    return operation


def _first_tensor(args: tuple) -> Any:
    for arg in args:
        while isinstance(arg, tuple) and arg:
            arg = arg[0]
        if isinstance(arg, Tensor):
            return arg
    return None
