"""Options of a subcommand from the fields of a frozen dataclass, which alone says what there is."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from typing import Any, TypeVar, get_args, get_type_hints

T = TypeVar("T")


def add_options(
    parser: argparse.ArgumentParser,
    cls: type,
    without: tuple[str, ...] = (),
    optional: tuple[str, ...] = (),
) -> None:
    """One ``--option`` per field of ``cls``, with its default, and its help from the ``Args:`` of ``cls``.

    An option without a default is required, unless it is among the ``optional``: these are None if unset.
    """
    hints, helps = get_type_hints(cls), _helps(cls)
    for field in dataclasses.fields(cls):
        if field.name in without:
            continue
        name = "--" + field.name.replace("_", "-")
        kind = next((arm for arm in get_args(hints[field.name]) if arm is not type(None)), hints[field.name])
        default = None if field.default is dataclasses.MISSING else field.default
        shown = helps.get(field.name, "") + ("" if default is None else f" (default {default})")
        if kind is bool:
            parser.add_argument(name, action="store_true", help=shown)
        else:
            required = field.default is dataclasses.MISSING and field.name not in optional
            metavar = kind.__name__.upper()
            parser.add_argument(
                name, type=kind, default=default, help=shown, metavar=metavar, required=required
            )


def read_options(cls: type[T], arguments: argparse.Namespace, **more: Any) -> T:
    """A ``cls`` from parsed ``arguments``; ``more`` gives the fields that were left out."""
    names = [field.name for field in dataclasses.fields(cls) if field.name not in more]  # pyright: ignore
    return cls(**{name: getattr(arguments, name) for name in names}, **more)


def _helps(cls: type) -> dict[str, str]:
    """Sentences of the docstring's ``Args:``, by field; several fields may share a line."""
    section = (inspect.getdoc(cls) or "").partition("Args:")[2].partition("\n\n")[0]
    text = " ".join(section.split())
    names = [field.name for field in dataclasses.fields(cls)]  # pyright: ignore
    found = list(re.finditer(rf"(?:^|(?<=\. ))({'|'.join(names)}): ", text))
    ends = [match.start() for match in found[1:]] + [len(text)]
    return {
        match[1]: text[match.end() : end].strip().rstrip(".").replace("%", "%%")
        for match, end in zip(found, ends, strict=True)
    }
