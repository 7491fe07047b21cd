"""Formats in which a device keeps weights: pytrees of arrays that programs take as arguments.

A program that is `bound` to weights uses arrays in the shapes that the model names. Where it multiplies with
one, or reads its rows, `stored_as` finds its format, and the format computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import torch
from jaxtyping import Array, Float
from torch import Tensor

from jax_bridge.arrays import own_copy, to_jax
from jax_bridge.weights.padding import OUTPUTS, enlarged, enough_rows, whole_tiles
from torch_dflash.ops.latents import Widths

FEW_ROWS = 16
"""Most rows for which the weight may be the first operand; above this the product is compute-bound."""


@runtime_checkable
class StoredWeight(Protocol):
    """A weight that a device keeps in its own format: a pytree of arrays that programs take as an argument.

    Attributes:
        shape: as the model names it.
        dtype: of the entries that `unwrap` gives.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...

    def unwrap(self) -> jax.Array:
        """The weight in the model's shape; call it where a program uses the weight."""
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


class OfOneArray:
    """A `StoredWeight` whose ``array`` is the weight itself, or another format of it."""

    array: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def unwrap(self) -> jax.Array:
        return plain(self.array)


@partial(jax.tree_util.register_dataclass, data_fields=["array", "bits"], meta_fields=[])
@dataclass(frozen=True, eq=False)
class Readable(OfOneArray):
    """An embedding [V, H] in half precision, and its bits as integers in the same memory, to read rows.

    XLA's CPU compiler has no gather of half-precision numbers: it would convert the whole table at each call.
    """

    array: Any
    bits: Any

    def look_up(self, ids: jax.Array) -> jax.Array:
        """Rows of the embedding."""
        return jax.lax.bitcast_convert_type(jnp.take(self.bits, ids, axis=0), self.dtype)


@partial(jax.tree_util.register_dataclass, data_fields=["up", "down"], meta_fields=[])
@dataclass(frozen=True, eq=False)
class Halved:
    """A weight [heads * (nope + v), R] of latents, kept as W_k [heads, nope, R] and W_v [heads, v, R]."""

    up: Any
    down: Any

    @classmethod
    def shapes(cls, shape: tuple[int, ...], dtype: Any, widths: Widths) -> Halved:
        """The shapes of the two arrays of a weight of ``shape``."""
        heads = shape[0] // (widths.nope + widths.value)
        parts = ((heads, size, widths.rank) for size in (widths.nope, widths.value))
        return cls(*(jax.ShapeDtypeStruct(part, name_of(dtype)) for part in parts))

    @property
    def shape(self) -> tuple[int, ...]:
        heads, nope, rank = self.up.shape
        return heads * (nope + self.down.shape[1]), rank

    @property
    def dtype(self) -> Any:
        return self.up.dtype

    def unwrap(self) -> jax.Array:
        return jnp.concatenate([self.up, self.down], axis=1).reshape(self.shape)


@dataclass(frozen=True, eq=False)
class Multiplier:
    """A linear weight [out, in] with its own `product`.

    ``table``: the plain weight where its rows are read too (a tied head), else None.
    """

    array: Any
    table: Any
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def unwrap(self) -> jax.Array:
        return self.entries().astype(self.dtype) if self.table is None else plain(self.table)

    @classmethod
    def of(cls, tensor: Tensor, table: Any, place: Any = None, dtype: Any = None, leads: bool = False) -> Any:
        """A torch weight [out, in] in this format at ``place`` (JAX's default).

        ``dtype``: of the products. ``leads``: as in `Quantized`.
        """
        raise NotImplementedError

    def entries(self) -> jax.Array:
        """The weight as ``array`` approximates it."""
        return self.array

    def product(self, rows: Float[Array, "N in"]) -> Float[Array, "N out"]:
        """``rows @ weight.T`` in float32."""
        raise NotImplementedError


@partial(jax.tree_util.register_dataclass, data_fields=["array", "table"], meta_fields=["dtype"])
@dataclass(frozen=True, eq=False)
class Cast(Multiplier):
    """Products are computed in the type of ``array``, sums in float32."""

    @classmethod
    def of(
        cls, tensor: Tensor, table: Any, place: Any = None, dtype: Any = None, leads: bool = False
    ) -> Cast:
        return cls(own_copy(tensor, dtype, place), table, name_of(tensor.dtype))

    def product(self, rows: Float[Array, "N in"]) -> Float[Array, "N out"]:
        """``rows @ weight.T`` in float32."""
        rounded = jnp.dtype(self.dtype) != jnp.float32
        return dot(rows.astype(self.array.dtype), self.array, jnp.float32, twice=rounded)


@partial(
    jax.tree_util.register_dataclass, data_fields=["array", "table", "scale"], meta_fields=["dtype", "leads"]
)
@dataclass(frozen=True, eq=False)
class Quantized(Multiplier):
    """``array`` has integers of 8 bits; ``scale`` [out] multiplies them.

    Rows are quantised at each product, each by its largest entry. The sums are integers, so a row's result
    depends neither on the other rows nor on ``leads``: few rows are then the second operand.
    """

    scale: Any
    leads: bool = False

    @classmethod
    def of(
        cls, tensor: Tensor, table: Any, place: Any = None, dtype: Any = None, leads: bool = False
    ) -> Quantized:
        kept = to_jax(by_rows(tensor), device=place)
        return cls(table=table, dtype=name_of(tensor.dtype), leads=leads, **kept)

    def entries(self) -> jax.Array:
        return self.array * self.scale[:, None]

    def product(self, rows: Float[Array, "N in"]) -> Float[Array, "N out"]:
        """``rows @ weight.T`` in float32."""
        rows = rows.astype(jnp.float32)
        top = jnp.max(jnp.abs(rows), axis=1, keepdims=True)
        own = jnp.where(top > 0, top, 1) * (1 / 127)  # XLA divides by a constant in two ways, by the shape
        integers = jnp.round(rows / own).astype(jnp.int8)
        led = self.leads and rows.shape[0] <= FEW_ROWS
        sums = (dot_led if led else dot)(integers, self.array, jnp.int32)
        return sums.astype(jnp.float32) * own * self.scale


def by_rows(tensor: Tensor) -> dict[str, Tensor]:
    """A matrix as integers of 8 bits and a scale for each row, whose largest entry becomes 127."""
    wide = tensor.detach().float().cpu()
    top = wide.abs().amax(dim=1, keepdim=True)
    scale = torch.where(top > 0, top, 1) / 127
    return {"array": torch.round(wide / scale).to(torch.int8), "scale": scale[:, 0]}


Weight = jax.Array | StoredWeight
_bound: ContextVar[dict[int, StoredWeight] | None] = ContextVar("bound", default=None)


def name_of(dtype: torch.dtype) -> str:
    """A torch dtype's name in JAX."""
    return str(dtype).removeprefix("torch.")


def plain(weight: Weight) -> jax.Array:
    """A weight in the model's shape."""
    return weight.unwrap() if isinstance(weight, StoredWeight) else weight


def dot(rows: Array, weight: Array, sums: Any, twice: bool = False) -> Array:
    """``rows`` [N, in] times a weight [out, in], summed in the type ``sums``.

    On some CPUs a product of one row in a narrow type is ten times slower than one of two. ``twice``: also
    pad one float32 row, whose sums have another order when it is alone.
    """
    least = 2 if twice or rows.dtype != jnp.float32 else 1
    count = enough_rows(rows.dtype, rows.shape[0], least)
    size = whole_tiles(rows.dtype, rows.shape[1])
    wide = enlarged(enlarged(rows, 0, count), 1, size)
    whole = enlarged(enlarged(weight, 0, OUTPUTS), 1, size)
    out = jax.lax.dot_general(wide, whole, (((1,), (1,)), ((), ())), preferred_element_type=sums)
    return out[: rows.shape[0], : weight.shape[0]]


def dot_led(rows: Array, weight: Array, sums: Any) -> Array:
    """`dot` with the weight as first operand. The order of its sums differs, which integers do not show."""
    wide = enlarged(rows, 0, max(rows.shape[0], 2))
    out = jax.lax.dot_general(weight, wide, (((1,), (1,)), ((), ())), preferred_element_type=sums)
    # Without the barrier XLA would merge the transpose with the product and swap the operands again.
    return jax.lax.optimization_barrier(out).T[: rows.shape[0]]


def unwrap(params: dict[str, Any]) -> dict[str, Any]:
    """``params`` in the model's shapes; call it inside a loop's body.

    XLA merges the transpose with the product there; outside the loop it would be a copy.
    """
    return {name: plain(leaf) for name, leaf in params.items()}


@contextmanager
def bound(params: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """`unwrap`; while open, `stored_as` knows the format of each of these arrays."""
    arrays = unwrap(params)
    kept = {id(arrays[name]): leaf for name, leaf in params.items() if isinstance(leaf, StoredWeight)}
    token = _bound.set(kept)
    try:
        yield arrays
    finally:
        _bound.reset(token)


def stored_as(array: Any) -> StoredWeight | None:
    """The format of a weight in the program that is being traced; None: a plain array."""
    return (_bound.get() or {}).get(id(array))
