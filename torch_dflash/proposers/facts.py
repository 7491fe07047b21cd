"""`TargetFacts`: the properties of a target that a drafter must fit, from a model or its config."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from torch_dflash.checks import check_there, is_count, positions_of
from torch_dflash.storage.json_text import naming_deep_json
from torch_dflash.storage.weight_files import HUB_OPTIONS

CHOSEN = ("revision", "subfolder")
"""Hub options that hold for one repository alone."""


@dataclass(frozen=True)
class TargetFacts:
    """The properties of a target that a drafter depends on.

    Attributes:
        name: for messages. layers: N. hidden: H of its layers. vocab: V.
        rows, columns: of its embedding. context: positions it was made for.
        rope: its rope_parameters, if it has one set of them. dtype: of its weights, if known.
        stops: its stop ids.
    """

    name: str
    layers: int
    hidden: int
    vocab: int
    rows: int
    columns: int
    context: int
    rope: dict[str, Any] | None
    dtype: torch.dtype | None
    stops: tuple[int, ...]


def facts_of(target: Any, **hub: Any) -> TargetFacts:
    """The facts of a causal LM, from the model, its config, a directory or a hub id.

    Args:
        target: a model, a config, a path or a hub id.
        hub: options for fetching, as in ``from_pretrained``; those in `CHOSEN` are left out.

    Raises:
        TypeError: none of these, or a drafter. OSError, ValueError: the config cannot be read.
    """
    if isinstance(target, str | os.PathLike):
        check_there("target", target)
        with naming_deep_json(target):
            config = AutoConfig.from_pretrained(target, **elsewhere(hub))
        return _of_config(config, str(target))
    if isinstance(target, PreTrainedConfig):
        return _of_config(target, type(target).__name__)
    _refuse_drafter(getattr(target, "config", None), type(target).__name__)
    if not hasattr(target, "config") or not hasattr(target, "get_input_embeddings"):
        raise TypeError(f"target={type(target).__name__}: pass a causal LM, its config, directory or hub id.")
    embedding = target.get_input_embeddings().weight
    stops = getattr(getattr(target, "generation_config", None), "eos_token_id", None)
    return _of_config(target.config, type(target).__name__, tuple(embedding.shape), target.dtype, stops)


def elsewhere(hub: dict[str, Any]) -> dict[str, Any]:
    """The hub options without those for one repository alone."""
    return {name: hub[name] for name in HUB_OPTIONS if name in hub and name not in CHOSEN}


def _of_config(
    config: Any, name: str, embedding: tuple[int, ...] | None = None, dtype: Any = None, stops: Any = None
) -> TargetFacts:
    _refuse_drafter(config, name)
    base = config.get_text_config()
    rows, columns = embedding or (base.vocab_size, base.hidden_size)
    dtype = dtype or getattr(base, "dtype", None) or getattr(config, "dtype", None)
    stops = stops if stops is not None else getattr(base, "eos_token_id", None)
    rope = getattr(base, "rope_parameters", None)
    return TargetFacts(
        name=name,
        layers=base.num_hidden_layers,
        hidden=base.hidden_size,
        vocab=base.vocab_size,
        rows=rows,
        columns=columns,
        context=positions_of(config),
        rope=rope if isinstance(rope, dict) and "rope_theta" in rope else None,
        dtype=getattr(torch, dtype, None) if isinstance(dtype, str) else dtype,
        stops=tuple(one for one in (stops if isinstance(stops, list) else [stops]) if is_count(one)),
    )


def _refuse_drafter(config: Any, name: str) -> None:
    if hasattr(config, "dflash_config"):
        raise TypeError(f"target={name}: that is a DFlash drafter; pass the target it was trained for.")
