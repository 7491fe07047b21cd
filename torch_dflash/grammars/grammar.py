"""`Grammar`: the texts that an answer may be."""

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
    """The texts that an answer may be, from `json_schema`, `regex`, `lark` or a ``response_format``.

    Pass a grammar to any call as ``grammar=``: one for all rows, or a list with one or None for each row. It
    limits the new tokens alone. A row's stop ids are allowed exactly where the text is complete. A text cut
    by ``max_new_tokens`` is the beginning of an allowed text.

    A matcher on the host (llguidance) finds the allowed tokens of each round: one more host read a round,
    counted in ``stats.grammar_reads``. For a regular expression a table on the device can replace it.

    Attributes:
        vocabulary: the tokenizer's.
        table: next states of the token-level automaton, for a grammar on the device.
    """

    def __init__(self, source: str, tokenizer: Any, shown: str, table: TokenTable | None = None):
        self.vocabulary, self.table = Vocabulary.of(tokenizer), table
        self._source, self._shown = source, shown
        wrong, notes = library("llguidance").LLMatcher.validate_grammar_with_warnings(
            source, self.vocabulary.tokenizer
        )
        if wrong:
            raise ValueError(f"{shown}: llguidance refuses it: {' '.join(notes[0].split())}")
        self.row((), self.vocabulary.size).check_beginning(shown)

    def __repr__(self) -> str:
        return self._shown

    @classmethod
    def json_schema(cls, schema: dict[str, Any] | str, tokenizer: Any) -> Grammar:
        """JSON that fits ``schema``, a dict or its JSON text.

        Keywords unknown to JSON Schema have no effect; known ones that llguidance cannot keep are refused.

        Raises:
            ValueError: no schema, a refused schema, or no token begins a text. TypeError: no fast tokenizer.
            ImportError: llguidance is missing.
        """
        try:
            parsed = parse_json(schema) if isinstance(schema, str) else schema
            text = json.dumps(parsed, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"schema={_short(schema)}: must be a JSON schema ({error}).") from None
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
            device: put a table of the token-level automaton on the device, without host reads. At most 512
                states and 16 MiB a row. A table that allows other texts than the matcher is refused: write
                out classes that dialects read differently, as ``[0-9]`` for a digit.

        Raises:
            ValueError: no pattern, a pattern that matches no text, or no such table. TypeError: no fast
                tokenizer. ImportError: llguidance is missing.
        """
        _check_text("pattern", pattern, "a regular expression")
        shown = f"Grammar.regex({_short(pattern)})"
        source = library("llguidance").LLMatcher.grammar_from_regex(pattern)
        plain = cls(source, tokenizer, shown)
        if not device:
            return plain
        table = token_table(pattern, plain.vocabulary.spelt)
        check_same(table, source, plain.vocabulary, shown)
        return cls(source, tokenizer, shown, table)

    @classmethod
    def lark(cls, text: str, tokenizer: Any) -> Grammar:
        """A context-free grammar in llguidance's form of Lark's syntax (EBNF); the first rule is ``start``.

        Raises:
            ValueError: llguidance refuses it, or no token begins an answer. TypeError: no fast tokenizer.
            ImportError: llguidance is missing.
        """
        _check_text("text", text, "a Lark grammar")
        source = library("llguidance").LLMatcher.grammar_from_lark(text)
        return cls(source, tokenizer, f"Grammar.lark({_short(text)})")

    @classmethod
    def of_response_format(cls, given: Any, tokenizer: Any) -> Grammar | None:
        """The grammar of an OpenAI ``response_format``; None for type "text".

        Raises:
            ValueError: no such format, or no ``tokenizer``; also as `json_schema`.
        """
        kind = given.get("type") if isinstance(given, dict) else None
        if kind not in RESPONSE_FORMATS:
            raise ValueError(
                f"response_format={_short(given)}: its type must be {' or '.join(RESPONSE_FORMATS)}."
            )
        if kind == "text":
            return None
        if tokenizer is None:
            raise ValueError(f"response_format={_short(given)} needs the model's tokenizer; pass tokenizer=.")
        if kind == "json_object":
            return cls.json_schema({"type": "object"}, tokenizer)
        inner = given.get("json_schema")
        if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
            form = '{"type": "json_schema", "json_schema": {"schema": {...}}}'
            raise ValueError(f"response_format={_short(given)}: must be {form}.")
        return cls.json_schema(inner["schema"], tokenizer)

    def row(self, stop_ids: Sequence[int], vocab_size: int, number: int = 0) -> MatcherRow | TableRow:
        """The grammar for row ``number`` of a request with ``stop_ids``.

        Raises:
            ValueError: the tokenizer has more ids than the target.
        """
        if self.vocabulary.size > vocab_size:
            sizes = f"its tokenizer has {self.vocabulary.size} ids, the target {vocab_size}"
            raise ValueError(f"{self}: {sizes}; make it with the target's own tokenizer.")
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
        text = repr(value)
    except RecursionError:
        text = f"{type(value).__name__} nested too deeply to be shown"
    return text if len(text) <= 80 else f"{text[:77]}..."
