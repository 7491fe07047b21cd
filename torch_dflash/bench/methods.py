"""The drafting methods that ``torch-dflash bench`` compares, by the words of ``--methods``."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch_dflash.proposers import NGramProposer
from torch_dflash.proposers.dflash.model import DFlashDraftModel
from torch_dflash.proposers.dflash2.model import DFlash2DraftModel
from torch_dflash.proposers.eagle3.model import Eagle3DraftModel
from torch_dflash.proposers.lookahead import LookaheadProposer
from torch_dflash.proposers.medusa.model import MedusaDraftModel
from torch_dflash.proposers.trees.proposer import TreeProposer
from torch_dflash.proposers.union import Union
from torch_dflash.storage.files import checksum_of

WIDTH = 8
"""Rows of prompt lookup, and drafts of transformers' own, where ``--methods`` says no other number."""
HEADS: dict[str, type] = {"eagle3": Eagle3DraftModel, "medusa": MedusaDraftModel}
HEADS |= {"dflash": DFlashDraftModel, "dflash2": DFlash2DraftModel}
TREES: dict[str, Callable[[Any, int], Any]] = {
    "tree": TreeProposer,
    "union": lambda drafter, rows: Union(NGramProposer(), drafter, rows=rows),
}
OWN = "plain", "lookup", "lookahead"
THEIRS = "hf", "hf-lookup", "hf-dflash", "hf-assistant"
FORMS = "plain, lookup[:W], lookahead, hf, hf-lookup[:W], hf-dflash[=DIR], hf-assistant=DIR, " + ", ".join(
    [*(f"{head}[:W]=DIR" for head in HEADS), *(f"{tree}:ROWS[=DIR]" for tree in TREES)]
)
_ORIGIN = {"_name_or_path", "transformers_version", "dtype", "auto_map"}
WIDEST = {"lookup": 512, "hf-lookup": 512} | dict.fromkeys((*HEADS, *TREES), 64)
"""The most rows by the kinds whose word may hold a number."""


@dataclass(frozen=True)
class Word:
    """A word of ``--methods`` such as ``tree:16=DIR``: its kind, number and drafter."""

    name: str
    kind: str
    number: int | None
    source: str | None


@dataclass(frozen=True)
class Method:
    """One method.

    Attributes:
        drafter: as `torch_dflash.compile` takes it. theirs: arguments of transformers' own ``generate``;
            None: this library decodes.
        weights: parameters that draft, all of them. verify_width: rows of a chain's verify pass; None: all.
        checksum: of these weights; 0 without.
    """

    name: str
    drafter: Any = None
    theirs: dict[str, Any] | None = None
    weights: int = 0
    verify_width: int | None = None
    checksum: int = 0

    @property
    def plain(self) -> bool:
        """Whether it drafts nothing."""
        return self.drafter is None and self.theirs is None


def read_words(text: str) -> list[Word]:
    """The methods that ``text`` names, in order; ``plain`` comes first.

    Raises:
        ValueError: an unknown, doubled or incomplete word.
    """
    words = [_word(word.strip()) for word in text.split(",") if word.strip()]
    if not words:
        raise ValueError(f"{text!r}: name at least one of {FORMS}.")
    names = [word.name for word in words]
    if doubled := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{doubled}: named twice; leave one out.")
    if all(word.source is None for word in words if word.kind in ("dflash", "dflash2")):
        for word in words:
            if word.kind in (*TREES, "hf-dflash") and word.source is None:
                raise ValueError(f"{word.name}: of no drafter; add dflash=DIR, or write {word.name}=DIR.")
    return [Word("plain", "plain", None, None), *(word for word in words if word.kind != "plain")]


def make_methods(words: list[Word], load: Callable[[str, bool], Any]) -> list[Method]:
    """The methods of ``words``; ``load(source, causal)`` reads a drafter, or a causal LM that assists.

    Raises:
        ValueError: a drafter of another kind than its word's, or with a shorter block.
    """
    named = [word for kind in ("dflash", "dflash2") for word in words if word.kind == kind]
    first = named[0].source if named else None
    loaded: dict[Any, Any] = {}

    def drafter(word: Word) -> Any:
        source = word.source or first
        assert source is not None
        key = source, word.kind == "hf-assistant"
        if key not in loaded:
            loaded[key] = load(*key)
        return loaded[key]

    return [_method(word, drafter) for word in words]


def _method(word: Word, drafter: Callable[[Word], Any]) -> Method:
    width = word.number or WIDTH
    if word.kind == "plain":
        return Method(word.name)
    if word.kind == "lookup":
        return Method(word.name, NGramProposer(width))
    if word.kind == "lookahead":
        return Method(word.name, LookaheadProposer())
    if word.kind == "hf":
        return Method(word.name, theirs={})
    if word.kind == "hf-lookup":
        return Method(word.name, theirs={"prompt_lookup_num_tokens": width - 1})
    own = drafter(word)
    same: Any = {"weights": sum(weight.numel() for weight in own.parameters())}
    weights = checksum_of({name: one.detach().cpu() for name, one in own.state_dict().items()})
    same |= {"checksum": zlib.crc32(settings_of(own.config).encode(), weights)}
    _check_kind(word, own)
    if word.kind.startswith("hf-"):
        more = {"speculation_type": "dflash"} if word.kind == "hf-dflash" else {}
        return Method(word.name, theirs={"assistant_model": own} | more, **same)
    if word.kind in TREES:
        return Method(word.name, TREES[word.kind](own, width), **same)
    return Method(word.name, own, verify_width=word.number, **same)


def settings_of(config: Any) -> str:
    """The fields of a model's config as JSON, without those that say where it is from."""
    fields = config.to_dict()
    return json.dumps({name: fields[name] for name in sorted(fields.keys() - _ORIGIN)}, default=str)


def _check_kind(word: Word, drafter: Any) -> None:
    """Raise ``ValueError`` if a drafter is of another kind than its word's, or has a shorter block."""
    found = next((name for name in reversed(HEADS) if isinstance(drafter, HEADS[name])), None)
    wanted = "dflash" if word.kind == "hf-dflash" else word.kind
    if wanted in HEADS and found != wanted:
        raise ValueError(f"{word.name}: {word.source} is {found or 'of another kind'}, not {wanted}.")
    block = getattr(getattr(drafter, "config", None), "block_size", None)
    if wanted in HEADS and word.number and block and word.number > block:
        raise ValueError(f"{word.name}: this drafter's block has {block} rows; ask for at most so many.")


def _word(word: str) -> Word:
    name, _, source = word.partition("=")
    kind, _, number = name.partition(":")
    most = WIDEST.get(kind, 0)
    if kind not in (*OWN, *THEIRS, *HEADS, *TREES) or (number and not most):
        raise ValueError(f"{word}: no such method; take some of {FORMS}.")
    if number and (not number.isdecimal() or not 2 <= int(number) <= most) or (kind in TREES and not number):
        raise ValueError(f"{word}: give rows from 2 to {most}, the anchor included, as {kind}:16.")
    if kind in (*HEADS, "hf-assistant") and not source:
        raise ValueError(f"{word}: name its drafter, as {kind}=DIR.")
    if source and kind not in (*HEADS, *TREES, "hf-dflash", "hf-assistant"):
        raise ValueError(f"{word}: {kind} has no drafter; leave ={source} out.")
    return Word(name, kind, int(number) if number else None, source or None)
