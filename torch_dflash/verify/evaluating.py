"""A live model in evaluation mode, in one thread alone: its modules are not written to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_patching = threading.RLock()
_here = threading.local()
torch_module: Any = nn.Module


class _Mode:
    """``training`` of every module, as its modules hold it; False in a thread that is `evaluating`."""

    def __get__(self, module: Any, kind: type) -> Any:
        if module is None or "training" not in vars(module):  # TorchScript keeps it elsewhere
            raise AttributeError("training")
        return vars(module)["training"] and not getattr(_here, "evaluates", False)

    def __set__(self, module: Any, mode: bool) -> None:
        vars(module)["training"] = mode


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """While open, this thread sees every module in evaluation mode; others see the mode that it is in."""
    if not any(part.training for part in model.modules()):
        yield
        return
    with _patching:
        torch_module.training = _Mode()
        _here.evaluates = True
        try:
            yield
        finally:
            _here.evaluates = False
            del torch_module.training
