"""A plan's processors see, at each row of a block, the text that plain decoding would show them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from support.scripted import pad
from support.states import look
from support.tiny import make_pair

import torch_dflash as td
from torch_dflash.decode import Pair
from torch_dflash.engine.batch import Generation
from torch_dflash.engine.width import Widths

PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [2, 7, 1], [6, 6, 2, 6, 6]]
NEW, PENALTY = 24, 1.7


@dataclass(frozen=True)
class Repetition:
    """transformers' repetition penalty; the newest ``late`` tokens before a row are not shown to it."""

    penalty: float
    late: int = 0

    def __call__(self, tokens, length, logits):
        slots = torch.arange(tokens.shape[1], device=tokens.device)
        known = slots < (length - self.late)[..., None]  # [B, M, S]
        ids = torch.where(known, tokens[:, None], logits.shape[-1]).long()
        present = torch.zeros(*logits.shape[:2], logits.shape[2] + 1, device=logits.device)
        present = present.scatter(2, ids, 1.0)[..., :-1] > 0
        changed = torch.where(logits < 0, logits * self.penalty, logits / self.penalty)
        return torch.where(present, changed, logits)


@pytest.fixture(scope="module")
def pair():
    return make_pair("llama", agree=4.0)


@pytest.fixture(scope="module")
def eager(pair):
    return td.compile(*pair, runtime="eager", max_length=64, batch_size=3)


def texts(engine, *processors):
    """The rows' new tokens, and how many rounds they took, with ``processors`` in the engine's plan."""
    plan = replace(engine.plan, processors=processors)
    pair = Pair(engine.pair.target, engine.pair.proposer, plan)
    runtime = type(engine.runtime)(pair, plan)
    params = runtime.refresh(engine.tensors())
    request = engine.read(*pad(PROMPTS), {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None})
    generation = Generation.begin(runtime, plan, params, request)
    while not generation.over:
        generation.step(16, Widths((plan.verify_width,), plan.rounds_per_chunk))
    seen = look(runtime, generation.state)
    rows = [seen.tokens[row, len(prompt) :][:NEW].tolist() for row, prompt in enumerate(PROMPTS)]
    return rows, int(seen.rounds.max())


def theirs(target, **options):
    """transformers' own text of each prompt."""
    options |= {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return [
        target.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in PROMPTS
    ]


@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_a_penalty_inside_of_blocks_is_that_of_plain_decoding(pair, eager, runtime):
    target, drafter = pair
    engine = eager if runtime == "eager" else td.compile(target, drafter, max_length=64, batch_size=3)
    rows, rounds = texts(engine, Repetition(PENALTY))
    assert rows == theirs(target, repetition_penalty=PENALTY) != theirs(target)
    assert rounds < NEW - 1  # some drafts were kept, so rows of a block did see drafts before them


def test_a_processor_that_misses_the_newest_token_shows(pair, eager):
    rows, _ = texts(eager, Repetition(PENALTY, late=1))
    assert rows != theirs(pair[0], repetition_penalty=PENALTY)


def test_rows_that_do_not_see_the_drafts_before_them_show(pair, eager, monkeypatch):
    def committed_alone(processors, tokens, length, logits):
        for processor in processors:
            logits = processor(tokens, length[:, :1].expand_as(length), logits)
        return logits

    monkeypatch.setattr("torch_dflash.decode.process", committed_alone)
    rows, _ = texts(eager, Repetition(PENALTY))
    assert rows != theirs(pair[0], repetition_penalty=PENALTY)


def test_processors_run_in_turn_and_belong_to_the_plan(pair, eager):
    plans = {replace(eager.plan, processors=given) for given in ((), (Repetition(2.0),), (Repetition(4.0),))}
    assert eager.plan in plans and len(plans) == 3
    both, _ = texts(eager, Repetition(2.0), Repetition(0.5))
    assert both == theirs(pair[0])  # each undoes the other
