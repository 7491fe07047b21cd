"""`generate`, `compile` and ``custom_generate`` follow transformers' conventions."""

import copy
import math
import time

import numpy as np
import pytest
import torch
from support import tiny
from support.scripted import Scripted
from transformers.generation.utils import GenerateDecoderOnlyOutput

import torch_dflash as td
from torch_dflash.requests.read import read_request
from torch_dflash.requests.row_values import seed_key

RUNTIMES = ["eager", "xla"]
IDS = torch.tensor([[5, 9, 13, 17, 21, 25, 29]])


@pytest.fixture(scope="module")
def pair():
    return tiny.make_pair()


@pytest.fixture
def target(pair):
    """A target whose ``generation_config`` a test may change."""
    return copy.deepcopy(pair[0])


def plain(target, ids, mask=None, new=16, **options):
    mask = torch.ones_like(ids) if mask is None else mask
    return target.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **options)


# Layout


def test_layout_is_that_of_transformers(target, pair):
    ids, mask = tiny.ragged_prompts(3)
    free = plain(target, ids, mask)
    stop = int(free[1, ids.shape[1] + 4])
    target.generation_config.update(eos_token_id=stop, pad_token_id=96)
    expected = plain(target, ids, mask)
    out = td.generate(target, pair[1], ids, mask, max_new_tokens=16, runtime="eager")
    assert type(out) is torch.Tensor and out.dtype == torch.long and out.device == ids.device
    assert torch.equal(out, expected)
    row = out[1, ids.shape[1] :].tolist()
    end = row.index(stop)  # the stop id is part of the text, padding follows
    assert set(row[end + 1 :]) <= {96}
    right = torch.stack([part.roll(-int((1 - real).sum())) for part, real in zip(ids, mask, strict=True)])
    real = mask.flip(1)
    shifted = td.generate(target, pair[1], right, real, max_new_tokens=16, runtime="eager")
    assert torch.equal(shifted[:, : ids.shape[1]], right)
    assert torch.equal(shifted[:, ids.shape[1] :], out[:, ids.shape[1] :])


def test_without_a_mask_the_pad_token_is_padding_as_in_transformers(target, pair):
    ids, mask = tiny.ragged_prompts(3)
    ids[mask == 0] = 96
    target.generation_config.update(pad_token_id=96)
    out = td.generate(target, pair[1], ids, max_new_tokens=5, runtime="eager")
    assert torch.equal(out, plain(target, ids, mask, 5))
    assert torch.equal(out, target.generate(ids, max_new_tokens=5))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_ids_of_any_integer_type(pair, dtype):
    out = td.generate(*pair, IDS.to(dtype), max_new_tokens=6, runtime="eager")
    assert out.dtype == torch.long
    assert torch.equal(out, plain(pair[0], IDS, new=6))


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_drafter_of_another_dtype(pair, runtime):
    drafter = copy.deepcopy(pair[1]).bfloat16()
    out = td.generate(pair[0], drafter, IDS, max_new_tokens=8, runtime=runtime)
    assert torch.equal(out, plain(pair[0], IDS, new=8))


# Statistics


def scripted(pair, new, runtime="eager", wrong=(), **options):
    """Generate with drafts that are right everywhere but at the new tokens ``wrong``."""
    text = plain(pair[0], IDS, new=40)
    drafter = Scripted(1, text.shape[1], width=4)
    drafter.say(text.tolist())
    drafter.script[0, [IDS.shape[1] + place for place in wrong]] += 1
    options |= {"max_new_tokens": new, "runtime": runtime, "return_dict_in_generate": True}
    out = td.generate(pair[0], drafter, IDS, **options)
    return out, text[0, IDS.shape[1] :].tolist()


def test_stats_of_a_generation_that_the_cap_cuts(pair):
    started = time.perf_counter()
    out, text = scripted(pair, 12)
    wall = time.perf_counter() - started
    assert isinstance(out, GenerateDecoderOnlyOutput) and isinstance(out, td.GenerateOutput)
    assert out.sequences[0].tolist() == IDS[0].tolist() + text[:12]
    stats = out.stats
    # One token from prefill, then blocks of 4 (3 drafts and the bonus); the cap leaves 3 of the last.
    assert stats.acceptance_lengths == [[4, 4, 3]] and stats.capped == [True]
    assert stats.mean_acceptance_length == 4.0
    assert (stats.rounds, stats.new_tokens) == (3, 12)
    assert (stats.compilations, stats.host_reads) == (0, 4)
    assert 0 < stats.time_to_first_token < wall
    assert 0 < stats.time_per_output_token * 11 <= wall - stats.time_to_first_token


def test_stats_count_what_was_accepted(pair):
    out, _ = scripted(pair, 13)
    assert out.stats.acceptance_lengths == [[4, 4, 4]] and out.stats.capped == [False]
    # Tokens 2 and 3 are wrongly drafted, so rounds commit up to the right token in their place.
    out, text = scripted(pair, 9, wrong=(2, 3))
    assert out.sequences[0, IDS.shape[1] :].tolist() == text[:9]
    assert out.stats.acceptance_lengths == [[2, 1, 4, 1]] and out.stats.capped == [True]
    assert out.stats.mean_acceptance_length == pytest.approx(7 / 3)
    out, _ = scripted(pair, 9, wrong=range(40))
    assert out.stats.acceptance_lengths == [[1] * 8] and out.stats.mean_acceptance_length == 1.0


def test_stats_trim_at_the_stop_id(pair):
    _, text = scripted(pair, 12)
    place = next(i for i in range(6, 12) if text[i] not in text[:i])
    out, _ = scripted(pair, 12, eos_token_id=text[place])
    lengths = out.stats.acceptance_lengths[0]
    assert out.stats.new_tokens == place + 1 == 1 + sum(lengths)
    assert out.stats.capped == [False] and out.stats.mean_acceptance_length == sum(lengths) / len(lengths)


def test_stats_without_a_round(pair):
    out, _ = scripted(pair, 1)
    assert out.stats.acceptance_lengths == [[]] and out.stats.rounds == 0 and out.stats.new_tokens == 1
    assert math.isnan(out.stats.mean_acceptance_length) and out.stats.time_per_output_token is None


def test_stats_of_rows_that_end_apart(pair):
    ids, mask = tiny.ragged_prompts(3)
    options = {"max_new_tokens": [3, 9, 6], "runtime": "eager", "return_dict_in_generate": True}
    out = td.generate(*pair, ids, mask, **options)
    assert [1 + sum(row) for row in out.stats.acceptance_lengths] == [3, 9, 6]
    assert out.stats.new_tokens == 18
    assert out.stats.rounds == max(map(len, out.stats.acceptance_lengths))


def test_stats_of_the_compiled_loop(pair):
    first, text = scripted(pair, 33, "xla", wrong=range(40), rounds_per_chunk=10)
    assert first.stats.compilations > 0
    assert first.sequences[0, IDS.shape[1] :].tolist() == text[:33]
    assert first.stats.rounds == 32 and first.stats.host_reads == 1 + 4
    assert first.stats.acceptance_lengths == [[1] * 32]


# Options from the model


def test_unset_options_are_the_models(target, pair):
    def both(**asked):
        ours = td.generate(target, pair[1], IDS, runtime="eager", **asked)
        return ours, target.generate(IDS, attention_mask=torch.ones_like(IDS), **asked)

    ours = td.generate(target, pair[1], IDS, runtime="eager")
    assert ours.shape[1] == IDS.shape[1] + 20  # transformers' default, which it warns about
    text = ours[0, IDS.shape[1] :].tolist()
    for changes in (
        {"max_new_tokens": 9},
        {"max_length": 15, "max_new_tokens": None},
        {"max_new_tokens": 18, "eos_token_id": [96, text[11], text[6]]},
        {"pad_token_id": 2},
    ):
        target.generation_config.update(**changes)
        assert torch.equal(*both()), changes
    assert torch.equal(*both(eos_token_id=text[3]))
    assert torch.equal(*both(max_new_tokens=4))
    target.generation_config.max_new_tokens = None
    assert torch.equal(*both(max_length=12))


@pytest.mark.parametrize(
    ("config", "asked"),
    [
        ({"do_sample": True}, {}),
        ({}, {"do_sample": True}),
        ({"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1}, {}),
        ({"do_sample": True, "temperature": 0.7}, {"temperature": 1.5, "top_k": 0}),
        ({"do_sample": True, "temperature": 0.7, "top_k": 5}, {"do_sample": False}),
    ],
)
def test_sampling_options_resolve_as_in_transformers(target, config, asked):
    target.generation_config.update(max_new_tokens=5, **config)
    seen = []

    def record(model, input_ids, generation_config, **kwargs):
        seen.append(generation_config)
        return input_ids

    target.generate(IDS, custom_generate=record, **asked)
    (theirs,) = seen
    (ours,) = read_request(target, IDS, None, dict(asked)).rows
    assert ours.temperature == (theirs.temperature if theirs.do_sample else 0.0)
    assert (ours.top_k, ours.top_p, ours.min_p) == (theirs.top_k, theirs.top_p, theirs.min_p or 0.0)
    if theirs.do_sample and not (config | asked).keys() & {"top_k"}:
        assert ours.top_k == 50


@pytest.mark.parametrize("never", [None, []])
def test_no_stop_id_never_stops(target, pair, never):
    text = plain(target, IDS)
    target.generation_config.update(eos_token_id=int(text[0, -8]), pad_token_id=1)
    stopped = td.generate(target, pair[1], IDS, max_new_tokens=16, runtime="eager")
    assert stopped.shape[1] < text.shape[1]
    out = td.generate(target, pair[1], IDS, max_new_tokens=16, runtime="eager", eos_token_id=never)
    assert torch.equal(out, text)


def test_seeds_of_any_64_bits_have_keys_of_their_own():
    edges = [0, 1, -1, -2, 2**31, 2**32, 2**32 - 1, 2**32 + 1, 2**63, -(2**63), 2**63 - 1, 2**64 - 2]
    seeds = {seed % 2**64 for seed in [*edges, *range(-500, 500), *(word << 32 for word in range(1000))]}
    keys = {seed_key(seed) for seed in seeds}
    assert len(keys) == len(seeds) and min(keys) == 0 and max(keys) < 2**32
    assert all(seed_key(seed) == seed for seed in (0, 7, 2**32 - 1)) and seed_key(-1) == seed_key(2**64 - 1)
    # splitmix64's finaliser of 1, worked out by code that gives the published first output for state 0.
    assert seed_key(1 << 32) == 0x5692161D100B05E5 & 0xFFFFFFFF


def test_seeds_are_integers_of_any_kind(target):
    ids = IDS.repeat(3, 1)

    def row_seeds(seed):
        return [row.seed for row in read_request(target, ids, None, {"seed": seed, "do_sample": True}).rows]

    tensors = torch.tensor(5), torch.tensor(5, dtype=torch.int32)
    for seed in (5, np.int64(5), np.uint8(5), np.array(5), *tensors):
        assert row_seeds(seed) == [5, 6, 7]
    for seeds in ([9, 5, -1], (np.int64(9), 5, -1), np.array([9, 5, -1]), torch.tensor([9, 5, -1])):
        assert row_seeds(seeds) == [9, 5, -1]
    assert all(type(seed) is int for seed in row_seeds(np.uint8(255))) and row_seeds(np.uint8(255))[1] == 256
    assert len({seed_key(seed) for seed in row_seeds(2**64 - 1)}) == 3  # counted modulo 2**64


def test_texts_of_distant_seeds_differ(pair):
    def draw(seed):
        options = {"max_new_tokens": 8, "do_sample": True, "temperature": 4.0, "runtime": "eager"}
        return tuple(td.generate(*pair, IDS, seed=seed, **options)[0].tolist())

    assert len({draw(seed) for seed in (0, -1, 2**32, 2**63, -(2**63) + 1, 2**64 - 2)}) == 6
    assert draw(-1) == draw(2**64 - 1)
