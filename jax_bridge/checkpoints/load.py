"""Loads a target's checkpoint straight into JAX arrays: no torch weight is ever made."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import torch
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from jax.sharding import Mesh, SingleDeviceSharding
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel

from jax_bridge.arrays import default_device, row_major, shape_of, to_jax
from jax_bridge.checkpoints.check_config import check_sizes
from jax_bridge.checkpoints.experts import Stacked
from jax_bridge.checkpoints.files import Source, find_source, fingerprint_of, is_plain, match, renamed
from jax_bridge.checkpoints.method import method_of
from jax_bridge.checkpoints.quantised import Dequantised, Packed, dequantised
from jax_bridge.device_memory import bytes_of, check_memory, memory_of
from jax_bridge.hosts.hosts import spanning
from jax_bridge.mesh.cut import Partition
from jax_bridge.mesh.put import place, place_parts, place_quantised, put, share_of
from jax_bridge.mesh.refusals import check_family
from jax_bridge.mesh.rules import heads_of, partitions_of_target
from jax_bridge.mesh.shape import check_distinct, devices_of, parts_of, slice_mesh
from jax_bridge.weights.codes import Scaled, of_codes, of_experts, of_pairs
from jax_bridge.weights.formats import Weight
from jax_bridge.weights.layout import LayoutRules, check_arithmetic, check_loaded, keep
from torch_dflash.checks import check_arithmetic as check_choice
from torch_dflash.checks import check_flag, check_mesh, check_types
from torch_dflash.engine.hosts import read_compared
from torch_dflash.guards.processes import check_process
from torch_dflash.progress import progress_bar
from torch_dflash.runtime_kinds import RUNTIMES
from torch_dflash.storage.json_text import naming_deep_json
from torch_dflash.storage.weight_files import HUB_OPTIONS, read_checkpoint
from torch_dflash.targets.auto import auto_class
from torch_dflash.targets.latents import find_latents, weights_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Errors that model classes raise for fields of senseless values.
_UNBUILDABLE = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError)
_UNBUILDABLE += (StrictDataclassError,)


@dataclass(frozen=True, eq=False)
class DeviceModel:
    """A target on the device, for `torch_dflash.compile` and `generate` with ``runtime="xla"``.

    ``model`` is the transformers model without weights (meta tensors; its buffers are real), ``arrays`` its
    parameters and buffers by name (tied ones once), ``mesh`` their mesh, if any, ``checkpoint`` a
    checksum of what was read, where several processes compare it, and ``quantize`` as `load` was told.
    """

    model: Any
    arrays: dict[str, Weight]
    mesh: Mesh | None = None
    checkpoint: str = ""
    quantize: str | None = None

    @property
    def config(self) -> Any:
        """The model's config."""
        return self.model.config

    @property
    def generation_config(self) -> GenerationConfig:
        """The defaults of options; may be changed."""
        return self.model.generation_config

    def arrays_for(
        self, runtime: str, compute: str = "auto", quantize: str | None = None
    ) -> dict[str, Weight]:
        """``arrays``; ``ValueError`` if ``runtime`` cannot decode with them or they have no such products."""
        if not RUNTIMES[runtime].needs_jax:
            raise ValueError(
                f"runtime={runtime!r}: this target was loaded as JAX arrays; pass runtime='xla', or load it "
                "with AutoModelForCausalLM.from_pretrained."
            )
        check_loaded(compute, quantize, self.quantize)
        return self.arrays

    def mesh_for(self, requested: Any, replicas: int = 1) -> Any:
        """The mesh of the arrays; ``ValueError`` if a call ``requested`` another one.

        With replicas they must be on the first one's part: the others get copies.
        """
        own = [default_device()] if self.mesh is None else list(self.mesh.devices.flat)
        wanted = own if requested is None else parts_of(requested, replicas)[0]
        if wanted != own:
            here = "JAX's default device" if self.mesh is None else f"{len(own)} devices"
            ids, requested_ids = ([device.id for device in devices] for devices in (own, wanted))
            there = "there" if replicas == 1 else "on the first replica's"
            raise ValueError(
                f"mesh={requested!r}, of devices {requested_ids}: the target was loaded on {here}, {ids} in "
                f"this order; load it {there}, jb.load(..., mesh=...), or leave mesh out."
            )
        return self.mesh if replicas == 1 else requested


def load(
    path_or_id: str | os.PathLike[str],
    mesh: Any = None,
    dtype: torch.dtype | None = None,
    *,
    quantize: str | None = None,
    keep_codes: bool = False,
    progress: bool | None = None,
    **hub: Any,
) -> DeviceModel:
    """Read a causal LM's safetensors into JAX arrays, one tensor at a time.

    The host holds at most a tensor or two besides a CPU backend's own arrays. Experts that are stored one by
    one become the model's stacked weight. Weights in MXFP4, in FP8 with scales, and in compressed-tensors'
    FP8, int8 and packed int4 are dequantised one by one, to ``dtype``. Linear weights get the backend's
    fastest layout (`jax_bridge.weights.layout`).

    Args:
        path_or_id: a checkpoint's directory, or its id on the Hugging Face hub.
        mesh: the devices that share each weight, as in `torch_dflash.compile`. Each of several processes
            reads only the parts of its own devices, one at a time. Unset: JAX's default device.
        dtype: of the weights: float32, bfloat16 or float16; unset: the one in config.json, else as stored.
            Weights that the model class keeps in float32, and buffers such as rotary frequencies, keep
            theirs.
        quantize: "int8" keeps linear weights in 8 bits, one by one as they are read, as in
            `torch_dflash.compile`; on a mesh off the CPU alone.
        keep_codes: keep linear weights that are stored in 8 bits or packed int4, and experts in these or in
            MXFP4, as they are stored, codes and scales. On a mesh no block of inputs is on two devices:
            where blocks do not divide, each has the whole weight. Unset, they are dequantised to ``dtype``.
        progress: show a bar of the bytes read; unset: where stderr is a terminal.
        **hub: options of ``from_pretrained`` for the hub: ``revision``, ``subfolder``, ``token``,
            ``cache_dir``, ``local_files_only``, ``force_download``.

    Raises:
        OSError: no such checkpoint, or no safetensors in it. TypeError: an argument is of another kind.
        ValueError: the index is damaged, the config asks for sizes that the files do not have, or a tensor is
            missing, unexpected or of another shape, before any is read; a mesh that ``compile`` refuses, or a
            kind of model that is not decoded on one; a device has too little memory for its part of the
            weights. RuntimeError: another process has read another checkpoint, or this one was forked after
            JAX had started.
    """
    check_process("xla")
    if dtype is not None and dtype not in DTYPES:
        raise TypeError(f"dtype={dtype!r}: pass one of {', '.join(map(str, DTYPES))}, or None.")
    check_mesh(mesh, "xla")
    check_choice("auto", quantize, "xla")
    devices = devices_of(mesh)
    check_flag(keep_codes=keep_codes)
    check_arithmetic(default_device().platform, devices is not None, quantize=quantize)
    check_distinct(devices or [])
    unknown = [name for name in hub if name not in HUB_OPTIONS]
    if unknown:
        raise TypeError(f"unknown option {unknown[0]!r}; load takes {', '.join(HUB_OPTIONS)}.")
    hosts = spanning(mesh)  # from here on other processes are told of failures

    def read() -> DeviceModel:
        forms = quantize, keep_codes
        return _load(path_or_id, devices, dtype, forms, progress, hub, compared=hosts is not None)

    if hosts is None:
        return read()

    def digest(found: DeviceModel) -> dict[str, str]:
        forms = f"quantize={quantize!r}, keep_codes={keep_codes}"
        return {"the mesh": hosts.order(mesh), "the form": forms, "the checkpoint": found.checkpoint}

    return read_compared(hosts, "jb.load", read, digest)


def _load(
    path_or_id: str | os.PathLike[str],
    devices: list[Any] | None,
    dtype: torch.dtype | None,
    forms: tuple[str | None, bool],
    progress: bool | None,
    hub: dict[str, Any],
    compared: bool,
) -> DeviceModel:
    """`load`; ``forms``: quantize and keep_codes; ``compared``: other processes must have read the same."""
    quantize, keep_codes = forms
    source = find_source(path_or_id)
    fields = _read_config(source, hub)
    stored = read_checkpoint(source, **hub)
    check_sizes(fields, stored, source)
    model = empty_model(source, dtype, **hub)
    if devices is not None:
        check_family(model)
    mesh = None if devices is None else slice_mesh(devices, heads_of(model.config))
    wanted: Any = dtype or model.config.dtype or torch.bfloat16
    plain = all(part.dtype in (torch.int64, torch.bool) or is_plain(part.dtype) for part in stored.values())
    weights = dequantised(stored, method_of(fields, source, plain), wanted)
    parts = match(model, renamed(model, weights), source)
    live = dict(model.named_parameters()) | dict(model.named_buffers())
    types = {name: _dtype(model, name, parts[name][0], live[name], dtype) for name in live if parts.get(name)}
    latents = weights_of(find_latents(model))
    partitions = None if mesh is None else partitions_of_target(model, mesh, latents)
    rules = LayoutRules.of(model, model.get_output_embeddings(), latents, quantize=quantize)
    coded = _coded(parts, rules.linear - latents.keys()) if keep_codes else set()
    stored_bytes = {name: parts[name][0].nbytes for name in coded}
    if partitions is not None:
        for name in coded:
            part = parts[name][0]
            if isinstance(part, Dequantised) and not part.turned and part.block[1] < part.shape[1]:
                partitions[name] = partitions[name].of_blocks(part.block[1], part.shape)
    _check_memory(live, types, partitions, rules, stored_bytes)
    keep_part = _on_device(rules, coded) if partitions is None else _on_mesh(partitions, rules, coded)
    total = sum(part.nbytes for group in parts.values() for part in group)
    arrays: dict[str, Weight] = {}
    with progress_bar(progress, total=total, unit="B", unit_scale=True, desc="loading weights") as bar:
        for name, tensor in live.items():
            for part in parts.get(name, ()):
                if name not in arrays:
                    arrays[name] = keep_part(name, part, types[name])
                else:
                    _check_tied(parts[name][0], part)
                bar.update(part.nbytes)
            if name not in arrays:  # a buffer that is made from the config
                arrays[name] = to_jax(tensor) if mesh is None else put(tensor, mesh)
    return DeviceModel(model, arrays, mesh, fingerprint_of(parts, types) if compared else "", quantize)


def _check_memory(
    live: dict[str, Any],
    types: dict[str, torch.dtype],
    partitions: dict[str, Partition] | None,
    rules: LayoutRules,
    stored: dict[str, int],
) -> None:
    """Raise ``ValueError`` if a device has less memory than its part of all weights takes.

    ``stored``: bytes of weights that stay as they are stored, by name.
    """
    if partitions is None:
        device = default_device()
        shapes: Any = {
            name: rules.shapes(name, tuple(tensor.shape), types.get(name) or tensor.dtype, device)
            for name, tensor in live.items()
        }
        shapes |= {name: jax.ShapeDtypeStruct((size,), jnp.uint8) for name, size in stored.items()}
    else:
        shapes = {}
        for name, tensor in live.items():
            given = tuple(tensor.shape), types.get(name) or tensor.dtype
            coded = rules.in_codes(name, *given, partitions[name].mesh.devices.flat[0])
            whole = Scaled.shapes(*given) if coded else shape_of(tensor.to(given[1]))
            shapes[name] = share_of(whole, partitions[name])
            if name in stored:
                parts = tensor.numel() // prod(partitions[name].place.shard_shape(given[0]))
                shapes[name] = jax.ShapeDtypeStruct((stored[name] // parts,), jnp.uint8)
    devices = [default_device()] if partitions is None else next(iter(partitions.values())).mesh.devices.flat
    more = "several devices" if partitions is None else "a larger mesh"
    check_memory({"weights": bytes_of(shapes)}, memory_of(devices), f"load the model on {more}, mesh=...")


def _coded(parts: dict[str, list[Source]], linear: set[str] | frozenset[str]) -> set[str]:
    """Names of the weights that can stay codes: ``linear`` ones, and stacks in MXFP4 and int4."""
    stored = {name: group[0] for name, group in parts.items() if group}
    codes = {name: part for name, part in stored.items() if isinstance(part, Dequantised)}
    stacks = {name for name, part in stored.items() if isinstance(part, Stacked) and part.block}
    return stacks | {
        name
        for name, part in codes.items()
        if (len(part.shape) == 3 if part.turned else name in linear and not part.shape[1] % part.block[1])
    }


def _on_device(rules: LayoutRules, coded: set[str]) -> Callable[[str, Source, torch.dtype], Weight]:
    """Copies a stored weight whole to JAX's default device; ``coded``: those that stay codes."""
    device = default_device()

    def kept(name: str, part: Source, dtype: torch.dtype) -> Weight:
        place = SingleDeviceSharding(device)
        if name in coded:
            return jax.tree.map(row_major, _in_codes(part, (), place, dtype))
        return keep(part.read(), rules.choose(name, part.shape, dtype, device), dtype, place)

    return kept


def _on_mesh(
    partitions: dict[str, Partition], rules: LayoutRules, coded: set[str]
) -> Callable[[str, Source, torch.dtype], Weight]:
    """Copies a stored weight to a mesh; this process reads the parts of its devices."""

    def kept(name: str, part: Source, dtype: torch.dtype) -> Weight:
        partition = partitions[name]
        if name in coded:
            read = partial(_in_codes, part, dtype=dtype, partition=partition)
            return place_parts(read, part.shape, partition)
        narrow = rules.in_codes(name, part.shape, dtype, partition.mesh.devices.flat[0])
        put = place_quantised if narrow else place
        return put(lambda index: part.read_part(index).to(dtype), part.shape, partition)

    return kept


def _in_codes(
    part: Any, index: tuple[slice, ...], place: Any, dtype: torch.dtype, partition: Partition | None = None
) -> Any:
    """A stored weight, or the part at an index (empty: all) of one that is cut, as it is stored."""
    first, *rest = list(index) or [slice(None)] * len(part.shape)
    if isinstance(part, Stacked):
        shape, one = (len(part.experts[first]), *part.shape[1:]), part.experts[0][0]
        int4 = isinstance(one, Dequantised) and isinstance(one.codes, Packed)
        return of_experts(part.read_codes(first), shape, part.block or (1, 1), dtype, place, int4)
    if part.turned:
        return of_pairs(part.codes.read_part((first,)), part.scales.read_part((first,)), dtype, place)
    unit = 0 if partition is None else partition.unit(part.shape)
    pieces = [first] if partition is None else partition.rows_of(first)
    found = [part.read_codes_of(rows, *rest, unit) for rows in pieces]
    own, scales, (block, *_) = map(list, zip(*found, strict=True))
    scale = scales[0] if prod(part.scales.shape) == 1 else torch.cat(scales)
    int4, by_rows = isinstance(part.codes, Packed), part.block[1] == part.shape[1]
    return of_codes(torch.cat(own) if len(own) > 1 else own[0], scale, block, dtype, place, int4, by_rows)


def empty_model(path_or_id: str, dtype: torch.dtype | None, **hub: Any) -> PreTrainedModel:
    """The checkpoint's model with meta parameters, real buffers and its own generation config."""
    try:
        config = AutoConfig.from_pretrained(path_or_id, **hub)
        with init_empty_weights(include_buffers=False):
            for part in (config, config.get_text_config()):  # loaded weights are dequantised
                vars(part).pop("quantization_config", None)
            model: Any = auto_class(config).from_config(config, dtype=dtype or config.dtype)
    except _UNBUILDABLE as error:
        raise ValueError(
            f"{path_or_id}: transformers builds no model from its config.json "
            f"({type(error).__name__}: {error}); correct the field, or fetch the checkpoint again."
        ) from error
    model.tie_weights()  # the empty init unties parameters
    try:
        with naming_deep_json(path_or_id):
            model.generation_config = GenerationConfig.from_pretrained(path_or_id, **hub)
    except OSError:
        pass  # the checkpoint has none: the one from the model's config stays
    return model.eval().requires_grad_(False)


def _read_config(source: str, hub: dict[str, Any]) -> dict[str, Any]:
    """The fields of config.json, unbuilt: a config object may take unbounded time."""
    with naming_deep_json(source):
        fields, _ = PreTrainedConfig.get_config_dict(source, **hub)
    check_types(fields, source)
    return fields


def _dtype(model: Any, name: str, part: Source, tensor: Any, requested: torch.dtype | None) -> torch.dtype:
    """The type of a loaded tensor, as ``from_pretrained`` decides it."""
    if not part.dtype.is_floating_point or not isinstance(tensor, torch.nn.Parameter):
        return tensor.dtype
    wanted = requested or model.config.dtype or part.dtype
    kept = list(model._keep_in_fp32_modules_strict or ()) if wanted != torch.float32 else []
    if wanted == torch.float16:
        kept += list(model._keep_in_fp32_modules or ())
    return torch.float32 if any(f".{module}." in f".{name}." for module in kept) else wanted


def _check_tied(kept: Source, other: Source) -> None:
    if not torch.equal(kept.read(), other.read()):
        raise ValueError(
            f"{other.file}: {other.name} differs from {kept.name}, and the config ties them "
            "(tie_word_embeddings=True); set it to false in config.json, or remove one of the two."
        )
