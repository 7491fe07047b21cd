"""Stage 4, evaluate: real speculative decoding of held-out prompts, and n-gram lookup on the same texts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from torch_dflash.checks import check_counts, check_runtime
from torch_dflash.engine import Engine
from torch_dflash.prompts import bucket
from torch_dflash.proposers import NGramProposer
from torch_dflash.state import DecodePlan
from torch_dflash.train.data import Prompt, encode_conversation


@dataclass(frozen=True)
class EvaluateOptions:
    """How prompts are decoded: greedily, so that the text is the target's whatever drafts.

    Args:
        limit: first prompts of each set. max_new_tokens: per turn. batch_size: rows decoded together.
        verify_width: how much of the block is verified, the anchor included; unset: all of it.
    """

    limit: int = 100
    max_new_tokens: int = 256
    batch_size: int = 8
    verify_width: int | None = None
    runtime: str = "xla"

    def __post_init__(self):
        counts = ("limit", "max_new_tokens", "batch_size", "verify_width")
        check_counts(**{name: getattr(self, name) for name in counts})
        check_runtime(self.runtime)


@dataclass(frozen=True)
class Acceptance:
    """Rounds of one drafting method over one set of prompts.

    Attributes:
        lengths: acceptance length of every whole round (accepted drafts and the bonus token).
        width: rows verified, so no length is above it.
    """

    lengths: list[int]
    width: int

    @property
    def mean(self) -> float:
        """Mean acceptance length (tau); nan without rounds."""
        return sum(self.lengths) / len(self.lengths) if self.lengths else float("nan")

    @property
    def per_position(self) -> list[float]:
        """Share of rounds in which draft k, and so every one before it, was accepted; k = 1 .. width-1."""
        count = max(len(self.lengths), 1)
        return [sum(length > k for length in self.lengths) / count for k in range(1, self.width)]


@dataclass(frozen=True)
class Evaluation:
    """One set of prompts: both methods on the same texts, and what the decoding took."""

    drafter: Acceptance
    ngram: Acceptance
    prompts: int
    new_tokens: int
    seconds: float
    left_out: int

    def row(self) -> dict[str, Any]:
        """The figures of a table row."""
        return {
            "prompts": self.prompts,
            "left_out": self.left_out,
            "new_tokens": self.new_tokens,
            "rounds": len(self.drafter.lengths),
            "acceptance_length": round(self.drafter.mean, 4),
            "per_position": [round(rate, 4) for rate in self.drafter.per_position],
            "ngram_acceptance_length": round(self.ngram.mean, 4),
            "ngram_per_position": [round(rate, 4) for rate in self.ngram.per_position],
            "seconds": round(self.seconds, 1),
        }


def evaluate(
    target, drafter, tokenizer, prompts: list[Prompt], options: EvaluateOptions, name: str = "evaluate"
) -> Evaluation:
    """Decode the first ``options.limit`` of ``prompts`` with ``drafter`` and count what was accepted.

    Later turns are asked after the earlier answers. Prompts that do not fit the target's context are left
    out and counted. N-gram lookup is replayed on the finished texts: greedy text does not depend on the
    drafter, so this gives the rounds that decoding with it would have had.
    """
    prompts = prompts[: options.limit]
    talks: list[tuple[Prompt, list[dict[str, str]]]] = [(prompt, []) for prompt in prompts]
    engines: dict[int, Engine] = {}
    lengths: list[int] = []
    ngram: list[int] = []
    turn, new_tokens, left_out, started = 0, 0, 0, time.monotonic()
    context = target.config.get_text_config().max_position_embeddings
    eos = target.generation_config.eos_token_id
    stops = set(eos if isinstance(eos, list) else [eos])
    with tqdm(total=sum(len(prompt.turns) for prompt in prompts), desc=name, unit="turn") as bar:
        while talks:
            asked = []
            for prompt, messages in talks:
                said = [*messages, {"role": "user", "content": prompt.turns[turn]}]
                ids = encode_conversation(tokenizer, said)
                if len(ids) + options.max_new_tokens <= context:
                    asked.append((prompt, said, ids))
                else:
                    left_out += 1
            asked.sort(key=lambda item: len(item[2]))
            talks, turn = [], turn + 1
            for start in range(0, len(asked), options.batch_size):
                batch = asked[start : start + options.batch_size]
                rows = [ids for _, _, ids in batch]
                engine = _engine(engines, target, drafter, rows, options)
                texts, rounds = decode_batch(engine, rows, options.max_new_tokens)
                lengths += rounds
                stopped = [text[-1] in stops for text in texts]
                ngram += replay_ngram(rows, texts, stopped, engine.plan.verify_width)
                new_tokens += sum(map(len, texts))
                for (prompt, said, _), text in zip(batch, texts, strict=True):
                    if turn < len(prompt.turns):
                        answer = tokenizer.decode(text, skip_special_tokens=True)
                        talks.append((prompt, [*said, {"role": "assistant", "content": answer}]))
                bar.update(len(batch))
                bar.set_postfix(acceptance=sum(lengths) / max(len(lengths), 1))
    seconds = time.monotonic() - started
    width = next(iter(engines.values())).plan.verify_width if engines else 1
    drafted, looked_up = Acceptance(lengths, width), Acceptance(ngram, width)
    return Evaluation(drafted, looked_up, len(prompts), new_tokens, seconds, left_out)


def _engine(engines: dict[int, Engine], target, drafter, rows, options: EvaluateOptions) -> Engine:
    longest = max(map(len, rows))
    if bucket(longest) not in engines:
        context = target.config.get_text_config().max_position_embeddings
        engines[bucket(longest)] = Engine(
            target,
            drafter,
            runtime=options.runtime,
            max_length=min(bucket(longest) + options.max_new_tokens, context),
            batch_size=options.batch_size,
            verify_width=options.verify_width,
            filters=False,
        )
    return engines[bucket(longest)]


def decode_batch(
    engine: Engine, rows: list[list[int]], max_new_tokens: int
) -> tuple[list[list[int]], list[int]]:
    """Greedy answers to ragged prompts, and the acceptance length of every round that no cap cut."""
    width = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width).long()
    for row, prompt in enumerate(rows):
        ids[row, : len(prompt)], mask[row, : len(prompt)] = torch.tensor(prompt), 1
    output: Any = engine.generate(
        ids, mask, max_new_tokens=max_new_tokens, do_sample=False, return_dict_in_generate=True
    )
    stats = output.stats
    texts, lengths = [], []
    for row, (rounds, capped) in enumerate(zip(stats.acceptance_lengths, stats.capped, strict=True)):
        texts.append(output.sequences[row, width : width + 1 + sum(rounds)].tolist())
        lengths += rounds[:-1] if capped else rounds
    return texts, lengths


def replay_ngram(
    prompts: list[list[int]], answers: list[list[int]], stopped: list[bool], width: int
) -> list[int]:
    """Acceptance lengths that n-gram lookup would have had on these texts, all rows at once.

    ``stopped`` says which answers end in a stop id; the others were cut by the cap.
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
        room = end - 1 - length
        # As in a real run: a round is trimmed at the stop id, and left out where the cap cut it.
        lengths += torch.minimum(count, room)[live & (complete | (count <= room))].tolist()
        step = torch.where(live, torch.minimum(count, room), 0).to(torch.int32)
        state = proposer.observe(state, None, _window(text, length, width), true, step)
        length = length + step
    return lengths


def _window(text: Tensor, start: Tensor, width: int) -> Tensor:
    at = start[:, None].long() + torch.arange(width)
    return text.gather(1, at.clamp(max=text.shape[1] - 1))
