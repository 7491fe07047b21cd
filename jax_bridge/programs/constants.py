"""Tensors that a forward takes from outside its parameters, such as a hook's vector, as constants."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torchax.tensor import Tensor as Traced
from torchax.view import View

from jax_bridge._torchax import environment
from jax_bridge.arrays import to_numpy


class Constants(TorchFunctionMode):
    """While open, a torch tensor that meets traced ones becomes a constant of the program.

    The engine compiles anew when such a tensor is written or replaced (`torch_dflash.targets.guard`).

    Raises:
        ValueError: the tensor is a weight or of a tensor subclass: later changes would not be seen.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _is_plain_beside_traced(args, kwargs):
            args, kwargs = pytree.tree_map_only(torch.Tensor, _constant, (args, kwargs))
        return func(*args, **kwargs)


def _is_plain_beside_traced(args: Any, kwargs: Any) -> bool:
    traced = plain = False
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Traced | View):
            traced = True
        elif isinstance(leaf, torch.Tensor):
            plain = True
    return traced and plain


def _constant(leaf: torch.Tensor) -> Any:
    if isinstance(leaf, Traced | View):
        return leaf
    if type(leaf) is not torch.Tensor:
        raise ValueError(
            f"runtime='xla': a forward reads a {type(leaf).__name__} {tuple(leaf.shape)} that is no "
            "parameter or buffer of the target (a closure over another module?); later changes of it would "
            "not be seen. Register it in the module, or pass runtime='eager'."
        )
    return environment().j2t_iso(jnp.asarray(to_numpy(leaf)))
