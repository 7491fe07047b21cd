"""What a model asks for by itself, where a call leaves it open."""

from __future__ import annotations

from typing import Any


def default_stop_ids(target: Any, tokenizer: Any) -> list[int]:
    """The model's stop ids, else the tokenizer's."""
    stops = target.generation_config.eos_token_id
    stops = tokenizer.eos_token_id if stops is None else stops
    return [] if stops is None else [*stops] if isinstance(stops, list | tuple) else [stops]


def penalty_of(target: Any) -> float | None:
    """The repetition penalty that the model asks for; None: none."""
    penalty = getattr(target.generation_config, "repetition_penalty", None)
    return None if penalty in (None, 1.0) else penalty
