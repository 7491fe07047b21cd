"""What an answer may say: a call's ``grammar`` and ``response_format``, as processors of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_dflash.checks import check_rows
from torch_dflash.grammars.grammar import Grammar
from torch_dflash.grammars.matcher import MatcherRow
from torch_dflash.grammars.table import TableRow
from torch_dflash.processors.grammars import GrammarMatcher, GrammarTable
from torch_dflash.processors.interface import Processor
from torch_dflash.requests.rule_values import power_of_two

RESPONSE_FORMAT = "response_format"
"""The option, as OpenAI's API has it."""
RowGrammar = MatcherRow | TableRow


def read_format(given: Any, grammar: Any, tokenizer: Any, rows: int) -> Any:
    """``grammar``, or those that ``response_format`` stands for, one a row.

    Raises:
        ValueError: both are given, or a format that is none or lacks its ``tokenizer``.
    """
    if given is None:
        return grammar
    if grammar is not None:
        raise ValueError("grammar and response_format both say what an answer may be; pass one of them.")
    made: dict[int, Grammar | None] = {}
    each = check_rows(RESPONSE_FORMAT, given, rows)
    for one in each:
        if id(one) not in made:
            made[id(one)] = None if one is None else Grammar.of_response_format(one, tokenizer)
    return [made[id(one)] for one in each]


def asked_grammars(
    given: Any, stop_ids: Sequence[tuple[int, ...]], vocab_size: int
) -> dict[Processor, list[RowGrammar | None]]:
    """The processors that rows' grammars need, and each row's own for them.

    Raises:
        ValueError: something that is no grammar, is of another vocabulary, or has no way to end.
    """
    matched: list[RowGrammar | None] = [None] * len(stop_ids)
    tabled = list(matched)
    for at, (grammar, stops) in enumerate(
        zip(check_rows("grammar", given, len(stop_ids)), stop_ids, strict=True)
    ):
        if grammar is None:
            continue
        if not isinstance(grammar, Grammar):
            raise ValueError(
                f"grammar={grammar!r}: must be a td.Grammar, as td.Grammar.json_schema(schema, tokenizer)."
            )
        ends = [stop for stop in stops if stop < vocab_size]
        if not ends:
            raise ValueError(
                f"row {at}: eos_token_id={list(stops)} leaves its grammar no way to end; pass the model's."
            )
        row = grammar.row(ends, vocab_size, at)
        (tabled if isinstance(row, TableRow) else matched)[at] = row
    tables = [row.table.following.shape for row in tabled if isinstance(row, TableRow)]
    asked: dict[Processor, list[RowGrammar | None]] = {GrammarMatcher(): matched}
    if tables:
        states, classes = (power_of_two(max(sizes), 16) for sizes in zip(*tables, strict=True))
        asked[GrammarTable(states, classes, vocab_size)] = tabled
    return asked


def grammars_of(asked: dict[Processor, list], rows: int) -> list[RowGrammar | None]:
    """Each row's grammar among what is asked of processors."""
    found: list[RowGrammar | None] = [None] * rows
    for values in asked.values():
        found = [
            value if isinstance(value, RowGrammar) else known
            for value, known in zip(values, found, strict=True)
        ]
    return found
