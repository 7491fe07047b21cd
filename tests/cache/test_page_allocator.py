"""Rows that share too few pages give the same text, none waits for ever, and no page has two rows."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from support.families import MORE
from support.scripted import own_text, pad
from support.tiny import BASE, MASK, make_pair, randomise
from torch.utils._pytree import tree_leaves

import torch_dflash as td
from torch_dflash.cache.allocate import LAYERS
from torch_dflash.cache.latent import LatentLayer
from torch_dflash.engine import pages as pages_module
from torch_dflash.engine.pages import PageAllocator
from torch_dflash.plan import DecodePlan
from torch_dflash.pytrees import register_state

ROWS, CAPACITY = 4, 128
OPTIONS = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True}
LENGTHS, NEW = (9, 40, 13, 21), (60, 20, 80, 33)
PROMPT = [11, 23, 5, 80, 41] * 3


@pytest.fixture(scope="module", params=["llama", "gpt_oss"])
def pair(request):
    return make_pair(request.param, agree=8.0)


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, MASK, (length,), generator=generator).tolist() for length in LENGTHS]


def engine(pair, runtime, **options):
    sizes = {"max_length": CAPACITY, "batch_size": ROWS, "rounds_per_chunk": 2, "prefill_chunk_size": 16}
    return td.compile(*pair, runtime=runtime, **(sizes | options))


@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_a_small_pool_says_the_same(pair, prompts, runtime):
    dense = engine(pair, runtime)
    wanted = dense.generate(*pad(prompts), max_new_tokens=list(NEW), **OPTIONS)
    assert max(map(max, wanted.stats.acceptance_lengths)) > 1
    rows = -(-dense.plan.slots // 16)
    waited = []
    for share in (1.0, 0.6, 0.3):
        small = engine(pair, runtime, cache="paged", page_size=16, pool_pages=int(share * ROWS * rows))
        out = small.generate(*pad(prompts), max_new_tokens=list(NEW), **OPTIONS)
        assert torch.equal(out.sequences, wanted.sequences)
        assert out.stats.acceptance_lengths == wanted.stats.acceptance_lengths
        waited.append(out.stats.host_reads)
        pool = small.plan.pages * small.plan.page_size
        assert pool <= share * ROWS * rows * 16 + 16
    assert waited[0] == wanted.stats.host_reads <= waited[1] < waited[2]  # rows waited for each other


@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_a_row_near_its_end_keeps_its_history_while_another_is_fed(pair, runtime):
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, MASK, (length,), generator=generator).tolist() for length in (60, 100)]
    given = pair[0], td.NGramProposer(4)
    sizes = {"max_length": 128, "batch_size": 2, "rounds_per_chunk": 2}
    options = OPTIONS | {"max_new_tokens": [64, 20]}
    wanted = td.compile(*given, runtime=runtime, **sizes).generate(*pad(prompts), **options)
    small = td.compile(*given, runtime=runtime, cache="paged", page_size=16, pool_pages=9, **sizes)
    out = small.generate(*pad(prompts), **options)
    assert out.stats.host_reads > wanted.stats.host_reads  # the second row waited
    assert torch.equal(out.sequences, wanted.sequences)
    assert out.stats.acceptance_lengths == wanted.stats.acceptance_lengths


@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_a_row_that_overflows_spoils_no_other(runtime):
    """One token's embedding is NaN; the NaN K and V of its row stay in pages that other rows get."""
    target, _ = make_pair("llama")  # the head and the embedding are not tied
    prompts = [[5, 17, 80, 33, 2] * 4, [7, 8, 9], [40, 3, 3, 61, 12, 8]]
    wanted = [own_text(target, prompt, 20) for prompt in prompts]
    with torch.no_grad():
        target.get_input_embeddings().weight[94] = torch.nan
    prompts[0] = [94, *prompts[0]]
    sizes = {"max_length": 64, "batch_size": 3, "rounds_per_chunk": 2, "page_size": 16, "cache": "paged"}
    for pool in (None, 8):
        engine = td.compile(target, None, runtime=runtime, pool_pages=pool, **sizes)
        for _ in range(2):
            out = engine.generate(*pad(prompts), max_new_tokens=[3, 20, 20], **OPTIONS)
            assert out.new_tokens[1:] == wanted[1:]


def test_rows_that_wait_stream_and_stop_as_ever(pair, prompts):
    small = engine(pair, "xla", cache="paged", page_size=16, pool_pages=9)
    said = [[] for _ in prompts]
    options = {name: value for name, value in OPTIONS.items() if name != "return_dict_in_generate"}
    for pieces in small.stream(*pad(prompts), max_new_tokens=list(NEW), **options):
        for row, piece in zip(said, pieces, strict=True):
            row += piece
    assert said == [own_text(pair[0], prompt, new) for prompt, new in zip(prompts, NEW, strict=True)]
    first = [text[0] for text in said]  # a row that ends in its prefill gives its pages back at once
    out = small.generate(*pad(prompts), max_new_tokens=20, **OPTIONS | {"eos_token_id": [[t] for t in first]})
    assert out.new_tokens == [[t] for t in first]


@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_a_step_by_hand_reads_no_cache(pair, prompts, runtime, monkeypatch):
    paged = engine(pair, runtime, cache="paged", page_size=16)
    state = paged.start(*pad(prompts), max_new_tokens=9, do_sample=False, eos_token_id=None)
    fetched, fetch = [], type(paged.runtime).fetch
    counted = lambda self, part: fetched.append(part) or fetch(self, part)  # noqa: E731
    monkeypatch.setattr(type(paged.runtime), "fetch", counted)
    paged.advance(state)
    read = sum(leaf.nbytes for part in fetched for leaf in tree_leaves(part))
    assert 0 < read < 4 * ROWS * (paged.plan.slots + paged.plan.row_pages + 16)


def test_steps_by_hand_need_pages_for_all(pair, prompts):
    small = engine(pair, "eager", cache="paged", page_size=16, pool_pages=9)
    options = {"do_sample": False, "eos_token_id": None}
    with pytest.raises(ValueError, match="pool_pages=9: pages for 3 of 4 rows at once"):
        small.start(*pad(prompts), max_new_tokens=list(NEW), **options)
    state = small.start(*pad(prompts[:2]), max_new_tokens=list(NEW[:2]), **options)
    while (state.length + 1 < state.limit).any():
        state = small.advance(state)
    for row in range(2):
        text = state.tokens[row, : int(state.limit[row])].tolist()
        assert text == prompts[row] + own_text(pair[0], prompts[row], NEW[row])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "ring"}, "cache='ring': choose one of 'static', 'paged'"),
        ({"matmul_precision": "foo"}, "matmul_precision='foo': choose one of 'default', 'high'"),
        ({"cache": "paged", "page_size": 24}, "page_size=24: must be a multiple of 16"),
        (
            {"cache": "paged", "page_size": 16, "pool_pages": 8},
            "pool_pages=8: one row of max_length=128 alone",
        ),
        ({"pool_pages": 40}, "pool_pages=40: only cache='paged' has pages"),
        ({"cache": "paged", "pool_pages": 0}, "pool_pages=0"),
    ],
)
def test_wrong_pages_are_refused_at_construction(pair, options, message):
    with pytest.raises(ValueError, match=message):
        engine(pair, "eager", **options)


def test_layers_that_expand_their_cache_are_not_paged():
    cls, config, extra = MORE["deepseek_v3"]
    model = expanding(cls(config(**BASE | extra)))
    with pytest.raises(ValueError, match=r"cache='paged': holds no latent layers, .*; choose 'static'"):
        td.compile(model, None, runtime="eager", cache="paged", max_length=32)


def expanding(model):
    """A model whose latents are expanded, for a hook of the user's reads the result."""
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.register_forward_hook(lambda module, args, out: out)
    return model


@register_state
@dataclass(frozen=True)
class UnpagedLayer(LatentLayer):
    """A latent layer that stays dense in a plan of pages."""


@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_a_layer_of_another_kind_is_an_entry(monkeypatch, runtime):
    monkeypatch.setitem(LAYERS, ("latent", "paged"), (UnpagedLayer,))
    cls, config, extra = MORE["deepseek_v3"]
    model = expanding(randomise(cls(config(**BASE | extra)), 3))
    proposer = td.NGramProposer()
    engine = td.compile(model, proposer, runtime=runtime, cache="paged", page_size=16, max_length=64)
    started = engine.start(torch.tensor([PROMPT]), max_new_tokens=NEW[1])
    assert {type(layer) for layer in started.cache} == {UnpagedLayer}
    out = engine.generate(torch.tensor([PROMPT]), max_new_tokens=NEW[1], **OPTIONS)
    assert out.sequences[0, len(PROMPT) :].tolist() == own_text(model, PROMPT, NEW[1])


def run_rows(book: PageAllocator, plan: DecodePlan, ends: list[int], draw: random.Random) -> int:
    """Grows rows at random until each has reached its end; returns the rounds in which a row had to wait."""
    reached, waits = [0] * len(ends), 0
    while any(at < end for at, end in zip(reached, ends, strict=True)):
        grown = False
        for row in draw.sample(range(len(ends)), len(ends)):
            if reached[row] >= ends[row]:
                continue
            wanted = min(reached[row] + draw.randint(1, 40), ends[row])
            if book.reserve(row, wanted):
                reached[row], grown = wanted, True
            else:
                waits += 1
            held = book.table[book.table > 0].tolist()
            assert len(held) == len(set(held)) and max(held, default=0) < plan.pages
            assert np.count_nonzero(book.table[row]) * plan.page_size >= reached[row]
            if reached[row] == ends[row]:
                book.release(row)
                assert not book.table[row].any()
        assert grown, "every row waits for every other"
    return waits


@pytest.mark.parametrize("seed", range(30))
def test_the_book_never_deadlocks_and_never_shares_a_page(seed):
    draw = random.Random(seed)
    rows = draw.randint(1, 9)
    base = DecodePlan(rows, 200, 8, 8, cache="paged", page_size=16)
    pool = draw.randint(base.row_pages, rows * base.row_pages)
    plan = DecodePlan(rows, 200, 8, 8, cache="paged", page_size=16, pool_pages=pool)
    ends = [draw.randint(1, 200) for _ in range(rows)]
    run_rows(PageAllocator(plan, ends), plan, ends, draw)


def test_without_the_rule_rows_do_deadlock(monkeypatch):
    """An allocator that hands out every free page ends with all rows waiting: the check above can fail."""
    plan = DecodePlan(6, 200, 8, 8, cache="paged", page_size=16, pool_pages=16)
    ends = [200] * 6
    assert run_rows(PageAllocator(plan, ends), plan, ends, random.Random(0)) > 0
    monkeypatch.setattr(pages_module.PageAllocator, "_all_can_end", lambda self, row, more: True)
    with pytest.raises(AssertionError, match="every row waits"):
        run_rows(PageAllocator(plan, ends), plan, ends, random.Random(0))
