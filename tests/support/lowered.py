"""A torch function as XLA computes it."""

from collections.abc import Callable

import jax
import torch

import jax_bridge as jb
from jax_bridge._torchax import call_torch


def lowered(function: Callable, rows: torch.Tensor) -> torch.Tensor:
    return jb.to_torch(jax.jit(lambda rows: call_torch(function, rows))(jb.to_jax(rows)))
