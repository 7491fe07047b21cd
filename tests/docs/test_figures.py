"""Every table and figure of the pages is the one in its JSON: `make figures` changes nothing."""

import gzip
import json
import runpy
import shutil
import sys

import pytest
import torch
from support import ROOT

from torch_dflash.cli.train.evaluate import prompts_checksum, read_figures
from torch_dflash.demo.pair import load_demo_drafter
from torch_dflash.storage.files import checksum_of
from torch_dflash.train.answers.data import read_answers, read_prompts
from torch_dflash.train.answers.provenance import data_section, describe
from torch_dflash.train.export import add_figures
from torch_dflash.train.fit.log import read_log

sys.path.insert(0, str(ROOT / "benchmarks"))
FIGURES = runpy.run_path(str(ROOT / "benchmarks/figures.py"))
sys.path.remove(str(ROOT / "benchmarks"))
PAGES = {str(page.relative_to(ROOT)): page.read_text() for page in FIGURES["pages"]()}
CARD = FIGURES["CARD"] / "README.md"


def result(name):
    return json.loads((ROOT / "docs/results" / f"{name}.json").read_text())


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_what_make_figures_writes(page):
    assert FIGURES["filled"](PAGES[page]) == PAGES[page], "run: make figures"


@pytest.mark.parametrize("chip", ["", "-v5e", "-v6e"])
def test_a_round_of_dflash2_is_near_its_floor_on_every_chip(chip):
    """The recorded rounds of v5p, v5e and v6e keep the published bound; `make test-aot` compiles v5p anew."""
    plain, second = (result(f"aot/qwen3-4b-{one}paged-16{chip}") for one in ("", "dflash2-"))
    assert second["topology"] == plain["topology"] and second["topology"].startswith(chip[1:] or "v5p")
    assert second["round_hbm_bytes"] <= 1.03 * second["round_floor_bytes"]
    assert second["round_hbm_bytes"] <= 1.013 * plain["round_hbm_bytes"]  # published: 1.3 % of a cycle


def test_the_picture_is_what_make_figures_draws():
    assert FIGURES["bars"](result("trees")) == FIGURES["PICTURE"].read_text(), "run: make figures"
    assert FIGURES["PICTURE"].stat().st_size < 20_000
    assert FIGURES["curves"](result("trees")) == FIGURES["TREES"].read_text(), "run: make figures"
    assert FIGURES["by_rows"]() == FIGURES["ROWS"].read_text(), "run: make figures"
    for name, drawn in FIGURES["COMPARED"].items():
        assert drawn() == (ROOT / f"docs/{name}.svg").read_text(), "run: make figures"


def test_a_tree_moves_what_a_chain_of_as_many_rows_moves():
    rounds = [one for name in ("trees_aot", "trees_slices_aot") for one in result(name)["rounds"]]
    assert len(rounds) == 36 and all(one.get("ratio", 1) <= 1.05 for one in rounds)
    assert not any(one["unaliased"] or one["scatters"] or one["forbidden"] for one in rounds)


def test_recurrent_layers_on_slices_are_near_their_floor():
    paths = sorted((ROOT / "docs/results/slices_hybrids").glob("*.json"))
    assert len(paths) == 3
    for found in (json.loads(path.read_text()) for path in paths):
        own = found["passes"]["round"]
        assert found["round_hbm_bytes"] <= 1.10 * found["round_floor_bytes"] and found["layers"] == 8
        assert own["unaliased"] == own["forbidden"] == [] and own["loops"] == 0
        assert set(own["scatters"]) <= {"f32[16,32]"}  # the angles of a rotation that has three parts


@pytest.mark.parametrize(
    ("form", "least"),
    [("tree of 8", 1.12), ("union of 8", 1.22), ("union of 16", 1.36), ("union of 32", 1.45)],
)
def test_trees_bring_more_tokens_a_round_than_chains(form, least):
    for own in result("trees")["tokens a round"].values():
        assert own[form] >= least * own["drafter"]


def test_the_card_is_what_make_figures_writes(tmp_path):
    shutil.copy(CARD, tmp_path)
    add_figures(tmp_path, result("acceptance_cpu"))
    assert (tmp_path / "README.md").read_text() == CARD.read_text(), "run: make figures"


def test_every_block_is_on_a_page_and_every_marker_is_closed():
    text = "\n".join(PAGES.values())
    assert {name for name, _ in FIGURES["MARKED"].findall(text)} == set(FIGURES["BLOCKS"])
    assert text.count("<!-- figures: ") == text.count("<!-- end -->") == len(FIGURES["MARKED"].findall(text))


def test_a_changed_figure_is_noticed():
    page = PAGES["docs/benchmarks.md"]
    assert "| gsm8k | 2." in page
    assert FIGURES["filled"](page.replace("| gsm8k | 2.", "| gsm8k | 7.")) == page


def test_an_unknown_block_is_refused():
    with pytest.raises(KeyError, match="no such block"):
        FIGURES["filled"]("<!-- figures: nothing -->\n<!-- end -->")


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs/results").rglob("*.json")), ids=lambda path: path.relative_to(ROOT).name
)
def test_every_json_says_where_it_is_from(path):
    found = json.loads(path.read_text())
    parts = [found.get(part, {}) for part in ("sets", "counts", "walls")]
    origins = [found] if "provenance" in found else [one for part in parts for one in part.values()]
    assert origins
    for origin in (one["provenance"] for one in origins):
        assert {"command", "date", "packages", "hardware"} <= set(origin)
        assert "/tmp" not in origin["command"] and "/home" not in origin["command"]


def test_what_the_tpu_page_says_of_all_passes_holds():
    paths = sorted((ROOT / "docs/results/aot").glob("*.json"))
    assert len(paths) >= 12
    for path in paths:
        found = json.loads(path.read_text())
        for name, summary in found["passes"].items():
            assert summary["forbidden"] == [] and summary["collectives"] == {}, path
            # A verify pass alone commits nothing: its round updates recurrent states.
            recurrent = any(leaf.endswith(".state") for leaf in summary["unaliased"])
            assert summary["unaliased"] == [] or (name == "verify" and recurrent), path
        assert "aot" in found["provenance"]["command"]


def test_the_quickstart_was_run_as_printed():
    block = PAGES["README.md"].partition("```python\n")[2].partition("```")[0]
    assert result("quickstart_cpu")["code"] == block, "run: benchmarks/quickstart.py"


def test_the_acceptance_figures_are_of_this_drafter_and_these_prompts():
    drafter = checksum_of(load_demo_drafter(torch.bfloat16).state_dict())
    for name in ("acceptance_cpu", "acceptance_shuffled_cpu"):
        assert result(name)["options"]["drafter_checksum"] == drafter
        _, sets = read_figures(ROOT / f"docs/results/{name}.json")
        for key, row in sets.items():
            prompts = read_prompts([ROOT / f"data/eval/{key}.jsonl"])
            assert row["prompts_checksum"] == prompts_checksum(prompts, 100)
            assert row["prompts"] >= 80 and row["left_out"] == 0
    assert result("acceptance_shuffled_cpu")["options"]["shuffled"]


def test_the_first_answer_was_timed_three_times():
    found = result("first_answer_cpu")
    assert all(len(found[name]["seconds"]) >= 3 for name in ("empty", "full", "second"))
    assert found["compilations"] == 5 and "cpu" in str(found["provenance"]).lower()


def test_the_card_tells_what_the_log_and_the_answers_say():
    card = CARD.read_text()
    held = [line for line in read_log(ROOT / "docs/results/embedded_fit.jsonl") if line["kind"] == "held_out"]
    assert ", ".join(f"{rate:.3f}" for rate in held[-1]["accuracy"]) in card
    files = sorted((ROOT / "data/train/regenerated").glob("*/*.gz"))
    section = data_section(describe(read_answers(files), files))
    assert section.partition("\n\n")[2] in card and section.partition(" tokens")[0] in card


def test_the_prompts_of_several_turns_are_what_their_script_draws():
    drawn = runpy.run_path(str(ROOT / "data/train/several_turns.py"))["conversations"]()
    kept = ROOT / "data/train/prompts/several_turns.jsonl.gz"
    assert gzip.decompress(kept.read_bytes()).decode() == drawn
    turns = [len(prompt.turns) for prompt in read_prompts([kept])]
    assert len(turns) == 2400 and set(turns) == {2, 3}
