"""A chain of stages keeps template variables, the data and recipe of a card, and figures."""

import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.refusals import refuses
from support.stages import EAGER, SHAPE, SHORT, fit, train
from support.tiny import make_target
from support.tokenizers import byte_tokenizer
from support.trained import CONTEXT, World

import torch_dflash as td
from torch_dflash.cli import main, parse
from torch_dflash.cli.train.fit import fit_command, target_name
from torch_dflash.storage.files import StageError
from torch_dflash.train.answers.data import Prompt, encode_conversation, read_answers
from torch_dflash.train.answers.regenerate import regenerate
from torch_dflash.train.evaluate import evaluate
from torch_dflash.train.export import export_drafter, trained_template
from torch_dflash.train.fit.log import draw_log
from torch_dflash.train.options import EvaluateOptions, RegenerateOptions

TERSE = {"terse": True}
TAPPED = ("--taps", "0,2", "--runtime", "eager")


def test_template_variables_are_set_once_and_used_by_every_stage(world, tmp_path, capsys):
    prompts, kwargs = world.write_prompts(tmp_path / "math.jsonl"), "--chat-template-kwargs"
    answers, features = tmp_path / "answers", tmp_path / "features"
    said = ("regenerate", "--prompts", prompts, "--out", answers, *EAGER)
    assert train(world, *said, kwargs, json.dumps(TERSE)) == 0
    assert train(world, *said) == 2 and "chat_template_kwargs={'terse': True}" in capsys.readouterr().err
    (one, *rest) = read_answers([answers])
    assert all(other.chat_template_kwargs == TERSE for other in (one, *rest))
    ids = encode_conversation(world.tokenizer, one.messages, TERSE)
    assert ids != encode_conversation(world.tokenizer, one.messages)
    assert train(world, "features", "--answers", answers, "--out", features, *TAPPED) == 0
    for source in (("--features", features), ("--answers", answers)):
        out = tmp_path / source[0]
        assert fit(world, out, *source, "--taps", "0,2", epochs=1) == 0
        drafter = td.DFlashDraftModel.from_pretrained(out / "drafter")
        assert trained_template(drafter) == [TERSE]
        assert 'Chat template with `{"terse": true}`' in (out / "drafter" / "README.md").read_text()
        assert fit(world, out, *source, "--taps", "0,2", kwargs, "{}") == 2
    judge = ("evaluate", "--drafter", tmp_path / "--features" / "drafter", "--prompts", prompts, *EAGER)
    assert train(world, *judge, "--limit", 2, "--json", tmp_path / "f.json") == 0
    assert json.loads((tmp_path / "f.json").read_text())["options"]["chat_template_kwargs"] == TERSE
    capsys.readouterr()
    assert train(world, *judge, kwargs, '{"terse": false}') == 2
    assert 'chat_template_kwargs={"terse": false}, but the drafter was trained' in capsys.readouterr().err
    other = ("features", "--answers", answers, "--out", tmp_path / "x", *TAPPED, kwargs, "{}")
    assert train(world, *other) == 2 and "leave the option out" in capsys.readouterr().err


def test_texts_are_decoded_with_the_variables_they_are_asked_with(world, overfit, tmp_path):
    asked = []

    class Tokenizer:
        chat_template, eos_token_id = "x", 0

        def apply_chat_template(self, messages, **options):
            asked.append(options.get("terse"))
            return world.tokenizer.apply_chat_template(messages, **options)

        def decode(self, *args, **options):
            return world.tokenizer.decode(*args, **options)

    options = EvaluateOptions(limit=1, max_new_tokens=4, runtime="eager", chat_template_kwargs=TERSE)
    evaluate(world.target, overfit.drafter, Tokenizer(), world.prompts, options)
    assert asked and set(asked) == {True}
    asked.clear()
    said = RegenerateOptions(max_new_tokens=4, runtime="eager", chat_template_kwargs=TERSE)
    regenerate(world.target, Tokenizer(), world.prompts[:1], tmp_path, said)
    assert asked and set(asked) == {True}


def test_greedy_stages_leave_a_repetition_penalty_out_and_say_so(world, tmp_path, capsys, monkeypatch):
    target = tmp_path / "target"
    world.target.save_pretrained(target)
    world.tokenizer.save_pretrained(target)
    config = json.loads((target / "generation_config.json").read_text()) | {"repetition_penalty": 1.1}
    (target / "generation_config.json").write_text(json.dumps(config))
    other = World(**vars(world) | {"folder": tmp_path})
    prompts = world.write_prompts(tmp_path / "math.jsonl")
    said = ("regenerate", "--prompts", prompts, "--runtime", "eager", "--max-new-tokens", 20, "--out")
    assert train(other, *said, tmp_path / "answers") == 0
    note = "the model's repetition_penalty=1.1 is not applied"
    assert f"torch-dflash train regenerate: {note}" in capsys.readouterr().err
    mine = {tuple(one.response_ids) for one in read_answers([tmp_path / "answers"])}
    assert mine == {tuple(one.response_ids) for one in world.answers}
    assert train(other, *said, tmp_path / "x", "--sampled") == 0
    assert note not in capsys.readouterr().err
    line = ("--answers", tmp_path / "answers", "--taps", "0,2")
    assert fit(other, tmp_path / "fit", *line, epochs=1) == 0
    judge = ("evaluate", "--drafter", tmp_path / "fit" / "drafter", "--prompts", prompts, *EAGER)
    assert train(other, *judge, "--limit", 1) == 0
    assert f"torch-dflash train evaluate: {note}" in capsys.readouterr().err


def test_without_stop_ids_the_tokenizers_end_an_answer(world, tmp_path):
    ended = next(one for one in world.answers if len(one.response_ids) < 20)
    target = make_target("qwen3", vocab_size=260, max_position_embeddings=CONTEXT)
    target.load_state_dict(world.target.state_dict())
    target.generation_config.eos_token_id = None
    tokenizer = SimpleNamespace(
        chat_template="x",
        eos_token_id=ended.response_ids[-1],
        apply_chat_template=world.tokenizer.apply_chat_template,
    )
    prompts = [Prompt("a", [ended.messages[0]["content"]])]
    regenerate(target, tokenizer, prompts, tmp_path, RegenerateOptions(max_new_tokens=20, runtime="eager"))
    assert read_answers([tmp_path])[0].response_ids == ended.response_ids


def test_later_turns_without_a_chat_template_are_refused_at_once(world, overfit, tmp_path):
    plain = byte_tokenizer()
    prompts = [*world.prompts[:2], Prompt("chat", ["a", "b"])]
    words = (StageError, "1 prompts have several turns (source chat)", "no chat template", "leave them out")
    with refuses(*words):
        regenerate(world.target, plain, prompts, tmp_path / "x", RegenerateOptions(runtime="eager"))
    with refuses(*words):
        evaluate(world.target, overfit.drafter, plain, prompts, EvaluateOptions(runtime="eager"))
    with refuses(StageError, "3 messages", "no chat template"):
        encode_conversation(plain, [{"role": "user", "content": "a"}] * 3)


def test_the_card_names_data_and_recipe_and_keeps_its_figures(world, tmp_path, capsys):
    prompts = world.write_prompts(tmp_path / "math.jsonl")
    out = tmp_path / "fit"
    line = ("--answers", world.folder / "answers", "--taps", "0,2", "--kl", "0.5")
    assert fit(world, out, *line, epochs=1) == 0
    folder, card = out / "drafter", out / "drafter" / "README.md"
    tokens = sum(len(one.response_ids) for one in world.answers)
    text = card.read_text()
    assert f"9 answers, {tokens:,} tokens. target answered greedily (max_new_tokens=20" in text
    assert f"| texts | 9 | {tokens:,} |" in text
    assert str(tmp_path) not in text and str(world.folder) not in text
    command = next(row for row in text.splitlines() if row.startswith("torch-dflash train fit"))
    given = parse(shlex.split(command)[1:]).arguments
    assert (given.target, given.answers, given.out) == ("target", [Path("answers")], Path("fit"))
    assert (given.taps, given.layers, given.block_size, given.kl, given.epochs) == ((0, 2), 1, 4, 0.5, 1)
    assert (given.held_out, given.anchors, given.learning_rate, given.accumulation) == (1, 8, 1e-3, 1)
    assert fit_command(given, 2) == f"accelerate launch --num_processes 2 --no_python {command}"
    judge = ("evaluate", "--drafter", folder, "--prompts", prompts, *EAGER, "--json", tmp_path / "f.json")
    assert train(world, *judge, "--limit", 2, "--card") == 0
    judged = card.read_text()
    assert judged.startswith(text.rstrip()) and "## Acceptance" in judged and "| math |" in judged
    assert fit(world, out, *line, epochs=1) == 0
    assert card.read_text() == judged  # a finished fit, run again
    (folder / "model.safetensors").write_bytes(b"another drafter's weights")
    assert fit(world, out, *line, epochs=1) == 0 and card.read_text() == text


def test_a_card_says_what_is_not_recorded(world, overfit, tmp_path):
    features = ("--features", world.features, "--start-from", overfit.exported)
    assert fit(world, tmp_path / "fit", *features, shape=(), epochs=1) == 0
    text = (tmp_path / "fit" / "drafter" / "README.md").read_text()
    assert "What the features were made of is not recorded" in text and "--start-from drafter" in text
    data = {"sources": {"a": {"answers": 2, "tokens": 5}}, "chat_template_kwargs": [], "answered": []}
    export_drafter(overfit.drafter, tmp_path / "d", world.target, overfit.directory, data=data)
    assert (
        "2 answers, 5 tokens. How they were made is not recorded." in (tmp_path / "d/README.md").read_text()
    )


@pytest.mark.parametrize(
    ("given", "shown"),
    [("demo", "SmolLM2-135M-Instruct"), ("org/model", "org/model"), (".", Path.cwd().name)],
)
def test_a_target_is_named_by_its_id_or_its_directorys_name(given, shown):
    assert target_name(given) == shown


def test_every_set_keeps_the_command_it_was_made_by(world, overfit, tmp_path, monkeypatch, capsys):
    figures, folder = tmp_path / "f.json", tmp_path / "drafter"
    monkeypatch.setenv("HOME", str(tmp_path))
    export_drafter(overfit.drafter, folder, world.target, overfit.directory)
    for name, size in (("math", 2), ("code", 3)):
        prompts = world.write_prompts(tmp_path / f"{name}.jsonl")
        line = ["train", "evaluate", "--target", world.path, "--drafter", str(folder), "--prompts"]
        line += [str(prompts)]
        line += [*EAGER, "--limit", "1", "--json", str(figures), "--card", "--batch-size", "8"]
        monkeypatch.setattr("sys.argv", ["torch-dflash", *line, f"--mark={size}"])
        assert main(line) == 0
    found = json.loads(figures.read_text())
    commands = [row["provenance"]["command"] for row in found["sets"].values()]
    assert [command[-1] for command in commands] == ["2", "3"]
    card = (folder / "README.md").read_text()
    assert all(command.replace(str(tmp_path), "~") in card for command in commands)
    assert str(tmp_path) not in card
    assert (found["options"]["target"], found["options"]["target_dtype"]) == ("target", "float32")
    found["options"]["target_checksum"] += 1
    figures.write_text(json.dumps(found))
    assert main(line) == 2 and "with target_checksum=" in capsys.readouterr().err
    figures.write_text(json.dumps(found | {"sets": {"math": {"prompts": 1}}}))
    assert main(line) == 2 and "holds no figures of this command" in capsys.readouterr().err


@pytest.mark.parametrize("online", [False, True])
def test_all_stages_in_one_command_and_again_without_work(world, tmp_path, capsys, monkeypatch, online):
    prompts, out = world.write_prompts(tmp_path / "math.jsonl"), tmp_path / "run"
    fitted = shlex.join([*SHAPE, *SHORT, "--epochs", "1"])
    line = ["all", "--out", out, "--prompts", prompts, "--eval-prompts", prompts, "--taps", "0,2"]
    line += ["--regenerate=--limit 7 " + " ".join(EAGER), "--evaluate=--limit 2 " + " ".join(EAGER)]
    line += ["--online"] if online else ["--features=--runtime eager"]
    with monkeypatch.context() as patch:
        patch.setattr("torch_dflash.train.answers.regenerate.regenerate", None)  # nothing may begin
        assert train(world, *line, f"--fit={fitted} --epochs many") == 2
    assert not out.exists() and "--epochs" in capsys.readouterr().err.splitlines()[-1]
    assert train(world, *line, f"--fit={fitted}") == 0
    assert (out / "features").exists() != online
    assert "| math |" in (out / "fit" / "drafter" / "README.md").read_text()
    said = capsys.readouterr()
    assert "| math |" in said.out and said.err.count("torch-dflash train ") == 4 - online
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert train(world, *line, f"--fit={fitted}") == 0
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    (tmp_path / "math.jsonl").write_text("{}")
    assert train(world, *line, f"--fit={fitted}") == 2  # the first stage that fails ends it


def test_the_picture_says_which_vocabulary_its_losses_run_over(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    shown, plot = [], Axes.plot
    monkeypatch.setattr(
        Axes, "plot", lambda self, *a, label, **k: shown.append(label) or plot(self, *a, label=label)
    )
    line = {"step": 1, "loss": 1.0, "acceptance_length": 1.0}
    (tmp_path / "log.jsonl").write_text(
        "".join(json.dumps(line | {"kind": kind}) + "\n" for kind in ("train", "held_out"))
    )
    for sampled, words in ((None, {"training", "held out"}), (64, {"sampled ids", "all ids"})):
        (tmp_path / "stage.json").write_text(json.dumps({"sampled_vocabulary": sampled}))
        shown.clear()
        draw_log(tmp_path)
        assert all(any(word in label for label in shown) for word in words) and len(set(shown)) == 2
        assert sampled or not any("ids" in label for label in shown)
