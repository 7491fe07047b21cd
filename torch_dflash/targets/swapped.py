"""A skeleton that runs with given weights in the place of its own, one thread at a time."""

from __future__ import annotations

import threading
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
        stores: list[dict[str, Any]] = [
            store for part in root.modules() for store in (part._parameters, part._buffers)
        ]
        self._own = [(store, dict(store)) for store in stores]

    def call(self, root: nn.Module, weights: dict[str, Tensor], args: tuple) -> Any:
        """``root(*args)`` with ``weights``, without gradients.

        Raises:
            RuntimeError: user code inside of a call asks for another one.
        """
        with holding(self.lock), torch.no_grad():
            try:
                return torch.func.functional_call(root, weights, args)
            except BaseException:
                # Ctrl-C inside of the swap would leave the user's weights here, and keep them alive.
                for store, own in self._own:
                    store.update(own)
                raise
