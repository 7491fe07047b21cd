"""``torch.autocast`` in a model's own forward on meta and JAX devices, which torch does not support."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_UNKNOWN = ("meta", "jax")
_patching = threading.RLock()


class TurnsAutocastOn(ValueError):
    """A forward opens ``torch.autocast`` itself."""


@contextmanager
def uncast() -> Iterator[None]:
    """While open, this thread may call ``torch.autocast(x.device.type, enabled=False)`` for any device.

    Rotary embeddings of many modelling files turn autocast off this way.

    Raises:
        TurnsAutocastOn: inside, where a forward turns autocast on.
    """
    kind, here = torch.autocast, threading.get_ident()
    with _patching:
        init, enter = kind.__init__, kind.__enter__

        def made(self: Any, device_type: str, *args: Any, **more: Any) -> None:
            if threading.get_ident() == here and device_type in _UNKNOWN:
                enabled = args[1] if len(args) > 1 else more.pop("enabled", True)
                if enabled:
                    _refuse()
                device_type, args, more = "cpu", (), {"enabled": False}
            init(self, device_type, *args, **more)

        def entered(self: Any) -> Any:
            if threading.get_ident() == here and self._enabled:
                _refuse()
            return enter(self)

        kind.__init__, kind.__enter__ = made, entered
        try:
            yield
        finally:
            kind.__init__, kind.__enter__ = init, enter


def _refuse() -> None:
    raise TurnsAutocastOn(
        "its forward turns torch.autocast on, which is not supported there; cast the model instead "
        "(model.to(torch.bfloat16)). Where accelerate prepared it, call accelerator.unwrap_model(model, "
        "keep_fp32_wrapper=False) first."
    )
