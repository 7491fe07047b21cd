"""A config of transformers' own class, built for the defaults of what a config.json leaves out."""

from __future__ import annotations

from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING

from torch_dflash.proposers.layouts.layout import Fields

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
