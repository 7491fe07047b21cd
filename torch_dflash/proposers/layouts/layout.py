"""What is known of a layout: whose config.json it is, its fields and its tensors' names in z-lab's words."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING

from torch_dflash.checks import is_count

Fields = dict[str, Any]
"""A config.json, as it was read."""


@dataclass(frozen=True)
class Layout:
    """One way to publish a drafter.

    Attributes:
        name: of the library or vendor.
        claims: whether a config.json is of this layout.
        fields: ``(config.json, where it lies) -> z-lab's fields and ours``; raises ``ValueError`` by field.
        renamed: patterns of tensors' names and what z-lab calls them, each tried in order.
        unread: names of tensors that no draft needs.
        classes: what ``architectures`` may name; none: it is not asked.
        top, nested: fields besides our config's own, at the top and within ``dflash_config``.
        kinds: transformers' types whose fields may stand at the top, too.
        network: the field that holds the network's, if they are not at the top.
        whole: whether our config's own fields are no part of this layout.
    """

    name: str
    claims: Callable[[Fields], bool]
    fields: Callable[[Fields, Any], Fields]
    renamed: tuple[tuple[str, str], ...] = ()
    unread: tuple[str, ...] = ()
    classes: tuple[str, ...] = ("DFlashDraftModel", "DFlash2DraftModel")
    top: tuple[str, ...] = ()
    nested: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    network: str | None = None
    whole: bool = False

    def zlabs(self, name: str) -> str | None:
        """What z-lab calls the tensor ``name``; None if it is not read."""
        name = name.removeprefix("model.")
        if name in self.unread:
            return None
        for pattern, words in (*self.renamed, (r"(candidate_selector\.\w+_codebook)\.weight$", r"\1")):
            name = re.sub(pattern, words, name)
        return name


def nested(config: Fields) -> Fields:
    """The fields within ``dflash_config``."""
    return config.get("dflash_config") or {}


def architectures(config: Fields) -> list[str]:
    """Its classes' names."""
    return config.get("architectures") or []


def switch(config: Fields, name: str, where: Any, unset: bool | None) -> bool | None:
    """The field ``name``, ``unset`` where it is absent or null.

    Raises:
        ValueError: it is neither true nor false.
    """
    value = config.get(name)
    if not isinstance(value, bool | None):
        raise ValueError(f"{name}={value!r} in {where}: must be true or false.")
    return unset if value is None else value


def count(config: Fields, name: str, where: Any) -> int:
    """The field ``name``, a number of something.

    Raises:
        ValueError: it is missing, or no positive integer.
    """
    value = required(config, name, where)
    if not is_count(value) or value < 1:
        raise ValueError(f"{name}={value!r} in {where}/config.json: must be a positive integer.")
    return value


def required(config: Fields, name: str, where: Any) -> Any:
    """The field ``name``.

    Raises:
        ValueError: it is missing.
    """
    if config.get(name) is None:
        raise ValueError(
            f"{name} is missing in {where}/config.json; add the one the drafter was trained with."
        )
    return config[name]


_APART = ("model_type", "dtype", "torch_dtype")  # the class, and what is checked where weights are read


def whole_fields(kind: Any, given: Fields, where: Any) -> Fields:
    """Every field of transformers' config class ``kind``, with the values of ``given``.

    Raises:
        ValueError: there is no such class, or it does not take a field.
    """
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise ValueError(
            f"model_type={kind!r} in {where}: this version of transformers has none of that name."
        )
    try:
        built = CONFIG_MAPPING[kind](**{name: given[name] for name in given if name not in _APART}).to_dict()
    except (StrictDataclassError, TypeError, AttributeError, IndexError) as error:
        raise refused_field(error, given, str(where)) from error
    return built | {name: given[name] for name in _APART[1:] if name in given}


def refused_field(error: Exception, given: Fields, where: str) -> ValueError:
    """What a config class says of a field, with its value and the fix."""
    named = next((name for name in given if f"'{name}'" in str(error) or f"`{name}`" in str(error)), None)
    said = where if named is None else f"{named}={given[named]!r} in {where}"
    return ValueError(f"{said}: {error.__cause__ or error}; correct it in config.json.")
