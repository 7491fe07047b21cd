"""A skeleton that runs with given weights in the place of its own, one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torch_dflash.guards.reentry import holding


class Swapped:
    """Puts weights into the modules of ``root``, runs them and takes the weights out again.

    Args:
        root: holds no weights of its own (meta tensors).

    Attributes:
        lock: held while a call runs.
    """

    def __init__(self, root: nn.Module):
        self.lock = threading.Lock()
        self._own = [(store, dict(store)) for part in root.modules() for store in _stores_of(part)]
        # torch's functional_call looks for tied weights anew in each call: 3 ms of a step of four layers.
        self._places: dict[str, list[tuple[dict[str, Any], str]]] = {}
        tied: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for path, part in root.named_modules(remove_duplicate=False):
            for store in _stores_of(part):
                for key in [key for key, tensor in store.items() if tensor is not None]:
                    places = tied.setdefault(id(store[key]), [])
                    places.append((store, key))
                    self._places[f"{path}.{key}" if path else key] = places

    def call(self, root: Callable, weights: dict[str, Tensor], args: tuple) -> Any:
        """``root(*args)`` with ``weights``, without gradients.

        Raises:
            RuntimeError: user code inside of a call asks for another one.
        """
        with holding(self.lock), torch.no_grad():
            try:
                for name, tensor in weights.items():
                    for store, key in self._places[name]:
                        put(store, key, tensor)
                out = root(*args)
                for name in weights:  # a forward may put another one in its place
                    store, key = self._places[name][0]
                    weights[name] = store[key]
                return out
            finally:
                try:
                    self._take_out()
                except BaseException:  # Ctrl-C here would leave the user's weights, and keep them alive
                    self._take_out()
                    raise

    def _take_out(self) -> None:
        for store, own in self._own:
            for key, tensor in own.items():
                put(store, key, tensor)


def put(store: dict[str, Any], key: str, tensor: Tensor | None) -> None:
    """One weight into a module's own dictionary."""
    store[key] = tensor


def _stores_of(part: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return part._parameters, part._buffers
