"""The examples and the demo run; the real pair decodes as transformers does."""

from __future__ import annotations

import json
import runpy

import pytest
from support import ROOT
from support.tiny import VOCAB, make_pair
from support.tokenizers import NumberTokenizer

import torch_dflash as td
from torch_dflash.cli import demo, main
from torch_dflash.train.fit.architecture import DrafterShape, new_drafter


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
    monkeypatch.setattr(demo, "load_demo_pair", lambda: (target, drafter, NumberTokenizer(VOCAB)))
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
    monkeypatch.setattr(demo, "load_demo_pair", lambda: (target, drafter, NumberTokenizer(VOCAB)))
    assert main(["demo", "--runtime", "eager", *line]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"torch-dflash demo: {words}") and err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.network
def test_the_quickstart_prints_what_the_readme_says(capsys):
    recorded = json.loads((ROOT / "docs/results/quickstart_cpu.json").read_text())
    exec(compile(recorded["code"], "README.md", "exec"), {})
    assert capsys.readouterr().out == recorded["output"]


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
