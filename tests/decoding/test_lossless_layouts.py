"""Drafters of every layout, loaded from files: the text is plain decoding's, and drafts are accepted."""

import pytest
import torch
from support.layouts import LAYOUTS as ALL
from support.layouts import pair, publish, with_more_ids
from support.resumed import ends
from support.tiny import ragged_prompts

import torch_dflash as td

ROWS, NEW = 3, 24
SAMPLED = {"do_sample": True, "temperature": [9.0, 0.0, 4.0], "top_k": 30, "seed": [5, 6, 7]}
CACHES, RUNTIMES = ("static", "paged"), ("eager", "xla")
# DSpark's other layouts are a network of these: tests/proposers/test_dspark_layouts.py compares them.
LAYOUTS = [name for name in ALL if name not in ("deepspec", "deepspec_dflash", "specforge_dspark")]
IN_SHORT = "speculators_dspark"  # has a vocabulary, rows and a head of its own
CASES = [(name, "eager", CACHES[at % 2]) for at, name in enumerate(LAYOUTS)]
CASES += [(IN_SHORT, "xla", "paged")]
RESUMED = [(IN_SHORT, "xla", "eager")]
# Every layout in each: further cases of the same network, except for the parts that a layout adds.
REST = [(name, "eager", CACHES[1 - at % 2]) for at, name in enumerate(LAYOUTS)]
REST += [(name, "xla", CACHES[at % 2]) for at, name in enumerate(LAYOUTS) if name != IN_SHORT]
CASES += [pytest.param(*one, marks=pytest.mark.heavy) for one in REST]
RESUMED += [
    pytest.param(name, *RUNTIMES[:: 1 - 2 * (at % 2)], marks=pytest.mark.heavy)
    for at, name in enumerate(LAYOUTS)
    if name != IN_SHORT
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    kept = {}
    for name in LAYOUTS:
        target, own = pair(name)
        target = with_more_ids(target) if name == IN_SHORT else target
        kept[name] = target, td.load_drafter(publish(tmp_path_factory.mktemp(name), name, own)), own
    return kept


def engine_of(target, drafter, **built):
    return td.compile(target, drafter, max_length=64, batch_size=ROWS, **built)


def decode(engine, options):
    asked = {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True}
    return engine.generate(*ragged_prompts(ROWS), **asked | options)


@pytest.mark.parametrize(("name", "runtime", "cache"), CASES)
def test_text_is_plain_decodings(loaded, name, runtime, cache):
    target, drafter, own = loaded[name]
    plain, same = engine_of(target, None, runtime="eager"), engine_of(target, own, runtime="eager")
    engine = engine_of(target, drafter, runtime=runtime, cache=cache)
    greedy = {"do_sample": False}
    stop = int(decode(plain, greedy).sequences[0, -9])
    for options in (greedy, SAMPLED, greedy | {"eos_token_id": stop}):
        out = decode(engine, options)
        assert torch.equal(out.sequences, decode(plain, options).sequences)
        assert out.stats.acceptance_lengths == decode(same, options).stats.acceptance_lengths
        assert "eos_token_id" in options or max(sum(out.stats.acceptance_lengths, [])) > 2


@pytest.mark.parametrize(("name", "here", "there"), RESUMED)
def test_a_saved_state_goes_on_in_the_other_runtime(loaded, name, here, there, tmp_path):
    target, drafter, _ = loaded[name]
    one, other = ends(target, drafter, here, there, tmp_path, NEW)
    assert one == other


def test_anchor_rows_draft_a_whole_block(loaded):
    target, drafter, _ = loaded["speculators_anchor"]
    engine = engine_of(target, drafter, runtime="eager")
    assert engine.plan.block_size == drafter.config.block_size + 1
    lengths = decode(engine, {"do_sample": False}).stats.acceptance_lengths
    assert max(sum(lengths, [])) <= engine.plan.block_size
