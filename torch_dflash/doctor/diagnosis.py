"""Searches for a better convention, and puts the result into words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from torch_dflash.checks import check_counts
from torch_dflash.doctor.changes import Change, Convention, changes
from torch_dflash.doctor.judge import Answered, Judge, record
from torch_dflash.doctor.tried import WEAK, Evidence, Tried, weigh
from torch_dflash.proposers.checkpoint.extras import has_smaller_vocabulary, refuse_extras
from torch_dflash.proposers.dflash.model import DFlashDraftModel
from torch_dflash.proposers.notes import Finding, findings
from torch_dflash.proposers.pair import check_pair
from torch_dflash.storage.files import write_atomically

ROUNDS = ((16, 48), (64, 12))
"""Screenings of pairs of changes: blocks of a screening, and number of pairs that it keeps."""


@dataclass(frozen=True)
class Diagnosis:
    """The verdict on a pair, and its evidence.

    Attributes:
        verdict: "broken", "weak", "healthy", or "unsure": too few blocks to tell weak from healthy.
        changes: the cure of a broken pair.
        length: acceptance length of the unchanged pair, teacher-forced on the target's text.
        better: acceptance length with ``changes``.
        positions: share of blocks whose first k drafts of the unchanged pair are right.
        tried: every convention that was judged on all blocks, the likeliest first.
        findings: remarks on the configs.
        evidence: evidence of the verdict.
    """

    verdict: str
    changes: tuple[Change, ...]
    length: float
    better: float
    positions: list[float]
    tried: list[Tried]
    findings: list[Finding]
    evidence: Evidence

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of config.json for ``changes``; a change without a field is left out."""
        return {name: value for one in self.changes for name, value in (one.fields or {}).items()}

    def __str__(self) -> str:
        lines = [str(finding) for finding in self.findings]
        lines.append(f"acceptance length {self.length:.2f}")
        if self.verdict == "broken":
            lines += [f"broken: {change.words}; {change.fix}" for change in self.changes]
            lines.append(f"with that: {self.better:.2f}")
        elif self.verdict == "weak":
            lines.append(
                "weak drafter: no other convention makes it better; it needs training, on such prompts."
            )
        elif self.verdict == "healthy":
            lines.append("healthy: no other convention makes it better.")
        lines.append(self._judged())
        return "\n".join(lines)

    def _judged(self) -> str:
        found = self.evidence
        if self.verdict == "unsure":
            open_to = f"on which {found.doubts[0]} {found.left}"
            return f"unsure, not enough to tell: {found}, {open_to}; {found.advice}."
        return f"judged on {found}" + ("." if self.changes else f": another convention {found.left}.")


def judge_texts(
    target: Any,
    drafter: DFlashDraftModel,
    texts: Sequence[Answered],
    *,
    masks: Sequence[int] = (),
    blocks: int = 256,
) -> Diagnosis:
    """Judge a pair under the conventions that it may have mixed up, singly and in pairs.

    The target runs once over the texts. Each convention then drafts the same blocks, teacher-forced. Two
    conventions are compared block by block, by the likelihood that they give to the target's own tokens, each
    at its best temperature: likelihood tells more than the number of accepted drafts. `Tried.beats` defines
    better. A pair of changes has to be better than either change alone. With too few blocks to rule a change
    out, the verdict is "unsure". Faults such as taps off by one cost speed and never change a text, so no
    other test finds them.

    Args:
        target: a live transformers causal LM; not changed.
        drafter: a `DFlashDraftModel`; not changed.
        texts: prompts with the target's own greedy answers, of some hundred tokens in all.
        masks: ids that may have been the mask in training, such as special tokens that are in no text.
        blocks: number of blocks that each convention drafts.

    Raises:
        TypeError, ValueError: the pair does not fit, so it cannot draft, or there is no text.
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
    evidence = weigh(base, [] if chosen.changes else [*single, *pairs], judge.most, len(texts))
    sound = "unsure" if evidence.doubts else "weak" if base.length < WEAK else "healthy"
    width = drafter.config.block_size
    return Diagnosis(
        verdict="broken" if chosen.changes else sound,
        changes=chosen.changes,
        length=base.length,
        better=chosen.length,
        positions=[float((base.drafted.accepted >= k).double().mean()) for k in range(1, width)],
        tried=sorted([base, *single, *pairs], key=lambda one: -one.nats),
        findings=findings(target, drafter),
        evidence=evidence,
    )


def check_judged(target: Any, drafter: DFlashDraftModel) -> None:
    """Raise ``TypeError`` or ``ValueError`` for a pair that does not fit, or that the doctor cannot judge."""
    if not isinstance(drafter, DFlashDraftModel):
        name = type(drafter).__name__
        raise TypeError(f"drafter={name}: has no conventions to be judged; pass a DFlashDraftModel.")
    rows, config = target.get_output_embeddings().weight.shape[0], drafter.config
    whole = config.vocab_size == rows and not has_smaller_vocabulary(config)
    known = ("sample_from_anchor", *(("markov_rank", "own_embedding", "own_head") if whole else ()))
    refuse_extras(config, "the doctor", "compare acceptance with the drafter's card.", known)
    check_pair(target, drafter)


def _both(own: Convention, pair: tuple[Change, ...]) -> Convention:
    for change in pair:
        own = change.apply(own)
    return own


def _best(chosen: Tried, tried: list[Tried], known: list[Tried]) -> Tried:
    """The best of ``tried`` that beats ``chosen`` and all of ``known`` with a part of its changes."""
    for one in sorted(tried, key=lambda one: -one.nats):
        less = [other for other in known if all(change in one.changes for change in other.changes)]
        if all(one.beats(other) for other in [chosen, *less]):
            return one
    return chosen


def _finalists(judge: Judge, own: Convention, single: list[Tried]) -> list[tuple[Change, ...]]:
    """The pairs of changes that the screenings of `ROUNDS` keep."""
    kinds = [one.changes[0] for one in single]
    pairs = [pair for pair in combinations(kinds, 2) if pair[0].kind != pair[1].kind]
    for blocks, most in ROUNDS:
        every = max(1, len(judge.places) // blocks)
        nats = [judge.likelihood(_both(own, pair), every) for pair in pairs]
        order = sorted(range(len(pairs)), key=lambda at: -nats[at])
        pairs = [pairs[at] for at in order[:most]]
    return pairs


SHOWN = 16


def draw_bars(found: Diagnosis, path: Path) -> None:
    """Draw acceptance length by convention, best first, and the share of right drafts by position, as PNG.

    Raises:
        ModuleNotFoundError: matplotlib is missing (extra ``demo``).
    """
    from matplotlib.figure import Figure

    base = next(one for one in found.tried if not one.changes)
    shown = found.tried[:SHOWN]
    shown = shown if base in shown else [*shown[:-1], base]
    figure = Figure(figsize=(11, 0.35 * len(shown) + 1.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    chosen = {change.name for change in found.changes}
    for place, one in enumerate(reversed(shown)):
        names = {change.name for change in one.changes}
        colour = "tab:orange" if not names else "tab:green" if names == chosen else "lightgrey"
        left.barh(place, one.length, color=colour)
    left.set_yticks(range(len(shown)), [one.name for one in reversed(shown)])
    left.set_xlabel("acceptance length")
    left.set_title(found.verdict)
    right.plot(range(1, len(found.positions) + 1), found.positions, marker="o", color="tab:orange")
    right.set_ylim(0, 1)
    right.set_xlabel("first k drafts right, as it is")
    right.set_ylabel("share of blocks")
    write_atomically(path, lambda part: figure.savefig(part, format="png"))
