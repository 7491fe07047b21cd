"""Checks that a drafter fits its target, for engines and for loaders."""

from __future__ import annotations

from typing import Any

from torch_dflash.proposers.facts import TargetFacts, facts_of

TRAINED = "use the drafter trained for this target."


def check_pair(target: Any, drafter: Any) -> None:
    """Raise ``ValueError`` naming the first field in which ``drafter`` does not fit ``target``.

    Args:
        target: as `facts_of` takes it.
        drafter: a `DFlashDraftModel`, or its config alone.
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
        named = f"num_target_layers={config.num_target_layers}"
        raise ValueError(f"{named}, but the target has {facts.layers} layers; {TRAINED}")
    outside = [tap for tap in config.target_layer_ids if not 0 <= tap < facts.layers]
    if outside:
        raise ValueError(
            f"target_layer_ids={config.target_layer_ids}: {outside} lie outside the target's {facts.layers} "
            "layers; ids are 0-based, speculators' aux_hidden_state_layer_ids one higher."
        )


def _check_ids(config: Any, facts: TargetFacts) -> None:
    if config.mask_token_id is None:
        raise ValueError("mask_token_id is missing in the drafter's config; set the one it was trained with.")
    rows_needed = not (config.own_embedding or config.mask_embedding)
    if rows_needed and not 0 <= config.mask_token_id < facts.rows:
        raise ValueError(
            f"mask_token_id={config.mask_token_id} has no row in the target's embedding ({facts.rows} rows); "
            "set the id the drafter was trained with."
        )


def tables_of_ids(config: Any) -> list[str]:
    """Names of the drafter's parts with a row for each id; without any it takes every vocabulary."""
    parts = {"embed_tokens": config.own_embedding, "lm_head": config.own_head}
    parts |= {"markov_head": config.markov_rank, "candidate_selector": config.dflash2}
    return [name for name, there in parts.items() if there]


def _check_devices(target: Any, drafter: Any) -> None:
    own, theirs = (getattr(one, "device", None) for one in (drafter, target))
    if own is None or theirs is None:
        return  # of a config alone
    # A loaded target has no torch device; a drafter's tensors are copied to wherever it is.
    if own != theirs and theirs.type != "meta":
        raise ValueError(f"the drafter is on {own}, the target on {theirs}; move them together.")
