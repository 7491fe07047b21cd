"""Does this drafter fit this target? Every check stands here once, for engines and for loaders."""

from __future__ import annotations

from typing import Any

from torch_dflash.proposers.facts import TargetFacts, facts_of


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
            raise ValueError(
                f"target_layer_ids names {len(config.target_layer_ids)} taps, but fc takes {taps:g}; "
                "the config and the weights are of different drafters."
            )
    _check_ids(config, facts)
    _check_devices(target, drafter)


def _check_width(config: Any, facts: TargetFacts) -> None:
    if facts.hidden != facts.columns:
        raise ValueError(
            f"hidden_size={facts.hidden} of the target's layers, but its embedding has {facts.columns} "
            "columns, which it projects; a drafter needs both alike: pass drafter=None or NGramProposer()."
        )
    if config.hidden_size != facts.columns:
        raise ValueError(
            f"hidden_size={config.hidden_size} of the drafter, but the target's is {facts.columns}; use the "
            "drafter trained for this target."
        )


def _check_layers(config: Any, facts: TargetFacts) -> None:
    if config.num_target_layers not in (None, facts.layers):
        raise ValueError(
            f"num_target_layers={config.num_target_layers} in the drafter, but the target has {facts.layers} "
            "layers; use the drafter trained for this target."
        )
    outside = [tap for tap in config.target_layer_ids if not 0 <= tap < facts.layers]
    if outside:
        raise ValueError(
            f"target_layer_ids={config.target_layer_ids}: {outside} lie outside the target's {facts.layers} "
            "layers (ids are 0-based block indices; speculators' aux_hidden_state_layer_ids are one higher)."
        )


def _check_ids(config: Any, facts: TargetFacts) -> None:
    if config.mask_token_id is None:
        raise ValueError(
            "mask_token_id is missing from the drafter's config; set the id it was trained with "
            "(config.mask_token_id = ...)."
        )
    rows_needed = not (config.own_embedding or config.mask_embedding)
    if rows_needed and not 0 <= config.mask_token_id < facts.rows:
        raise ValueError(
            f"mask_token_id={config.mask_token_id} has no row in the target's embedding ({facts.rows} rows); "
            "set the id the drafter was trained with."
        )


def tables_of_ids(config: Any) -> list[str]:
    """The parts of a drafter that have a row for each id; a drafter without any takes every vocabulary."""
    parts = {
        "embed_tokens": config.own_embedding,
        "lm_head": config.own_head,
        "markov_head": config.markov_rank,
        "candidate_selector": config.dflash2,
    }
    return [name for name, there in parts.items() if there]


def _check_devices(target: Any, drafter: Any) -> None:
    own, theirs = (getattr(one, "device", None) for one in (drafter, target))
    if own is None or theirs is None:
        return  # of a config alone
    # A loaded target has no torch device; a drafter's tensors are copied to wherever it is.
    if own != theirs and theirs.type != "meta":
        raise ValueError(f"the drafter is on {own}, the target on {theirs}; move them together.")
