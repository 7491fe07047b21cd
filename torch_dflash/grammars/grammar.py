"""`Grammar`: what an answer may say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from torch_dflash.grammars.matcher import MatcherRow
from torch_dflash.grammars.table import TableRow, TokenTable, check_same, token_table
from torch_dflash.grammars.vocabulary import Vocabulary, library
from torch_dflash.storage.json_text import parse_json

RESPONSE_FORMATS = ("text", "json_object", "json_schema")


class Grammar:
    """The texts that an answer may be; made by `json_schema`, `regex`, `lark`, or from a ``response_format``.

    Give it to any call as ``grammar=``, one for all rows or a list with one, or None, for each. It holds for
    the new tokens alone. A row's stop ids are allowed exactly where the text is complete. A text that
    ``max_new_tokens`` cuts is the beginning of one.

    A matcher on the host (llguidance) tells each round which tokens may follow: one more host read a round,
    counted in ``stats.grammar_reads``. A regular expression can be a table on the device instead.

    Attributes:
        vocabulary: that of its tokenizer.
        table: next states of the token-level automaton, for a grammar that stays on the device.
    """

    def __init__(self, source: str, tokenizer: Any, said: str, table: TokenTable | None = None):
        self.vocabulary, self.table = Vocabulary.of(tokenizer), table
        self._source, self._said = source, said
        wrong, notes = library("llguidance").LLMatcher.validate_grammar_with_warnings(
            source, self.vocabulary.tokenizer
        )
        if wrong:
            raise ValueError(f"{said}: llguidance refuses it: {' '.join(notes[0].split())}")
        self.row((), self.vocabulary.size).check_beginning(said)

    def __repr__(self) -> str:
        return self._said

    @classmethod
    def json_schema(cls, schema: dict[str, Any] | str, tokenizer: Any) -> Grammar:
        """JSON that fits ``schema``, a dict or its JSON text.

        Keywords that JSON Schema does not know mean nothing in it; those that it knows and llguidance cannot
        keep are refused.

        Raises:
            ValueError: no schema, or one that is refused, or that no token begins. TypeError: a tokenizer
                that is not a fast one. ImportError: llguidance is missing.
        """
        try:
            parsed = parse_json(schema) if isinstance(schema, str) else schema
            text = json.dumps(parsed, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"schema={_short(schema)}: must be a JSON schema, a dict or text ({error})."
            ) from None
        if not isinstance(parsed, dict):
            raise ValueError(f"schema={_short(schema)}: must be a JSON schema, a dict or its text.")
        source = library("llguidance").LLMatcher.grammar_from_json_schema(text)
        return cls(source, tokenizer, f"Grammar.json_schema({_short(text)})")

    @classmethod
    def regex(cls, pattern: str, tokenizer: Any, device: bool = False) -> Grammar:
        """Texts that ``pattern`` (Rust's syntax: no look-around, no back references) matches as a whole.

        Args:
            pattern: the regular expression.
            tokenizer: the model's.
            device: make a table of the token-level automaton, which lies on the device: no host read. At most
                512 states and 16 MiB a row. In each state it allows the texts that the matcher does, or is
                refused: write out what dialects read differently, ``[0-9]`` for a digit.

        Raises:
            ValueError: no pattern, one that matches nothing, or one with no such table. TypeError: a
                tokenizer that is not a fast one. ImportError: llguidance is missing.
        """
        _check_text("pattern", pattern, "a regular expression")
        said = f"Grammar.regex({_short(pattern)})"
        source = library("llguidance").LLMatcher.grammar_from_regex(pattern)
        plain = cls(source, tokenizer, said)
        if not device:
            return plain
        table = token_table(pattern, plain.vocabulary.spelt)
        check_same(table, source, plain.vocabulary, said)
        return cls(source, tokenizer, said, table)

    @classmethod
    def lark(cls, text: str, tokenizer: Any) -> Grammar:
        """A context-free grammar in Lark's syntax (EBNF), as llguidance reads it; it begins at ``start``.

        Raises:
            ValueError: it is refused, or no token begins it. TypeError: a tokenizer that is not a fast one.
                ImportError: llguidance is missing.
        """
        _check_text("text", text, "a Lark grammar")
        return cls(
            library("llguidance").LLMatcher.grammar_from_lark(text),
            tokenizer,
            f"Grammar.lark({_short(text)})",
        )

    @classmethod
    def of_response_format(cls, given: Any, tokenizer: Any) -> Grammar | None:
        """What OpenAI's API means by a ``response_format``; None for text.

        Raises:
            ValueError: of another form, or without a ``tokenizer``; else as `json_schema`.
        """
        kind = given.get("type") if isinstance(given, dict) else None
        if kind not in RESPONSE_FORMATS:
            raise ValueError(
                f"response_format={_short(given)}: must be a dict, its type {' or '.join(RESPONSE_FORMATS)}."
            )
        if kind == "text":
            return None
        if tokenizer is None:
            raise ValueError(f"response_format={_short(given)} needs the model's tokenizer; pass tokenizer=.")
        if kind == "json_object":
            return cls.json_schema({"type": "object"}, tokenizer)
        inner = given.get("json_schema")
        if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
            raise ValueError(
                f"response_format={_short(given)}: must be "
                '{"type": "json_schema", "json_schema": {"schema": {...}}}.'
            )
        return cls.json_schema(inner["schema"], tokenizer)

    def row(self, stop_ids: Sequence[int], vocab_size: int, number: int = 0) -> MatcherRow | TableRow:
        """The grammar for row ``number`` of a request, which ends with one of ``stop_ids``.

        Raises:
            ValueError: its tokenizer has more ids than the target.
        """
        if self.vocabulary.size > vocab_size:
            raise ValueError(
                f"{self}: its tokenizer has {self.vocabulary.size} ids, the target {vocab_size}; make it "
                "with the target's own tokenizer."
            )
        if self.table is not None:
            return TableRow(self.table, stop_ids, number)
        return MatcherRow(self._source, self.vocabulary, stop_ids, number)


def _check_text(name: str, value: Any, kind: str) -> None:
    try:
        value.encode()
    except (AttributeError, UnicodeEncodeError):  # half a surrogate pair is no character
        raise ValueError(f"{name}={_short(value)}: must be {kind}, as text.") from None


def _short(value: object) -> str:
    try:
        said = repr(value)
    except RecursionError:
        said = f"{type(value).__name__} nested too deeply to be shown"
    return said if len(said) <= 80 else f"{said[:77]}..."
