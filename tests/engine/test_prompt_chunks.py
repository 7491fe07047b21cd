"""Prompts are read in buckets: padding that costs more than one more pass is not computed."""

import pytest
from support.scripted import own_text, run
from support.tiny import make_pair

import torch_dflash as td
from torch_dflash.plan import MIN_BUCKET
from torch_dflash.requests import prompts
from torch_dflash.requests.prompts import chunk_widths, split


@pytest.mark.parametrize(
    ("length", "worth", "widths"),
    [
        (1, 0, [16]),
        (100, 128, [128]),
        (260, 128, [256, 16]),
        (390, 128, [512]),  # 256 + 128 + 16 saves 112 positions and takes two passes more
        (390, 40, [256, 128, 16]),
        (100, 4, [64, 32, 16]),
        (112, 0, [64, 32, 16]),
        (128, 0, [128]),
    ],
)
def test_a_pass_more_has_to_save_its_worth(length, worth, widths):
    assert split(length, worth) == widths


@pytest.mark.parametrize("worth", [0, 7, 16, 128, 1 << 20])
def test_no_split_computes_more_than_one_bucket_does(worth):
    for length in range(1, 1025):
        widths = split(length, worth)
        padded = sum(widths)
        assert length <= padded <= split(length, 1 << 30)[0]
        assert widths == sorted(widths, reverse=True) and padded - widths[-1] < length
        assert all(width >= MIN_BUCKET and width & (width - 1) == 0 for width in widths)
        if worth == 0:
            assert padded - length < MIN_BUCKET


def test_chunks_stay_within_the_largest_and_within_the_room():
    assert list(chunk_widths(1500, 512, 2064, 128)) == [512, 512, 512]
    assert list(chunk_widths(1300, 512, 2064, 128)) == [512, 512, 256, 32]
    assert list(chunk_widths(260, 512, 272, 1 << 20)) == [256, 16]  # 512 rows would run past the end
    for length in range(1, 300):
        for worth in (0, 1 << 20):
            room = length + MIN_BUCKET - 1
            assert length <= sum(chunk_widths(length, 128, room, worth)) <= room


@pytest.mark.parametrize("where", ["eager", "xla"])
def test_a_batch_reads_less_padding_and_says_the_same(where, monkeypatch):
    """Prompts of 40 tokens are worth two passes with 16 rows, and one pass with one row."""
    monkeypatch.setattr(prompts, "WORTH", 128)
    target, _ = make_pair("llama")
    rows = [[3 + (7 * row + at) % 90 for at in range(33 + row % 8)] for row in range(16)]
    read = []
    for count in (16, 1):
        engine = td.compile(target, None, runtime=where, max_length=96, batch_size=count)
        compiled = engine.warmup().runtime.compilations
        passes = engine.runtime.prefill
        monkeypatch.setattr(
            engine.runtime, "prefill", lambda *given, p=passes: read.append(given[2].ids.shape) or p(*given)
        )
        texts, _ = run(engine, rows[:count], max_new_tokens=6, do_sample=False)
        assert texts == [own_text(target, prompt, 6) for prompt in rows[:count]]
        assert engine.runtime.compilations == compiled
    assert [tuple(shape) for shape in read] == [(16, 32), (16, 16), (1, 64)]
