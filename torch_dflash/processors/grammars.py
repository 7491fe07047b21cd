"""Grammars as logits rules: matched on the host, or by a table on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from torch_dflash.checks import one_per_row
from torch_dflash.grammars.grammar import Grammar
from torch_dflash.grammars.matcher import MatcherRow, allowed_bits
from torch_dflash.grammars.table import DEAD, FIRST, TableRow
from torch_dflash.grammars.vocabulary import ALL, words_of
from torch_dflash.ops.control_flow import on_host
from torch_dflash.ops.trees import Tree
from torch_dflash.processors.interface import Forgetful, Text, column
from torch_dflash.processors.options import Batch, Option, power_of_two


@dataclass(frozen=True)
class GrammarMatcher(Forgetful):
    """Any grammar, matched on the host: one read of the rows' tokens a pass, in both runtimes.

    A memory is a row's number there and where its answer begins; what may follow is worked out from the
    tokens each time.
    """

    options = (Option("grammar", None, per_row=True, ours=True),)

    @classmethod
    def read_options(cls, given: dict[str, Any], batch: Batch) -> list[tuple[Any, list[Any]]]:
        return _read_grammars(given.get("grammar"), batch)

    def values(self, requested: Sequence[MatcherRow | None], starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        handles = [None if one is None else one.handle for one in requested]
        return column(handles, -1, torch.int32), column(starts, 0, torch.int32)

    def __call__(self, memory: tuple[Tensor, Tensor], text: Text, logits: Tensor) -> Tensor:
        words = words_of(logits.shape[-1])
        ask = partial(allowed_bits, words=words)
        shape = (*logits.shape[:2], words)
        return only(on_host(text.tokens, text.length, *memory, function=ask, shape=shape), logits)


class Automaton(NamedTuple):
    """Each row's tables (`torch_dflash.grammars.table`), and the state behind what was taken in."""

    state: Int[Tensor, " B"]
    following: Int[Tensor, "B states classes"]
    class_of: Int[Tensor, "B V"]
    allowed: Int[Tensor, "B states words"]


@dataclass(frozen=True)
class GrammarTable(Forgetful):
    """Regular grammars as tables on the device: nothing is read on the host.

    Args:
        states, classes: most that a row's table has.
        vocab_size: ids of the target.
    """

    reads_text = False
    states: int
    classes: int
    vocab_size: int

    def covers(self, other: Any) -> bool:
        fits = type(other) is type(self) and other.vocab_size == self.vocab_size
        return fits and other.states <= self.states and other.classes <= self.classes

    def values(self, requested: Sequence[TableRow | None], starts: Sequence[int]) -> Automaton:
        following = np.zeros((len(requested), self.states, self.classes), np.int32)
        class_of = np.zeros((len(requested), self.vocab_size), np.int32)
        allowed = np.full((len(requested), self.states, words_of(self.vocab_size)), ALL)
        for at, row in enumerate(requested):
            if row is not None:
                next_states, class_of[at], bits = row.arrays(self.vocab_size)
                following[at, : next_states.shape[0], : next_states.shape[1]] = next_states
                allowed[at, : len(bits)] = bits
        first = [None if row is None else FIRST for row in requested]
        return Automaton(
            column(first, DEAD, torch.int32), *map(torch.from_numpy, (following, class_of, allowed))
        )

    def observe(self, memory: Automaton, ids: Tensor, count: Tensor) -> Automaton:
        states = torch.stack([memory.state, *_states(memory, ids)], dim=1)
        return memory._replace(state=states.gather(1, count[:, None].long())[:, 0])

    def __call__(self, memory: Automaton, text: Text, logits: Tensor) -> Tensor:
        if text.rows is None:
            states = memory.state[:, None]
        elif text.tree is None:
            states = torch.stack(_states(memory, text.rows), dim=1)
        else:
            states = _on_paths(memory, text.rows, text.tree, text.deepest)
        rows = torch.arange(len(memory.state), device=logits.device)[:, None]
        return only(memory.allowed[rows, states.long()], logits)


def _states(memory: Automaton, ids: Int[Tensor, "B M"]) -> list[Int[Tensor, " B"]]:
    """The state behind each of ``ids``, which follow what was taken in."""
    rows, state, found = torch.arange(len(ids), device=ids.device), memory.state, []
    for at in range(ids.shape[1]):
        kind = memory.class_of[rows, ids[:, at].long()]
        state = memory.following[rows, state.long(), kind.long()]
        found.append(state)
    return found


def _on_paths(memory: Automaton, ids: Int[Tensor, "B M"], tree: Tree, deepest: int) -> Int[Tensor, "B M"]:
    """The state behind each of ``ids``, which follow what was taken in and their own paths in a tree."""
    rows, row = (
        torch.arange(len(ids), device=ids.device)[:, None],
        torch.arange(ids.shape[1], device=ids.device),
    )
    above = torch.where(tree.before(), row, 0).sum(dim=-1)
    kind = memory.class_of[rows, ids.long()]
    states = memory.state[:, None].expand(ids.shape)
    for _ in range(deepest + 1):  # one level more of them is right after each turn
        held = torch.where(row == 0, memory.state[:, None], states.gather(1, above))
        states = memory.following[rows, held.long(), kind.long()]
    return states


def only(bits: Int[Tensor, "B M words"], logits: Float[Tensor, "B M V"]) -> Float[Tensor, "B M V"]:
    """``logits`` of the tokens whose bits are set (`torch_dflash.grammars.vocabulary`), -inf elsewhere."""
    place = torch.arange(32, device=logits.device, dtype=torch.int32)
    flags = ((bits[..., None] >> place) & 1).flatten(-2)[..., : logits.shape[-1]]
    return torch.where(flags != 0, logits, -torch.inf)


RowGrammar = MatcherRow | TableRow


def _read_grammars(given: Any, batch: Batch) -> list[tuple[Any, list[RowGrammar | None]]]:
    """The processors that rows' grammars need: those matched on the host, and those that are tables.

    Raises:
        ValueError: something that is no grammar, is of another vocabulary, or has no way to end.
    """
    matched: list[RowGrammar | None] = [None] * len(batch.stop_ids)
    tabled = list(matched)
    grammars = one_per_row("grammar", given, len(batch.stop_ids))
    for at, (grammar, stops) in enumerate(zip(grammars, batch.stop_ids, strict=True)):
        if grammar is None:
            continue
        if not isinstance(grammar, Grammar):
            raise ValueError(
                f"grammar={grammar!r}: must be a td.Grammar, as td.Grammar.json_schema(schema, tokenizer)."
            )
        ends = [stop for stop in stops if stop < batch.vocab_size]
        if not ends:
            raise ValueError(
                f"row {at}: eos_token_id={list(stops)} leaves its grammar no way to end; pass the model's."
            )
        row = grammar.row(ends, batch.vocab_size, at)
        (tabled if isinstance(row, TableRow) else matched)[at] = row
    tables = [row.table.following.shape for row in tabled if isinstance(row, TableRow)]
    if not tables:
        return [(GrammarMatcher(), matched)]
    states, classes = (power_of_two(max(sizes), 16) for sizes in zip(*tables, strict=True))
    return [(GrammarMatcher(), matched), (GrammarTable(states, classes, batch.vocab_size), tabled)]
