"""A row given to another request keeps nothing of its old occupant; the other rows stay untouched."""

from dataclasses import replace
from functools import partial

import jax
import pytest
import torch
from support.authors import SECOND
from support.scripted import own_text
from support.states import look
from support.tiny import make_pair, make_target, randomise
from torch.utils import _pytree as pytree

import torch_dflash as td
from jax_bridge.arrays import to_jax
from jax_bridge.programs.lower import lower, tracing
from torch_dflash.cache.ring import RingLayer
from torch_dflash.engine.batch import Generation
from torch_dflash.requests.prompts import prompt_chunks
from torch_dflash.requests.request import row_requests
from torch_dflash.rows import reset
from torch_dflash.runtime import Rounds

NEW = 10
OLD, OTHER, NEXT = [3, 1, 4, 1, 5], [2, 7, 1, 8], [6, 6, 2]
OPTIONS = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}


@pytest.fixture(scope="module")
def pairs():
    return {
        "full": make_pair("llama", agree=4.0),
        "ring": make_pair(
            "llama",
            agree=4.0,
            use_sliding_window=True,
            sliding_window=6,
            layer_types=["sliding_attention"] * 2,
        ),
        "dflash2": make_pair("llama", agree=4.0, **SECOND),
        "eagle3": (target := make_target("llama"), randomise(td.Eagle3DraftModel(layer_for(target)), 7)),
        "medusa": (target := make_target("llama"), randomise(td.MedusaDraftModel(heads_for(target)), 7)),
    }


def layer_for(target):
    given = target.config.to_dict()
    sizes = ["vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"]
    sizes += ["head_dim", "max_position_embeddings"]
    return td.Eagle3Config(
        **{name: given[name] for name in sizes}, num_target_layers=given["num_hidden_layers"]
    )


def heads_for(target):
    given = target.config
    return td.MedusaConfig(
        vocab_size=given.vocab_size, hidden_size=given.hidden_size, num_target_layers=given.num_hidden_layers
    )


def poisoned(state, row):
    """``state`` with NaN in every float and nonsense in every integer of ``row``."""

    def poison(leaf):
        leaf = leaf.clone()
        leaf[row] = torch.nan if leaf.is_floating_point() else 77
        return leaf

    parts = {"cache": state.cache, "proposer": state.proposer, "tokens": state.tokens}
    return replace(state, **{name: pytree.tree_map(poison, part) for name, part in parts.items()})


def ask(engine, prompts):
    ids = torch.zeros(len(prompts), max(map(len, prompts)), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)], mask[row, : len(prompt)] = torch.tensor(prompt), 1
    return engine.read(ids, mask, OPTIONS).rows


def reset_on(runtime, engine, params, state, rows, requests):
    state = poisoned(runtime.fetch(state), 0)
    if engine.options.runtime == "eager":
        return reset(engine.pair, params, state, rows, requests)
    with tracing(engine.plan.matmul_precision):
        program = jax.jit(lower(partial(reset, engine.pair)), donate_argnums=1)
        return program(params, runtime.place(state), to_jax(rows), to_jax(requests))


@pytest.mark.parametrize("where", ["eager", "xla"])
@pytest.mark.parametrize("kind", ["dflash", "ring", "dflash2", "ngram", "plain"])
def test_a_row_is_given_to_another_request(pairs, kind, where):
    target, drafter = pairs[kind if kind in pairs else "full"]
    others = {"ngram": td.NGramProposer(5), "lookahead": td.LookaheadProposer(3, 4, 2), "plain": None}
    drafter = others.get(kind, drafter)
    engine = td.compile(target, drafter, runtime=where, max_length=64, batch_size=2)
    runtime, params = engine.runtime, engine.runtime.refresh(engine.tensors())
    generation = Generation.begin(runtime, engine.plan, params, ask(engine, [OLD, OTHER]))
    generation.prepare(64)
    for _ in range(2):
        generation.advance(Rounds.of(engine.plan))
    rows = torch.tensor([True, False])
    requests = row_requests(ask(engine, [NEXT, OTHER]), engine.plan)
    before = look(runtime, generation.state).length
    state = reset_on(runtime, engine, params, generation.state, rows, requests)
    if kind == "ring":
        assert any(isinstance(layer, RingLayer) for layer in state.proposer.layers)
    assert look(runtime, state).length.tolist() == [0, before[1]]
    fresh = Generation(runtime, engine.plan, params, state, generation.scheduler, [])
    for chunk in prompt_chunks([torch.tensor(NEXT).int().numpy(), torch.zeros(0).int().numpy()], 2, 64, 64):
        fresh.state = runtime.prefill(params, fresh.state, chunk)
    while not look(runtime, fresh.state).done.all():
        fresh.advance(Rounds.of(engine.plan))
    seen = look(runtime, fresh.state)
    texts = [seen.tokens[row, : seen.length[row] + 1].tolist() for row in (0, 1)]
    assert texts == [NEXT + own_text(target, NEXT, NEW), OTHER + own_text(target, OTHER, NEW)]


@pytest.mark.parametrize("kind", ["lookahead", "medusa", "eagle3"])
def test_an_eager_row_is_given_to_another_request(pairs, kind):
    test_a_row_is_given_to_another_request(pairs, kind, "eager")


def test_without_the_reset_the_old_occupant_shows(pairs, monkeypatch):
    monkeypatch.setattr(td.NGramProposer, "reset", lambda self, pstate, rows: pstate)
    with pytest.raises(AssertionError):
        test_a_row_is_given_to_another_request(pairs, "ngram", "eager")
