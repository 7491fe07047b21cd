"""How a weight lies in device memory: chosen where it is put there, once for all engines.

torch keeps a linear layer's weight as [out, in]. XLA's CPU products of two and more rows in float32 are
faster with [in, out] (`benchmarks/weight_layout.py`). A weight that is kept so is `Transposed`: programs take
it as it is and `unwrap` it, so shapes and names stay those of the model. XLA's own array layouts would do
without this class, but its CPU compiler copies such arguments into the usual order on every call.

On a TPU they are the means: a matrix lies there by rows, as torch keeps it, and programs take it so.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import torch
from jax.experimental.layout import Format, Layout
from jax.sharding import Sharding
from torch import nn


@runtime_checkable
class StoredWeight(Protocol):
    """A weight that a device keeps in a form of its own: a pytree of arrays, which programs take as it is.

    Attributes:
        shape: as the model names it.
        dtype: of the entries that `unwrap` gives.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...

    def unwrap(self) -> jax.Array:
        """The weight in the shape the model names. To be called where a program uses it."""
        ...


@partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=[])
@dataclass(frozen=True, eq=False)
class Transposed:
    """A weight [out, in] kept as ``array`` [in, out]."""

    array: Any  # a jax.Array, or what JAX puts in its place while it traces

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape[::-1]

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def unwrap(self) -> jax.Array:
        return self.array.T


Weight = jax.Array | StoredWeight


def linear_weights(module: nn.Module, head: nn.Module | None) -> frozenset[str]:
    """Names of the weights that may be transposed: those of linear layers.

    Not the output head's: a prompt's last chunk and plain decoding multiply it with one row, where [out, in]
    is as fast or faster, and where it is tied the embedding reads its rows.
    """
    linear = ((name, part) for name, part in module.named_modules() if isinstance(part, nn.Linear))
    tied = None if head is None else head.weight
    return frozenset(f"{name}.weight" for name, part in linear if part.weight is not tied)


def transpose_pays(dtype: torch.dtype, device: Any) -> bool:
    """Whether a linear weight of ``dtype`` is faster transposed on ``device``; measured for CPUs alone.

    In bfloat16 it is not: a product of one row becomes tens of times slower there.
    """
    return device.platform == "cpu" and dtype == torch.float32


def row_major_format(place: Sharding) -> Format:
    """Of a matrix at ``place``: each row in one piece."""
    return Format(Layout(major_to_minor=(0, 1)), place)


def row_major(array: Any) -> jax.Array:
    """A matrix on a TPU laid by rows; anything else as it is.

    Left to itself, XLA lays a matrix by columns there where that needs less padding (gpt-oss: 2,880 is no
    multiple of 128), and programs begin with a copy of it the other way round.
    """
    elsewhere = any(device.platform != "tpu" for device in array.sharding.device_set)
    if elsewhere or array.ndim != 2 or array.format.layout.major_to_minor == (0, 1):
        return array
    return jax.device_put(array, row_major_format(array.sharding))


def unwrap(params: dict[str, Any]) -> dict[str, Any]:
    """``params`` in the shapes the model names. To be called inside of a loop's body.

    There XLA merges the transpose with the product; outside of the loop it would be a copy.
    """
    return {name: leaf.unwrap() if isinstance(leaf, StoredWeight) else leaf for name, leaf in params.items()}
