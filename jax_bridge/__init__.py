"""The XLA runtime of torch_dflash: its steps lowered through torchax into XLA programs.

It imports torch_dflash. torch_dflash imports it only for ``runtime="xla"`` and in the commands made for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from jax_bridge import _torchax as _torchax  # first: its error names versions that work together
from jax_bridge.arrays import to_jax as to_jax
from jax_bridge.arrays import to_torch as to_torch
from jax_bridge.checkpoints.load import DeviceModel as DeviceModel
from jax_bridge.checkpoints.load import load as load
from jax_bridge.state import state_to_jax as state_to_jax
from jax_bridge.state import state_to_torch as state_to_torch

if TYPE_CHECKING:
    from jax_bridge import aot as aot
else:  # out of type checkers' sight, so that they report a mistyped name

    def __getattr__(name: str):
        """Imports ``aot`` on first use: it imports the lowerings, and these start JAX's platform."""
        if name == "aot":
            return import_module("jax_bridge.aot")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
