"""The logits rules of a call: the processors that its options need, and each row's value for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any, cast

from torch_dflash.checks import INT32_MAX
from torch_dflash.processors.endings import ForcedTokens, LengthDecay
from torch_dflash.processors.grammars import GrammarMatcher, GrammarTable
from torch_dflash.processors.interface import Processor
from torch_dflash.processors.ngrams import NoRepeatNgram
from torch_dflash.processors.options import Batch, Option
from torch_dflash.processors.penalties import OccurrencePenalty, RepetitionPenalty
from torch_dflash.processors.sequences import Bans, SequenceBias
from torch_dflash.processors.warpers import EpsilonCutoff, EtaCutoff, TypicalP
from torch_dflash.requests.row_values import stop_ids

RULES: tuple[Any, ...] = (
    SequenceBias,
    RepetitionPenalty,
    OccurrencePenalty,
    NoRepeatNgram,
    Bans,
    ForcedTokens,
    LengthDecay,
    GrammarMatcher,
    TypicalP,
    EpsilonCutoff,
    EtaCutoff,
)
"""Every rule that options stand for, in transformers' order."""
KINDS: dict[str, Any] = {option.name: rule() for rule in RULES for option in rule.options}
"""The rule that an option is compiled in as; tables in the sizes that nobody has asked for.

The one table of rules: what else is known of options is read from their classes.
"""


def options_of_rules() -> dict[str, Option]:
    """Every option that a rule stands for, by its name."""
    return {name: next(one for one in kind.options if one.name == name) for name, kind in KINDS.items()}


def ours() -> tuple[str, ...]:
    """Options that transformers does not have; the penalties as vLLM and OpenAI's API mean them."""
    return tuple(name for name, option in options_of_rules().items() if option.ours)


def _order() -> list[type]:
    """The classes of `KINDS` in the order in which rows apply them."""
    return [*dict.fromkeys(map(type, KINDS.values())), GrammarTable]


def requested_processors(options: dict[str, Any], batch: Batch) -> dict[Processor, list]:
    """The processors that ``options`` (of `KINDS`, None: unset) need, and what each row asks of them.

    Raises:
        ValueError: an option is of the wrong type or out of range.
    """
    found = [pair for rule in _order()[:-1] for pair in cast(Any, rule).read_options(options, batch)]
    return {kind: values for kind, values in found if any(value is not None for value in values)}


def check_covered(requested: Sequence[Processor], compiled: tuple[Processor, ...]) -> None:
    """Raise ``ValueError`` unless an engine with the processors ``compiled`` in can do what is asked."""
    for kind in requested:
        if any(own.covers(kind) for own in compiled):
            continue
        names = [option for option, own in KINDS.items() if type(own) is type(kind)] or ["grammar"]
        fix = repr(names[0]) if kind == KINDS[names[0]] else f"td.processors.{kind!r}"
        raise ValueError(
            f"This engine was compiled without {' or '.join(names)} (or for fewer entries); compile with "
            f"processors=({fix},)."
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
    theirs = [name for name, option in options_of_rules().items() if not option.ours]
    options = {name: getattr(config, name, None) for name in theirs}
    own = stop_ids(config.eos_token_id, 1)[0]
    spare = tuple(range(-1, len(own) - stop_slots - 1, -1))  # no ids, but entries of a table
    anyone = Batch(
        width=1, max_new_tokens=[INT32_MAX], stop_ids=[own + spare], sampled=True, vocab_size=vocab_size
    )
    return arranged([*requested_processors(options, anyone)])


def arranged(given: Sequence[str | Processor]) -> tuple[Processor, ...]:
    """In the order in which they run: transformers', each once and as large as any, and own ones as given."""
    order = _order()
    kinds: list[Processor] = []
    largest: dict[type, Processor] = {}
    for one in given:
        kind = KINDS[one] if isinstance(one, str) else one
        if type(kind) not in order:
            kinds.append(kind)
        else:
            known = largest.get(type(kind), kind)
            sizes = (max(sizes) for sizes in zip(astuple(known), astuple(kind), strict=True))  # pyright: ignore[reportArgumentType]
            largest[type(kind)] = type(kind)(*sizes)

    def place(kind: Processor) -> tuple:
        return kind.scaled, order.index(type(kind)) if type(kind) in order else len(order)

    return tuple(sorted([*largest.values(), *kinds], key=place))
