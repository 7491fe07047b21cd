"""torch_dflash lowered through torchax into one XLA program, and what exists only on that side.

Imports torch_dflash; that reaches it behind ``runtime="xla"`` alone, and in the commands made for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from jax_bridge import _torchax as _torchax  # first: says which versions work together
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
        """``aot`` comes when it is asked for: it imports the lowerings, which start JAX's platform."""
        if name == "aot":
            return import_module("jax_bridge.aot")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
