"""The README's code runs as printed, the examples run, and every figure is the one in its JSON."""

from __future__ import annotations

import json
import re
import runpy
import shlex

import pytest
import torch
import transformers
from support import ROOT
from support.tiny import VOCAB, make_pair

import jax_bridge as jb
import torch_dflash as td
from torch_dflash.cli import demo, main, main_parser
from torch_dflash.cli.train_evaluate import prompts_checksum, read_figures
from torch_dflash.demo.pair import load_demo_drafter
from torch_dflash.storage.checksums import checksum_of
from torch_dflash.train.answers.data import read_answers, read_prompts
from torch_dflash.train.answers.provenance import data_section, describe
from torch_dflash.train.export.card import acceptance_table
from torch_dflash.train.fit.architecture import DrafterShape, new_drafter
from torch_dflash.train.fit.log import read_log

README = (ROOT / "README.md").read_text()


class FakeTokenizer:
    """Enough of a tokenizer for the README and the demo: a fixed prompt in, numbers out."""

    def __call__(self, text):
        return {"input_ids": [len(text) % VOCAB, 5, 6, 7]}

    def apply_chat_template(self, messages, **options):
        assert options["return_dict"] and options["return_tensors"] == "pt"
        ids = torch.tensor([[len(message["content"]) % VOCAB, 5, 6, 7] for message in messages])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def decode(self, ids, **options):
        return " ".join(str(int(token)) for token in ids)


def test_every_code_block_of_the_readme_runs_in_order(monkeypatch, capsys, tmp_path):
    target, drafter = make_pair("qwen3")
    loads = []
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM,
        "from_pretrained",
        lambda name, **kw: loads.append(name) or target,
    )
    monkeypatch.setattr(
        transformers.AutoTokenizer,
        "from_pretrained",
        lambda name, **kw: loads.append(name) or FakeTokenizer(),
    )
    monkeypatch.setattr(
        td.DFlashDraftModel, "from_pretrained", lambda name, **kw: loads.append(name) or drafter
    )
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    assert len(blocks) == 5
    # The directory stands for the id; the loading is real.
    target.save_pretrained(tmp_path)
    whole = jb.load
    monkeypatch.setattr(jb, "load", lambda name: loads.append(name) or whole(tmp_path))
    scope: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), scope)
    assert loads == ["Qwen/Qwen3-4B", "Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16", "Qwen/Qwen3-4B"]
    plain = target.generate(**scope["inputs"], max_new_tokens=64, do_sample=False)
    assert torch.equal(scope["ids"], plain)
    assert torch.equal(scope["out"].sequences[:, : plain.shape[1]], plain)
    streamed = capsys.readouterr().out.split("torch.Size([1, 68])\n")[1]
    assert streamed.replace(" ", "") == "".join(map(str, plain[0, 4:].tolist()))


def test_the_demo_table_is_the_one_in_its_json():
    results = json.loads((ROOT / "docs/results/demo_cpu.json").read_text())
    assert results["provenance"]["command"] in README
    table = re.search(r"(\| method \|.*?)\n\n", README, flags=re.S)
    assert table is not None
    printed = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1].splitlines()[2:]]
    stored = [
        [
            row["method"],
            f"{row['acceptance_length']:.2f}",
            f"{row['speedup']:.2f}x",
            "yes" if row["same_text"] else "no",
        ]
        for row in results["rows"]
    ]
    assert printed == stored


def test_the_acceptance_table_is_the_one_in_its_json():
    results, shuffled = (
        json.loads((ROOT / f"docs/results/acceptance{name}_cpu.json").read_text())
        for name in ("", "_shuffled")
    )
    card = (ROOT / "torch_dflash/assets/smollm2-135m-instruct-dflash/README.md").read_text()
    table = acceptance_table(results["sets"])
    assert table + "\n" in README and table + "\n" in card
    for shown in (results, shuffled):
        for row in shown["sets"].values():
            assert row["provenance"]["command"] in README.replace(" \\\n    ", " ")
    for row in results["sets"].values():
        assert row["provenance"]["command"] in card
    assert all(row["prompts"] >= 80 and row["left_out"] == 0 for row in results["sets"].values())
    control = shuffled["sets"]["gsm8k"]["acceptance_length"]
    assert shuffled["options"]["shuffled"] and f"same drafter reaches {control:.2f} on GSM8K" in README
    drafter = load_demo_drafter(torch.bfloat16)
    assert results["options"]["drafter_checksum"] == checksum_of(drafter.state_dict())


def test_the_throughput_table_is_the_one_in_its_json():
    results = json.loads((ROOT / "docs/results/train_throughput_cpu.json").read_text())["results"]
    table = (ROOT / "docs/training.md").read_text().partition("| blocks/s |")[2].partition("\n\n")[0]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    shown = {name: cells for name, *cells in lines}
    for column, result in enumerate(results):
        for row in result["rows"]:
            name = re.sub(r"\b[1-9]\d* ids", "sampled ids", row["name"])
            assert shown[name][column] == f"{row['blocks_per_second']:.1f}", name


def test_the_figures_are_of_the_prompts_that_are_here():
    for name in ("acceptance_cpu", "acceptance_shuffled_cpu"):
        _, sets = read_figures(ROOT / f"docs/results/{name}.json")
        for key, row in sets.items():
            prompts = read_prompts([ROOT / f"data/eval/{key}.jsonl"])
            assert row["prompts_checksum"] == prompts_checksum(prompts, 100)


def test_the_embedded_fit_is_the_one_in_its_log():
    lines = read_log(ROOT / "docs/results/embedded_fit.jsonl")
    held = {line["step"]: line for line in lines if line["kind"] == "held_out"}
    guide = " ".join((ROOT / "docs/training.md").read_text().split())
    told = re.search(r"The fit took .*?\(\[its log\]", guide)[0]
    last = held[max(held)]
    assert f"took {last['seconds'] / 60:.0f} minutes: {last['step']} steps" in told
    found = re.findall(r"(\d\.\d\d) \((?:step )?(\d+)\)", told)
    assert len(found) == 4 and all(f"{held[int(step)]['acceptance_length']:.2f}" == at for at, step in found)
    assert told.endswith(f"to {last['acceptance_length']:.2f} ([its log]")
    card = (ROOT / "torch_dflash/assets/smollm2-135m-instruct-dflash/README.md").read_text()
    assert ", ".join(f"{rate:.3f}" for rate in last["accuracy"]) in card


def test_the_embedded_card_counts_the_answers_that_are_here():
    folder = ROOT / "data/train/answers"
    card = (ROOT / "torch_dflash/assets/smollm2-135m-instruct-dflash/README.md").read_text()
    section = data_section(describe(read_answers([folder]), [folder]))
    assert section.partition("\n\n")[2] in card and section.partition(" tokens")[0] in card


def test_every_command_that_is_shown_is_one():
    pages = (
        "docs/training.md",
        "docs/tpu.md",
        "README.md",
        "torch_dflash/assets/smollm2-135m-instruct-dflash/README.md",
    )
    text = "\n".join((ROOT / page).read_text() for page in pages).replace("\\\n", " ")
    for name, value in ((" ID", " 16"), ("$layers", "2"), ("$block", "8")):
        text = text.replace(name, value)
    lines = re.findall(r"^ *(?:accelerate .*)?torch-dflash (.*)$", text, flags=re.M)
    assert len(lines) > 15
    for line in lines:
        main_parser().parse_args(shlex.split(line, comments=True))


def test_every_test_file_and_link_named_in_the_readme_exists():
    for name in re.findall(r"`(?:tests/)?(test_\w+\.py)`", README):
        assert (ROOT / "tests" / name).exists(), name
    for page in ("README.md", "docs/training.md"):
        for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / page).read_text()):
            assert (ROOT / page).parent.joinpath(link).exists(), link


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize("example", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_examples_run(example, capsys):
    runpy.run_path(str(ROOT / "examples" / example))
    said = capsys.readouterr().out
    assert said
    assert "same text: False" not in said and "same tokens: False" not in said


def test_the_demo_fails_loudly_when_a_text_differs(monkeypatch, capsys, tmp_path):
    """The demo on a tiny model: exit status 0, and 1 when a method's text is not plain decoding's."""
    target, drafter = make_pair("qwen3", block_size=6)
    monkeypatch.setattr(demo, "load_demo_pair", lambda: (target, drafter, FakeTokenizer()))
    picture = tmp_path / "timeline.png"
    arguments = ["demo", "--runtime", "eager", "--max-new-tokens", "12", "--png", str(picture)]
    assert main(arguments) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "n-gram lookup, W=6" in said and "acceptance length" in said and "verify round costs" in said

    honest = td.Engine.generate

    def wrong(self, *args, **options):
        output = honest(self, *args, **options)
        if self.plan.block_size > 1 and isinstance(output, td.GenerateOutput):
            output.sequences[0, -1] += 1
        return output

    monkeypatch.setattr(td.Engine, "generate", wrong)
    assert main(arguments) == 1
    assert "NO" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (("--max-new-tokens", "0"), "--max-new-tokens 0: must be"),
        (("--max-new-tokens", "100000"), "--max-new-tokens 100000: the target's max_position_embeddings"),
        (("--question", ""), "prompt='': it is empty"),
        (("--verify-width", "0"), "--verify-width 0: the anchor and a draft need at least 2"),
        (("--verify-width", "99"), "--verify-width 99: the drafter's blocks have 6 rows"),
        (("--json", "/nonexistent/x.json"), "--json /nonexistent/x.json: its folder does not exist"),
        (("--png", "/nonexistent/x.png"), "--png /nonexistent/x.png: its folder does not exist"),
    ],
)
def test_the_demo_refuses_in_one_line(line, words, monkeypatch, capsys):
    target, drafter = make_pair("qwen3", block_size=6)
    monkeypatch.setattr(demo, "load_demo_pair", lambda: (target, drafter, FakeTokenizer()))
    assert main(["demo", "--runtime", "eager", *line]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"torch-dflash demo: {words}") and err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_smollm2_is_lossless(runtime):
    """The real pair: a ragged batch, n-gram, trained and random drafters, against transformers row by row."""
    target, trained, tokenizer = td.load_demo_pair(progress=False)
    untrained = new_drafter(target, DrafterShape(mask_token_id=16, layers=2, block_size=6, init_seed=1))
    tokenizer.padding_side = "left"
    prompts = ["The capital of France is", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,", "Roses are red,"]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    wanted = [
        target.generate(row[real.bool()][None], max_new_tokens=20, do_sample=False)[0, int(real.sum()) :]
        for row, real in zip(ids, mask, strict=True)
    ]
    for drafter in (td.NGramProposer(6), trained, untrained):
        out = td.generate(
            target,
            drafter,
            ids,
            mask,
            max_new_tokens=20,
            do_sample=False,
            runtime=runtime,
            return_dict_in_generate=True,
        )
        for row, text in zip(out.sequences[:, ids.shape[1] :], wanted, strict=True):
            assert row[: len(text)].tolist() == text.tolist()
            assert set(row[len(text) :].tolist()) <= {target.generation_config.pad_token_id}
        assert isinstance(out.stats, td.DecodeStats)
        assert drafter is not trained or out.stats.mean_acceptance_length > 1.3
