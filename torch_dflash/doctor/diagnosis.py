"""The search for a better convention, and what it says of a pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from torch_dflash.checks import check_counts
from torch_dflash.doctor.changes import Change, changes
from torch_dflash.doctor.convention import Convention
from torch_dflash.doctor.judge import Drafted, Judge, standard_score
from torch_dflash.doctor.recorded import Text, record
from torch_dflash.proposers.dflash.extras import refuse_extras
from torch_dflash.proposers.dflash.model import DFlashDraftModel
from torch_dflash.proposers.notes import Finding, findings
from torch_dflash.proposers.pair import check_pair

SURE = 3.5
"""Standard errors that a change has to gain: hundreds are tried."""
GAIN = 0.02
"""Nats a block that a change has to gain: another dtype shifts all blocks by a hundredth."""
FAINT = 0.25
"""Nats that it has to gain where the drafter stays weak: what has hardly learned is likelier by chance."""
ROUNDS = ((16, 48), (64, 12))
"""Pairs of changes are screened on so many blocks, and so many go on."""
WEAK = 2.0
"""An acceptance length below which a pair without a fault is called weak: a step in two."""


@dataclass(frozen=True)
class Tried:
    """A convention by its ``changes`` (none: as the config says), and all blocks as it drafts them."""

    changes: tuple[Change, ...]
    drafted: Drafted

    @property
    def name(self) -> str:
        """For tables."""
        return " and ".join(change.name for change in self.changes) or "as it is"

    @property
    def length(self) -> float:
        """Acceptance length: accepted drafts of a block and the bonus token, in the mean."""
        return 1 + float(self.drafted.accepted.double().mean())

    @property
    def nats(self) -> float:
        """What a block says of the target's tokens, in the mean."""
        return float(self.drafted.nats.double().mean())

    def beats(self, other: Tried) -> bool:
        """Whether the target's tokens are likelier, and drafts no less often accepted, both beyond noise."""
        new, old = self.drafted, other.drafted
        least = GAIN if self.length >= WEAK else FAINT
        sure = standard_score(new.nats, old.nats) >= SURE and self.nats - other.nats >= least
        return sure and standard_score(new.accepted, old.accepted) > -1


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a pair.

    Attributes:
        verdict: "broken", "weak" or "healthy".
        changes: what makes it better, if it is broken.
        length: acceptance length of blocks drafted as the pair is, teacher-forced on the target's text.
        better: the same with ``changes``.
        positions: share of blocks whose first k drafts are right, as the pair is.
        tried: every convention that was judged on all blocks, the likeliest first.
        findings: what the configs say.
    """

    verdict: str
    changes: tuple[Change, ...]
    length: float
    better: float
    positions: list[float]
    tried: list[Tried]
    findings: list[Finding]

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of config.json that ``changes`` come to; what no field says is not among them."""
        return {name: value for one in self.changes for name, value in (one.fields or {}).items()}

    def __str__(self) -> str:
        said = [str(finding) for finding in self.findings]
        said.append(f"acceptance length {self.length:.2f}")
        if self.verdict == "broken":
            for change in self.changes:
                said.append(f"broken: {change.words}; {change.fix}")
            said.append(f"with that: {self.better:.2f}")
        elif self.verdict == "weak":
            said.append(
                "weak drafter: no other convention makes it better; it needs training, on such prompts."
            )
        else:
            said.append("healthy: no other convention makes it better.")
        return "\n".join(said)


def judge_texts(
    target: Any,
    drafter: DFlashDraftModel,
    texts: Sequence[Text],
    *,
    masks: Sequence[int] = (),
    blocks: int = 256,
) -> Diagnosis:
    """Judge a pair under the conventions it may have mixed up, singly and in pairs.

    The target runs once over the texts. Each convention then drafts the same blocks, teacher-forced, and is
    compared with others block by block: how likely it holds the target's own tokens, each convention at the
    temperature that suits it best, which tells more than how many drafts are accepted. It counts as better by
    `SURE` standard errors and `GAIN` nats (`FAINT` for a weak drafter), unless fewer drafts are accepted. A
    pair of changes has to be better than either alone. Where taps are off by one, say, text stays right and
    only speed is lost, so nothing else would tell.

    Args:
        target: a live transformers causal LM.
        drafter: a `DFlashDraftModel`; neither is changed.
        texts: prompts with the target's own greedy answers; some hundred tokens of them.
        masks: ids that may have been the mask in training, such as special tokens that no text holds.
        blocks: how many are drafted by each convention.

    Raises:
        TypeError, ValueError: the pair does not fit, so that nothing could be drafted, or there is no text.
    """
    check_counts(blocks=blocks)
    check_judged(target, drafter)
    if not any(len(text.ids) - text.start >= 2 for text in texts):
        raise ValueError("texts: no answer of two tokens or more; give longer ones.")
    judge = Judge(target, drafter, record(target, texts), blocks)
    base = Tried((), judge(own := Convention.of(drafter)))
    longest = max(len(text.ids) for text in texts)
    single = [Tried((one,), judge(one.apply(own))) for one in changes(target, drafter, longest, masks)]
    pairs = [Tried(pair, judge(_both(own, pair))) for pair in _finalists(judge, own, single)]
    chosen = _best(_best(base, single, []), pairs, [base, *single])
    verdict = "broken" if chosen.changes else "weak" if base.length < WEAK else "healthy"
    width = drafter.config.block_size
    return Diagnosis(
        verdict=verdict,
        changes=chosen.changes,
        length=base.length,
        better=chosen.length,
        positions=[float((base.drafted.accepted >= k).double().mean()) for k in range(1, width)],
        tried=sorted([base, *single, *pairs], key=lambda one: -one.nats),
        findings=findings(target, drafter),
    )


def check_judged(target: Any, drafter: DFlashDraftModel) -> None:
    """Raise ``ValueError`` for a pair that does not fit, or a drafter with a part that no convention has."""
    refuse_extras(drafter.config, "the doctor", "compare acceptance with the drafter's card.")
    check_pair(target, drafter)


def _both(own: Convention, pair: tuple[Change, ...]) -> Convention:
    for change in pair:
        own = change.apply(own)
    return own


def _best(chosen: Tried, tried: list[Tried], known: list[Tried]) -> Tried:
    """The best of ``tried`` that beats ``chosen`` and those ``known`` that it has all changes of."""
    for one in sorted(tried, key=lambda one: -one.nats):
        less = [other for other in known if all(change in one.changes for change in other.changes)]
        if all(one.beats(other) for other in [chosen, *less]):
            return one
    return chosen


def _finalists(judge: Judge, own: Convention, single: list[Tried]) -> list[tuple[Change, ...]]:
    """The pairs of changes that are best on a part of the blocks."""
    kinds = [one.changes[0] for one in single]
    pairs = [pair for pair in combinations(kinds, 2) if pair[0].kind != pair[1].kind]
    for blocks, most in ROUNDS:
        every = max(1, len(judge.places) // blocks)
        nats = [judge.likelihood(_both(own, pair), every) for pair in pairs]
        order = sorted(range(len(pairs)), key=lambda at: -nats[at])
        pairs = [pairs[at] for at in order[:most]]
    return pairs
