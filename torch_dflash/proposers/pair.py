"""`TargetFacts` of a model or its config, and checks that a drafter fits them."""

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


TRAINED = "use the drafter trained for this target."


def check_pair(target: Any, drafter: Any) -> None:
    """Raise ``ValueError`` naming the first field in which ``drafter`` does not fit ``target``.

    Args:
        target: as `facts_of` takes it.
        drafter: a `DFlashDraftModel`, an `Eagle3DraftModel` or a `MedusaDraftModel`, or its config alone.
    """
    config = getattr(drafter, "config", drafter)
    facts = target if isinstance(target, TargetFacts) else facts_of(target)
    _check_width(config, facts)
    _check_layers(config, facts)
    if hasattr(drafter, "fc"):
        taps = drafter.fc.in_features / config.hidden_size
        if taps != len(config.target_layer_ids):
            named = f"target_layer_ids names {len(config.target_layer_ids)} taps, but fc takes {taps:g}"
            raise ValueError(f"{named}; config and weights are of different drafters.")
    if hasattr(config, "mask_token_id"):  # only DFlash has masks
        _check_ids(config, facts)
    _check_devices(target, drafter)


def _check_width(config: Any, facts: TargetFacts) -> None:
    if facts.hidden != facts.columns:
        raise ValueError(
            f"hidden_size={facts.hidden} of the target's layers, but {facts.columns} of its embedding; a "
            "drafter needs both alike: pass drafter=None or NGramProposer()."
        )
    if config.hidden_size != facts.columns:
        own = config.hidden_size
        raise ValueError(f"hidden_size={own} of the drafter, but the target's is {facts.columns}; {TRAINED}")


def _check_layers(config: Any, facts: TargetFacts) -> None:
    if config.num_target_layers not in (None, facts.layers):
        named = f"num_target_layers={config.num_target_layers} in the drafter"
        raise ValueError(f"{named}, but the target has {facts.layers} layers; {TRAINED}")
    outside = [tap for tap in config.target_layer_ids if not 0 <= tap < facts.layers]
    if outside:
        raise ValueError(
            f"target_layer_ids={config.target_layer_ids}: {outside} lie outside the target's {facts.layers} "
            "layers; ids are 0-based, speculators' aux_hidden_state_layer_ids one higher."
        )


def _check_ids(config: Any, facts: TargetFacts) -> None:
    if config.mask_token_id is None:
        fix = "set the one it was trained with (config.mask_token_id = ...)"
        raise ValueError(f"mask_token_id is missing in the drafter's config; {fix}.")
    rows_needed = not (config.own_embedding or config.mask_embedding)
    if rows_needed and not 0 <= config.mask_token_id < facts.rows:
        raise ValueError(
            f"mask_token_id={config.mask_token_id} has no row in the target's embedding ({facts.rows} rows); "
            "set the id the drafter was trained with."
        )


def tables_of_ids(config: Any) -> list[str]:
    """Names of the drafter's parts with a row for each id; without any it takes every vocabulary."""
    parts = {"embed_tokens": "own_embedding", "lm_head": "own_head"}
    parts |= {"markov_head": "markov_rank", "candidate_selector": "dflash2"}
    return [name for name, field in parts.items() if getattr(config, field, None)]


def _check_devices(target: Any, drafter: Any) -> None:
    own, theirs = (getattr(one, "device", None) for one in (drafter, target))
    if own is None or theirs is None:
        return  # of a config alone
    # A loaded target has no torch device; a drafter's tensors are copied to wherever it is.
    if own != theirs and theirs.type != "meta":
        raise ValueError(f"the drafter is on {own}, the target on {theirs}; move them together.")
