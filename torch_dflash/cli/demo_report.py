"""What the demo found: a table, one line that anyone understands, and the same as data."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_dflash.cli.provenance import LOAD
from torch_dflash.demo.contest import TimedAnswer

PLAIN, UNION, DFLASH = "plain decoding", "DFlash + lookup", "DFlash"
DRAFTED = UNION, DFLASH
TRANSFORMERS, NATIVE = "transformers' generate, {}", "transformers' DFlash, {}"


@dataclass
class Asked:
    """A question, its ids [1, T], and by method the answers to it; ``ties``: ours that part at a tie."""

    kind: str
    question: str
    ids: torch.Tensor
    answers: dict[str, list[TimedAnswer]] = field(default_factory=dict)
    ties: list[TimedAnswer] = field(default_factory=list)

    def times(self, name: str) -> list[float]:
        """Seconds per output token of each answer. One token alone comes with the prompt's pass."""
        return [answer.time_per_output_token for answer in self.answers[name] if len(answer.pieces) > 1]

    def seconds(self, name: str) -> float:
        """The median of `times`."""
        return statistics.median(self.times(name))

    def same(self, name: str) -> bool:
        """Whether a method said what its own kind of plain decoding says, each time, ties apart."""
        native, generate = (kind.partition(",")[0] for kind in (NATIVE, TRANSFORMERS))
        plain = PLAIN if name in DRAFTED else name.replace(native, generate)
        wanted = self.answers[plain][0].tokens
        return all(answer.tokens == wanted or answer in self.ties for answer in self.answers[name])

    @torch.no_grad()
    def note_ties(self, target: Any) -> None:
        """Find our answers that part from plain decoding where ``target`` gives both tokens one logit.

        One, that is, up to the last bit of the weights' type: no order of sums decides between such tokens.
        """
        plain = self.answers[PLAIN][0].tokens
        for answer in (one for name in DRAFTED for one in self.answers.get(name, [])):
            pairs = list(zip(plain, answer.tokens, strict=False))
            at = next((number for number, (one, other) in enumerate(pairs) if one != other), None)
            if at is None:
                continue
            said = torch.tensor([plain[:at]], dtype=self.ids.dtype, device=self.ids.device)
            logits = target(torch.cat([self.ids, said], dim=1)).logits[0, -1].float()
            one, other = logits[list(pairs[at])]
            if abs(one - other) <= torch.finfo(target.dtype).eps * abs(one):
                self.ties.append(answer)


class Parts:
    """How long each part took, in seconds."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add what happens meanwhile to the part ``name``."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


def report(asked: list[Asked], dtype: str, parts: Parts) -> bool:
    """Print everything; whether our texts are those of plain decoding."""
    rows = _rows(asked)
    ours = [row for row in rows if row["method"] in DRAFTED]
    print(_sentence(rows, ours[0], " (median)" if len(asked) > 1 else "") + "\n")
    print(f"{'':34}{'tokens a pass':>14}{'tok/s':>8}{'vs plain':>10}{'(quartiles)':>14}  same text")
    for row in rows:
        spread = "({:.2f}..{:.2f})".format(*row["quartiles"]) if row["quartiles"] and len(asked) > 1 else ""
        print(
            f"{row['method']:34}{_told(row['acceptance_length'], 14)}{_told(row['tokens_per_second'], 8, 1)}"
            f"{_told(row['speedup'], 9)}{'x' if row['speedup'] else ' '}{spread:>14}"
            f"  {'NO' if not row['same_text'] else 'tie' if row['ties'] else 'yes'}"
        )
    if LOAD is not None and LOAD > (cores := os.cpu_count() or 1):
        print(f"\nThe machine was busy before (load {LOAD:.1f}, {cores} cores): these speeds may say little.")
    print("\ntime: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.seconds.items()))
    for row in ours:
        if row["ties"]:
            count = f"{row['ties']} of {len(asked)} texts of {row['method']}"
            print(f"\n{count} part from plain decoding's where two tokens have the same logit in {dtype}.")
    return all(row["same_text"] for row in ours)


def _sentence(rows: list[dict[str, Any]], ours: dict[str, Any], median: str) -> str:
    same = "same text up to a tie" if ours["ties"] else "same text"
    text = same if ours["same_text"] else "OTHER TEXT"
    if ours["speedup"] is None:
        return (
            f"{ours['method']}: {text}; answers of one token come with the prompt's pass: there is no speed."
        )
    said = (
        f"{ours['method']}: {ours['speedup']:.2f} times as fast as plain decoding{median}, {text}, "
        f"{_told(ours['acceptance_length'], 1, 1)} tokens per target pass"
    )
    others = [row for row in rows if "generate" in row["method"] and row["speedup"] is not None]
    if not others:
        return said + "."
    best = max(others, key=lambda row: row["speedup"])
    return f"{said};\n{ours['speedup'] / best['speedup']:.2f} times as fast as {best['method']}."


def _told(value: float | None, width: int, digits: int = 2) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"


def as_json(asked: list[Asked], parts: Parts) -> dict[str, Any]:
    """The figures, of all questions together and of each."""
    return {
        "seconds": parts.seconds,
        "rows": _rows(asked),
        "questions": [
            {
                "kind": one.kind,
                "question": one.question,
                "rows": _rows([one]),
                "token_seconds": {name: one.times(name) for name in one.answers},
            }
            for one in asked
        ],
    }


def _rows(asked: list[Asked]) -> list[dict[str, Any]]:
    """A method each: tokens a pass (of first answers), tokens a second, the median of what is gained.

    None: all answers were of one token, which comes with the prompt's pass.
    """
    rows = []
    for name in asked[0].answers:
        answers = [one.answers[name][0] for one in asked]
        timed = [one for one in asked if one.times(name) and one.times(PLAIN)]
        gained = sorted(one.seconds(PLAIN) / one.seconds(name) for one in timed)
        quartiles = statistics.quantiles(gained, n=4, method="inclusive") if len(gained) > 1 else gained * 3
        later = [len(piece) for answer in answers for piece in answer.pieces[1:]]
        counts = [sum(map(len, one.answers[name][0].pieces[1:])) for one in timed]
        spent = sum(one.seconds(name) * count for one, count in zip(timed, counts, strict=True))
        rows.append(
            {
                "method": name,
                "acceptance_length": sum(later) / len(later) if later else None,
                "tokens_per_second": sum(counts) / spent if spent else None,
                "new_tokens": sum(len(answer.tokens) for answer in answers),
                "speedup": statistics.median(gained) if gained else None,
                "quartiles": [quartiles[0], quartiles[2]] if gained else None,
                "same_text": all(one.same(name) for one in asked),
                "ties": sum(any(answer in one.ties for answer in one.answers[name]) for one in asked),
            }
        )
    return rows
