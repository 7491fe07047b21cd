"""Stage 4, evaluate: speculative decoding of held-out prompts, and n-gram lookup on the same texts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_dflash.checks import context_of
from torch_dflash.engine.engine import Engine
from torch_dflash.plan import DecodePlan
from torch_dflash.progress import progress_bar
from torch_dflash.proposers import NGramProposer
from torch_dflash.proposers.dflash.model import DFlashDraftModel
from torch_dflash.proposers.dflash.proposer import DFlashProposer, DFlashState
from torch_dflash.requests.options import EngineOptions
from torch_dflash.requests.prompts import bucket, pad_rows
from torch_dflash.requests.row_values import default_stop_ids
from torch_dflash.train.answers.conversations import check_some_fit, check_turns, converse
from torch_dflash.train.answers.data import Prompt
from torch_dflash.train.options import EvaluateOptions


@dataclass(frozen=True)
class Acceptance:
    """Rounds of one drafting method over one set of prompts.

    Attributes:
        lengths: acceptance length of every whole round (accepted drafts and the bonus token).
        width: rows verified, the largest length.
    """

    lengths: list[int]
    width: int

    @property
    def mean(self) -> float:
        """Mean acceptance length (tau); nan without rounds."""
        return sum(self.lengths) / len(self.lengths) if self.lengths else float("nan")

    @property
    def per_position(self) -> list[float]:
        """Share of rounds that accepted draft k and all drafts before; k = 1 .. width-1."""
        count = max(len(self.lengths), 1)
        return [sum(length > k for length in self.lengths) / count for k in range(1, self.width)]


@dataclass(frozen=True)
class Evaluation:
    """Results for one set of prompts: both methods on the same texts, and the cost of decoding."""

    drafter: Acceptance
    ngram: Acceptance
    prompts: int
    new_tokens: int
    seconds: float
    left_out: int

    def row(self) -> dict[str, Any]:
        """The figures of a table row; an acceptance length without rounds is None."""
        return {
            "prompts": self.prompts,
            "left_out": self.left_out,
            "new_tokens": self.new_tokens,
            "rounds": len(self.drafter.lengths),
            "acceptance_length": _figure(self.drafter),
            "per_position": [round(rate, 4) for rate in self.drafter.per_position],
            "ngram_acceptance_length": _figure(self.ngram),
            "ngram_per_position": [round(rate, 4) for rate in self.ngram.per_position],
            "seconds": round(self.seconds, 1),
        }


def _figure(found: Acceptance) -> float | None:
    return round(found.mean, 4) if found.lengths else None


def evaluate(
    target, drafter, tokenizer, prompts: list[Prompt], options: EvaluateOptions, name: str = "evaluate"
) -> Evaluation:
    """Decode the first ``options.limit`` of ``prompts`` with ``drafter`` and count accepted drafts.

    Later turns follow the earlier answers. A question beyond the target's context ends its conversation;
    ``left_out`` counts the turns not asked. N-gram lookup is replayed on the finished texts, for greedy texts
    do not depend on the drafter. The model's repetition penalty is left out.

    Raises:
        ValueError, StageError: prompts that cannot be asked; the message gives the fix.
    """
    if options.shuffled and not isinstance(drafter, DFlashDraftModel):
        raise ValueError(f"shuffled=True with a {type(drafter).__name__}: the control is of DFlash drafters.")
    prompts = prompts[: options.limit]
    longest, started = context_of(target) - options.max_new_tokens, time.monotonic()
    check_turns(tokenizer, prompts)
    check_some_fit(tokenizer, prompts, longest, options.chat_template_kwargs)
    stops = default_stop_ids(target, tokenizer)
    decode = _Decoder(target, ShuffledFeatures(drafter) if options.shuffled else drafter, options, stops)
    turns, answered, ngram = sum(len(prompt.turns) for prompt in prompts), 0, []
    with progress_bar(True, total=turns, desc=name, unit="turn") as bar:
        size, template = options.batch_size, options.chat_template_kwargs
        for batch in converse(
            tokenizer, prompts, decode, batch_size=size, longest=longest, template=template
        ):
            texts = [item.response for item in batch]
            stopped = [text[-1] in stops for text in texts]
            ngram += replay_ngram([item.ids for item in batch], texts, stopped, decode.width)
            answered += len(batch)
            bar.update(len(batch))
            bar.set_postfix(acceptance=decode.mean)
        bar.set_postfix(acceptance=decode.mean, left_out=turns - answered)
    return Evaluation(
        drafter=Acceptance(decode.lengths, decode.width),
        ngram=Acceptance(ngram, decode.width),
        prompts=len(prompts),
        new_tokens=decode.new_tokens,
        seconds=time.monotonic() - started,
        left_out=turns - answered,
    )


class _Decoder:
    """Answers batches with an engine per prompt bucket, and counts."""

    def __init__(self, target, drafter, options: EvaluateOptions, stops: list[int]):
        self.target, self.drafter, self.options, self.stops = target, drafter, options, stops
        self.engines: dict[int, Engine] = {}
        self.lengths: list[int] = []
        self.new_tokens, self.width = 0, 1

    @property
    def mean(self) -> float:
        return sum(self.lengths) / max(len(self.lengths), 1)

    def __call__(self, rows: list[list[int]]) -> list[list[int]]:
        engine = self._engine(bucket(max(map(len, rows))))
        texts, lengths = decode_batch(engine, rows, self.options.max_new_tokens, self.stops)
        self.lengths += lengths
        self.new_tokens += sum(map(len, texts))
        self.width = engine.plan.verify_width
        return texts

    def _engine(self, longest: int) -> Engine:
        if longest not in self.engines:
            self.engines[longest] = Engine(
                self.target,
                self.drafter,
                EngineOptions(
                    runtime=self.options.runtime,
                    max_length=min(longest + self.options.max_new_tokens, context_of(self.target)),
                    batch_size=self.options.batch_size,
                    verify_width=self.options.verify_width,
                    filters=False,
                ),
            )
        return self.engines[longest]


def decode_batch(
    engine: Engine, rows: list[list[int]], max_new_tokens: int, stops: list[int]
) -> tuple[list[list[int]], list[int]]:
    """Greedy answers to ragged prompts, and the acceptance lengths of rounds that no cap cut."""
    ids, mask = pad_rows(rows)
    output: Any = engine.generate(
        ids,
        mask,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=stops,
        repetition_penalty=1.0,
        return_dict_in_generate=True,
    )
    return output.new_tokens, output.stats.whole_rounds


def replay_ngram(
    prompts: list[list[int]], answers: list[list[int]], stopped: list[bool], width: int
) -> list[int]:
    """Acceptance lengths of n-gram lookup on these texts, all rows at once.

    ``stopped`` marks answers that end in a stop id; the cap cut the others.
    """
    if width < 2:
        return []
    proposer, rows = NGramProposer(width), len(prompts)
    longest = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    plan = DecodePlan(batch_size=rows, capacity=longest + width, block_size=width, verify_width=width)
    text = torch.zeros(rows, longest + 2 * width, dtype=torch.int32)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        text[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
    end = torch.tensor([len(p) + len(a) for p, a in zip(prompts, answers, strict=True)], dtype=torch.int32)
    length = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32)
    complete = torch.tensor(stopped)
    state = proposer.observe(proposer.start(plan, "cpu"), None, text[:, : int(length.max())], text, length)
    lengths: list[int] = []
    while bool((length + 1 < end).any()):
        live = length + 1 < end
        anchor = text.gather(1, length[:, None].long())[:, 0]
        draft, state = proposer.propose(state, anchor, length, None, None)
        true = _window(text, length + 1, width)
        same = (draft.tokens == true[:, :-1]) & (torch.arange(width - 1) < draft.valid[:, None])
        count = 1 + torch.cumprod(same.to(torch.int32), dim=1).sum(1)
        remaining = end - 1 - length
        # As in a real run: a stop id trims a round, and a round cut by the cap is left out.
        lengths += torch.minimum(count, remaining)[live & (complete | (count <= remaining))].tolist()
        step = torch.where(live, torch.minimum(count, remaining), 0).to(torch.int32)
        state = proposer.observe(state, None, _window(text, length, width), true, step)
        length = length + step
    return lengths


def _window(text: Tensor, start: Tensor, width: int) -> Tensor:
    at = start[:, None].long() + torch.arange(width)
    return text.gather(1, at.clamp(max=text.shape[1] - 1))


class ShuffledFeatures(DFlashProposer):
    """Drafts with each batch row's features taken from the next row; needs a batch of 2 or more.

    Remaining acceptance comes from the anchor's embedding and the commonest tokens. The distance to the true
    acceptance length is the drafter's use of the target's states.
    """

    name = "shuffled"

    def __init__(self, drafter: DFlashDraftModel):
        super().__init__(drafter)
        self.drafter: Any = drafter  # with its weights: the engine copies a proposer whole

    def ingest(self, pstate, features, ids, next_ids, count) -> DFlashState:
        return super().ingest(pstate, torch.roll(features, 1, dims=0), ids, next_ids, count)

    def observe(self, pstate, features, ids, next_ids, count) -> DFlashState:
        return super().observe(pstate, torch.roll(features, 1, dims=0), ids, next_ids, count)
