"""From options, of transformers and of servers, to processors and what each row asks of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from torch_dflash.checks import INT32_MAX, check_rows
from torch_dflash.processors.endings import ForcedTokens, LengthDecay
from torch_dflash.processors.grammars import GrammarMatcher, GrammarTable
from torch_dflash.processors.interface import Processor
from torch_dflash.processors.ngrams import NoRepeatNgram
from torch_dflash.processors.penalties import OccurrencePenalty, RepetitionPenalty
from torch_dflash.processors.sequences import Bans, Entry, SequenceBias
from torch_dflash.processors.warpers import EpsilonCutoff, EtaCutoff, TypicalP
from torch_dflash.requests.grammars import asked_grammars
from torch_dflash.requests.row_values import stop_ids
from torch_dflash.requests.rule_values import (
    check_decay,
    check_numbers,
    check_sequences,
    id_list,
    power_of_two,
)

RowRules = dict[Processor, list]
"""Processors in the order in which they run, and what each row asks of each: None for nothing."""
KINDS: dict[str, Processor] = {
    "sequence_bias": SequenceBias(),
    "repetition_penalty": RepetitionPenalty(),
    "presence_penalty": OccurrencePenalty(),
    "frequency_penalty": OccurrencePenalty(),
    "no_repeat_ngram_size": NoRepeatNgram(),
    "bad_words_ids": Bans(),
    "suppress_tokens": Bans(),
    "begin_suppress_tokens": Bans(),
    "min_length": Bans(),
    "min_new_tokens": Bans(),
    "forced_bos_token_id": ForcedTokens(),
    "forced_eos_token_id": ForcedTokens(),
    "exponential_decay_length_penalty": LengthDecay(),
    "grammar": GrammarMatcher(),
    "typical_p": TypicalP(),
    "epsilon_cutoff": EpsilonCutoff(),
    "eta_cutoff": EtaCutoff(),
}
"""What an option is compiled in as, in transformers' order; tables in the sizes that nobody has asked for."""
ORDER = (*dict.fromkeys(map(type, KINDS.values())), GrammarTable)
MOST_BEHIND = 255
OURS = ("presence_penalty", "frequency_penalty", "grammar")
"""Options that transformers does not have; the penalties as vLLM and OpenAI's API mean them."""
PER_ROW = (*OURS, "repetition_penalty", "no_repeat_ngram_size", "min_new_tokens", "typical_p")
PER_ROW += ("epsilon_cutoff", "eta_cutoff")
"""Options of which each row may have its own."""


@dataclass(frozen=True)
class Batch:
    """What the options of a batch are read against, one entry a row.

    ``width``: columns of the padded prompt; ``sampled``: whether any row is.
    """

    width: int
    max_new_tokens: list[int]
    stop_ids: list[tuple[int, ...]]
    sampled: bool
    vocab_size: int


def asked_processors(options: dict[str, Any], batch: Batch) -> RowRules:
    """The processors that ``options`` (of `KINDS`, None: unset) need, and what rows ask of them.

    Raises:
        ValueError: an option is of the wrong type or out of range.
    """
    rows = len(batch.max_new_tokens)
    numbers = check_numbers(options, rows, batch.sampled)
    asked: RowRules = {}

    def add(kind: Processor, values: Sequence[Any]) -> None:
        if any(value is not None for value in values):
            asked[kind] = list(values)

    biases = check_sequences("sequence_bias", options.get("sequence_bias"), batch.vocab_size)
    entries = [Entry(ids, bias) for ids, bias in biases]
    add(_table(SequenceBias, [entries]), [entries or None] * rows)
    add(RepetitionPenalty(), numbers["repetition_penalty"])
    pairs = zip(numbers["presence_penalty"], numbers["frequency_penalty"], strict=True)
    add(OccurrencePenalty(), [(a or 0.0, b or 0.0) if a or b else None for a, b in pairs])
    # Longer n-grams than the text, and a block behind its limit, do not occur twice.
    longest = [batch.width + new + MOST_BEHIND for new in batch.max_new_tokens]
    sizes = [
        size if size and size <= most else None
        for size, most in zip(numbers["no_repeat_ngram_size"], longest, strict=True)
    ]
    add(NoRepeatNgram(power_of_two(max((size or 0 for size in sizes), default=0), 4)), sizes)
    bans = [_bans(options, numbers["min_new_tokens"][row], batch, row) for row in range(rows)]
    add(_table(Bans, bans), [entries or None for entries in bans])
    forced = [_forced(options, batch, row) for row in range(rows)]
    add(ForcedTokens(power_of_two(max(map(len, forced)), 4)), [pairs or None for pairs in forced])
    decay = check_decay(options.get("exponential_decay_length_penalty"))
    stops = [[one for one in dict.fromkeys(row) if one < batch.vocab_size] for row in batch.stop_ids]
    add(
        LengthDecay(power_of_two(max(map(len, stops)), 8)),
        [(*decay, ids) if decay and ids else None for ids in stops],
    )
    for kind, rules in asked_grammars(options.get("grammar"), batch.stop_ids, batch.vocab_size).items():
        add(kind, rules)
    for name in ("typical_p", "epsilon_cutoff", "eta_cutoff"):
        add(KINDS[name], numbers[name])
    return asked


def check_covered(asked: RowRules, compiled: tuple[Processor, ...]) -> None:
    """Raise ``ValueError`` unless an engine with the processors ``compiled`` in can do what is asked."""
    for kind in asked:
        if any(own.covers(kind) for own in compiled):
            continue
        names = [option for option, own in KINDS.items() if type(own) is type(kind)] or ["grammar"]
        fix = repr(names[0]) if kind == KINDS[names[0]] else f"td.processors.{kind!r}"
        raise ValueError(
            f"{' or '.join(names)} was asked for, but the engine was compiled without it, or for less of it; "
            f"compile with processors=({fix},)."
        )


def check_processors(given: Any) -> None:
    """Raise ``ValueError`` unless ``given`` is None or a tuple of options of `KINDS` and processors."""
    if given is None:
        return
    if not isinstance(given, tuple):
        raise ValueError(f"processors={given!r}: must be a tuple, as processors=('repetition_penalty',).")
    for one in given:
        if isinstance(one, str) and one in KINDS:
            continue
        if isinstance(one, type | str) or not isinstance(one, Processor):
            raise ValueError(
                f"processors holds {one!r}: must be an option ({', '.join(KINDS)}) or a processor, such as "
                "td.BlockProcessor(function)."
            )


def of_the_model(config: Any, stop_slots: int, vocab_size: int) -> tuple[Processor, ...]:
    """The processors that a model's own ``config`` asks for, whatever the prompt and the stop ids."""
    options = {name: getattr(config, name, None) for name in KINDS if name not in OURS}
    own = stop_ids(config.eos_token_id, 1)[0]
    spare = tuple(range(-1, len(own) - stop_slots - 1, -1))  # no ids, but entries of a table
    anyone = Batch(
        width=1, max_new_tokens=[INT32_MAX], stop_ids=[own + spare], sampled=True, vocab_size=vocab_size
    )
    return arranged([*asked_processors(options, anyone)])


def arranged(given: Sequence[str | Processor]) -> tuple[Processor, ...]:
    """In the order in which they run: transformers', each once and as large as any, and own ones as given."""
    kinds: list[Processor] = []
    largest: dict[type, Processor] = {}
    for one in given:
        kind = KINDS[one] if isinstance(one, str) else one
        if type(kind) not in ORDER:
            kinds.append(kind)
        else:
            known = largest.get(type(kind), kind)
            sizes = (max(sizes) for sizes in zip(astuple(known), astuple(kind), strict=True))  # pyright: ignore[reportArgumentType]
            largest[type(kind)] = type(kind)(*sizes)

    def place(kind: Processor) -> tuple:
        return kind.scaled, ORDER.index(type(kind)) if type(kind) in ORDER else len(ORDER)

    return tuple(sorted([*largest.values(), *kinds], key=place))


def _table(kind: type[SequenceBias], rows: list[list[Entry]]) -> SequenceBias:
    entries = max(map(len, rows), default=0)
    prefix = max((len(entry.ids) - 1 for row in rows for entry in row), default=0)
    return kind(power_of_two(entries, 32), power_of_two(prefix, 4))


def _bans(options: dict[str, Any], least: int | None, batch: Batch, row: int) -> list[Entry]:
    vocab, stops = batch.vocab_size, batch.stop_ids[row]
    words = check_sequences("bad_words_ids", options.get("bad_words_ids"), vocab)
    banned = [Entry(ids, bias) for ids, bias in words if ids not in [(stop,) for stop in stops]]
    banned += [Entry((token,), -math.inf) for token in id_list("suppress_tokens", options, vocab)]
    first = _first_begun(options, batch)
    for token in id_list("begin_suppress_tokens", options, vocab):
        banned.append(Entry((token,), -math.inf, first, first + 1))
    # transformers: the number of new tokens, if it is given, counts instead of that of all, though it be 0.
    given = check_rows("min_new_tokens", options.get("min_new_tokens"), len(batch.max_new_tokens))[row]
    fewest = least or 0 if given is not None else (options.get("min_length") or 0) - batch.width
    if fewest > 0:
        banned += [Entry((stop,), -math.inf, 0, fewest) for stop in stops if stop < vocab]
    return banned


def _forced(options: dict[str, Any], batch: Batch, row: int) -> list[tuple[int, int]]:
    last = batch.max_new_tokens[row] - 1
    pairs = [(token, last) for token in _left("forced_eos_token_id", options, batch, last)]
    if batch.width == 1 and not (last == 0 and pairs):  # of two for one token transformers' last one counts
        pairs += [(token, 0) for token in _left("forced_bos_token_id", options, batch, 0)]
    return pairs


def _left(name: str, options: dict[str, Any], batch: Batch, number: int) -> list[int]:
    """Of the ids that are forced as new token ``number`` those that are not suppressed there as well."""
    vocab = batch.vocab_size
    left = id_list(name, options, vocab)
    names = "suppress_tokens", "begin_suppress_tokens"
    for suppressing in names[: 1 + (number == _first_begun(options, batch))]:
        banned = id_list(suppressing, options, vocab)
        before, left = left, [token for token in left if token not in banned]
        if before and not left:
            raise ValueError(
                f"{name} and {suppressing} both hold {before[0]}: no token is left to force; leave it out of "
                "one of them."
            )
    return left


def _first_begun(options: dict[str, Any], batch: Batch) -> int:
    """The new token of ``begin_suppress_tokens``: transformers leaves the first to a forced one."""
    return int(batch.width == 1 and bool(id_list("forced_bos_token_id", options, batch.vocab_size)))
