"""Linear weights kept as codes and scales, off the CPU: rows stay as they are, and a scale multiplies sums.

Multiplied into the weight a scale would make XLA write the weight anew in the rows' type, which moves more
bytes than the codes save.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int
from torch import Tensor

from jax_bridge.arrays import default_device, to_jax
from jax_bridge.weights.formats import Multiplier, by_rows, dot, name_of
from jax_bridge.weights.products import layer_of, stacked_linear_jax, stacked_sums

FEW_ROWS = 64
"""Most rows of a prompt's chunk whose sums are scaled block by block: they are float32 for each block of the
input, so that more rows would move more bytes than the weight in the rows' type does."""
GROUP = 32
"""Inputs of an expert that share a scale in MXFP4, and in Kimi-K2.5's int4."""
_prompt: ContextVar[bool] = ContextVar("prompt", default=False)


@contextmanager
def reading_prompts() -> Iterator[None]:
    """While open, what is traced reads prompts. A round never changes its form with its rows."""
    token = _prompt.set(True)
    try:
        yield
    finally:
        _prompt.reset(token)


def reads_prompts() -> bool:
    """Whether what is traced reads prompts (`reading_prompts`)."""
    return _prompt.get()


@partial(jax.tree_util.register_dataclass, data_fields=["array", "table", "scale"], meta_fields=["dtype"])
@dataclass(frozen=True, eq=False)
class Scaled(Multiplier):
    """``array`` has codes of 8 bits, integers or floats; ``scale`` [out] multiplies the sums.

    Rows that are looked up, as of a tied embedding, are codes and scales, too: there is no ``table``.
    """

    scale: Any

    @classmethod
    def of(
        cls, tensor: Tensor, table: Any, place: Any = None, dtype: Any = None, leads: bool = False
    ) -> Scaled:
        return cls(table=None, dtype=name_of(tensor.dtype), **to_jax(by_rows(tensor), device=place))

    @classmethod
    def shapes(cls, shape: tuple[int, ...], dtype: torch.dtype) -> Scaled:
        """The shapes of `of` for a weight [out, in] of ``dtype``."""
        codes = jax.ShapeDtypeStruct(shape, jnp.int8)
        return cls(codes, None, name_of(dtype), jax.ShapeDtypeStruct(shape[:1], jnp.float32))

    def specs(self, spec: P) -> Scaled:
        """The spec of each array of a weight that is cut by ``spec`` [out, in]: scales go with outputs."""
        return replace(self, array=spec, scale=P(*spec[:1]))

    def entries(self) -> jax.Array:
        return self.array.astype(jnp.float32) * self.scale[:, None]

    def look_up(self, ids: jax.Array) -> jax.Array:
        """Rows of the weight."""
        codes = jnp.take(self.array, ids, axis=0).astype(jnp.float32)
        rows = codes * jnp.take(self.scale, ids, axis=0)[..., None]
        return rows.astype(self.dtype)

    def product(self, rows: Float[Array, "N in"]) -> Float[Array, "N out"]:
        """``rows @ weight.T`` in float32."""
        codes = self.array.astype(rows.dtype)  # exact; XLA merges the cast with the product

        def padded(rows: Array, codes: Array) -> Array:
            return dot(rows, codes, jnp.float32, twice=True)

        def as_it_is(rows: Array, codes: Array) -> Array:
            return jnp.einsum("ra,oa->ro", rows, codes, preferred_element_type=jnp.float32)

        return jax.lax.platform_dependent(rows, codes, cpu=padded, default=as_it_is) * self.scale


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["array", "table", "scale"],
    meta_fields=["dtype", "outputs"],
)
@dataclass(frozen=True, eq=False)
class Blocks(Multiplier):
    """``array`` [in / b, b, out] has codes of 8 or 4 bits, ``scale`` [in / b, out / outputs] one a block.

    The codes lie so because XLA lays [out, in] anew in every pass on some chips. The last block of outputs
    may be short.
    """

    scale: Any
    outputs: int

    @classmethod
    def shapes(cls, shape: tuple[int, ...], dtype: torch.dtype, block: tuple[int, int]) -> Blocks:
        """The shapes of `of_codes` for FP8 codes [out, in] with a scale for each whole ``block``."""
        (out, size), (rows, columns) = shape, block
        codes = jax.ShapeDtypeStruct((size // columns, columns, out), jnp.float8_e4m3fn)
        scale = jax.ShapeDtypeStruct((size // columns, -(-out // rows)), jnp.float32)
        return cls(codes, None, name_of(dtype), scale, rows)

    @property
    def shape(self) -> tuple[int, ...]:
        blocks, size, out = self.array.shape
        return out, blocks * size

    def specs(self, spec: P) -> Blocks:
        """The spec of each array of a weight that is cut by ``spec`` [out, in]: a chip has whole blocks."""
        out, size = (*spec, None, None)[:2]
        return replace(self, array=P(size, None, out), scale=P(size, out))

    def finer(self, unit: int) -> Blocks:
        """The same values in blocks of outputs that end at every multiple of ``unit``; 0: as they are."""
        outputs = gcd(self.outputs, unit)
        scale = jnp.repeat(self.scale, self.outputs // outputs, axis=1)[:, : -(-self.shape[0] // outputs)]
        return self if outputs == self.outputs else replace(self, scale=scale, outputs=outputs)

    def entries(self) -> jax.Array:
        values = self.array.astype(jnp.float32) * self._by_outputs()[:, None]
        return values.reshape(*self.shape[::-1]).T

    def product(self, rows: Float[Array, "N in"]) -> Float[Array, "N out"]:
        """``rows @ weight.T`` in float32."""
        if reads_prompts() and rows.shape[0] > FEW_ROWS:
            return dot(rows, self.entries().astype(rows.dtype), jnp.float32)
        parts = rows.reshape(rows.shape[0], *self.array.shape[:2]).swapaxes(0, 1)
        return (_sums_of_groups(parts, self.array) * self._by_outputs()[:, None]).sum(0)

    def _by_outputs(self) -> Float[Array, "blocks out"]:
        return jnp.repeat(self.scale, self.outputs, axis=1)[:, : self.array.shape[2]]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["array", "scale"],
    meta_fields=["dtype", "transposed", "outputs"],
)
@dataclass(frozen=True, eq=False)
class Groups:
    """A stack of experts' weights in MXFP4, int4 or 8 bits (`jax_bridge.weights.formats.StoredWeight`).

    ``array`` [experts, in / b, b, out] has codes of 4 or 8 bits, ``scale`` [experts, in / b, out / outputs] a
    factor for each block, of MXFP4 an exponent. The CPU's memory holds a code in a byte.

    ``transposed``: the model names the stack [experts, in, out], else [experts, out, in].
    """

    array: Any
    scale: Any
    dtype: str
    transposed: bool = True
    outputs: int = 1

    @classmethod
    def shapes(cls, shape: tuple, dtype: torch.dtype, int4: bool = False, block: Any = None) -> Groups:
        """The shapes of `of_pairs` for a stack [experts, in, out], in groups of `GROUP` inputs.

        ``int4``: those of `of_experts` off the CPU for a stack [experts, out, in], scales in ``dtype``.
        ``block``: those of `of_experts` for FP8 codes of such a stack, with a scale for each block.
        """
        if block is not None:
            own = Blocks.shapes(shape[1:], dtype, block)
            laid, scale = (
                jax.ShapeDtypeStruct((shape[0], *one.shape), one.dtype) for one in (own.array, own.scale)
            )
            return cls(laid, scale, name_of(dtype), transposed=False, outputs=block[0])
        size, out = shape[:0:-1] if int4 else shape[1:]
        kinds = (jnp.int4, jnp.dtype(name_of(dtype))) if int4 else (jnp.float4_e2m1fn, jnp.float8_e8m0fnu)
        codes = jax.ShapeDtypeStruct((shape[0], size // GROUP, GROUP, out), kinds[0])
        scale = jax.ShapeDtypeStruct((shape[0], size // GROUP, out), kinds[1])
        return cls(codes, scale, name_of(dtype), transposed=not int4)

    @property
    def shape(self) -> tuple[int, ...]:
        experts, groups, size, out = self.array.shape
        return (experts, groups * size, out) if self.transposed else (experts, out, groups * size)

    def specs(self, spec: P) -> Groups:
        """The spec of each array of a stack that is cut by ``spec``: by experts."""
        return replace(self, array=spec, scale=spec)

    def unwrap(self) -> jax.Array:
        whole = self.entries(self.dtype)
        return whole if self.transposed else whole.swapaxes(1, 2)

    def entries(self, dtype: Any) -> Float[Array, "experts in out"]:
        """The weights; bfloat16 holds those in MXFP4 exactly."""
        experts, groups, size, out = self.array.shape
        values = self.array.astype(jnp.float32) * self._by_outputs()[:, :, None]
        return values.reshape(experts, groups * size, out).astype(dtype)

    def one(self, at: Int[Array, " 1"]) -> Groups:
        """The expert ``at`` alone."""
        return replace(self, array=layer_of(self.array, at), scale=layer_of(self.scale, at))

    def products(self, rows: Float[Array, "experts R in"]) -> Float[Array, "experts R out"]:
        """Each expert's ``rows`` times its weight, in their type."""
        if reads_prompts() and rows.shape[1] > FEW_ROWS:
            return stacked_linear_jax(rows, self.entries(rows.dtype), transposed=True)
        experts, groups, size, out = self.array.shape
        parts = rows.reshape(experts, -1, groups, size).swapaxes(1, 2).reshape(experts * groups, -1, size)
        sums = _sums_of_groups(parts, self.array.reshape(experts * groups, size, out))
        scaled = sums.reshape(experts, groups, -1, out) * self._by_outputs()[:, :, None]
        return scaled.sum(1).astype(rows.dtype)

    def _by_outputs(self) -> Float[Array, "experts blocks out"]:
        wide = self.scale.astype(jnp.float32)
        return (
            wide if self.outputs == 1 else jnp.repeat(wide, self.outputs, axis=2)[:, :, : self.array.shape[3]]
        )


InCodes = Scaled | Blocks | Groups


def _sums_of_groups(rows: Float[Array, "groups R b"], codes: Array) -> Float[Array, "groups R out"]:
    """Products with codes [groups, b, out] in float32, before their scales."""
    codes = codes.astype(rows.dtype)  # exact; XLA merges the cast with the product

    def as_it_is(rows: Array, codes: Array) -> Array:
        axes = (((2,), (1,)), ((0,), (0,)))
        return jax.lax.dot_general(rows, codes, axes, preferred_element_type=jnp.float32)

    padded = partial(stacked_sums, transposed=True)
    return jax.lax.platform_dependent(rows, codes, cpu=padded, default=as_it_is)


def of_pairs(codes: Tensor, scale: Tensor, dtype: torch.dtype, place: Any) -> Groups:
    """A stack that is stored as MXFP4, with its codes' bits as they are.

    Args:
        codes: [experts, out, in / b, b / 2] bytes of two codes, the first one in the lower bits.
        scale: [experts, out, in / b], exponents. dtype: of the weight as the model sees it.
    """
    experts, out, groups, pairs = codes.shape
    laid = np.empty((experts, groups, 2 * pairs, out), np.uint8)
    for own, expert in zip(codes, laid, strict=True):
        apart = torch.stack([own & 15, own >> 4], dim=-1).reshape(out, groups, 2 * pairs)
        expert[:] = apart.permute(1, 2, 0).numpy()
    exponents = scale.permute(0, 2, 1).contiguous().numpy()
    kept = laid.view(jnp.float4_e2m1fn), exponents.view(jnp.float8_e8m0fnu)
    array, exponent = jax.device_put(
        kept, None if default_device().platform == "cpu" else place
    )  # `bound_to`
    return Groups(array, exponent, name_of(dtype))


def bound_to(weight: Any, place: Any) -> Any:
    """A weight's arrays moved to ``place``, a device or its sharding; a CPU gets MXFP4's codes in FP8.

    A CPU's compiled program refuses codes of 4 bits that are bound to a device: it names another layout.
    """
    on_cpu = any(device.platform == "cpu" for device in getattr(place, "device_set", {place}))

    def moved(leaf: jax.Array) -> jax.Array:
        wide = on_cpu and leaf.dtype == jnp.float4_e2m1fn
        return jax.device_put(leaf.astype(jnp.float8_e4m3fn) if wide else leaf, place)

    return jax.tree.map(moved, weight)


def of_experts(
    experts: Iterable[tuple[Tensor, ...]],
    shape: tuple[int, ...],
    block: tuple[int, int],
    dtype: torch.dtype,
    place: Any,
    int4: bool = True,
) -> Groups:
    """A stack of ``shape`` [experts, out, in] whose experts are stored one by one as codes.

    Args:
        experts: codes [out, in] and scales [out / rows, in / columns] of each; uint8 is an exponent.
        block: rows and columns that share a scale.
        dtype: of the weight as the model sees it.
        int4: the codes are integers from -8 to 7; scales then keep their type.
    """
    (count, out, size), (outputs, columns) = shape, block
    laid = torch.empty(count, size // columns, columns, out, dtype=torch.uint8)
    scales, kind = [], torch.int8
    for rows, (codes, scale) in zip(laid, experts, strict=True):
        rows.copy_(codes.view(torch.uint8).T.reshape(rows.shape))
        scales.append((scale if int4 else _wide(scale)).T)
        kind = codes.dtype
    scale = to_jax(torch.stack(scales), device=place)
    put = _put_int4 if int4 else lambda codes, place: to_jax(codes, device=place)
    return Groups(put(laid.view(kind), place), scale, name_of(dtype), transposed=False, outputs=outputs)


def _wide(scale: Tensor) -> Tensor:
    return torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()


def _put_int4(codes: Tensor, place: Any) -> jax.Array:
    """Codes from -8 to 7 at ``place``; a CPU gets bytes, for it refuses 4 bits that are bound to it."""
    if default_device().platform == "cpu":
        return to_jax(codes, device=place)
    return jax.device_put(codes.numpy().astype(jnp.int4), place)


def of_codes(
    codes: Tensor,
    scale: Tensor,
    block: tuple[int, int],
    dtype: torch.dtype,
    place: Any,
    int4: bool = False,
    by_rows: bool | None = None,
) -> Any:
    """A weight [out, in] that is stored as codes, with a scale for each block, in its form at ``place``.

    Args:
        scale: [out / rows, in / columns] of ``block``, or of one entry; uint8 is an exponent.
        dtype: of the weight as the model sees it.
        int4: the codes are integers from -8 to 7; scales of groups then keep their type.
        by_rows: a scale is for all inputs, of a part of the weight too; unset: where a block has them all.

    Returns:
        None where the last block of inputs is short.
    """
    (out, size), (rows, columns), name = codes.shape, block, name_of(dtype)
    wide = _wide(scale)
    put = _put_int4 if int4 else lambda codes, place: to_jax(codes, device=place)
    if columns == size if by_rows is None else by_rows:
        each = wide.reshape(-1).repeat_interleave(out if wide.numel() == 1 else rows)[:out]
        return Scaled(table=None, dtype=name, array=put(codes, place), scale=to_jax(each, device=place))
    if size % columns:
        return None
    laid = codes.view(torch.uint8).T.reshape(size // columns, columns, out).contiguous().view(codes.dtype)
    each = to_jax((scale if int4 else wide).T.contiguous(), device=place)
    return Blocks(table=None, dtype=name, outputs=rows, array=put(laid, place), scale=each)
