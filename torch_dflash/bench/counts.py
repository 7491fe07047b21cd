"""Counts rounds of a method on known texts: replayed where a drafter drafts, else decoded."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from torch_dflash.engine.engine import Engine
from torch_dflash.processors.interface import Forgetful, Text
from torch_dflash.requests.prompts import pad_rows
from torch_dflash.requests.request import Request
from torch_dflash.storage.files import StageError

FEWEST = 20
"""Rounds from which a conditional acceptance is shown."""


@dataclass(frozen=True)
class GivenText(Forgetful):
    """Picks the tokens of a known text, whatever the target's logits: rounds then replay this text.

    Drafts see the target's own features of the text, as in decoding.
    """

    capacity: int
    reads_text = False

    def values(self, requested, starts) -> Tensor:
        texts = torch.zeros(len(requested), self.capacity, dtype=torch.int32, device="cpu")
        for row, (text, start) in enumerate(zip(requested, starts, strict=True)):
            if text is not None:
                texts[row, start : start + len(text)] = torch.tensor(text, dtype=torch.int32)
        return texts

    def __call__(self, memory: Tensor, text: Text, logits: Tensor) -> Tensor:
        at = text.length.clamp(max=self.capacity - 1).long()
        given = torch.arange(logits.shape[-1], device=logits.device) == memory.gather(1, at)[..., None]
        return torch.where(given, 0.0, torch.finfo(torch.float32).min)


@dataclass
class Count:
    """Rounds of one method on one set.

    Attributes:
        rounds: for each answer, the tokens of each of its rounds. cut: whether the limit cut the last one.
        same: for each answer that was decoded, whether its text is plain decoding's.
        parted: answers whose text is another than plain decoding's; ties: those among them that part where
            the target gives both tokens the same logit.
    """

    rounds: list[list[int]] = field(default_factory=list)
    cut: list[bool] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)
    parted: int = 0
    ties: int = 0

    def add(self, rounds: Iterable[list[int]], cut: Iterable[bool]) -> None:
        """Take in further answers."""
        self.rounds += rounds
        self.cut += cut

    @property
    def tokens_per_round(self) -> float:
        """Tokens after the first over rounds, those that the limit cuts included; nan without rounds."""
        count = sum(map(len, self.rounds))
        return sum(map(sum, self.rounds)) / count if count else math.nan

    @property
    def standard_error(self) -> float:
        """Error of `tokens_per_round`, a ratio of sums over independent answers; nan of fewer than two."""
        answers, count = len(self.rounds), sum(map(len, self.rounds))
        if answers < 2 or not count:
            return math.nan
        mean = self.tokens_per_round
        squares = sum((sum(own) - mean * len(own)) ** 2 for own in self.rounds)
        return math.sqrt(squares * answers / (answers - 1)) / count

    @property
    def whole_rounds(self) -> list[int]:
        """The tokens of each round that the limit did not cut."""
        pairs = zip(self.rounds, self.cut, strict=True)
        return [length for own, cut in pairs for length in (own[:-1] if cut else own)]

    @property
    def survival(self) -> list[float]:
        """Share of whole rounds that accepted draft k and all before it, k = 1, 2, ..."""
        whole = self.whole_rounds
        deepest = max(whole, default=1)
        return [sum(length > k for length in whole) / len(whole) for k in range(1, deepest)]

    @property
    def conditional(self) -> list[float | None]:
        """Share of whole rounds that accepted draft k among those that accepted draft k - 1; None of few."""
        alive, before, found = self.survival, 1.0, []
        count = len(self.whole_rounds)
        for share in alive:
            found.append(share / before if before * count >= FEWEST else None)
            before = share
        return found

    def row(self) -> dict[str, Any]:
        """The figures of a table row."""
        return {
            "answers": len(self.rounds),
            "rounds": sum(map(len, self.rounds)),
            "whole_rounds": len(self.whole_rounds),
            "tokens_per_round": _figure(self.tokens_per_round),
            "standard_error": _figure(self.standard_error),
            "survival": [round(share, 4) for share in self.survival],
            "conditional": [None if share is None else round(share, 4) for share in self.conditional],
            "parted": self.parted,
            "ties": self.ties,
        }


def _figure(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)


def replay(engine: Engine, prompts: list[list[int]], answers: list[list[int]], stops: list[int]) -> Count:
    """Count the rounds in which ``engine``, compiled with a `GivenText`, decodes these answers."""
    rule = GivenText(engine.plan.capacity)
    request = _request(engine, prompts, stops)
    rows = [
        replace(row, rules={rule: answer}, max_new_tokens=len(answer))
        for row, answer in zip(request.rows, answers, strict=True)
    ]
    output: Any = engine.run(replace(request, rows=rows))
    if output.new_tokens != answers:
        raise StageError("a replay has left its text: GivenText and the round disagree; report this.")
    count = Count()
    # A text's last token is its stop id or was the limit's; a round that drafted on behind it was cut there.
    count.add(output.stats.acceptance_lengths, output.stats.capped)
    return count


def decode(
    engine: Engine, prompts: list[list[int]], new: int, stops: list[int]
) -> tuple[Count, list[list[int]]]:
    """Count the rounds in which ``engine`` decodes the prompts, and the answers that it gives."""
    request = _request(engine, prompts, stops)
    rows = [replace(row, max_new_tokens=new) for row in request.rows]
    output: Any = engine.run(replace(request, rows=rows))
    count = Count()
    count.add(output.stats.acceptance_lengths, output.stats.capped)
    return count, output.new_tokens


def _request(engine: Engine, prompts: list[list[int]], stops: list[int]) -> Request:
    ids, mask = pad_rows(prompts)
    options = {"max_new_tokens": 1, "do_sample": False, "eos_token_id": stops, "repetition_penalty": 1.0}
    return engine.read(ids, mask, options)


def parting(target: Any, prompt: list[int], plain: list[int], other: list[int]) -> str | None:
    """Say "tie" where two answers part at tokens of the same logit, "other" elsewhere; None: they are equal.

    The same logit is one up to the last bit of the weights' type: the order of sums decides between the two.
    """
    if plain == other:
        return None
    pairs = list(zip(plain, other, strict=False))
    at = next((number for number, (one, two) in enumerate(pairs) if one != two), None)
    if at is None:  # one goes on where the other ends
        return "other"
    ids = torch.tensor([[*prompt, *plain[:at]]], device=target.device)
    with torch.no_grad():
        logits = target(ids, logits_to_keep=1).logits[0, -1].float()
    one, two = (float(logits[token]) for token in pairs[at])
    return "tie" if abs(one - two) <= torch.finfo(target.dtype).eps * abs(one) else "other"
