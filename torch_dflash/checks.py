"""Checks of arguments. Each message names the field, the value and the fix.

The command line checks its options here before torch is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any, Literal, get_args

from torch_dflash.runtime_kinds import RUNTIMES

Runtime = Literal["xla", "eager"]
Cache = Literal["static", "paged"]
CACHES: tuple[str, ...] = get_args(Cache)
COMPUTE = ("auto", "float32", "bfloat16")
QUANTIZE = (None, "int8")
Precision = Literal["default", "high", "highest", "bfloat16", "tensorfloat32", "float32"]
PRECISIONS: tuple[str, ...] = get_args(Precision)
INT32_MAX = 2**31 - 1


def is_count(value: Any) -> bool:
    """Whether ``value`` is an integer and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_counts(least: int = 1, **values: Any) -> None:
    """Raise ``ValueError`` unless every named value is an integer of at least ``least`` (None: unset)."""
    for name, value in values.items():
        if value is not None and (not is_count(value) or value < least):
            raise ValueError(f"{name}={value!r}: must be an integer of at least {least}.")


def check_width(verify_width: Any) -> None:
    """Raise ``ValueError`` unless ``verify_width`` is a count of rows, "auto" or None."""
    if verify_width not in (None, "auto") and (not is_count(verify_width) or verify_width < 1):
        raise ValueError(f'verify_width={verify_width!r}: must be an integer of at least 1, or "auto".')


def row_list(value: Any) -> Any:
    """``value`` as a list if it may hold one entry per row, else unchanged."""
    if hasattr(value, "tolist"):  # a tensor or an array
        return value.tolist()  # a number, if it has no dimension
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else value


def one_per_row(name: str, value: Any, rows: int) -> list:
    """``value`` as a list of one entry per row; ``ValueError`` for another number of entries."""
    value = row_list(value)
    if not isinstance(value, list):
        return [value] * rows
    if len(value) != rows:
        raise ValueError(f"{name} has {len(value)} entries for a batch of {rows}; give one, or one per row.")
    return value


def _check_choice(name: str, value: Any, known: Iterable) -> None:
    if not isinstance(value, str | None) or value not in known:
        raise ValueError(f"{name}={value!r}: choose one of {', '.join(map(repr, known))}.")


def check_runtime(runtime: Any) -> None:
    """Raise ``ValueError`` unless ``runtime`` names one of `RUNTIMES`."""
    _check_choice("runtime", runtime, RUNTIMES)


def check_autocast(runtime: str) -> None:
    """Raise ``ValueError`` under ``torch.autocast`` if ``runtime`` does not follow it."""
    import torch

    if not RUNTIMES[runtime].follows_autocast and any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        raise ValueError(
            f"torch.autocast is on, which runtime={runtime!r} does not follow; cast the models instead "
            "(model.to(torch.bfloat16)), or pass runtime='eager'."
        )


def check_cache(cache: Any) -> None:
    """Raise ``ValueError`` unless ``cache`` names one of `CACHES`."""
    _check_choice("cache", cache, CACHES)


def check_flag(**values: Any) -> None:
    """Raise ``ValueError`` unless every named value is True or False."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r}: must be True or False.")


def check_precision(matmul_precision: Any) -> None:
    """Raise ``ValueError`` unless ``matmul_precision`` names one of JAX's `PRECISIONS`."""
    _check_choice("matmul_precision", matmul_precision, PRECISIONS)


def check_arithmetic(compute: Any, quantize: Any, runtime: str, drafter_quantize: Any = None) -> None:
    """Raise ``ValueError`` unless ``runtime`` has products of these types."""
    of_drafter = "drafter_quantize", drafter_quantize, QUANTIZE
    for name, value, known in (("compute", compute, COMPUTE), ("quantize", quantize, QUANTIZE), of_drafter):
        _check_choice(name, value, known)
        if value != known[0] and not RUNTIMES[runtime].needs_jax:
            raise ValueError(
                f"{name}={value!r}: runtime={runtime!r} has no such products; use runtime='xla'."
            )
    if quantize is not None and compute != "auto":
        raise ValueError(f"compute={compute!r} with quantize={quantize!r}: leave one of the two out.")


def check_mesh(mesh: Any, runtime: str, replicas: Any = 1) -> None:
    """Raise ``ValueError`` for a mesh that ``runtime`` does not support; the bridge finds the devices."""
    if not is_count(replicas) or replicas < 1:
        raise ValueError(f"replicas={replicas!r}: must be an integer of at least 1.")
    if mesh is None and replicas > 1:
        raise ValueError(
            f'replicas={replicas} without a mesh: name the devices, as mesh={replicas} or mesh="auto".'
        )
    if mesh is not None and not RUNTIMES[runtime].needs_jax:
        raise ValueError(f"mesh={mesh!r}: runtime={runtime!r} has no devices of JAX's; use runtime='xla'.")
    if isinstance(mesh, str) and mesh != "auto":
        raise ValueError(f'mesh={mesh!r}: name "auto" for all devices, or how many.')
    if isinstance(mesh, int | float):
        check_counts(mesh=mesh)


def check_blocks(drafter: Any, **widths: Any) -> None:
    """Raise ``ValueError`` for a ``block_size`` or ``verify_width`` above 1 without a drafter.

    The plan's own message would name a block width that the user never gave.
    """
    for name, value in widths.items():
        if drafter is None and is_count(value) and value > 1:
            verb = "draft" if name == "block_size" else "verify"
            raise ValueError(
                f"{name}={value} without a drafter: nothing to {verb}; pass a drafter or leave {name} unset."
            )


def field_of(config: Any, name: str) -> Any:
    """A config's field, or None; for a field that differs by layer, the default of all layers."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers refuses to read a field that differs by layer
        return vars(config).get(name)


def context_of(target: Any) -> int:
    """Positions that the target was made for; the largest int32 without a limit in its config."""
    return positions_of(target.config)


def positions_of(config: Any) -> int:
    """`context_of` by the target's config."""
    limit: Any = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if is_count(limit) and limit > 0 else INT32_MAX  # -1 is how XLNet says "no limit"


def check_context(target: Any, max_length: int) -> None:
    """Raise ``ValueError`` if the target was not made for ``max_length`` positions."""
    context = context_of(target)
    if max_length > context:
        raise ValueError(
            f"max_length={max_length} is beyond the target's max_position_embeddings={context}; lower it."
        )


def check_dtype(what: str, state: Any, weights: Any) -> None:
    """Raise ``ValueError`` if the model ``what`` (target or drafter) was cast after the state was made."""
    if state != weights:
        raise ValueError(
            f"the state was made with a {what} in {state}, which is in {weights} now; cast it back with "
            f"{what}.to({state}), or start the generation again."
        )


def names_a_folder(source: str) -> bool:
    """Whether ``source`` can only be a path, existing or not, and no hub id."""
    return not source or source.startswith((".", "/", "~")) or source.endswith("/") or source.count("/") > 1


def check_there(name: str, source: Any) -> None:
    """Raise ``FileNotFoundError`` if ``source`` can only be a path and is no directory."""
    path = os.fspath(source)
    if names_a_folder(path) and not os.path.isdir(path):
        raise FileNotFoundError(f"{name}={path!r}: no such directory; pass an existing one, or a hub id.")


def check_loaded(field: str, value: Any, call: str) -> None:
    """Raise ``TypeError`` for a name or path where a model is needed, which ``call`` loads."""
    if isinstance(value, str | os.PathLike):
        name = os.fspath(value)
        raise TypeError(f"{field}={name!r}: a name or a path; load it first: {call.format(repr(name))}.")


def check_target(target: Any) -> None:
    """Raise ``TypeError`` unless ``target`` is a causal LM that decodes on its own."""
    check_loaded("target", target, "AutoModelForCausalLM.from_pretrained({0}), or jax_bridge.load({0})")
    name, config = type(target).__name__, getattr(target, "config", None)
    if hasattr(target, "_orig_mod"):
        raise TypeError(
            f"target={name}: a module of torch.compile, whose weights have other names; pass the original "
            "module, target._orig_mod. The XLA runtime compiles it itself."
        )
    inner = getattr(target, "module", None)
    if hasattr(inner, "get_output_embeddings") and not hasattr(type(target), "get_output_embeddings"):
        raise TypeError(f"target={name}: a wrapper of a model; pass the model, target.module.")
    if hasattr(config, "dflash_config"):
        raise TypeError(f"target={name}: a DFlash drafter; pass the target model first, the drafter second.")
    head = getattr(target, "get_output_embeddings", lambda: None)()
    if head is None or getattr(target, "generation_config", None) is None:
        raise TypeError(f"target={name}: pass a transformers causal LM (AutoModelForCausalLM).")
    if name.endswith("ForBlockDiffusion"):
        raise TypeError(
            f"target={name}: it denoises a canvas of tokens, and has no text from left to right that drafts "
            "could be verified in; pass a causal LM."
        )
    if getattr(config, "is_encoder_decoder", False):
        raise TypeError(f"target={name}: encoder-decoder models cannot be drafted for; pass a causal LM.")


def check_streamer(streamer: Any, rows: int) -> None:
    """Raise unless ``streamer`` is None or a transformers streamer for a request of one row."""
    if streamer is None:
        return
    if not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise TypeError(f"streamer={type(streamer).__name__}: pass a streamer with put(ids) and end().")
    if rows != 1:
        raise ValueError(f"streamer with {rows} rows in input_ids: streamers take one row; use stream().")


def check_static_rope(config) -> None:
    """Raise ``ValueError`` for rope types that depend on the length at run time.

    In a model of several parts only the text's rope counts.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    parameters = getattr(text, "rope_parameters", None)
    parameters = parameters if isinstance(parameters, dict) else {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in nested or [parameters]:
        kind = rope.get("rope_type", "default")
        if kind in DYNAMIC_ROPE_TYPES:
            raise ValueError(
                f"rope_type={kind!r}: its frequencies change with the length seen at run time, which one "
                "compiled program cannot follow; use a static type (default, linear, yarn, llama3)."
            )


DYNAMIC_ROPE_TYPES = ("dynamic", "longrope")


def check_types(config: dict[str, Any], where: Any) -> None:
    """Raise ``ValueError`` for an unknown ``dtype`` or ``quantization_config``."""
    import torch

    for name in ("dtype", "torch_dtype"):
        value = config.get(name)
        known = isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype)
        if value is not None and not known:
            raise ValueError(
                f"{name}={value!r} in {where}/config.json: torch has no such type; name the weights' own."
            )
    quantized = config.get("quantization_config")
    if quantized is not None and not isinstance(quantized, dict):
        where = f"quantization_config={quantized!r} in {where}/config.json"
        raise ValueError(f"{where}: must be an object; remove it if the weights are plain.")
