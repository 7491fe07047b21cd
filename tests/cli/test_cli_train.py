"""``torch-dflash train``: the whole chain on saved models, again without work, and its errors in one line."""

import json
import math
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from support.hybrids import make_hybrid, own_greedy
from support.stages import EAGER, SHAPE, SHORT, fit, train
from support.tokenizers import TEMPLATE, byte_tokenizer
from support.trained import CONTEXT, MASK

import torch_dflash as td
from torch_dflash.cli import main
from torch_dflash.train.fit.log import read_log
from torch_dflash.train.fit.torch_trainer import TorchTrainer

STAGES = ("regenerate", "features", "fit", "evaluate", "vocabulary", "all")


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_whole_chain_and_again_without_work(world, tmp_path, capsys, monkeypatch):
    prompts = world.write_prompts(tmp_path / "math.jsonl")
    answers, features, fitted = tmp_path / "answers", tmp_path / "features", tmp_path / "fit"
    figures = tmp_path / "figures.json"
    chain = [
        ("regenerate", "--prompts", prompts, "--out", answers, *EAGER, "--shard-size", 4, "--limit", 7),
        ("features", "--answers", answers, "--out", features, "--runtime", "eager"),
        ("fit", "--features", features, "--out", fitted, *SHAPE, *SHORT, "--epochs", 2),
    ]
    for line in chain:
        assert train(world, *line) == 0
    assert capsys.readouterr().out == f"The drafter is in {fitted / 'drafter'}.\n"
    assert len(list(answers.glob("answers-*-of-00002.jsonl.gz"))) == 2
    assert {line["step"] for line in read_log(fitted / "log.jsonl")} == {4}  # two batches, two epochs
    judge = ("evaluate", "--drafter", fitted / "drafter", *EAGER, "--json", figures, "--prompts")
    assert train(world, *judge, prompts) == 0
    said = capsys.readouterr().out
    found = json.loads(figures.read_text())
    row = found["sets"]["math"]
    assert f"| math | {row['acceptance_length']:.2f} | {row['ngram_acceptance_length']:.2f} |" in said
    assert row["prompts"] == 9 and found["options"]["max_new_tokens"] == 8
    for module in ("answers.regenerate", "features.extract"):
        monkeypatch.setattr(f"torch_dflash.train.{module}.write_atomically", None, raising=False)
    before = content(tmp_path)
    for line in chain:
        assert train(world, *line) == 0
    assert content(tmp_path) == before
    other = tmp_path / "code.jsonl"
    other.write_text('{"prompt": "x = 1"}\n')
    assert train(world, *judge, other) == 0
    kept = json.loads(figures.read_text())["sets"]
    assert list(kept) == ["math", "code"] and kept["math"] == row
    assert train(world, *judge, prompts, "--verify-width", 2) == 2
    assert "verify_width=None, now verify_width=2; name another file" in capsys.readouterr().err
    other.write_text('{"prompt": "y = 1"}\n')
    assert train(world, *judge, other) == 2
    assert "figures of code are of other prompts" in capsys.readouterr().err
    assert json.loads(figures.read_text())["sets"] == kept


def test_a_target_with_recurrent_layers_trains_a_drafter_that_decodes(tmp_path):
    sizes = {"vocab_size": 260, "max_position_embeddings": CONTEXT, "eos_token_id": 0, "pad_token_id": 0}
    target = make_hybrid("qwen3_5", **sizes)
    target.save_pretrained(tmp_path / "target")
    byte_tokenizer(TEMPLATE).save_pretrained(tmp_path / "target")
    prompts, answers, figures = (tmp_path / name for name in ("math.jsonl", "answers", "figures.json"))
    prompts.write_text("".join(f'{{"prompt": "{word}"}}\n' for word in ("one", "two", "three", "four")))
    drafter, sizes = tmp_path / "fit/drafter", (*SHAPE, *SHORT, "--taps", "0,1", "--epochs", 2)
    for stage, *line in (
        ("regenerate", "--prompts", prompts, "--out", answers, *EAGER),
        ("fit", "--answers", answers, "--out", tmp_path / "fit", *sizes),
        ("evaluate", "--drafter", drafter, *EAGER, "--json", figures, "--prompts", prompts),
    ):
        assert main(["train", stage, "--target", str(tmp_path / "target"), *map(str, line)]) == 0
    assert json.loads(figures.read_text())["sets"]["math"]["acceptance_length"] >= 1
    ids, options = torch.tensor([[3, 4, 5]]), {"max_new_tokens": 8, "runtime": "eager", "do_sample": False}
    text = td.generate(target, td.load_drafter(drafter, target), ids, eos_token_id=None, **options)
    assert text[0, 3:].tolist() == own_greedy(target, [3, 4, 5], 8)


def test_features_can_be_computed_as_they_are_needed(world, tmp_path):
    """The features are the same, so the fit is the same, except for rounding."""
    answers = world.folder / "answers"
    runs = (("a", "--answers", answers), ("b", "--features", world.features))
    for name, option, path in runs:
        line = ("--taps", "0,2", "--kl", "0.5", "--weighting", "dpace", "--log-steps", 1)
        assert fit(world, tmp_path / name, option, path, *line) == 0
    one, other = (read_log(tmp_path / name / "log.jsonl") for name, _, _ in runs)
    assert len(one) == len(other) == 5
    for mine, theirs in zip(one, other, strict=True):
        assert mine["step"] == theirs["step"] and mine["blocks"] == theirs["blocks"]
        assert math.isclose(mine["loss"], theirs["loss"], rel_tol=1e-3)


def test_a_drafter_is_trained_on_from_where_another_stopped(world, overfit, tmp_path, capsys):
    line = ("--features", world.features, "--start-from", overfit.exported, "--log-steps", 1)
    assert fit(world, tmp_path, *line, shape=(), epochs=1) == 0
    first = read_log(tmp_path / "log.jsonl")[0]
    assert first["loss"] < 0.2  # a new one begins above 5
    config = td.DFlashDraftModel.from_pretrained(tmp_path / "drafter").config
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (6, MASK, [0, 2])
    assert fit(world, tmp_path / "x", *line[:2], "--start-from", "ngram", shape=()) == 2
    assert "--start-from ngram: pass a DFlash drafter" in capsys.readouterr().err
    assert fit(world, tmp_path / "x", *line, "--layers", 3, shape=()) == 2
    assert "--layers: --start-from takes the drafter's own" in capsys.readouterr().err


def test_a_v1_drafter_is_given_a_selector_and_judged_with_it(world, overfit, tmp_path, capsys):
    line = ("--features", world.features, "--start-from", overfit.exported, "--log-steps", 1)
    head = ("--head", "dflash2", "--selector-rank", 4, "--selector-top-k", 3)
    assert fit(world, tmp_path, *line, *head, "--freeze", shape=(), epochs=1) == 0
    kept = td.load_drafter(overfit.exported).state_dict()
    own = td.load_drafter(tmp_path / "drafter").state_dict()
    assert all(torch.equal(own[name], weight) for name, weight in kept.items())
    first = read_log(tmp_path / "log.jsonl")[0]
    assert first["loss"] < 0.2 and first["recall"][0] == 1  # v1's weights, and a selector of zeros
    drafter = td.load_drafter(tmp_path / "drafter")
    assert (drafter.config.selector_rank, drafter.config.selector_top_k) == (4, 3)
    card = (tmp_path / "drafter" / "README.md").read_text()
    assert "--head dflash2 --selector-rank 4" in card and "--freeze\n" in card.replace(" --", "\n--")
    prompts, figures = world.write_prompts(tmp_path / "math.jsonl"), tmp_path / "figures.json"
    judge = ("evaluate", "--drafter", tmp_path / "drafter", *EAGER, "--prompts", prompts, "--json", figures)
    assert train(world, *judge, "--card") == 0
    assert json.loads(figures.read_text())["sets"]["math"]["acceptance_length"] > 2
    capsys.readouterr()
    again = ("--features", world.features, "--start-from", tmp_path / "drafter", "--head", "dflash")
    assert fit(world, tmp_path / "x", *again, shape=()) == 2
    assert "head='dflash': the drafter's is 'dflash2'" in capsys.readouterr().err


def test_ctrl_c_is_no_traceback(world, tmp_path, capsys, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("torch_dflash.train.answers.regenerate.generate", interrupted)
    prompts = world.write_prompts(tmp_path / "math.jsonl")
    assert train(world, "regenerate", "--prompts", prompts, "--out", tmp_path / "out", *EAGER) == 130
    assert "train regenerate: interrupted; run the same command again" in capsys.readouterr().err


def test_ctrl_c_in_a_fit_is_no_error_and_leaves_a_checkpoint(world, tmp_path, capsys, monkeypatch):
    step, steps = TorchTrainer.step, []

    def interrupted(self, *args):
        steps.append(1)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        return step(self, *args)

    monkeypatch.setattr(TorchTrainer, "step", interrupted)
    assert fit(world, tmp_path, "--features", world.features, "--taps", "0,2") == 130
    assert "train fit: stopped after step 3 of 4; run the same command again" in capsys.readouterr().err
    assert [path.stem for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
    assert fit(world, tmp_path, "--features", world.features, "--taps", "0,2") == 0 and len(steps) == 4


def test_a_fit_on_the_cpu_is_one_where_there_is_something_faster(world, tmp_path, capsys, monkeypatch):
    asked = []

    def accelerator(cpu):
        asked.append(cpu)
        return Accelerator(cpu=cpu)

    monkeypatch.setattr("accelerate.Accelerator", accelerator)
    line = ("--features", world.features, "--taps", "0,2")
    assert fit(world, tmp_path, *line, "--device", "cpu", epochs=1) == 0
    assert fit(world, tmp_path, *line, epochs=1) == 0 and asked == [True, False]

    class Elsewhere:
        state = SimpleNamespace(device=torch.device("cuda", 1), num_processes=2)

    monkeypatch.setattr("accelerate.Accelerator", lambda cpu: Elsewhere)
    assert fit(world, tmp_path, *line, "--device", "cpu", epochs=1) == 2
    assert (
        "--device cpu: accelerate places this process on cuda:1; leave --device out"
        in capsys.readouterr().err
    )


def errors(world, tmp_path):
    prompts, answers = tmp_path / "math.jsonl", world.folder / "answers"
    bad, empty, long = tmp_path / "bad.jsonl", tmp_path / "empty", tmp_path / "long.jsonl"
    nothing = tmp_path / "nothing.jsonl"
    nothing.touch()
    long.write_text(json.dumps({"prompt": "x" * CONTEXT}))
    latin, half = tmp_path / "latin.jsonl", tmp_path / "half.jsonl"
    latin.write_bytes(b'{"prompt": "x"}\n{"prompt": "\xe9"}\n')
    half.write_text('{"prompt": "x"}\n{"prompt": "a\\ud800b"}\n')
    placed, judged = ("--runtime", "xla", "--device", "cpu"), ("--drafter", tmp_path, "--prompts", prompts)
    bad.write_text('{"prompt": "x"}\n{"prompt": \n')
    empty.mkdir()
    same = tmp_path / "same" / "math.jsonl"
    same.parent.mkdir()
    world.write_prompts(same)
    cached = ("--features", world.features)
    drafter = ("--drafter", world.path)
    return [
        ("regenerate", ("--prompts", tmp_path / "gone.jsonl"), ["gone.jsonl", "No such file"]),
        ("regenerate", ("--prompts", bad), ["bad.jsonl:2 is not JSON"]),
        ("regenerate", ("--prompts", nothing), ["nothing.jsonl holds no prompts"]),
        ("regenerate", ("--prompts", long, *EAGER), ["none of the 1", "max_prompt_tokens", "max_new_tokens"]),
        ("regenerate", ("--prompts", prompts, "--limit", 0), ["'--limit'", "0 is not in the range x>=1"]),
        ("regenerate", ("--prompts", prompts, "--max-new-tokens", CONTEXT), ["max_new_tokens=128"]),
        ("regenerate", ("--prompts", prompts, "--out", prompts, *EAGER), ["math.jsonl is a file", "name a"]),
        ("regenerate", ("--prompts", prompts, "--out", prompts / "x"), ["--out", "math.jsonl is a file"]),
        ("regenerate", ("--prompts", latin), ["latin.jsonl is not UTF-8", "convert it"]),
        ("regenerate", ("--prompts", half), ["half.jsonl:2", "half a surrogate pair ('\\ud800')"]),
        ("regenerate", ("--prompts", prompts, *placed), ["--device cpu with --runtime xla", "leave it out"]),
        ("features", ("--answers", answers, "--taps", "1", *placed), ["--device cpu with --runtime xla"]),
        ("fit", (*SHAPE, *cached, *placed), ["--device cpu with --runtime xla"]),
        ("fit", (*SHAPE, *cached, "--device", "meta"), ["--device meta", "no values", "such as cpu"]),
        ("fit", (*SHAPE, *cached, "--device", "nowhere"), ["--device nowhere", "such as cpu"]),
        ("evaluate", (*judged, *placed), ["--device cpu with --runtime xla"]),
        ("evaluate", (*judged, "--json", tmp_path / "no" / "x"), ["--json", "folder does not exist"]),
        ("evaluate", (*judged, "--json", empty), ["--json", "is a directory", "name a file"]),
        ("evaluate", (*judged, "--card", "--shuffled", "--json", tmp_path / "x"), ["--card with --shuffled"]),
        ("evaluate", (*judged, "--chat-template-kwargs", "[1]"), ["--chat-template-kwargs [1]", "object"]),
        ("fit", (*SHAPE, *cached, "--chat-template-kwargs", "{}"), ["pass it to the features stage"]),
        ("regenerate", ("--prompts", prompts, "--target", tmp_path / "gone"), ["gone", "no such directory"]),
        ("features", ("--answers", empty, "--taps", "1"), ["empty", "regenerate answers"]),
        ("features", ("--answers", prompts, "--taps", "1"), ["math.jsonl:1", "response_ids"]),
        ("features", ("--answers", answers, "--taps", "1,9"), ["taps=[1, 9]", "[9]", "0 to 3"]),
        ("features", ("--answers", answers, "--taps", "1", "--max-length", 2), ["max_length", "raise it"]),
        ("features", ("--answers", answers, "--taps", "1", "--dtype", "int8"), ["'int8' is not one of"]),
        ("fit", (*SHAPE, "--features", tmp_path / "gone"), ["gone", "run the features stage first"]),
        ("fit", (*SHAPE, *cached, "--taps", "0,1"), ["[0, 1]", "layers [1]", "[0, 2, 3]"]),
        ("fit", (*SHAPE, *cached, "--taps", "7"), ["target_layer_ids=[7]", "4 layers"]),
        ("fit", (*SHAPE, *cached, "--weighting", "flat"), ["'flat' is not one of 'decay', 'dpace'"]),
        ("fit", (*SHAPE, *cached, "--held-out", 64), ["held_out=64", "9 sequences"]),
        ("fit", (*SHAPE, *cached, "--kl", "nan"), ["kl=nan"]),
        ("fit", (*SHAPE, *cached, "--taps", "0,0"), ["taps=[0, 0]", "once"]),
        ("fit", (*SHAPE, "--answers", answers, "--max-length", 2), ["max_length", "raise it"]),
        ("fit", (*SHAPE, *cached, "--mask-token-id", 0), ["mask_token_id=0 occurs", "choose"]),
        ("fit", cached, ["--mask-token-id", "--start-from"]),
        ("fit", (*SHAPE, *cached, "--freeze"), ["--freeze", "--start-from"]),
        ("fit", (*cached, *SHAPE, "--mask-token-id", 999), ["mask_token_id=999", "260 rows"]),
        ("fit", (*SHAPE, *cached, "--start-from", tmp_path / "gone"), ["gone", "no such directory"]),
        ("fit", (*SHAPE, "--answers", tmp_path / "gone.jsonl"), ["gone.jsonl", "No such file"]),
        ("evaluate", (*drafter, "--prompts", prompts), ["not a DFlash drafter"]),
        ("evaluate", (*drafter, "--prompts", nothing), ["nothing.jsonl holds no prompts"]),
        ("evaluate", ("--drafter", "ngram", "--prompts", prompts), ["--drafter ngram", "DFlash drafter"]),
        ("evaluate", (*drafter, "--prompts", prompts, same), ["two files", "math", "rename"]),
        ("evaluate", (*drafter, "--prompts", prompts, "--json", bad), ["bad.jsonl", "name another file"]),
    ]  # fmt: skip


def test_errors_are_one_line_and_status_2(world, tmp_path, capsys):
    world.write_prompts(tmp_path / "math.jsonl")
    for stage, line, words in errors(world, tmp_path):
        out = () if stage == "evaluate" else ("--out", tmp_path / "out")
        assert train(world, stage, *out, *line) == 2, line
        shown, err = capsys.readouterr()
        told = [text for text in err.splitlines() if text.startswith(f"torch-dflash train {stage}: ")]
        assert shown == "" and len(told) == 1 and told[0] == err.splitlines()[-1], (line, err)
        for word in words:
            assert word in told[0], (line, told)
    assert not list((tmp_path / "out").glob("*.safetensors"))


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (["train", "fits"], "no such command 'fits'"),
        (["train", "features", "--target", "t", "--out", "o", "--answers", "a", "--taps", "a,b"], "--taps"),
        (["train", "fit", "--target", "t", "--out", "o"], "--features"),
        (["train", "fit", "--target", "t", "--out", "o", "--features", "f", "--answers", "a"], "were given"),
        (["train", "fit", "--target", "t", "--out", "o", "--features", "f", "--epochs", "many"], "--epochs"),
        (["train", "evaluate", "--target", "t", "--prompts", "p"], "--drafter"),
    ],
)
def test_wrong_usage_names_the_option(line, word, capsys):
    assert main(line) == 2
    assert word.lower() in capsys.readouterr().err.splitlines()[-1].lower()


@pytest.mark.parametrize("stage", STAGES)
def test_help_lists_every_option_once_with_its_meaning(stage, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["train", stage, "--help"]) == 0
    text = capsys.readouterr().out.partition("Options:")[2]
    entries = re.split(r"\n  (?=-)", text)[1:]
    names = [re.search(r"--[\w-]+", entry)[0] for entry in entries]
    assert len(names) == len(set(names)) > 5
    for entry in entries:
        words = entry.split("\n", 1)[0].split("  ")[1:] + entry.split("\n")[1:]
        name = re.search(r"--([\w-]+)", entry)[1]
        if name not in ("target-dtype", "out", "prompts", "answers", "draft-model"):
            assert "".join(words).strip(), entry  # a sentence of description
    if stage == "fit":
        assert "--learning-rate FLOAT" in text and "[default: 0.0006]" in text and "--taps LAYERS" in text
