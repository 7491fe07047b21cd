"""Runs a skeleton with given weights, as `functional_call` does, with tied weights found once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torch_dflash.guards.reentry import holding


class BoundWeights:
    """Binds weights to the modules of ``root`` for the time of a call, one thread at a time.

    Args:
        root: a module without weights (meta tensors).

    Attributes:
        lock: held during a call.
    """

    def __init__(self, root: nn.Module):
        self.lock = threading.Lock()
        self._own = [(store, dict(store)) for part in root.modules() for store in _stores_of(part)]
        # torch's functional_call searches for tied weights in each call: 3 ms of a step of four layers.
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
            RuntimeError: user code inside a call starts another one.
        """
        with holding(self.lock), torch.no_grad():
            try:
                for name, tensor in weights.items():
                    for store, key in self._places[name]:
                        store[key] = tensor
                out = root(*args)
                for name in weights:  # a forward may have replaced one
                    store, key = self._places[name][0]
                    weights[name] = store[key]
                return out
            finally:
                try:
                    self._unbind()
                except BaseException:  # Ctrl-C here would leave the weights bound, and alive
                    self._unbind()
                    raise

    def _unbind(self) -> None:
        for store, own in self._own:
            store.update(own)


def _stores_of(part: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return part._parameters, part._buffers
