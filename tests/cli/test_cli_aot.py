"""``torch-dflash aot``: the figures it reports, from configs alone; its errors in one line."""

import json
import re

import jax
import pytest
from support import ROOT
from support.config_folders import DRAFTER, write_configs
from support.tiny import BASE, FAMILIES
from transformers import AutoConfig

import torch_dflash as td
from jax_bridge.aot import compile as aot
from jax_bridge.aot import report as aot_report
from jax_bridge.aot import shapes as topology
from jax_bridge.aot.floor import chip_of, floor_of, prefill_floor
from jax_bridge.aot.kflat import kflat
from torch_dflash.cli import main
from torch_dflash.cli.errors import UserError
from torch_dflash.cli.loading import load_configs

CONFIGS = ROOT / "benchmarks/configs"
KEYS = (
    "compile_seconds hbm_per_chip_bytes peak_temp_bytes aliased_bytes collectives verify_hbm_bytes "
    "verify_floor_bytes draft_hbm_bytes draft_floor_bytes round_hbm_bytes round_floor_bytes roofline_ms bound"
).split()
HLO = """\
HloModule step
ENTRY %main (a: f32[1000]) -> f32[1000] {
  %a = f32[1000]{0:T(128)} parameter(0)
  %k = (f32[10]{0:T(128)}, f32[1000]{0:T(128)}) custom-call(%a), custom_call_target="tpu_custom_call", \
output_to_operand_aliasing={{1}: (0, {})}COST
}
"""


def compiled(cost: str = "", traffic: int = 4040) -> aot.CompiledStep:
    """A possible answer of the compiler; ``cost`` is the kernel's own estimate."""
    return aot.CompiledStep(
        1.5, 5000, 4400, 300, 4000, traffic, {".tokens": "[1].tokens"}, [".length"],
        HLO.replace("COST", cost), {"flops": 1e6, "bytes accessed": 9000.0},
    )  # fmt: skip


folders = pytest.fixture(name="folders")(write_configs)


@pytest.fixture
def compiler(monkeypatch):
    """Stands in for libtpu; lists the requested steps."""
    asked = []

    def compile_step(model, step, *, topology, chips):
        asked.append((step, topology, model.pair.plan))
        return compiled()

    monkeypatch.setattr(aot_report, "find_topology", lambda name: None)
    monkeypatch.setattr(aot_report, "compile_step", compile_step)
    return asked


def run(folders, *options, target="target", drafter="drafter"):
    line = ["--target", str(folders / target), "--drafter", str(folders / drafter), "--context", "64"]
    return main(["aot", *line, *map(str, options)])


def test_json_on_standard_output_holds_every_figure(folders, compiler, capsys):
    assert run(folders, "--json", "-", "--verify", 4, "--batch", 2, "--dump-hlo", folders / "hlo") == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert set(KEYS) <= set(found) and found["provenance"]
    assert [step for step, *_ in compiler] == ["verify", "draft", "round"]
    assert all(place == "v5p:2x2x1" for _, place, _ in compiler)
    plan = compiler[0][-1]
    assert (plan.verify_width, plan.block_size, plan.capacity, plan.batch_size) == (4, 6, 64, 2)
    assert found["round_hbm_bytes"] == 4040 and found["hbm_per_chip_bytes"] == 5000 + 400 + 300
    assert found["round_floor_bytes"] == found["verify_floor_bytes"] + found["draft_floor_bytes"]
    assert found["plan"]["cache"] == "static" and found["layers"] == BASE["num_hidden_layers"]
    assert "compiling verify" in err and "1.5 s" in err
    assert sorted(path.name for path in (folders / "hlo").iterdir()) == [
        "draft.hlo.txt", "round.hlo.txt", "verify.hlo.txt",
    ]  # fmt: skip


def test_the_table_says_what_it_means_and_the_file_has_it_all(folders, compiler, capsys):
    file = folders / "found.json"
    assert run(folders, "--passes", "verify", "--layers", 2, "--json", file) == 0
    out = capsys.readouterr().out
    assert "layers 2, block 6, verify 6, context 64, batch 1, cache static" in out
    assert "not .length" in out and "weights once and the K/V of the context once" in out
    found = json.loads(file.read_text())
    assert found["draft_hbm_bytes"] is None and found["verify_hbm_bytes"] == 4040
    assert found["compile_seconds"] == found["passes"]["verify"]["compile_seconds"] == 1.5


def test_a_tree_is_compiled_as_a_round(folders, compiler, capsys):
    assert run(folders, "--rows", 4) == 0
    assert "verify 4, rows 4, context 64" in capsys.readouterr().out
    ((step, _, plan),) = compiler
    assert (step, plan.verify_width, plan.depth) == ("round", 4, 3)
    assert run(folders, "--rows", 4, "--kflat") == 2
    assert "--rows 4: --kflat counts every number of rows" in capsys.readouterr().err
    assert main(["aot", "--target", str(folders / "target"), "--context", "64", "--rows", "4"]) == 2
    assert "drafter=NoneType" in capsys.readouterr().err


def test_json_without_a_file_is_standard_output(folders, compiler, capsys):
    assert run(folders, "--json") == 0
    assert json.loads(capsys.readouterr().out)["verify_hbm_bytes"] == 4040


def test_figures_that_cannot_be_written_are_printed(folders, compiler, monkeypatch, capsys):
    def full(path, results):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch_dflash.cli.tpu.write_results", full)
    file = folders / "found.json"
    assert run(folders, "--json", file) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["round_hbm_bytes"] == 4040 and json.loads(out)["provenance"]
    assert f"--json {file}: could not be written (No space left on device); the figures went to" in err


def test_a_program_that_cannot_be_written_costs_no_figures(folders, compiler, capsys):
    (folders / "hlo/draft.hlo.txt").mkdir(parents=True)
    assert run(folders, "--dump-hlo", folders / "hlo", "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["round_hbm_bytes"] == 4040
    assert "draft.hlo.txt could not be written (Is a directory)" in err
    assert (folders / "hlo/round.hlo.txt").is_file()


def test_a_silent_kernel_is_taken_to_be_the_attention(folders):
    model = tiny(folders)
    floor = floor_of(model.pair, model.params, 64)
    chip = chip_of("v5e:2x2")
    silent = aot_report._summary(compiled(), floor.verify_attention_flops, chip)
    outspoken = aot_report._summary(compiled(', backend_config={"cost_estimate":{"flops":7}}'), 12345, chip)
    assert silent["flops"] == 1e6 + 2 * 6 * 4 * 4 * 2 * 16 * 64 and outspoken["flops"] == 1e6
    assert silent["bound"] == "compute" and silent["roofline_ms"] == round(silent["flops"] / 197e9, 4)
    moving = aot_report._summary(compiled(traffic=10**9), 0, chip)
    assert moving["bound"] == "memory" and moving["roofline_ms"] == round(1e9 / 819e6, 4)


def tiny(folders, **plan):
    target, drafter = load_configs(str(folders / "target"), str(folders / "drafter"), None, None)
    return aot.abstract_pair(target, drafter, capacity=64, **plan)


def test_a_tree_of_the_drafters_block_is_an_abstract_pair(folders):
    plan = tiny(folders, rows=4).pair.plan
    assert (plan.verify_width, plan.depth) == (4, 3) and tiny(folders).pair.plan.depth is None


def test_the_floor_is_weights_once_and_the_context_once(folders):
    model = tiny(folders, batch_size=3)
    bytes_of = {name: shape.size * shape.dtype.itemsize for name, shape in model.params.items()}
    target = sum(size for name, size in bytes_of.items() if name.startswith("target."))
    head = bytes_of["target.model.model.embed_tokens.weight"]  # tied: the embedding is the head
    layers, heads, width = BASE["num_hidden_layers"], BASE["num_key_value_heads"], 16
    floor = floor_of(model.pair, model.params, 50)
    assert floor.verify == target + 3 * 50 * layers * heads * 2 * width * 2
    assert floor.draft == sum(bytes_of.values()) - target + head + 3 * 50 * 2 * 2 * 2 * 16 * 2
    assert floor.round == floor.verify + floor.draft


def test_the_floor_of_an_untied_target_leaves_its_embedding_out(folders):
    config = AutoConfig.from_pretrained(folders / "target")
    config.tie_word_embeddings = False
    model = aot.abstract_pair(config, None, capacity=64)
    tied = aot.abstract_pair(AutoConfig.from_pretrained(folders / "target"), None, capacity=64)
    floors = [floor_of(each.pair, each.params, 50) for each in (model, tied)]
    assert floors[0] == floors[1] and floors[0].draft == 0


@pytest.mark.parametrize("width", [1, 2, 8])
def test_the_floor_of_experts_and_windows(width):
    _, config, extra = FAMILIES["gpt_oss"]
    config = config(**(BASE | extra))
    drafter = td.DFlashConfig(**(DRAFTER | {"hidden_size": config.hidden_size, "block_size": 8}))
    model = aot.abstract_pair(config, drafter, capacity=64, verify_width=width)
    full = {name: shape for name, shape in model.params.items() if name.startswith("target.")}
    experts = [shape for name, shape in full.items() if ".experts." in name]
    assert {shape.shape[0] for shape in experts} == {config.num_local_experts}
    rest = sum(s.size * s.dtype.itemsize for s in full.values()) - sum(s.size * 2 for s in experts)
    embedding = full["target.model.model.embed_tokens.weight"].size * 2
    share = (
        1 - (1 - config.num_experts_per_tok / config.num_local_experts) ** width
    )  # hit by a uniform router
    seen = [
        min(50, config.sliding_window + width - 1) if kind == "sliding_attention" else 50
        for kind in config.layer_types
    ]
    cached = sum(seen) * config.num_key_value_heads * 2 * config.head_dim * 2
    expected = rest - embedding + sum(round(s.size * 2 * share) for s in experts) + cached
    assert floor_of(model.pair, model.params, 50).verify == expected


def test_the_floor_of_a_prompt_chunk_is_the_target_and_what_makes_draft_keys_and_values(folders):
    model = tiny(folders, batch_size=3)
    kept = ("fc.", "hidden_norm.", "k_proj.", "k_norm.", "v_proj.")
    context = sum(
        shape.size * shape.dtype.itemsize
        for name, shape in model.params.items()
        if name.startswith("proposer.") and any(part in name for part in kept)
    )
    verify = floor_of(model.pair, model.params, 50).verify
    assert prefill_floor(model.pair, model.params, 50, 32) == verify + context
    plain = aot.abstract_pair(AutoConfig.from_pretrained(folders / "target"), None, capacity=64)
    assert prefill_floor(plain.pair, plain.params, 50, 32) == floor_of(plain.pair, plain.params, 50).verify


def test_fewer_layers_keep_as_many_taps_at_the_same_depth():
    target, drafter = load_configs(
        str(CONFIGS / "gpt-oss-20b"), str(CONFIGS / "gpt-oss-20b-dflash/config.json"), None, 6
    )
    assert target.num_hidden_layers == len(target.layer_types) == drafter.num_target_layers == 6
    assert drafter.target_layer_ids == [0, 1, 2, 4, 5]


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_drafters_without_weights(folders, compiler, drafter, capsys):
    line = ["--target", str(folders / "target"), "--drafter", drafter, "--context", "64", "--json", "-"]
    assert main(["aot", *line]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["draft_floor_bytes"] == 0 and found["block"] == (1 if drafter == "none" else 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--verify", "9"], "verify_width=9 is wider than block_size=6"),
        (["--context", "0"], "'--context': 0 is not in the range x>=1"),
        (["--layers", "0"], "'--layers': 0 is not in the range x>=1"),
        (["--layers", "99"], "--layers 99: the target has 4; ask for at most that many"),
        (["--block", "1"], "block_size=1: set >= 2, or drafter=None"),
        (["--topology", "v99:2x2"], "topology='v99:2x2': no peak figures for 'v99'; name one of v4, v5e"),
        (["--cache", "ring"], "'ring' is not one of 'static', 'paged'"),
        (["--json", "/nowhere/found.json"], "--json /nowhere/found.json: its folder does not exist"),
        (["--json", str(CONFIGS)], f"--json {CONFIGS}: is a directory; name a file."),
        (["--json", "/proc/x.json"], "--json /proc/x.json: may not be written; choose another place."),
        (["--dump-hlo", __file__], "that is a file; name a directory"),
        (["--dump-hlo", f"{__file__}/x"], "test_cli_aot.py/x: cannot be made (Not a directory); choose"),
        (["--dump-hlo", "/proc/x"], "--dump-hlo /proc/x: cannot be made (No such file or directory); choose"),
        (["--dump-hlo", "/proc"], "--dump-hlo /proc: no file can be written there; choose another place."),
        (["--matmul-precision", "foo"], "'foo' is not one of 'default', 'high', 'highest'"),
        (
            ["--context", "513"],
            "--context 513: is beyond the target's max_position_embeddings=512; lower it.",
        ),
        (["--target", "./nowhere"], "--target ./nowhere: no such directory; pass a directory or a hub id."),
        (["--drafter", "/nowhere"], "no such directory; pass a directory, a hub id, or one of none, ngram"),
    ],
)
def test_bad_options(folders, compiler, monkeypatch, capsys, options, message):
    if options[0] in ("--json", "--dump-hlo", "--matmul-precision", "--context"):
        monkeypatch.setattr(aot, "abstract_pair", lambda *args, **given: pytest.fail("built before refused"))
    assert run(folders, *options) == 2
    err = capsys.readouterr().err
    assert err.startswith("torch-dflash aot: ") and message in err and err.count("\n") == 1
    assert not compiler


def test_the_whole_context_is_accepted(folders, compiler):
    assert run(folders, "--context", 512, "--passes", "verify") == 0


def test_target_and_drafter_in_each_others_place(folders, compiler, capsys):
    assert run(folders, target="drafter") == 2
    assert "that is a DFlash drafter; pass it as --drafter" in capsys.readouterr().err
    assert run(folders, drafter="target") == 2
    assert "not a DFlash drafter" in capsys.readouterr().err


def test_unreadable_configs(folders, compiler, capsys):
    (folders / "target/config.json").write_text("{")
    assert run(folders) == 2
    assert "--target" in capsys.readouterr().err
    with pytest.raises(UserError, match="holds no config.json"):
        load_configs(str(folders), "none", None, None)


def test_without_libtpu_it_says_what_to_install(folders, monkeypatch, capsys):
    monkeypatch.setattr(topology, "find_spec", lambda name: None)
    assert run(folders, "--topology", "v6e:2x4") == 2
    assert "libtpu is not installed" in (err := capsys.readouterr().err) and "pip install 'jax[tpu]'" in err


def test_what_does_not_fit_names_the_remedies(folders, compiler, monkeypatch, capsys):
    def too_large(*args, **options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory\nUsed 110G of 95.74G hbm.")

    monkeypatch.setattr(aot_report, "compile_step", too_large)
    assert run(folders) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert "verify for v5p:2x2x1: RESOURCE_EXHAUSTED" in err and "fewer --layers" in err


@pytest.mark.aot
def test_a_published_pair_cut_to_two_layers_is_near_its_floor(tmp_path, capsys):
    line = ["--target", CONFIGS / "qwen3-8b", "--drafter", CONFIGS / "qwen3-8b-dflash", "--layers", 2]
    assert main(["aot", *map(str, line), "--dump-hlo", str(tmp_path), "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    for name, most in {"verify": 1.15, "draft": 1.15, "round": 1.15}.items():
        assert 0.99 < found[f"{name}_hbm_bytes"] / found[f"{name}_floor_bytes"] < most, name
        assert found["passes"][name]["forbidden"] == found["passes"][name]["unaliased"] == []
        assert "is_scheduled=true" in (tmp_path / f"{name}.hlo.txt").read_text()
    assert found["bound"] == "memory" and found["collectives"] == {} and found["libtpu"]
    # The two passes are the round, but for the savings of one program: no large array is counted twice.
    parts = found["verify_hbm_bytes"] + found["draft_hbm_bytes"]
    assert found["round_hbm_bytes"] == pytest.approx(parts, rel=0.05)


@pytest.mark.aot
def test_a_topology_that_does_not_exist(folders, capsys):
    assert run(folders, "--topology", "v5p:9x9") == 2
    assert "topology='v5p:9x9'" in capsys.readouterr().err


def test_the_options_of_the_plan_are_those_that_can_be_given(capsys):
    """The command offers each field of the plan, or names the field as one that cannot be given."""
    assert main(["aot", "--help"]) == 0
    shown = set(re.findall(r"^  (?:-q, )?--([a-z-]+)", capsys.readouterr().out, flags=re.M))
    plan = {"filters", "matmul-precision", "cache", "page-size", "pool-pages"}
    own = {*"model draft-model topology block-size verify-width context batch-size layers".split()}
    assert shown == plan | own | {*"mesh passes dump-hlo json quiet kflat acceptance rows quantize".split()}


def kflat_of(name, quantize=None, **how):
    target, drafter = load_configs(str(CONFIGS / name), str(CONFIGS / f"{name}-dflash"), None, 2)
    return kflat(aot.abstract_pair(target, drafter, capacity=64, quantize=quantize), [1024], [1, 8], **how)


def test_a_pass_by_its_rows_is_derived_by_hand():
    found = kflat_of("qwen3-4b", acceptance=(0.5, 0.25))
    assert found["tokens"][:4] == [1, 1.5, 1.75, 1.75]
    one, eight = found["cells"]
    layer = 2560 * (4096 + 2 * 1024 + 4096) + 3 * 2560 * 9728 + 2 * 2560 + 2 * 128  # products and norms
    # The head, the last norm, and the two tables of rotary frequencies.
    weights, cached = 2 * layer + 2560 * 151936 + 2560 + 2 * 64, 2 * 2 * 8 * 128
    for cell, batch in ((one, 1), (eight, 8)):
        for work in cell["rows"]:
            every = batch * work["rows"]
            added = 2560 + cached + 2 * 151936
            frequencies = 2 * 2 * 64  # in float32
            assert work["bytes"] == 2 * (weights + batch * 1024 * cached + every * added) + frequencies
            scores = 2 * 32 * 2 * 128 * (1024 + (work["rows"] + 1) / 2)
            assert work["flops"] == work["routed_flops"] == 2 * every * (weights + scores)
    chip = chip_of("v5p:2x2x1")
    at = one["bound_from"]["v5p"]
    assert 128 < at < 256 and one["ms"]["v5p"][7] < 1.1 * one["ms"]["v5p"][0] < one["ms"]["v5p"][8]
    assert eight["bound_from"]["v5p"] < at / 5
    last = one["rows"][-1]
    assert one["ms"]["v5p"][-1] == round(1e3 * last["flops"] / chip.flops, 4)
    draft = max(one["draft"]["bytes"] / chip.bandwidth, one["draft"]["flops"] / chip.flops) * 1e3
    wanted = 1.75 * one["ms"]["v5p"][0] / (one["ms"]["v5p"][2] + draft)
    assert one["speedup"]["v5p"][2] == pytest.approx(wanted, rel=1e-3) and one["speedup"]["v5p"][0] == 1


def test_experts_that_are_hit_are_read_once_and_multiplied_for_all_rows():
    rows = {work["rows"]: work for work in kflat_of("qwen3-coder-30b-a3b")["cells"][0]["rows"]}
    experts = 2 * 128 * 3 * 2048 * 768
    alone = rows[1]["bytes"]
    for count, work in rows.items():
        hit = 1 - (1 - 8 / 128) ** min(count, 512)  # 512 rows are one call's
        assert work["flops"] - work["routed_flops"] == pytest.approx(2 * count * experts * (hit - 8 / 128))
        if count <= 64:
            assert work["bytes"] - alone == pytest.approx(2 * experts * (hit - 8 / 128), rel=0.05)
    assert rows[1024]["bytes"] - rows[512]["bytes"] > 2 * experts * 0.99


def test_codes_move_fewer_bytes_and_groups_of_inputs_compute_longer():
    wide, narrow = (kflat_of("qwen3-4b", form)["cells"][0] for form in (None, "int8"))
    assert 0.5 < narrow["rows"][0]["bytes"] / wide["rows"][0]["bytes"] < 0.52
    assert narrow["draft"]["flops"] == pytest.approx(wide["draft"]["flops"], rel=1e-3)
    assert narrow["draft"]["bytes"] < 0.52 * wide["draft"]["bytes"]
    assert 0.5 < narrow["bound_from"]["v5p"] / wide["bound_from"]["v5p"] < 0.6
    assert all(work["grouped_flops"] == 0 for work in narrow["rows"])
    grouped = kflat_of("gpt-oss-20b", "mxfp4")["cells"][0]
    one = grouped["rows"][-1]
    hit = 32 * 3 * 2880 * 2880 * 2  # two layers' experts
    assert one["group"] == 32 and one["grouped_flops"] == pytest.approx(2 * 1024 * hit)
    for chip, times in (("v5p", 4), ("v6e", 8)):
        peak = chip_of(f"{chip}:").flops
        seconds = (one["flops"] + (times - 1) * one["grouped_flops"]) / peak
        assert grouped["ms"][chip][-1] == pytest.approx(1e3 * seconds, rel=1e-3)


@pytest.mark.parametrize(("name", "rows"), [("paged-16", 16), ("paged-64", 64)])
def test_what_is_derived_is_near_what_is_compiled(name, rows):
    derived, compiled = (
        json.loads((ROOT / "docs/results" / f"{one}.json").read_text())
        for one in ("kflat/qwen3-4b", f"aot/qwen3-4b-{name}")
    )
    (own,) = [cell for cell in derived["cells"] if (cell["context"], cell["batch"]) == (4096, 1)]
    work = next(work for work in own["rows"] if work["rows"] == rows)
    assert 1 < compiled["verify_hbm_bytes"] / work["bytes"] < 1.07
    assert 1 < compiled["passes"]["verify"]["flops"] / work["flops"] < 1.04


def test_kflat_prints_a_table_without_a_compiler(folders, compiler, capsys):
    assert run(folders, "--kflat", "--acceptance", 0.6, 0.3) == 0
    assert compiler == []
    out, _ = capsys.readouterr()
    assert "rows from which a chip computes longer than it reads" in out and "x: speed-up" in out
    assert run(folders, "--kflat", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [cell["context"] for cell in found["cells"]][0] == 64 and found["cells"][0]["speedup"] == {}
    assert run(folders, "--acceptance", 0.5) == 2
    assert "--acceptance: is for --kflat" in capsys.readouterr().err
