"""The examples and the demo run; the real pair decodes as transformers does."""

import errno
import io
import json
import os
import re
import runpy
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import ROOT
from support.served import ask, said, spelling_pair
from support.tiny import VOCAB, make_drafter, make_pair, make_target
from support.tokenizers import GROWING, TEMPLATE, NumberTokenizer, byte_tokenizer

import torch_dflash as td
from torch_dflash.cli import comparison, demo, errors, main
from torch_dflash.cli.comparison import DFLASH, PLAIN, UNION, Parts, Question, figures_of, report
from torch_dflash.demo.contest import TimedAnswer
from torch_dflash.demo.questions import QUESTIONS
from torch_dflash.train.fit.architecture import new_drafter
from torch_dflash.train.fit.options import DrafterShape

AOT, RAY = "09_compile_for_a_tpu.py", "11_ray_serve.py"  # the latter needs ray, and serves until it is ended
EXAMPLES = sorted({path.name for path in (ROOT / "examples").glob("*.py")} - {RAY})


def run_example(name, capsys):
    runpy.run_path(str(ROOT / "examples" / name))
    said = capsys.readouterr().out
    assert said and "False" not in said
    return said


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize(
    "example", [pytest.param(name, marks=[pytest.mark.aot] if name == AOT else []) for name in EXAMPLES]
)
def test_examples_run(example, capsys):
    said = run_example(example, capsys)
    assert "<|" not in said  # no special token
    found = [json.loads(line) for line in re.findall(r"acceptance lengths: (.*)", said)]
    assert all(max(lengths) > 1 for lengths in found)
    said_first = {"04_compiled.py": "capital", "07_chat.py": "The capital of France is Paris."}  # 04: int8
    assert said_first.get(example, "") in said


@pytest.mark.parametrize("example", [name for name in EXAMPLES if name != AOT])
def test_examples_run_with_another_pair(example, monkeypatch, capsys):
    target = make_target("llama", vocab_size=257, max_position_embeddings=1024)
    drafter, tokenizer = make_drafter(target, max_position_embeddings=1024), byte_tokenizer(GROWING)
    monkeypatch.setattr(td, "load_demo_pair", lambda **options: (target, drafter, tokenizer))
    monkeypatch.setattr(td, "load_demo_target", lambda **options: (target, tokenizer))
    run_example(example, capsys)


def test_a_replica_of_the_ray_example_answers(monkeypatch):
    tokenizer, make = byte_tokenizer(TEMPLATE), td.compile
    monkeypatch.setattr(td, "load_demo_pair", lambda **options: (*spelling_pair(), tokenizer))
    monkeypatch.setattr(td, "compile", lambda *pair, **options: make(*pair, runtime="eager", **options))
    example = runpy.run_path(str(ROOT / "examples" / RAY))
    body = {"model": "demo", "messages": example["MESSAGES"], "max_tokens": 4}
    assert len(said(ask(example["app"](), body)[0])) == 1


@pytest.mark.slow
def test_the_recipe_trains_a_drafter(tmp_path):
    """The stages of the recipe run in small on a target with room for the prompts of the data."""
    target = make_target("llama", vocab_size=1100, max_position_embeddings=4096)
    target.save_pretrained(tmp_path / "target")
    byte_tokenizer(GROWING).save_pretrained(tmp_path / "target")
    line = [ROOT / "examples/10_train_a_drafter.sh", tmp_path / "target", "1090", tmp_path / "out"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", *map(str, line), "cpu", "8", "small"],
        capture_output=True,
        text=True,
        env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(f"| {name} | " in done.stdout for name in ("gsm8k", "humaneval", "mbpp", "mt-bench"))
    drafter = td.load_drafter(next(tmp_path.glob("out/**/drafter")), target, dtype=torch.float32)
    assert drafter.config.mask_token_id == 1090


def test_examples_are_short_and_listed():
    listed = (ROOT / "examples/README.md").read_text()
    for path in (ROOT / "examples").glob("[0-9]*"):
        assert path.name in listed and len(path.read_text().splitlines()) < 60, path.name


@pytest.fixture
def tiny_demo(monkeypatch):
    target, drafter = make_pair("qwen3", block_size=6)
    monkeypatch.setattr(comparison, "load_demo_pair", lambda dtype: (target, drafter, NumberTokenizer(VOCAB)))
    monkeypatch.setattr(comparison, "load_demo_draft_ids", lambda: range(VOCAB - 9))
    return drafter


def test_the_demo_compares_and_fails_loudly_when_a_text_differs(tiny_demo, monkeypatch, capsys, tmp_path):
    picture, figures = tmp_path / "timeline.png", tmp_path / "figures.json"
    (tmp_path / "set.jsonl").write_text('{"turns": ["5 6 7"]}\n{"turns": ["8 9", "1"]}\n')
    arguments = ["demo", "--runtime", "eager", "--device", "cpu", "--max-new-tokens", "12"]
    arguments += ["--dtype", "float32", "--question", "1 2"]
    more = ["--png", str(picture), "--json", str(figures), "--draw", "2", "--prompts", str(tmp_path)]
    order, drawn, ask, draw = [], [], comparison.ask, comparison.draw_timeline
    monkeypatch.setattr(
        comparison, "draw_timeline", lambda path, of, width: drawn.extend(of) or draw(path, of, width)
    )

    def noted(one, *rest, **how):
        order.append(one.question)
        ask(one, *rest, **how)

    monkeypatch.setattr(comparison, "ask", noted)
    assert main([*arguments, *more, "--repeats", "2"]) == 0
    assert drawn == ["DFlash + lookup", "DFlash"]
    # An engine learns from its last drafts: no question is asked twice in a row.
    assert len(order) == 6 and order[:3] == order[3:] and len({*order}) == 3
    assert picture.read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "DFlash + lookup: " in said and "same text" in said and "tokens per target pass" in said
    assert "(median)" in said
    found = json.loads(figures.read_text())
    assert [one["kind"] for one in found["questions"]] == ["yours", "set", "set"]
    rows = {row["method"]: row for row in found["rows"]}
    for one in found["questions"]:
        each, ratio = one["token_seconds"], {row["method"]: row["speedup"] for row in one["rows"]}
        assert set(each) == set(rows) and {*map(len, each.values())} == {2}
        plain = statistics.median(each["plain decoding"])
        for name in drawn:
            assert ratio[name] == pytest.approx(plain / statistics.median(each[name]))
    assert rows["plain decoding"]["speedup"] == 1.0 and found["verify_width"] == "auto"
    assert list(rows)[1:3] == drawn and all(rows[name]["acceptance_length"] >= 1 for name in drawn)
    assert all(row["same_text"] and row["new_tokens"] == 36 for row in rows.values())
    assert "transformers' generate, float32" in rows
    assert set(found["seconds"]) >= {"load", "compile", "decode"}
    honest = td.Engine.stream

    def wrong(self, *args, **options):
        for (piece,) in honest(self, *args, **options):
            yield [[(token + 1) % VOCAB for token in piece] if self.plan.block_size > 1 else piece]

    monkeypatch.setattr(td.Engine, "stream", wrong)
    assert main(arguments) == 1
    alone = capsys.readouterr().out
    assert "OTHER TEXT" in alone and "transformers' generate" in alone
    assert "transformers' DFlash" not in alone  # fewer methods answer one question


@pytest.mark.parametrize(
    ("drafts", "names"), [("union", ["DFlash + lookup", "DFlash"]), ("drafter", ["DFlash"])]
)
def test_a_first_look_names_what_drafts_and_asks_transformers_for_less(
    drafts, names, tiny_demo, monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(comparison, "FEW", 5)
    figures = tmp_path / "figures.json"
    arguments = ["--runtime", "eager", "--max-new-tokens", "12", "--dtype", "float32", "--question", "1 2"]
    assert main(["demo", *arguments, "--drafts", drafts, "--json", str(figures)]) == 0
    said = capsys.readouterr().out
    assert f"\n{names[0]}: " in said and said.count("same text") == 2
    found = json.loads(figures.read_text())
    assert [row["method"] for row in found["rows"]] == [PLAIN, *names, "transformers' generate, float32"]
    assert [row["new_tokens"] for row in found["rows"]] == [12] * (len(names) + 1) + [5]
    assert found["verify_width"] == 6  # one program of rounds; auto has several


def test_answers_of_one_token_have_no_speed():
    """The one token comes with the prompt's pass, so no time is known and no speed is printed."""
    asked = Question("a", "?", torch.zeros(1, 1))
    wanted = {PLAIN: [0.5], DFLASH: [], "transformers' generate, float32": [0.5]}
    for name, lengths in zip(wanted, ((1, 3), (1, 1), (3, 1)), strict=True):
        answers = [TimedAnswer(0.0, [[7]] * length, [0.5 * at for at in range(length)]) for length in lengths]
        asked.answers[name] = answers
    found = json.loads(json.dumps(figures_of([asked], Parts()), allow_nan=False))
    assert found["questions"][0]["token_seconds"] == wanted
    assert [row["speedup"] for row in found["rows"]] == [1.0, None, 1.0]


def test_a_speed_that_only_a_later_answer_has_is_told(capsys):
    """Tokens a pass are the first answer's, which had no speed; transformers' speed is unknown."""
    asked = Question("a", "?", torch.zeros(1, 1))
    for name, lengths in {PLAIN: (3, 3), DFLASH: (1, 3), "transformers' generate, float32": (1, 1)}.items():
        answers = [TimedAnswer(0.0, [[7]] * length, [0.5 * at for at in range(length)]) for length in lengths]
        asked.answers[name] = answers
    assert not report([asked], "float32", Parts())  # the texts differ
    said = capsys.readouterr().out
    assert "1.00 times as fast as plain decoding, OTHER TEXT, - tokens per target pass." in said


def test_questions_of_like_lengths_share_their_programs():
    target = make_target("qwen3", max_position_embeddings=700)
    assert [comparison._capacity(needed, target) for needed in (65, 256, 257, 650)] == [256, 256, 512, 700]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (("--max-new-tokens", "0"), "Invalid value for '--max-tokens' / '--max-new-tokens': 0 is not"),
        (("--max-new-tokens", "100000"), "--max-tokens 100000: the target's max_position_embeddings"),
        (("--question", " "), "--question ' ': it is empty"),
        (("--question", "a\udcff"), "--question 'a\\udcff': it is not UTF-8"),
        (("--json", "x" * 300), f"--json {'x' * 300}: File name too long"),
        (("--png", os.devnull), f"--png {os.devnull}: is not a regular file"),
        (("--question", "1 2", "--kind", "maths"), "--kind maths: --question asks one of your own"),
        (("--prompts", "data/eval"), "--prompts data/eval: nothing is drawn from it"),
        (("--verify-width", "0"), "--verify-width 0: must be an integer from 2 to 8, or auto"),
        (("--verify-width", "1.5"), "--verify-width 1.5: must be an integer from 2 to 8, or auto"),
        (("--verify-width", "99"), "--verify-width 99: must be an integer from 2 to 8, or auto"),
        (("--json", "/nonexistent/x.json"), "--json /nonexistent/x.json: its folder does not exist"),
        (("--repeats", "0"), "Invalid value for '--repeats': 0 is not in the range x>=1"),
        (("--draw", "-1"), "Invalid value for '--draw': -1 is not in the range x>=0"),
        (
            ("--draw", "2", "--prompts", "/nonexistent"),
            "--draw 2: /nonexistent: is not a folder; name one that holds",
        ),
        (("--json", "same", "--png", "same"), "--png same: --json is written there too"),
        (("--quantize", "int8"), "--quantize int8: --runtime eager has no such products"),
        (("--device", "meta"), "--device meta: tensors there hold no values"),
        (("--device", "cpu", "--runtime", "xla"), "--device cpu with --runtime xla: XLA runs on JAX's"),
        (("--png", "/nonexistent/x.png"), "--png /nonexistent/x.png: its folder does not exist"),
    ],
)
def test_the_demo_refuses_in_one_line(line, words, tiny_demo, capsys):
    assert main(["demo", "--runtime", "eager", *line]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"torch-dflash demo: {words}") and err.count("\n") == 1


def test_the_demo_ends_when_nobody_reads_it(monkeypatch):
    """The demo notices after the last print at the latest, not at the end of the interpreter."""

    class Left(io.StringIO):
        def flush(self):
            raise BrokenPipeError

    monkeypatch.setattr(comparison, "compare_methods", lambda *_: 0)
    monkeypatch.setattr(errors, "hang_up", lambda: 7)
    monkeypatch.setattr(sys, "stdout", Left())
    assert main(["demo"]) == 7


def test_the_demo_says_in_a_line_that_something_cannot_be_written(monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "figures.json")

    monkeypatch.setattr(comparison, "compare_methods", full)
    assert main(["demo"]) == 2
    assert (
        capsys.readouterr().err == "torch-dflash demo: [Errno 28] No space left on device: 'figures.json'\n"
    )


def test_the_demo_ends_in_a_line_where_stdout_has_no_room(monkeypatch, capsys):
    class Full(io.StringIO):
        def flush(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    left = []
    monkeypatch.setattr(comparison, "compare_methods", lambda *_: 0)
    monkeypatch.setattr(errors, "hang_up", lambda: left.append(True))
    monkeypatch.setattr(sys, "stdout", Full())
    assert main(["demo"]) == 2 and left == [True]
    assert "No space left on device" in capsys.readouterr().err


def test_an_error_of_the_programs_own_is_not_taken_for_a_full_disk(monkeypatch):
    def broken(*_):
        raise FileNotFoundError(errno.ENOENT, "no compiler")

    monkeypatch.setattr(comparison, "compare_methods", broken)
    with pytest.raises(FileNotFoundError):
        main(["demo"])


def test_closed_streams_are_no_error(monkeypatch):
    monkeypatch.setattr(
        comparison, "compare_methods", lambda *_: print("said", sys.stdout.isatty(), file=sys.stderr) or 0
    )
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["demo"]) == 0
    assert main(["demo", "--json", "q\udcff/x"]) == 2
    sys.stdout.close()
    sys.stderr.close()


def test_a_kind_is_asked():
    asked = [demo._fixed(SimpleNamespace(kind=kind, question=None)) for kind in (None, "chat", "all")]
    assert asked == [[("maths", QUESTIONS["maths"])], [("chat", QUESTIONS["chat"])], [*QUESTIONS.items()]]


@pytest.mark.parametrize(("load", "told"), [(None, False), (4.0, False), (4.1, True)])
def test_that_the_machine_was_busy_is_told(monkeypatch, capsys, load, told):
    monkeypatch.setattr(comparison, "LOAD", load)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    asked = Question("a", "?", torch.zeros(1, 1))
    asked.answers = {name: [TimedAnswer(0.0, [[7], [7]], [0.5, 1.0])] for name in (PLAIN, DFLASH)}
    report([asked], "float32", Parts())
    assert ("The machine was busy before (load 4.1" in capsys.readouterr().out) == told


@pytest.mark.parametrize(
    ("gap", "told"), [(0.0, "same text up to a tie"), (0.125, "tie"), (0.5, "OTHER TEXT")]
)
def test_a_text_that_parts_at_a_tie_is_told_apart_from_a_wrong_one(capsys, gap, told):
    asked = Question("a", "?", torch.zeros(1, 1, dtype=torch.long))
    texts = {PLAIN: [[5], [6], [7]], UNION: [[5], [6], [8]], DFLASH: [[5], [6], [7]]}
    asked.answers = {name: [TimedAnswer(0.0, pieces, [0.5, 1.0, 1.5])] for name, pieces in texts.items()}

    def target(ids):
        assert ids.tolist() == [[0, 5, 6]]
        logits = torch.zeros(1, 3, 9)
        logits[0, -1, 7:] = torch.tensor([20.0, 20.0 - gap])
        return SimpleNamespace(logits=logits)

    target.dtype = torch.bfloat16
    asked.note_ties(target)
    assert report([asked], "bfloat16", Parts()) == (gap < 0.2)
    said = capsys.readouterr().out
    assert told in said and ("1 of 1 texts of DFlash + lookup part" in said) == (gap < 0.2)


def test_a_wrong_text_of_the_drafter_alone_fails_too(capsys):
    asked = Question("a", "?", torch.zeros(1, 1))
    texts = {PLAIN: [[5], [6]], UNION: [[5], [6]], DFLASH: [[5], [7]]}
    asked.answers = {name: [TimedAnswer(0.0, pieces, [0.5, 1.0])] for name, pieces in texts.items()}
    assert not report([asked], "float32", Parts())
    assert "DFlash + lookup: 1.00 times as fast as plain decoding, same text" in (
        said := capsys.readouterr().out
    )
    assert said.count("  NO") == 1


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
    """The real pair gives transformers' text row by row: ragged batch, n-gram, trained, random drafters."""
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
