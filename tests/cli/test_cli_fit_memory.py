"""``torch-dflash fit-memory``: bytes of a chip, the largest that fits, slices; its errors in one line."""

import json
import re
from types import SimpleNamespace

import jax
import pytest
from support.config_folders import DRAFTER, write_configs
from support.tiny import BASE, FAMILIES

import torch_dflash as td
from jax_bridge.aot import compile as aot
from jax_bridge.aot import memory, shapes, sizes
from jax_bridge.aot import sizes as slices
from jax_bridge.aot.traffic import Laid, laid_bytes
from jax_bridge.device_memory import bytes_of
from jax_bridge.devices import on_mesh as places
from torch_dflash.cli import main
from torch_dflash.cli.loading import load_configs

NAMES = {"bfloat16": "bf16", "float32": "f32", "int32": "s32", "uint8": "u8", "bool": "pred"}
A_ROW, A_POSITION, PROGRAM = 30_000, 100, 5000
"""Bytes that the stand-in's programs need besides: of each row, of each position, and any."""


folders = pytest.fixture(name="folders")(write_configs)


@pytest.fixture
def compiler(monkeypatch):
    """Stands in for libtpu: bytes by rows and positions, the compiled programs, and chips' memory."""
    asked, limits = [], {"v5e": 10**9, "v6e": 2 * 10**9, "v5p": 4 * 10**9}

    def compile_step(model, step, *, topology, chips, prompt_rows=None):
        plan = model.pair.plan
        asked.append((step, len(model.pair.target.specs), plan.batch_size, plan.capacity, prompt_rows))
        given = sizes._share(model, topology, chips)
        temp = PROGRAM + A_ROW * plan.batch_size + A_POSITION * plan.capacity + (step == "prefill")
        total = bytes_of(given)
        if total + temp > limits["v5e"]:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory")
        lines = [
            f"  %p{at} = {NAMES[str(leaf.dtype)]}[{','.join(map(str, leaf.shape))}] parameter({at})"
            for at, leaf in enumerate(jax.tree.leaves(given))
        ]
        hlo = "\n".join(["ENTRY %main () -> f32[] {", *lines, "}"])
        return aot.CompiledStep(0.1, total, 0, temp, 0, 0, {}, [], hlo, {})

    def find_topology(name):
        return SimpleNamespace(devices=jax.devices()[:1] * {"2x2": 4, "2x2x1": 4}.get(name[4:], 8))

    for module in (memory, shapes, slices):
        monkeypatch.setattr(module, "find_topology", find_topology)
    monkeypatch.setattr(places, "check_distinct", lambda devices: None)  # one stands for all
    monkeypatch.setattr(sizes, "compile_step", compile_step)
    monkeypatch.setattr(slices, "HBM", limits)
    monkeypatch.setattr(memory, "HBM", limits)
    return SimpleNamespace(asked=asked, limits=limits)


def run(folders, *options, drafter="drafter"):
    line = ["--target", str(folders / "target"), "--drafter", str(folders / drafter), "--context", "64"]
    return main(["fit-memory", *line, *map(str, options)])


def held(folders, batch, context, chips=1, **plan):
    target, drafter = load_configs(str(folders / "target"), str(folders / "drafter"), None, None)
    model = aot.abstract_pair(target, drafter, batch_size=batch, capacity=context, **plan)
    return bytes_of(sizes._share(model, "v5e:2x2", chips))


def spent(batch, context):
    return PROGRAM + A_ROW * batch + A_POSITION * context + 1


@pytest.mark.parametrize(
    ("cache", "chips"), [("static", 1), pytest.param("paged", 2, marks=pytest.mark.heavy)]
)
def test_all_bytes_are_there_and_the_largest_fits_to_the_byte(folders, compiler, capsys, cache, chips):
    room = compiler.limits["v5e"] = held(folders, 5, 64, chips, cache=cache) + spent(5, 64)
    options = ["--topology", "v5e:2x2", "--mesh", chips, "--cache", cache, "--json"]
    assert run(folders, *options) == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        found["needed_bytes"]
        == sum(found["bytes"].values())
        == held(folders, 1, 64, chips, cache=cache) + spent(1, 64)
    )
    assert found["bytes"]["temporaries"] == spent(1, 64) == found["temporaries"]["prefill"]
    assert found["hbm_bytes"] == room and found["fits"] and found["chips"] == chips
    assert found["largest"]["batch"]["value"] == 5 and found["largest"]["batch"]["confirmed"]
    assert found["largest"]["batch"]["needed_bytes"] == room
    best = found["largest"]["context"]["value"]
    assert best % 64 == 0 and found["largest"]["context"]["confirmed"]
    assert held(folders, 1, best, chips, cache=cache) + spent(1, best) <= room
    longest = BASE["max_position_embeddings"]
    assert best == longest or held(folders, 1, best + 64, chips, cache=cache) + spent(1, best + 64) > room
    assert cache == "paged" or best < longest
    whole = [one for one in compiler.asked if one[1] == BASE["num_hidden_layers"]]
    assert [one[:1] + one[2:4] for one in whole] == [
        ("chunk", 5, 64), ("prefill", 5, 64), ("chunk", 1, best), ("prefill", 1, best),
    ]  # fmt: skip
    assert {one[1] for one in compiler.asked} == {2, BASE["num_hidden_layers"]}
    assert {one[4] for one in compiler.asked if one[0] == "prefill"} <= {64, 128, 256, 512}


@pytest.mark.heavy
def test_a_whole_that_needs_more_than_its_layers_is_made_smaller(folders, compiler, monkeypatch, capsys):
    compiler.limits["v5e"] = held(folders, 5, 64) + spent(5, 64)
    real = sizes.compile_step

    def dearer(model, step, **more):
        made = real(model, step, **more)
        if len(model.pair.target.specs) > 2 and model.pair.plan.batch_size > 4:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory")
        return made

    monkeypatch.setattr(sizes, "compile_step", dearer)
    assert run(folders, "--topology", "v5e:2x2", "--mesh", 1, "--largest", "batch", "--json") == 0
    best = json.loads(capsys.readouterr().out)["largest"]
    assert set(best) == {"batch"} and best["batch"]["value"] == 4 and best["batch"]["confirmed"]


def test_what_does_not_fit_is_said_with_its_lack(folders, compiler, capsys):
    compiler.limits["v5e"] = held(folders, 1, 64) + spent(1, 64) - 1
    compiler.limits["v6e"], compiler.limits["v5p"] = 10, held(folders, 1, 64)
    assert run(folders, "--topology", "v5e:2x2", "--mesh", 1, "--largest", "none", "--batch", 1) == 1
    out = capsys.readouterr().out
    assert "does not fit, by 0.000 GB" in out and "v6e: on none of the slices that were tried" in out
    assert re.search(r"v5p: v5p:2x2x1, 4 chips", out) and "compiled with 2 of the target's layers" in out


@pytest.mark.heavy
def test_slices_are_the_smallest_that_have_room(folders, compiler, capsys):
    alone, four = (held(folders, 1, 64, chips) + spent(1, 64) for chips in (1, 4))
    compiler.limits |= {"v5e": alone, "v6e": alone - 1, "v5p": four - 1}
    assert run(folders, "--topology", "v5e:2x2", "--mesh", 1, "--largest", "none", "--json") == 0
    found = json.loads(capsys.readouterr().out)["slices"]
    assert found["v5e"] == {
        "topology": "v5e:2x2", "chips": 1, "needed_bytes": alone, "hbm_bytes": alone,
    }  # fmt: skip
    assert (found["v6e"]["topology"], found["v6e"]["chips"], found["v6e"]["needed_bytes"]) == (
        "v6e:2x2",
        4,
        four,
    )
    assert found["v5p"] is None or found["v5p"]["chips"] > 4


@pytest.mark.heavy
def test_the_table_says_what_was_asked(folders, compiler, capsys):
    assert run(folders, "--topology", "v5e:2x2", "--no-confirm", "--filters") == 0
    out, err = capsys.readouterr()
    assert "each of 4 chips of v5e:2x2" in out and "batch 1, context 64, cache static, filters yes" in out
    assert "largest batch at context 64" in out and "(not compiled whole)" in out
    assert "largest context at batch 1: 512" in out  # the target's own longest context
    assert "compiling chunk of 2 layers" in err and "all layers" not in err


def test_shapes_alone_need_no_compiler(folders, compiler, capsys):
    compiler.limits["v5e"] = held(folders, 1, 64) + 10**5
    assert run(folders, "--topology", "v5e:2x2", "--mesh", 1, "--shapes-only", "--largest", "batch") == 0
    out, err = capsys.readouterr()
    assert not compiler.asked and not err and "From shapes alone" in out
    best = int(re.search(r"largest batch at context 64: (\d+) \(not compiled whole\)", out)[1])
    room = compiler.limits["v5e"]
    assert held(folders, best, 64) <= room < held(folders, best + 1, 64)


def test_as_many_layers_are_compiled_as_there_are_kinds_and_taps():
    _, config, extra = FAMILIES["gpt_oss"]
    kinds = ["sliding_attention"] * 4 + ["full_attention", "sliding_attention"]
    target = config(**(BASE | extra | {"num_hidden_layers": 6, "layer_types": kinds}))
    assert sizes.enough_layers(aot.abstract_pair(target, None, capacity=64)) == 5
    target.layer_types = kinds[3:] * 2
    assert sizes.enough_layers(aot.abstract_pair(target, None, capacity=64)) == 2
    drafter = {"hidden_size": target.hidden_size, "num_target_layers": 6, "target_layer_ids": [0, 2, 5]}
    drafter = td.DFlashConfig(**(DRAFTER | drafter))
    assert sizes.enough_layers(aot.abstract_pair(target, drafter, capacity=64)) == 3


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("bf16[2880,4]{0,1:T(8,128)(2,1)}", 2 * 2944 * 8), ("bf16[4,2880]{1,0:T(8,128)(2,1)}", 2 * 2944 * 8),
        ("f32[3,5,130]{2,1,0:T(8,128)}", 4 * 3 * 8 * 256), ("s32[1000]{0:T(1024)}", 4 * 1024),
        ("f32[]{:T(128)}", 4), ("pred[7]", 7),
    ],
)  # fmt: skip
def test_tiles_are_filled_up(kind, size):
    assert laid_bytes(kind) == size


def test_arrays_like_those_of_a_program_are_filled_up_like_them():
    hlo = "ENTRY %main () -> f32[] {\n  %a = f32[8,100]{1,0:T(8,128)} parameter(0)\n}"
    laid = Laid(hlo, [jax.ShapeDtypeStruct((8, 100), "float32")])
    assert laid.total == laid.of([jax.ShapeDtypeStruct((8, 100), "float32")]) == 4 * 8 * 128
    assert laid.of([jax.ShapeDtypeStruct((80, 100), "float32")] * 2) == 2 * 4 * 80 * 128


@pytest.mark.parametrize("chips", [1, 2])
def test_codes_are_counted(folders, compiler, tmp_path, capsys, chips):
    found = {}
    for form in (None, "int8"):
        more = ["--quantize", form] if form else []
        path = tmp_path / "found.json"
        assert run(folders, "--mesh", chips, "--shapes-only", "--json", path, *more) == 0
        found[form] = json.loads(path.read_text())
        counted = sum(size for kind, size in found[form]["bytes"].items() if kind != "temporaries")
        assert chips > 1 or counted == held(folders, 1, 64, quantize=form)
    said = capsys.readouterr().out
    assert (
        "Weights in int8; every row" in said
        and found["int8"]["slices"].keys() == found[None]["slices"].keys()
    )
    assert found["int8"]["bytes"]["target_weights"] < 0.75 * found[None]["bytes"]["target_weights"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch", "0"], "'--batch-size' / '--batch': 0 is not in the range x>=1"),
        (["--mesh", "9", "--topology", "v5e:2x2"], "chips=9: v5e:2x2 has 4; name at most so many."),
        (["--topology", "v99:2x2"], "topology='v99:2x2': no peak figures for 'v99'"),
        (["--context", "513"], "--context 513: is beyond the target's max_position_embeddings=512"),
        (["--quantize", "int4", "--mesh", "1"], "quantize='int4': no experts of the target are stored"),
        (["--cache", "ring"], "'ring' is not one of 'static', 'paged'"),
        (["--json", "/nowhere/found.json"], "--json /nowhere/found.json: its folder does not exist"),
    ],
)
def test_bad_options(folders, compiler, capsys, options, message):
    assert run(folders, *options) == 2
    err = capsys.readouterr().err
    assert err.startswith("torch-dflash fit-memory: ") and message in err and err.count("\n") == 1
    assert not compiler.asked


def test_few_layers_that_do_not_fit_are_said_with_the_lack_of_all(folders, compiler, capsys):
    compiler.limits["v5e"] = 10
    assert run(folders, "--topology", "v5e:2x2", "--mesh", 1) == 2
    err, taken = capsys.readouterr().err, held(folders, 1, 64)
    assert "RESOURCE_EXHAUSTED" in err and "a larger slice" in err
    assert f"takes {taken:,} bytes of each chip, which has 10 bytes: {taken - 10:,} bytes too few." in err
