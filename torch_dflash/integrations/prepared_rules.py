"""transformers' processors of penalties, bans and forced ids, as the options that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.generation import logits_process as processors_of


@dataclass(frozen=True)
class TransformersCall:
    """What a list of processors was made for.

    ``width``: columns of the prompts; ``max_length``: of the text with them; ``stop_ids``: of all rows;
    ``padding``: masked columns before each prompt; ``forces_first``: whether the token after a prompt of one
    is forced, which transformers then leaves to that.
    """

    width: int
    max_length: int
    stop_ids: frozenset[int]
    padding: tuple[int, ...] = ()
    forces_first: bool = False

    @property
    def begins(self) -> int:
        """Columns before the first token that is not forced."""
        return self.width + (self.width == 1 and self.forces_first)


@dataclass(frozen=True)
class Rule:
    """How an option is read off a processor, and what besides must hold of it.

    ``ban``: it only takes tokens away, so it may stand anywhere before a forced one. ``otherwise``: what is
    said where it does not hold.
    """

    option: str
    value: Callable[[Any, TransformersCall], Any]
    holds: Callable[[Any, TransformersCall], bool] = lambda item, call: True
    ban: bool = False
    otherwise: str = "for another prompt, length or stop id than this call's; pass {} as an option."


def _ids(tensor: Any) -> list[int]:
    return tensor.reshape(-1).tolist()


def _ignores_padding(item: Any, call: TransformersCall) -> bool:
    """As transformers' own does. A number ignores a part of the prompt, and None counts the padding too."""
    ignored = getattr(item, "prompt_ignore_length", None)
    if isinstance(ignored, Tensor):
        return tuple(ignored.tolist()) == call.padding
    return ignored is None and not any(call.padding)


def _own_stops(item: Any, call: TransformersCall) -> bool:
    return set(_ids(item.eos_token_id)) == call.stop_ids


# By exact type: a subclass may do anything. In the order in which transformers lists and rows apply them.
RULES: dict[type, Rule] = {
    processors_of.SequenceBiasLogitsProcessor: Rule(
        "sequence_bias", lambda item, call: dict(item.sequence_bias)
    ),
    processors_of.RepetitionPenaltyLogitsProcessor: Rule(
        "repetition_penalty",
        lambda item, call: item.penalty,
        _ignores_padding,
        otherwise="that leaves out a part of the prompts, or counts their padding, as transformers "
        "before 5.23 does; pass {} to td.generate, or one prompt at a time.",
    ),
    processors_of.NoRepeatNGramLogitsProcessor: Rule(
        "no_repeat_ngram_size", lambda item, call: item.ngram_size, ban=True
    ),
    processors_of.NoBadWordsLogitsProcessor: Rule(
        "bad_words_ids", lambda item, call: [list(ids) for ids in item.sequence_bias], ban=True
    ),
    processors_of.MinLengthLogitsProcessor: Rule(
        "min_length", lambda item, call: item.min_length, _own_stops, ban=True
    ),
    processors_of.MinNewTokensLengthLogitsProcessor: Rule(
        "min_new_tokens",
        lambda item, call: max(item.prompt_length_to_skip + item.min_new_tokens - call.width, 0),
        _own_stops,
        ban=True,
    ),
    processors_of.SuppressTokensLogitsProcessor: Rule(
        "suppress_tokens", lambda item, call: _ids(item.suppress_tokens), ban=True
    ),
    processors_of.SuppressTokensAtBeginLogitsProcessor: Rule(
        "begin_suppress_tokens",
        lambda item, call: _ids(item.begin_suppress_tokens),
        lambda item, call: item.begin_index == call.begins,
        ban=True,
    ),
    processors_of.ForcedBOSTokenLogitsProcessor: Rule(
        "forced_bos_token_id", lambda item, call: item.bos_token_id
    ),
    processors_of.ForcedEOSTokenLogitsProcessor: Rule(
        "forced_eos_token_id",
        lambda item, call: _ids(item.eos_token_id),
        lambda item, call: item.max_length == call.max_length,
    ),
    processors_of.ExponentialDecayLengthPenalty: Rule(
        "exponential_decay_length_penalty",
        lambda item, call: (item.regulation_start - call.width, item.regulation_factor),
        lambda item, call: _own_stops(item, call) and item.regulation_start >= call.width,
    ),
}
OFF: dict[str, Any] = dict.fromkeys((rule.option for rule in RULES.values()), ())
OFF |= {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_length": 0, "min_new_tokens": 0}
OFF |= {"exponential_decay_length_penalty": None}
"""Options of `RULES`, and what leaves each out whatever the model's own config says."""
_ORDER = list(RULES)
_FORCED = (processors_of.ForcedBOSTokenLogitsProcessor, processors_of.ForcedEOSTokenLogitsProcessor)


def read_rules(items: list[Any], call: TransformersCall) -> dict[str, Any]:
    """Options with the effect of ``items``, processors of `RULES`, in their order.

    Raises:
        ValueError: one is set up as no option could, stands twice, or in an order that changes what it does.
    """
    asked: dict[str, Any] = {}
    done: list[Any] = []
    for item in items:
        rule, name = RULES[type(item)], type(item).__name__
        if not rule.holds(item, call):
            raise ValueError(f"logits_processor holds {name} {rule.otherwise.format(rule.option)}")
        if rule.option in asked:
            raise ValueError(f"logits_processor holds {name} twice; pass one of it.")
        for earlier in done:
            if _ORDER.index(type(earlier)) > _ORDER.index(type(item)) and not _commute(earlier, item):
                raise ValueError(
                    f"logits_processor holds {type(earlier).__name__} before {name}; block decoding applies "
                    f"them in transformers' order: pass {rule.option} as an option."
                )
        asked[rule.option] = rule.value(item, call)
        done.append(item)
    if "min_length" in asked:  # both apply, and as options the one would replace the other
        least = asked.pop("min_length") - call.width
        asked["min_new_tokens"] = max(least, asked.get("min_new_tokens", 0), 0)
    return asked


def _commute(earlier: Any, item: Any) -> bool:
    """Whether two processors have the same effect in either order: bans do with what forces no token."""
    if isinstance(earlier, _FORCED):  # its token is refused among the suppressed ones
        return isinstance(
            item,
            processors_of.SuppressTokensLogitsProcessor | processors_of.SuppressTokensAtBeginLogitsProcessor,
        )
    return RULES[type(earlier)].ban or RULES[type(item)].ban
