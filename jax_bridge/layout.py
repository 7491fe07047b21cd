"""How a weight lies in device memory: chosen where it is put there, once for all engines.

torch keeps a linear layer's weight as [out, in]. XLA's CPU products of two and more rows in float32 are
faster with [in, out] (`benchmarks/weight_layout.py`). A weight that is kept so is a `Turned`: programs take
it as it is and see its transpose, so shapes and names stay those of the model. XLA's own array layouts
would do without this class, but its CPU compiler copies such arguments into the usual order on every call.

On a TPU they are the means: a matrix lies there by rows, as torch keeps it, and programs take it so.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import torch
from jax.experimental.layout import Format, Layout
from jax.sharding import Sharding
from torch import nn


@partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=[])
@dataclass(frozen=True, eq=False)
class Turned:
    """A weight [out, in] kept as ``array`` [in, out]."""

    array: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in], as the model names it."""
        return self.array.shape[::-1]

    @property
    def dtype(self) -> Any:
        """Of its entries."""
        return self.array.dtype


Weight = jax.Array | Turned


def linear_weights(module: nn.Module, head: nn.Module | None) -> frozenset[str]:
    """Names of the weights that may be turned: those of linear layers.

    Not the output head's: a prompt's last chunk and plain decoding multiply it with one row, where [out, in]
    is as fast or faster, and where it is tied the embedding reads its rows.
    """
    linear = ((name, part) for name, part in module.named_modules() if isinstance(part, nn.Linear))
    tied = None if head is None else head.weight
    return frozenset(f"{name}.weight" for name, part in linear if part.weight is not tied)


def pays(dtype: torch.dtype, device: Any) -> bool:
    """Whether a linear weight of ``dtype`` is faster turned on ``device``; measured for CPUs alone.

    In bfloat16 it is not: a product of one row becomes tens of times slower there.
    """
    return device.platform == "cpu" and dtype == torch.float32


def rows_format(place: Sharding) -> Format:
    """Of a matrix at ``place``: each row in one piece."""
    return Format(Layout(major_to_minor=(0, 1)), place)


def by_rows(array: Any) -> jax.Array:
    """A matrix on a TPU laid by rows; anything else as it is.

    Left to itself, XLA lays a matrix by columns there where that needs less padding (gpt-oss: 2,880 is no
    multiple of 128), and programs begin with a copy of it the other way round.
    """
    elsewhere = any(device.platform != "tpu" for device in array.sharding.device_set)
    if elsewhere or array.ndim != 2 or array.format.layout.major_to_minor == (0, 1):
        return array
    return jax.device_put(array, rows_format(array.sharding))


def upright(params: dict[str, Any]) -> dict[str, Any]:
    """``params`` in the shapes the model names. To be called inside of a loop's body.

    There XLA merges the transpose with the product; outside of the loop it would be a copy.
    """
    return {name: leaf.array.T if isinstance(leaf, Turned) else leaf for name, leaf in params.items()}
