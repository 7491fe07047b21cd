"""The search for a better convention, and what it says of a pair."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from torch import Tensor

from torch_dflash.checks import check_counts
from torch_dflash.doctor.changes import Change, changes
from torch_dflash.doctor.convention import Convention
from torch_dflash.doctor.judge import Judge, standard_score
from torch_dflash.doctor.recorded import Text, record
from torch_dflash.doctor.static import Finding, findings
from torch_dflash.proposers.choose import check_pair
from torch_dflash.proposers.dflash.model import DFlashDraftModel

SURE = 4.0
"""Standard errors that a change has to gain: dozens of changes and hundreds of pairs are tried."""
GAIN = 0.1
"""Accepted drafts a block that a change has to gain."""
SCREENED = 64
FINALISTS = 12
WEAK = 2.0
"""An acceptance length below which a pair without a fault is called weak: a step in two."""


@dataclass(frozen=True)
class Tried:
    """A convention by its ``changes`` (none: as the config says), and its accepted drafts in each block."""

    changes: tuple[Change, ...]
    accepted: Tensor

    @property
    def name(self) -> str:
        """For tables."""
        return " and ".join(change.name for change in self.changes) or "as it is"

    @property
    def length(self) -> float:
        """Acceptance length: accepted drafts of a block and the bonus token, in the mean."""
        return 1 + float(self.accepted.double().mean())

    def beats(self, other: Tried) -> bool:
        """Whether it is better beyond noise."""
        sure = standard_score(self.accepted, other.accepted) >= SURE
        return sure and self.length - other.length >= GAIN


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a pair.

    Attributes:
        verdict: "broken", "weak" or "healthy".
        changes: what makes it better, if it is broken.
        length: acceptance length of blocks drafted as the pair is, teacher-forced on the target's text.
        better: the same with ``changes``.
        positions: share of blocks whose first k drafts are right, as the pair is.
        tried: every convention that was judged on all blocks, the best first.
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

    The target runs once over the texts. Each convention then drafts the same blocks, teacher-forced: what
    would be accepted is compared block by block, and a convention counts as better by `SURE` standard errors
    and `GAIN` drafts at least. Where taps are off by one, say, text stays right and only speed is lost, so
    nothing else would tell.

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
    check_pair(target, drafter)
    if not any(len(text.ids) - text.start >= 2 for text in texts):
        raise ValueError("texts: no answer of two tokens or more; give longer ones.")
    judge = Judge(target, drafter, record(target, texts), blocks)
    base = Tried((), judge(own := Convention.of(drafter)))
    longest = max(len(text.ids) for text in texts)
    single = [Tried((one,), judge(one.apply(own))) for one in changes(target, drafter, longest, masks)]
    pairs = [Tried(pair, judge(_both(own, pair))) for pair in _finalists(judge, own, single)]
    chosen = base
    for tried in (single, pairs):
        best = max(tried, key=lambda one: one.length, default=chosen)
        chosen = best if best.beats(chosen) else chosen
    verdict = "broken" if chosen.changes else "weak" if base.length < WEAK else "healthy"
    width = drafter.config.block_size
    return Diagnosis(
        verdict=verdict,
        changes=chosen.changes,
        length=base.length,
        better=chosen.length,
        positions=[float((base.accepted >= k).double().mean()) for k in range(1, width)],
        tried=sorted([base, *single, *pairs], key=lambda one: -one.length),
        findings=findings(target, drafter),
    )


def _both(own: Convention, pair: tuple[Change, ...]) -> Convention:
    for change in pair:
        own = change.apply(own)
    return own


def _finalists(judge: Judge, own: Convention, single: list[Tried]) -> Iterator[tuple[Change, ...]]:
    """The pairs of changes that are best on a part of the blocks."""
    every = max(1, len(judge.places) // SCREENED)
    kinds = [one.changes[0] for one in single]
    pairs = [pair for pair in combinations(kinds, 2) if pair[0].kind != pair[1].kind]
    means = [float(judge(_both(own, pair), every).double().mean()) for pair in pairs]
    order = sorted(range(len(pairs)), key=lambda at: -means[at])
    return (pairs[at] for at in order[:FINALISTS])
