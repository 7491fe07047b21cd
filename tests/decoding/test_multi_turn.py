"""A second turn appended to a state in mid-batch gives the text and the drafts of a fresh state."""

from dataclasses import replace

import pytest
import torch
from support.scripted import Scripted, own_text, pad
from support.tiny import MASK, make_pair

import jax_bridge as jb
import torch_dflash as td
from torch_dflash.cache.dense import StaticLayer
from torch_dflash.state import PromptChunk

CHUNK = 16
PROMPT_LENGTHS, FIRST = (9, 4, 13), (7, 10, 60)  # the third row still decodes when the others continue
QUESTION_LENGTHS, SECOND = (20, 5), (24, 17)
ENGINE = {"max_length": 128, "batch_size": 3, "prefill_chunk_size": CHUNK, "rounds_per_chunk": 1}
OPTIONS = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def random_rows(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, MASK, (length,), generator=generator).tolist() for length in lengths]


@pytest.fixture(scope="module")
def pair():
    return make_pair("llama", agree=8.0)


@pytest.fixture(scope="module", params=["eager", "xla"])
def runtime(request):
    return request.param


@pytest.fixture(scope="module", params=["dflash", "ngram"])
def engine(request, pair, runtime):
    drafter = pair[1] if request.param == "dflash" else td.NGramProposer(6)
    return td.compile(pair[0], drafter, runtime=runtime, **ENGINE)


def on_host(state):
    return state if isinstance(state.done, torch.Tensor) else jb.state_to_torch(state)


def advance_until(engine, state, rows):
    while not on_host(state).done[rows].all():
        state = engine.advance(state)
    return state


def text_of(state):
    """Each row's committed tokens, with the anchor."""
    return [state.tokens[row, : int(state.length[row]) + 1].tolist() for row in range(3)]


def append_turn(engine, state, questions, budgets):
    """Raises the limits of the first rows and prefills their anchor and question, in chunks."""
    host, on_device = on_host(state), not isinstance(state.done, torch.Tensor)
    pieces = [[int(host.tokens[row, host.length[row]]), *q] for row, q in enumerate(questions)]
    ends = [int(host.length[row]) + len(piece) for row, piece in enumerate(pieces)]
    limit, done = host.limit.clone(), host.done.clone()
    for row, budget in enumerate(budgets):
        limit[row], done[row] = ends[row] + budget, False
    host = replace(host, limit=limit, done=done)
    state = jb.state_to_jax(host) if on_device else host
    params = engine.runtime.refresh(engine.tensors())
    for start in range(0, max(map(len, pieces)), CHUNK):
        ids = torch.zeros(3, CHUNK, dtype=torch.int32)
        count, following = torch.zeros(3, dtype=torch.int32), torch.full((3,), -1, dtype=torch.int32)
        for row, piece in enumerate(pieces):
            here = piece[start : start + CHUNK]
            ids[row, : len(here)] = torch.tensor(here, dtype=torch.int32)
            count[row] = len(here)
            if start + CHUNK < len(piece):
                following[row] = piece[start + CHUNK]
        state = engine.runtime.prefill(params, state, PromptChunk(ids, count, following))
    return state


def draft_memory(state):
    """Returns the proposer's keys and values, or its history, row by row."""
    kept, length = state.proposer, state.proposer.length
    if hasattr(kept, "history"):
        return [[kept.history[row, : length[row]].float()] for row in range(3)]
    assert not kept.buffered.any()
    return [
        [part[row, :, : length[row]] for layer in kept.layers for part in (layer.key, layer.value)]
        for row in range(3)
    ]


@pytest.mark.parametrize("seed", [4, 5])
def test_a_second_turn_continues_the_state(engine, pair, seed):
    target = pair[0]
    prompts, questions = random_rows(PROMPT_LENGTHS, seed), random_rows(QUESTION_LENGTHS, seed + 1)
    state = engine.start(*pad(prompts), max_new_tokens=list(FIRST), **OPTIONS)
    state = advance_until(engine, state, slice(0, 2))
    host = on_host(state)
    assert host.done.tolist() == [True, True, False]
    first = text_of(host)
    assert first[:2] == [p + own_text(target, p, new) for p, new in zip(prompts[:2], FIRST, strict=False)]
    if hasattr(host.proposer, "buffered"):
        assert host.proposer.buffered.max() > 1  # tokens without draft K/V
    rounds = host.rounds.tolist()
    state = append_turn(engine, state, questions, SECOND)
    turned = on_host(state)
    whole = [text + question for text, question in zip(first, questions, strict=False)]
    assert turned.length.tolist() == [*map(len, whole), len(first[2]) - 1]
    assert not turned.done.any()
    # A fresh state that reads everything at once; the third row's anchor is picked again.
    left = int(turned.limit[2]) - int(turned.length[2])
    fresh = engine.start(*pad([*whole, first[2][:-1]]), max_new_tokens=[*SECOND, left], **OPTIONS)
    wanted = on_host(fresh)
    assert text_of(wanted) == text_of(turned)
    assert wanted.length.tolist() == turned.proposer.committed.tolist() == turned.length.tolist()
    for ours, theirs in zip(draft_memory(turned), draft_memory(wanted), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    state = on_host(advance_until(engine, state, slice(None)))
    fresh = on_host(advance_until(engine, fresh, slice(None)))
    said = text_of(state)
    assert said[:2] == [w + own_text(target, w, new) for w, new in zip(whole, SECOND, strict=True)]
    assert said[2] == prompts[2] + own_text(target, prompts[2], FIRST[2])
    for row in range(3):
        after = state.accepted[row, rounds[row] : int(state.rounds[row])].tolist()
        assert after == fresh.accepted[row, : int(fresh.rounds[row])].tolist()
        assert after and (row == 2 or max(after) > 1)


def test_layers_are_told_what_a_round_really_keeps(pair, monkeypatch):
    """The count that a layer commits ends at a stop id and at the row's limit; a row that is done has 0."""
    target, new = pair[0], 20
    prompts = random_rows(PROMPT_LENGTHS, 1)
    texts = [prompt + own_text(target, prompt, new) for prompt in prompts]
    proposer = Scripted(3, 160, 6)
    proposer.say(texts)  # every draft is right, so every end lies inside a block
    engine = td.compile(target, proposer, runtime="eager", **ENGINE)
    stop = next(t for t in texts[1][len(prompts[1]) + 3 :] if t not in texts[1][len(prompts[1]) :][:3])
    stops = [[], [stop], []]
    options = OPTIONS | {"eos_token_id": stops}
    state = engine.start(*pad(prompts), max_new_tokens=[4, new, new], **options)
    told, commit = [], StaticLayer.commit

    def recorded(self, kept, path):
        told.append(kept.tolist())
        return commit(self, kept, path)

    monkeypatch.setattr(StaticLayer, "commit", recorded)
    rounds, trimmed = 0, 0
    while not state.done.all():
        before, was_done = state.length.clone(), state.done.clone()
        told.clear()
        state = engine.advance(state)
        grown = (state.length - before).tolist()
        assert told == [grown] * target.config.num_hidden_layers
        assert all(grown[row] == 0 for row in range(3) if was_done[row])
        trimmed += sum(0 < count < 6 for count in grown)
        rounds += 1
    assert rounds > 3 and trimmed >= 2
    ends = text_of(state)
    assert ends[0] == texts[0][: len(prompts[0]) + 4] and ends[2] == texts[2]
    assert ends[1] == texts[1][: len(ends[1])] and ends[1][-1] == stop and len(ends[1]) < len(texts[1])
