"""Reads transformers' prepared lists back: processors and criteria as the options that they stand for.

transformers builds processors and criteria from the options and puts the user's own among them: a criterion
in the place of its own of that type, a warper before its own. So the lists say what is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from transformers.generation import logits_process as processors_of
from transformers.generation import stopping_criteria as criteria_of

from torch_dflash.processors.custom import BlockProcessor, HostProcessor
from torch_dflash.processors.options import Option, TransformersCall, Twin
from torch_dflash.requests.request import SAMPLING
from torch_dflash.requests.rules import options_of_rules

# By exact type: a subclass may do anything. Both in the order in which a round applies them.
_TWINS = [
    (option, option.twin) for option in (*SAMPLING.values(), *options_of_rules().values()) if option.twin
]
_RULES: dict[type, Option] = {twin.kind: option for option, twin in _TWINS if not option.samples}
_WARPERS: dict[type, Option] = {twin.kind: option for option, twin in _TWINS if option.samples}
OFF: dict[str, Any] = {option.name: option.off for option in _RULES.values()}
"""Options of rules, and what leaves each out whatever the model's own config says."""
OF_SAMPLES: dict[str, Any] = {option.name: option.off for option in _WARPERS.values()}
"""Options of sampling, and what leaves each out."""
_ORDER = list(_RULES)


def _twin(item: Any) -> Twin:
    """The counterpart of one of transformers' own."""
    twin = (_RULES | _WARPERS)[type(item)].twin
    assert twin is not None
    return twin


def read_processors(processors: Iterable[Any], call: TransformersCall) -> tuple[dict[str, Any], list[Any]]:
    """(options with the effect of ``processors``, in their order; those that no option stands for).

    Among the latter are transformers' own that stand between or behind those of a user.

    Raises:
        ValueError: a processor that is set up as no option could, or in an order that an option cannot have.
    """
    effective = _effective(list(processors), call.width)
    kinds = [0 if type(item) in _RULES else 2 if type(item) in _WARPERS else 1 for item in effective]
    start = next((place for place, kind in enumerate(kinds) if kind != 0), len(kinds))
    end = next((place + 1 for place, kind in reversed([*enumerate(kinds)]) if kind != 2), 0)
    rules, own, warpers = effective[:start], effective[start:end], effective[end:]
    # Nothing is drafted beside one that is asked on the host, so transformers' own are asked there as well.
    if kinds != sorted(kinds) and not any(map(_is_on_host, own)):
        at = next(place for place in range(1, len(kinds)) if kinds[place] < kinds[place - 1])
        early, late = (type(effective[place]).__name__ for place in (at - 1, at))
        raise ValueError(
            f"logits_processor holds {early} before {late}: penalties, bans and forced ids come first, then "
            "processors of your own, then warpers; leave one of the two out."
        )
    return _read_rules(rules, call) | _read_warpers(warpers, call), own


def _read_rules(items: list[Any], call: TransformersCall) -> dict[str, Any]:
    """Options with the effect of ``items``, penalties, bans and forced ids, in their order.

    Raises:
        ValueError: one is set up as no option could, stands twice, or in an order that changes what it does.
    """
    options: dict[str, Any] = {}
    done: list[Any] = []
    for item in items:
        option, twin, name = _RULES[type(item)].name, _twin(item), type(item).__name__
        if not twin.holds(item, call):
            raise ValueError(f"logits_processor holds {name} {twin.otherwise.format(option)}")
        if option in options:
            raise ValueError(f"logits_processor holds {name} twice; pass one of it.")
        for earlier in done:
            if _ORDER.index(type(earlier)) > _ORDER.index(type(item)) and not _commute(earlier, item):
                raise ValueError(
                    f"logits_processor holds {type(earlier).__name__} before {name}; block decoding applies "
                    f"them in transformers' order: pass {option} as an option."
                )
        options |= {option: twin.value(item, call)}
        done.append(item)
    if "min_length" not in options:
        return options
    # Both apply, and as options the one would replace the other.
    least = max(options["min_length"] - call.width, options.get("min_new_tokens", 0), 0)
    others = {name: value for name, value in options.items() if name != "min_length"}
    return others | {"min_new_tokens": least}


def _commute(earlier: Any, item: Any) -> bool:
    """Whether two processors have the same effect in either order: bans do with what forces no token."""
    if _twin(earlier).forces:  # its token is refused among the suppressed ones
        return isinstance(
            item,
            processors_of.SuppressTokensLogitsProcessor | processors_of.SuppressTokensAtBeginLogitsProcessor,
        )
    return _twin(earlier).ban or _twin(item).ban


def _read_warpers(warpers: list[Any], call: TransformersCall) -> dict[str, Any]:
    options: dict[str, Any] = dict(OF_SAMPLES)
    seen: list[tuple[str, str]] = []
    for item in warpers:
        name, twin = _WARPERS[type(item)].name, _twin(item)
        value = twin.value(item, call)
        shown = f"{type(item).__name__}({value!r})"
        _check_plain(item, name)
        for earlier, text in seen:
            if earlier not in twin.after:
                raise ValueError(
                    f"logits_processor holds {text} before {shown}; block decoding applies "
                    f"{', '.join(OF_SAMPLES)}, in this order, one of each: remove it and pass {earlier} "
                    "as an option."
                )
        seen.append((name, shown))
        known = options[name]
        if name == "temperature":
            value = known * value
        elif name == "top_k":
            value = min(known or value, value)
        options |= {name: max(known, value) if name == "min_p" else value}
    return options


def check_scores(processors: Iterable[Any], config: Any) -> None:
    """Raise ``ValueError`` for one that moves scores and no token, which a round would leave out."""
    for item in processors:
        kind = type(item)
        unseen = kind in _WARPERS and not config.do_sample
        if unseen or (kind is processors_of.LogitNormalization and not config.renormalize_logits):
            raise ValueError(
                f"output_scores=True with {kind.__name__} in logits_processor, which changes scores and no "
                "token here; leave it out, or pass output_logits=True instead."
            )


def read_prepared_criteria(criteria: Iterable[Any]) -> tuple[list[int], list[int] | None, list[Any]]:
    """The lengths of which the least ends all rows, the ids that end a row (None: nothing says), the others.

    Raises:
        ValueError: stop ids that are not one list.
    """
    lengths, stops, others = [], None, []
    for item in criteria:
        if type(item) is criteria_of.MaxLengthCriteria:
            lengths.append(item.max_length)
        elif type(item) is criteria_of.EosTokenCriteria:
            if item.eos_token_id.ndim > 1:
                raise ValueError(
                    f"eos_token_id={item.eos_token_id.tolist()}: transformers makes one list of them; "
                    "pass one list here, or rows of their own to torch_dflash.generate."
                )
            stops = (stops or []) + item.eos_token_id.reshape(-1).tolist()
        else:
            others.append(item)
    return lengths, None if stops is None else list(dict.fromkeys(stops)), others


def _effective(processors: list[Any], width: int) -> list[Any]:
    """``processors`` but for those that change nothing here."""
    found: list[Any] = []
    for item in reversed(processors):
        if type(item) is processors_of.LogitNormalization:  # adds one number to all logits
            useful = any(_is_own(later) or _twin(later).sizes for later in found)
        else:
            useful = not _without_effect(item, width)
        found = [item, *found] if useful else found
    return found


def _is_own(item: Any) -> bool:
    return type(item) not in _RULES and type(item) not in _WARPERS


def _is_on_host(item: Any) -> bool:
    """Whether it is asked for one token at a time."""
    in_blocks = isinstance(item, BlockProcessor) or (isinstance(item, HostProcessor) and item.pure)
    return _is_own(item) and not in_blocks


def _without_effect(item: Any, width: int) -> bool:
    kind = type(item)
    if kind is processors_of.MinLengthLogitsProcessor:
        return item.min_length <= width  # what transformers makes of min_new_tokens=0
    if kind is processors_of.MinNewTokensLengthLogitsProcessor:
        return item.prompt_length_to_skip + item.min_new_tokens <= width
    if kind is processors_of.SuppressTokensLogitsProcessor:
        return item.suppress_tokens.numel() == 0
    if kind is processors_of.SuppressTokensAtBeginLogitsProcessor:
        return item.begin_suppress_tokens.numel() == 0
    return False


def _check_plain(item: Any, name: str) -> None:
    """The settings that no option stands for must be transformers' own."""
    settings = {"filter_value": -math.inf} if name != "temperature" else {}
    if name not in ("temperature", "top_k"):
        settings["min_tokens_to_keep"] = 1
    for setting, value in settings.items():
        if getattr(item, setting) != value:
            raise ValueError(
                f"logits_processor holds {type(item).__name__} with {setting}={getattr(item, setting)!r}; "
                f"block decoding honours {setting}={value} alone: leave {setting} unset."
            )
