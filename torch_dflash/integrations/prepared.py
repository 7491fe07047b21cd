"""What transformers prepared for a custom generate, read back into the options that it stands for.

transformers builds processors and criteria from the options and puts the user's own among them: a criterion
in the place of its own of that type, a warper before its own. So the lists say what is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from transformers.generation import logits_process as processors_of
from transformers.generation import stopping_criteria as criteria_of

# By exact type: a subclass may do anything. The order is that in which a round applies them.
_WARPERS = {
    processors_of.TemperatureLogitsWarper: "temperature",
    processors_of.TopKLogitsWarper: "top_k",
    processors_of.TopPLogitsWarper: "top_p",
    processors_of.MinPLogitsWarper: "min_p",
}
_ORDER = "temperature, top_k, top_p, min_p"
# What may follow what and still have the effect of that order. Top-k keeps the same tokens at any temperature
# and after min-p, and min-p compares with the best token alone; top-p weighs all that is left.
_AFTER = {
    "temperature": ("temperature", "top_k"),
    "top_k": ("temperature", "top_k", "min_p"),
    "top_p": ("temperature", "top_k"),
    "min_p": ("temperature", "top_k", "top_p", "min_p"),
}


def read_processors(processors: Iterable[Any], width: int) -> dict[str, Any]:
    """``temperature``, ``top_k``, ``top_p`` and ``min_p`` with the effect of ``processors``, in their order.

    Args:
        processors: a ``LogitsProcessorList``.
        width: columns of the padded prompt.

    Raises:
        ValueError: a processor of another kind, or warpers in an order that one of each cannot stand for.
    """
    asked: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    seen: list[tuple[str, str]] = []
    for item in processors:
        if _without_effect(item, width):
            continue
        name = _WARPERS.get(type(item))
        if name is None:
            raise _refusal("logits_processor", item, ", ".join(kind.__name__ for kind in _WARPERS))
        value = getattr(item, name)
        shown = f"{type(item).__name__}({value!r})"
        _check_plain(item, name)
        for earlier, text in seen:
            if earlier not in _AFTER[name]:
                raise ValueError(
                    f"logits_processor holds {text} before {shown}; block decoding applies {_ORDER}, in this "
                    f"order, one of each: remove it and pass {earlier} as an option."
                )
        seen.append((name, shown))
        if name == "temperature":
            asked[name] *= value
        elif name == "top_k":
            asked[name] = min(asked[name] or value, value)
        else:
            asked[name] = value if name == "top_p" else max(asked[name], value)
    return asked


def read_criteria(criteria: Iterable[Any]) -> tuple[list[int], list[int] | None]:
    """The lengths of which the least ends all rows, and the ids that end a row (None: nothing says).

    Raises:
        ValueError: a criterion of another kind.
    """
    lengths, stops = [], None
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
            raise _refusal("stopping_criteria", item, "MaxLengthCriteria, EosTokenCriteria")
    return lengths, None if stops is None else list(dict.fromkeys(stops))


def _without_effect(item: Any, width: int) -> bool:
    kind = type(item)
    if kind is processors_of.LogitNormalization:
        return True  # adds one number to all logits
    if kind is processors_of.MinLengthLogitsProcessor:
        return item.min_length <= width  # what transformers makes of min_new_tokens=0
    if kind is processors_of.SuppressTokensLogitsProcessor:
        return item.suppress_tokens.numel() == 0
    if kind is processors_of.SuppressTokensAtBeginLogitsProcessor:
        return item.begin_suppress_tokens.numel() == 0
    return False


def _check_plain(item: Any, name: str) -> None:
    """The settings that no option stands for must be transformers' own."""
    settings = {"filter_value": -math.inf} if name != "temperature" else {}
    if name in ("top_p", "min_p"):
        settings["min_tokens_to_keep"] = 1
    for setting, value in settings.items():
        if getattr(item, setting) != value:
            raise ValueError(
                f"logits_processor holds {type(item).__name__} with {setting}={getattr(item, setting)!r}; "
                f"block decoding honours {setting}={value} alone: leave {setting} unset."
            )


def _refusal(argument: str, item: Any, honoured: str) -> ValueError:
    return ValueError(
        f"{argument} holds {type(item).__name__}, which is written for one token at a time; block decoding "
        f"honours {honoured}: remove it."
    )
