"""A weight's layout is measured once a machine and kept on disk."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn

from jax_bridge.compilations import compilations
from jax_bridge.weights import autotune as measured
from jax_bridge.weights.formats import Cast, Quantized, Transposed, dot, dot_led
from jax_bridge.weights.layout import LayoutRules, WeightLayout

SHAPE = (1024, 512)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(measured, "_file", lambda: tmp_path / "cache" / measured.FILE)
    (tmp_path / "cache").mkdir()
    choices = measured._kept, measured._slow, measured._led
    for choice in choices:
        choice.cache_clear()
    yield tmp_path / "cache"
    for choice in choices:
        choice.cache_clear()


@pytest.fixture
def asked(monkeypatch):
    """The shapes that were measured; the answer is always no."""
    shapes = []
    monkeypatch.setattr(measured, "_measure", lambda *shape: bool(shapes.append(shape)))
    return shapes


def again(shape) -> bool:
    """What the next process finds."""
    measured._kept.cache_clear()
    return measured.lies_by_inputs(shape)


@pytest.mark.parametrize("faster, by_inputs", [("oi", False), ("io", True), (None, True)])
def test_the_faster_layout_is_chosen(faster, by_inputs, folder, monkeypatch):
    def run(product, rows, weights):
        name = "oi" if weights[0].shape == SHAPE else "io"
        assert rows.shape[0] in (1, 8) and sum(weight.size for weight in weights) == measured.MOST
        assert product(rows, weights[0]).shape == (rows.shape[0], SHAPE[0])
        return 1.0 if name == faster else 1.2 if faster else 1.0

    monkeypatch.setattr(measured, "_run", run)
    assert measured.lies_by_inputs(SHAPE) == by_inputs
    weight = nn.Linear(*reversed(SHAPE), bias=False).weight
    forms = LayoutRules(frozenset({"a"}))
    form = forms.choose("a", tuple(weight.shape), torch.float32, jax.devices("cpu")[0])
    assert form == (WeightLayout(Transposed) if by_inputs else WeightLayout())


def test_it_is_measured_once_for_all_processes(folder, asked, monkeypatch):
    assert [measured.lies_by_inputs(SHAPE), measured.lies_by_inputs(SHAPE), again(SHAPE)] == [False] * 3
    assert asked == [SHAPE] * 3
    monkeypatch.setattr(measured, "fingerprint", lambda: "another machine")
    assert not again(SHAPE) and asked == [SHAPE] * 6
    assert len(json.loads((folder / measured.FILE).read_text())) == 2


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1}', "{", "[" * 200_000], ids=len)
def test_a_damaged_file_is_measured_anew(content, folder, asked):
    (folder / measured.FILE).write_text(content)
    assert not measured.lies_by_inputs(SHAPE) and not again(SHAPE)
    assert asked == [SHAPE] * 3


def test_a_folder_that_cannot_be_written_is_no_error(folder, asked):
    folder.rmdir()
    folder.write_text("a file")
    assert not measured.lies_by_inputs(SHAPE) and not again(SHAPE)
    assert asked == [SHAPE] * 6


def test_one_measurement_beside_other_work_does_not_turn_a_weight(folder, monkeypatch):
    said = iter([False, False, True])
    monkeypatch.setattr(measured, "_measure", lambda *shape: next(said))
    assert measured.lies_by_inputs(SHAPE)


def test_it_is_kept_where_programs_are(tmp_path, monkeypatch):
    config: Any = jax.config
    kept = config.jax_compilation_cache_dir
    monkeypatch.setattr(measured, "keep_programs", lambda: None)
    try:
        for place, file in ((tmp_path, tmp_path / measured.FILE), (None, None), ("gs://bucket/x", None)):
            jax.config.update("jax_compilation_cache_dir", place and str(place))
            assert measured._file() == file
    finally:
        jax.config.update("jax_compilation_cache_dir", kept)


def test_small_weights_are_not_measured_and_large_ones_in_part(folder, asked):
    assert measured.lies_by_inputs((100, 100))
    measured.lies_by_inputs((50_000, 4096))
    assert asked == [(measured.MOST // 4096, 4096)] * 3


@pytest.mark.parametrize(("seconds", "slow"), [(1.3, True), (1.1, False), (0.5, False)])
def test_a_type_that_takes_longer_than_float32_is_kept_in_it(seconds, slow, folder, monkeypatch):
    def run(product, rows, weights):
        assert rows.dtype == "float32" and product(rows, weights[0]).dtype == "float32"
        return seconds if weights[0].dtype == "bfloat16" else 1.0

    monkeypatch.setattr(measured, "_run", run)
    before = compilations()
    form = LayoutRules(frozenset({"a"})).choose("a", SHAPE, torch.bfloat16, jax.devices("cpu")[0])
    assert (
        form == (WeightLayout(Cast, torch.float32) if slow else WeightLayout()) and compilations() == before
    )
    monkeypatch.setattr(measured, "_run", None)  # the next process asks the file
    measured._slow.cache_clear()
    assert measured.is_slow("bfloat16", SHAPE) == slow
    assert not measured.is_slow("bfloat16", (100, 100))


def test_one_measurement_beside_other_work_does_not_widen_a_type(folder, monkeypatch):
    said = iter([True, True, False])
    monkeypatch.setattr(measured, "_measure_type", lambda dtype: next(said))
    assert not measured.is_slow("bfloat16", SHAPE)


@pytest.mark.parametrize(("said", "led"), [([True, False, True], True), ([False, True, False], False)])
def test_a_weight_of_8_bits_leads_where_that_is_mostly_faster(said, led, folder, monkeypatch):
    answers = iter(said)
    monkeypatch.setattr(measured, "_measure_led", lambda: next(answers))
    form = LayoutRules(frozenset({"a"}), quantize="int8").choose(
        "a", SHAPE, torch.float32, jax.devices("cpu")[0]
    )
    assert form == WeightLayout(Quantized, torch.float32, leads=led)
    measured._led.cache_clear()  # the next process asks the file
    assert measured.leads(SHAPE) == led and not measured.leads((100, 100))


@pytest.mark.parametrize(("seconds", "faster"), [(0.9, True), (0.99, False), (2.0, False)])
def test_the_weight_first_is_held_against_the_rows_first(seconds, faster, monkeypatch):
    def race(size, products, weights):
        made = {of: product(jnp.ones((2, size)), weights[of][0]) for of, product in products.items()}
        assert all((sums == size).all() and sums.dtype == jnp.int32 for sums in made.values())
        return {dot: 1.0, dot_led: seconds}

    monkeypatch.setattr(measured, "_race", race)
    assert measured._measure_led() == faster
