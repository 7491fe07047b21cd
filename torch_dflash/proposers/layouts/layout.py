"""`Layout`: recognises a config.json, maps its fields and tensor names to z-lab's."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING

from torch_dflash.checks import is_count

Fields = dict[str, Any]
"""A config.json, as read."""


@dataclass(frozen=True)
class Layout:
    """One way to publish a drafter.

    Attributes:
        name: of the library or vendor.
        claims: whether a config.json is of this layout.
        fields: ``(config.json, where it lies) -> z-lab's fields and ours``; raises ``ValueError`` by field.
        renamed: patterns of tensor names and z-lab's names, applied in order.
        unread: names of tensors that no draft needs.
        classes: names allowed in ``architectures``; empty: any.
        top, nested: known fields besides our config's, at the top and within ``dflash_config``.
        kinds: transformers' types whose fields may also stand at the top.
        network: the field that holds the network's fields, if not the top.
        whole: whether the layout has none of our config's own fields.
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
        """z-lab's name of the tensor ``name``; None for one that is not read."""
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
    """The names in ``architectures``."""
    return config.get("architectures") or []


def without(config: Fields, names: tuple[str, ...]) -> Fields:
    """``config`` without the fields ``names``."""
    return {name: value for name, value in config.items() if name not in names}


def switch(config: Fields, name: str, where: Any, unset: bool | None) -> bool | None:
    """The field ``name``, ``unset`` where it is absent or null.

    Raises:
        ValueError: the field is neither true nor false.
    """
    value = config.get(name)
    if not isinstance(value, bool | None):
        raise ValueError(f"{name}={value!r} in {where}: must be true or false.")
    return unset if value is None else value


def count(config: Fields, name: str, where: Any) -> int:
    """The field ``name``, a positive integer.

    Raises:
        ValueError: the field is missing, or no positive integer.
    """
    value = required(config, name, where)
    if not is_count(value) or value < 1:
        raise ValueError(f"{name}={value!r} in {where}/config.json: must be a positive integer.")
    return value


def required(config: Fields, name: str, where: Any) -> Any:
    """The field ``name``.

    Raises:
        ValueError: the field is missing.
    """
    if config.get(name) is None:
        raise ValueError(f"{name} is missing in {where}/config.json; add the one it was trained with.")
    return config[name]


_APART = ("model_type", "dtype", "torch_dtype")  # the class, and types, which are checked with the weights


def whole_fields(kind: Any, given: Fields, where: Any) -> Fields:
    """Every field of transformers' config class ``kind``, with the values of ``given``.

    Raises:
        ValueError: no such class, or the class refuses a field.
    """
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise ValueError(f"model_type={kind!r} in {where}: this transformers has none of that name.")
    try:
        built = CONFIG_MAPPING[kind](**{name: given[name] for name in given if name not in _APART}).to_dict()
    except (StrictDataclassError, TypeError, AttributeError, IndexError) as error:
        raise refused_field(error, given, str(where)) from error
    return built | {name: given[name] for name in _APART[1:] if name in given}


def refused_field(error: Exception, given: Fields, where: str) -> ValueError:
    """A config class's error as a `ValueError` with the field, its value and the fix."""
    named = next((name for name in given if f"'{name}'" in str(error) or f"`{name}`" in str(error)), None)
    subject = where if named is None else f"{named}={given[named]!r} in {where}"
    return ValueError(f"{subject}: {error.__cause__ or error}; correct it in config.json.")
