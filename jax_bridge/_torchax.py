"""torchax with a helpful import error, and traces that layers share.

`once` traces an operation once per program instead of once per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch

TESTED = "torchax==0.0.14.dev20261026"
"""The newest nightly that was tested, and pyproject.toml's upper bound."""

try:
    import jax
    import torchax
    from torchax import device_module, interop
    from torchax.interop import call_jax
except ModuleNotFoundError as error:
    raise ImportError(
        f"runtime='xla' needs jax and torchax ({error}): pip install jax \"{TESTED}\". Without them pass "
        "runtime='eager'."
    ) from error
except Exception as error:  # 0.0.13 fails with AttributeError from deep inside, not ImportError
    raise ImportError(
        f"torchax does not import with torch {torch.__version__} ({type(error).__name__}: {error}). torchax "
        f'0.0.13 fails on torch >= 2.13; this one works: pip install "{TESTED}".'
    ) from error

# torchax registers as torch's accelerator and reports a device. torch then asks for streams. No jax device
# has any: torch.compile fails, and since torch 2.15 every optimizer does.
device_module.is_available = lambda: False

environment = torchax.default_env


def call_torch(step: Any, *given: Any) -> Any:
    """torchax's ``call_torch``. Also ends a torch mode that Ctrl-C has left open in torchax."""
    functions, dispatches = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    try:
        return interop.call_torch(step, *given)
    finally:
        while torch._C._len_torch_function_stack() > functions:
            torch._C._pop_torch_function_stack()
        while torch._C._len_torch_dispatch_stack() > dispatches:
            torch._C._pop_torch_dispatch_stack(None)


_known: ContextVar[dict[Any, Callable] | None] = ContextVar("known", default=None)


@contextmanager
def sharing() -> Iterator[None]:
    """While open, `once` shares traces; they end with it."""
    token = _known.set({})
    try:
        yield
    finally:
        _known.reset(token)


def once(function: Callable, *args: Any, **static: Any) -> Any:
    """``function(*args, **static)``, for a pure function of JAX arrays and hashable ``static``.

    Calls with equal shapes, dtypes and ``static`` share one trace: a function in the program that XLA inlines
    at each call.
    """
    known = _known.get()
    if known is None:
        return function(*args, **static)
    key = function, tuple(sorted(static.items()))
    if key not in known:
        known[key] = jax.jit(partial(function, **static))
    return known[key](*args)


__all__ = ["call_jax", "call_torch", "environment", "once", "sharing", "torchax"]
