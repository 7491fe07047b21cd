"""Weights transposed for the CPU, by rows on TPUs: the model's values, followed, copied by no program."""

import json
import re
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental.layout import Format, Layout
from support.scripted import own_text, run
from support.tiny import make_pair, make_target
from torch import nn

import jax_bridge as jb
import torch_dflash as td
from jax_bridge import arrays
from jax_bridge.arrays import row_major
from jax_bridge.compilations import compilations
from jax_bridge.devices import weights
from jax_bridge.programs import lower
from jax_bridge.weights import autotune as measured
from jax_bridge.weights.formats import Cast, Quantized, StoredWeight, Transposed, dot, dot_led, unwrap
from jax_bridge.weights.layout import LayoutRules, WeightLayout
from torch_dflash.rows import RowRequests

FIXED = {"max_length": 40, "batch_size": 1, "prefill_chunk_size": 16, "filters": False}
PROMPT = [5, 17, 80, 33, 2, 9, 41]


@pytest.fixture(scope="module")
def pair():
    return make_pair("llama", agree=6.0)


@pytest.fixture(scope="module")
def engine(pair):
    engine = td.compile(*pair, **FIXED)
    assert run(engine, [PROMPT], max_new_tokens=12)[0] == [own_text(pair[0], PROMPT, 12)]
    return engine


def test_linear_weights_are_turned_and_the_head_is_not(engine, pair):
    params = engine.runtime.refresh(engine.tensors())
    transposed = {name for name, leaf in params.items() if isinstance(leaf, Transposed)}
    linear = [
        f"{prefix}.{name}.weight"
        for prefix, model in (("target.model", pair[0]), ("proposer.drafter", pair[1]))
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear)
    ]
    assert transposed == set(linear) - {"target.model.lm_head.weight"} and len(transposed) > 30
    for name, tensor in engine.tensors().items():
        assert tuple(params[name].shape) == tuple(tensor.shape)
        assert torch.equal(jb.to_torch(unwrap(params)[name]), tensor), name


def test_a_turned_weight_follows_its_tensor(engine, pair):
    name = "target.model.model.layers.0.mlp.up_proj.weight"
    weight = pair[0].model.layers[0].mlp.up_proj.weight
    before = engine.runtime.refresh(engine.tensors())
    with torch.no_grad():
        weight.mul_(2)
    after = engine.runtime.refresh(engine.tensors())
    with torch.no_grad():
        weight.div_(2)
    assert torch.equal(jb.to_torch(unwrap(after)[name]), weight * 2)
    same = [key for key in before if key != name and not isinstance(before[key], Transposed)]
    assert all(before[key] is after[key] for key in same)
    shared = [key for key in before if key != name and isinstance(before[key], Transposed)]
    assert all(before[key].array is after[key].array for key in shared)


def copies(program):
    """Transposes and copies, in a compiled program, of something shaped like an MLP's weight."""
    return re.findall(r"= f32\[(?:32,48|48,32)\]\S* (?:copy|transpose)\(", program.as_text())


def test_no_program_copies_a_turned_weight(engine, pair, monkeypatch):
    made = engine.runtime._programs._compiled
    steps = {key[0].partition(" ")[0]: program for key, program in made.items()}
    steps = {name: steps[name] for name in ("prefill", "rounds")}
    assert {name: copies(program) for name, program in steps.items()} == {"prefill": [], "rounds": []}
    # The search sees a weight that is transposed back outside of the loop, a copy on every call.
    runtime, params = engine.runtime, engine.runtime.refresh(engine.tensors())
    state = runtime.begin(params, RowRequests.idle(engine.plan))
    monkeypatch.setattr(lower, "bound", nullcontext)
    outside = jax.jit(lambda params, state: runtime._rounds[engine.plan.verify_width](unwrap(params), state))
    with lower.tracing("highest"):
        assert copies(outside.lower(params, state).compile())


def test_what_is_turned_depends_on_type_and_device():
    class Device:
        platform = "tpu"

    cpu, forms = jax.devices("cpu")[0], LayoutRules(frozenset({"a"}))
    assert forms.choose("a", (6, 4), torch.float32, cpu) == WeightLayout(Transposed)
    assert forms.choose("b", (6, 4), torch.float32, cpu) == WeightLayout()
    for dtype, device in ((torch.bfloat16, cpu), (torch.float16, cpu), (torch.float32, Device())):
        assert forms.choose("a", (6, 4), dtype, device) == WeightLayout()


def test_a_layout_is_part_of_what_is_known_of_a_tensor(monkeypatch):
    layer = nn.Linear(4, 6, bias=False)
    forms = LayoutRules.of(nn.ModuleDict({"a": layer}), None)
    assert forms.linear == {"a.weight"}
    first, second = weights.Weights(forms), weights.Weights(LayoutRules())
    transposed, plain = (one.refresh({"a.weight": layer.weight})["a.weight"] for one in (first, second))
    assert isinstance(transposed, Transposed)
    assert transposed.array.shape == (4, 6) and transposed.shape == (6, 4)
    assert not isinstance(plain, Transposed) and plain.shape == (6, 4)


@pytest.mark.parametrize("family", ["llama", "qwen3"])  # qwen3's embedding is its head
@pytest.mark.parametrize("source", ["live", "loaded"])
def test_programs_take_matrices_as_they_lie(family, source, tmp_path, monkeypatch):
    def by_columns(array):  # no CPU would choose this layout, as some TPUs would choose none by rows
        place = Format(Layout(major_to_minor=(1, 0)), array.sharding)
        return jax.device_put(array, place) if array.ndim == 2 else array

    monkeypatch.setattr(arrays, "row_major", by_columns)
    target, drafter = make_pair(family, agree=6.0)
    given = target
    if source == "loaded":
        target.save_pretrained(tmp_path)
        given = jb.load(tmp_path)
    engine = td.compile(given, drafter, **FIXED)
    assert run(engine, [PROMPT], max_new_tokens=12)[0] == [own_text(target, PROMPT, 12)]
    params = engine.runtime.refresh(engine.tensors())
    embedding = params["target.model.model.embed_tokens.weight"]
    assert embedding.format.layout.major_to_minor == (1, 0)
    made = engine.runtime._programs._compiled.items()
    programs = {key[0].partition(" ")[0]: program for key, program in made}
    for step in ("prefill", "rounds"):
        taken = programs[step].input_formats[0][0]["target.model.model.embed_tokens.weight"]
        assert taken.layout == embedding.format.layout


def test_only_a_tpus_weights_are_laid_by_rows(monkeypatch):
    def on_tpu(*order):
        lies = SimpleNamespace(layout=SimpleNamespace(major_to_minor=order))
        place = SimpleNamespace(device_set=[SimpleNamespace(platform="tpu")])
        return SimpleNamespace(ndim=len(order), format=lies, sharding=place)

    monkeypatch.setattr(arrays, "row_major_format", lambda place, axes: place)
    monkeypatch.setattr(jax, "device_put", lambda array, place: "by rows")
    assert row_major(on_tpu(1, 0)) == row_major(on_tpu(0, 2, 1)) == "by rows"
    for array in (on_tpu(0, 1), on_tpu(0), on_tpu(0, 1, 2), jax.numpy.zeros((2, 3))):
        assert row_major(array) is array


@partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=[])
@dataclass(frozen=True, eq=False)
class Halved:  # a weight kept at half its size: a stored form that no program knows
    array: jax.Array

    @property
    def shape(self):
        return self.array.shape

    @property
    def dtype(self):
        return self.array.dtype

    def unwrap(self):
        return self.array * 2


def test_programs_unwrap_any_form_of_a_weight():
    target = make_target("llama")
    engine = td.compile(target, None, max_length=64)
    wanted, _ = run(engine, [PROMPT], max_new_tokens=8)
    name = "target.model.model.norm.weight"
    refresh = engine.runtime.refresh

    def halved(tensors):
        params = refresh(tensors)
        return params | {name: Halved(params[name] / 2)}

    engine.runtime.refresh = halved
    assert isinstance(Halved(jnp.ones(2)), StoredWeight) and not isinstance(jnp.ones(2), StoredWeight)
    assert run(engine, [PROMPT], max_new_tokens=8)[0] == wanted
    engine.runtime.refresh = lambda tensors: refresh(tensors) | {name: Halved(-refresh(tensors)[name])}
    assert run(engine, [PROMPT], max_new_tokens=8)[0] != wanted  # the stored measurement was used


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
    shapes = []
    monkeypatch.setattr(measured, "_measure", lambda *shape: bool(shapes.append(shape)))
    return shapes


def again(shape) -> bool:
    """Whether the next process finds that a weight of this shape lies by inputs."""
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
