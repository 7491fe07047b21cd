"""The layout of a weight in device memory: chosen once, when it is copied there.

torch keeps a linear layer's weight as [out, in]. XLA's CPU products of two and more rows in float32 are
faster with [in, out] on some CPUs (`jax_bridge.weights.autotune`); such a weight is kept as `Transposed`.
Programs unwrap it (`jax_bridge.weights.formats`), so shapes and names stay those of the model. XLA's own
array layouts would make this format unnecessary, but its CPU compiler copies such arguments on every call.

On a TPU XLA's layouts are used: matrices are row-major, as in torch, and programs take them so.

`ARITHMETIC` lists the types of products that a device has besides the weights' own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import torch
from torch import nn

from jax_bridge.arrays import own_copy, row_major, shape_of, to_jax
from jax_bridge.weights.autotune import is_slow, leads, lies_by_inputs
from jax_bridge.weights.codes import Scaled
from jax_bridge.weights.formats import (
    Cast,
    Halved,
    Multiplier,
    Quantized,
    Readable,
    Transposed,
    Weight,
    name_of,
)
from torch_dflash.ops.latents import Widths, halves

HALVES = (torch.bfloat16, torch.float16)
ARITHMETIC: dict[str, dict[str, type[Multiplier]]] = {
    "cpu": {"float32": Cast, "bfloat16": Cast, "int8": Quantized},
    "tpu": {"int8": Scaled},
    "gpu": {"int8": Scaled},
}
"""The format of a linear weight by JAX's platform and the type of products; a mesh has `Scaled` alone."""


def check_arithmetic(
    platform: str,
    mesh: bool,
    compute: str = "auto",
    quantize: str | None = None,
    drafter_quantize: str | None = None,
) -> None:
    """Raise ``ValueError`` unless weights on a ``platform``, or cut over a ``mesh``, have such products.

    ``compute``, ``quantize`` and ``drafter_quantize`` are those of `torch_dflash.compile`.
    """
    if drafter_quantize is not None and quantize is None:
        shown, chosen = f"drafter_quantize={drafter_quantize!r}", drafter_quantize
    elif (compute, quantize) == ("auto", None):
        return
    else:
        shown, chosen = f"compute={compute!r}, quantize={quantize!r}", quantize or compute
    if mesh and (compute != "auto" or ARITHMETIC.get(platform, {}).get(chosen) is not Scaled):
        raise ValueError(f"{shown} with a mesh: decode on one device (leave mesh out), or leave them out.")
    if chosen not in ARITHMETIC.get(platform, {}):
        able = " and ".join(f"{name.upper()}s" for name, formats in ARITHMETIC.items() if chosen in formats)
        raise ValueError(
            f"{shown}: so far only {able} have products in another type, and JAX's device is a {platform}; "
            "leave them out."
        )


def check_loaded(compute: str, quantize: str | None, loaded: str | None) -> None:
    """Raise ``ValueError`` unless weights that ``jb.load(quantize=loaded)`` has read have such products."""
    if compute != "auto":
        raise ValueError(
            f"compute={compute!r}: jb.load keeps the type of products; load the model with transformers for "
            "this."
        )
    if quantize not in (None, loaded):
        raise ValueError(
            f"quantize={quantize!r}: the target was loaded without; pass jb.load(..., quantize={quantize!r})."
        )


class WeightLayout(NamedTuple):
    """A weight's ``format`` on a device (None: a plain array), its products' ``dtype``; rows are ``read``.

    ``leads``: as in `Quantized`; ``widths``: those of latents, of a `Halved` weight.
    """

    format: type[Transposed | Readable | Halved | Multiplier] | None = None
    dtype: torch.dtype | None = None
    read: bool = False
    leads: bool = False
    widths: Widths | None = None


@dataclass(frozen=True)
class LayoutRules:
    """Chooses the layout of a model's weights by their names.

    Args:
        linear: weights of linear layers, the output head's apart: a prompt's last chunk and plain decoding
            multiply it with one row, where [out, in] is as fast, and where it is tied rows of it are read.
        heads: the output head's. read: the embeddings', whose rows are read.
        latents: those of layers that attend to latents (`torch_dflash.targets.latents`), by name. They stay
            as they are where others become codes with their scales on the sums: they multiply no row.
        compute, quantize, drafter_quantize: as in `torch_dflash.compile`.
    """

    linear: frozenset[str] = frozenset()
    heads: frozenset[str] = frozenset()
    read: frozenset[str] = frozenset()
    latents: dict[str, Widths] = field(default_factory=dict)
    compute: str = "auto"
    quantize: str | None = None
    drafter_quantize: str | None = None

    @classmethod
    def of(
        cls,
        module: nn.Module,
        head: nn.Module | None,
        latents: dict[str, Widths] | None = None,
        **arithmetic: Any,
    ) -> LayoutRules:
        """The rules for all weights of ``module``; ``head`` is its output head, ``latents`` as above."""
        tied = None if head is None else head.weight
        parts = [(f"{name}.weight", part) for name, part in module.named_modules()]
        linear = {name for name, part in parts if isinstance(part, nn.Linear) and part.weight is not tied}
        read = {name for name, part in parts if isinstance(part, nn.Embedding)} | lookups_of(module)
        heads = {name for name, part in parts if tied is not None and getattr(part, "weight", None) is tied}
        return cls(frozenset(linear), frozenset(heads), frozenset(read), latents or {}, **arithmetic)

    def choose(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> WeightLayout:
        """The layout of the weight ``name`` on ``device``."""
        if not dtype.is_floating_point:
            return WeightLayout()
        cpu, read, own = device.platform == "cpu", name in self.read, name_of(dtype)
        if name in self.linear | self.heads:
            quantize = (self.drafter_quantize if name.startswith("proposer.") else None) or self.quantize
            wanted = quantize or (own if self.compute == "auto" else self.compute)
            if cpu and wanted == own and dtype in HALVES and is_slow(own, shape):
                wanted = "float32"
            kind = ARITHMETIC[device.platform][wanted] if wanted != own else None
            if name in self.latents and (kind in (None, Scaled) or wanted == "float32"):
                return WeightLayout(Halved, widths=self.latents[name])
            if kind is not None:
                products = dtype if quantize else getattr(torch, wanted)
                return WeightLayout(kind, products, read, kind is Quantized and leads(shape))
        if cpu and name in self.linear and dtype == torch.float32 and lies_by_inputs(shape):
            return WeightLayout(Transposed)  # in bfloat16 a product of one row would be tens of times slower
        return WeightLayout(Readable) if cpu and read and dtype in HALVES else WeightLayout()

    def in_codes(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> bool:
        """Whether the weight is kept in 8 bits (`Scaled`), on a mesh too."""
        asked = self.quantize or self.drafter_quantize
        return bool(asked) and self.choose(name, shape, dtype, device).format is Scaled

    def shapes(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> Any:
        """The shapes of the weight's arrays on ``device``; of a CPU's formats the plain weight's."""
        layout = self.choose(name, shape, dtype, device)
        if layout.format is Scaled:
            return Scaled.shapes(shape, dtype)
        if layout.widths is not None:
            return Halved.shapes(shape, dtype, layout.widths)
        return shape_of(torch.empty(shape, dtype=dtype, device="meta"))


def lookups_of(module: nn.Module) -> set[str]:
    """Names of the weights whose rows are read, besides embeddings: a selector's codebooks."""
    parts = module.named_modules()
    return {f"{name}.{table}" for name, part in parts for table in getattr(part, "lookups", ())}


def keep(
    tensor: torch.Tensor, layout: WeightLayout, dtype: torch.dtype | None = None, place: Any = None
) -> Weight:
    """A copy of ``tensor`` on the device in its layout.

    Args:
        tensor: anywhere; a mapped file's memory is copied too, for it may change.
        layout: as `LayoutRules` chose it.
        dtype: what the weight is cast to; unset: its own.
        place: a JAX device or sharding; unset: JAX's default device.
    """
    kind = layout.format
    if kind is not None and issubclass(kind, Multiplier):
        tensor = tensor.to(dtype or tensor.dtype)
        half, apart = tensor.dtype in HALVES, layout.read and kind is not Scaled
        table = keep(tensor, WeightLayout(Readable if half else None), place=place) if apart else None
        kept = kind.of(tensor, table, place, dtype=layout.dtype, leads=layout.leads)
        return jax.tree.map(row_major, kept)
    if kind is Halved:
        assert layout.widths is not None
        up, down = halves(tensor, layout.widths)
        return Halved(own_copy(up, dtype, place), own_copy(down, dtype, place))
    if kind is Transposed:
        return Transposed(own_copy(tensor.T, dtype, place))
    array = own_copy(tensor, dtype, place)
    if kind is None:
        return array
    return Readable(array, to_jax(torch.from_dlpack(array).view(torch.int16), copy=False, device=place))
