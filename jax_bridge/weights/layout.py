"""The layout of a weight in device memory: chosen where it is put there, once for all engines.

torch keeps a linear layer's weight as [out, in]. XLA's CPU products of two and more rows in float32 are
faster with [in, out] on some CPUs (`jax_bridge.weights.autotune`). A weight that is kept so is `Transposed`:
programs unwrap it (`jax_bridge.weights.forms`), so shapes and names stay those of the model. XLA's own array
layouts would do without this format, but its CPU compiler copies such arguments on every call.

On a TPU they are the means: a matrix lies there by rows, as torch keeps it, and programs take it so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import torch
from jax.experimental.layout import Format, Layout
from jax.sharding import Sharding
from torch import nn

from jax_bridge.arrays import to_jax
from jax_bridge.weights.autotune import is_slow, leads, lies_by_inputs
from jax_bridge.weights.forms import Cast, Quantized, Readable, Transposed, Weight, name_of, quantized

HALVES = (torch.bfloat16, torch.float16)


class Form(NamedTuple):
    """How a weight is kept: ``kind`` (None: as it is), its products' type, whether its rows are read.

    ``leads``: as in `Quantized`.
    """

    kind: type[Transposed | Readable | Cast | Quantized] | None = None
    dtype: torch.dtype | None = None
    read: bool = False
    leads: bool = False


@dataclass(frozen=True)
class Forms:
    """Which weights of a model may be kept in which form, by name.

    Args:
        linear: weights of linear layers, the output head's apart: a prompt's last chunk and plain decoding
            multiply it with one row, where [out, in] is as fast, and where it is tied rows of it are read.
        heads: the output head's. read: the embeddings', of which rows are read.
        compute, quantize: as in `torch_dflash.compile`.
    """

    linear: frozenset[str] = frozenset()
    heads: frozenset[str] = frozenset()
    read: frozenset[str] = frozenset()
    compute: str = "auto"
    quantize: str | None = None

    @classmethod
    def of(cls, module: nn.Module, head: nn.Module | None, **arithmetic: Any) -> Forms:
        """Of all weights of ``module``, of which ``head`` is the output head."""
        tied = None if head is None else head.weight
        parts = [(f"{name}.weight", part) for name, part in module.named_modules()]
        linear = {name for name, part in parts if isinstance(part, nn.Linear) and part.weight is not tied}
        read = {name for name, part in parts if isinstance(part, nn.Embedding)} | lookups_of(module)
        heads = {name for name, part in parts if tied is not None and getattr(part, "weight", None) is tied}
        return cls(frozenset(linear), frozenset(heads), frozenset(read), **arithmetic)

    def choose(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> Form:
        """The form of the weight ``name`` on ``device``; off the CPU each is kept as it is."""
        if device.platform != "cpu" or not dtype.is_floating_point:
            return Form()
        read = name in self.read
        if name in self.linear | self.heads:
            if self.quantize is not None:
                return Form(Quantized, dtype, read, leads(shape))
            wanted = dtype if self.compute == "auto" else getattr(torch, self.compute)
            if wanted == dtype and dtype in HALVES and is_slow(name_of(dtype), shape):
                wanted = torch.float32
            if wanted != dtype:
                return Form(Cast, wanted, read)
        if name in self.linear and dtype == torch.float32 and lies_by_inputs(shape):
            return Form(Transposed)  # in bfloat16 a product of one row would be tens of times slower
        return Form(Readable) if read and dtype in HALVES else Form()


def lookups_of(module: nn.Module) -> set[str]:
    """Names of the weights, others than embeddings, of which rows are read: a selector's codebooks."""
    parts = module.named_modules()
    return {f"{name}.{table}" for name, part in parts for table in getattr(part, "lookups", ())}


def keep(tensor: torch.Tensor, form: Form, dtype: torch.dtype | None = None, place: Any = None) -> Weight:
    """A tensor on the device in its form, in memory that is the device's own.

    Args:
        tensor: anywhere; a mapped file's is not kept, for it may change.
        form: as `Forms` chose it.
        dtype: what the weight is cast to; unset: its own.
        place: a JAX device or sharding; unset: JAX's default device.
    """
    if form.kind is Transposed:
        return Transposed(_own(tensor.T, dtype, place))
    if form.kind in (None, Readable):
        array = _own(tensor, dtype, place)
        if form.kind is None:
            return array
        host = torch.from_dlpack(array).view(torch.int16)
        return Readable(array, to_jax(host, copy=False, device=place))
    tensor = tensor.to(dtype or tensor.dtype)
    half = tensor.dtype in HALVES
    table = keep(tensor, Form(Readable if half else None), place=place) if form.read else None
    if form.kind is Quantized:
        return quantized(tensor, table, place, form.leads)
    return Cast(_own(tensor, form.dtype, place), table, name_of(tensor.dtype))


def _own(tensor: torch.Tensor, dtype: torch.dtype | None, place: Any) -> jax.Array:
    """One copy, in memory that JAX may keep, for a weight is never donated. Waited for, or copies pile up."""
    kind = dtype or tensor.dtype
    own = tensor.to("cpu", kind, copy=True, memory_format=torch.contiguous_format)
    return row_major(to_jax(own, copy=False, device=place)).block_until_ready()


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
