"""The comparison of methods: known answers give known figures; a method that changes a text is reported."""

import json
import math
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.refusals import refuses
from support.scripted import Scripted, own_text
from support.tiny import VOCAB, make_pair, small_pair
from support.trained import shape

import torch_dflash as td
from torch_dflash.bench import run as bench_run
from torch_dflash.bench.counts import Count, GivenText, decode, parting, replay
from torch_dflash.bench.methods import Method, make_methods, read_words
from torch_dflash.bench.options import BenchOptions
from torch_dflash.bench.report import add_dollars, bounds, dollars, tables, tokens_by_law
from torch_dflash.bench.run import Bench
from torch_dflash.bench.run import checksum as checksum_of_answers
from torch_dflash.bench.sets import MATHS, SETS, checksum, read_sets
from torch_dflash.bench.walls import time_methods, wall_row
from torch_dflash.cli import main
from torch_dflash.proposers import DFlashProposer, NGramProposer
from torch_dflash.storage.files import StageError
from torch_dflash.train.answers.data import Prompt, read_prompts
from torch_dflash.train.fit.architecture import new_drafter
from torch_dflash.train.options import Layers

PROMPT, ROOM = [5, 17, 80, 33], 64


def engine(target, drafter, runtime="eager", *rules, **more):
    return td.compile(target, drafter, runtime=runtime, max_length=ROOM, processors=rules, **more)


@pytest.mark.parametrize("runtime", ["eager", "xla"])
@pytest.mark.parametrize(
    "new, rounds, cut, survival",
    [(20, [4, 4, 1, 4, 1, 4, 1], False, 4 / 7), (17, [4, 4, 1, 4, 1, 2], True, 3 / 5)],
)
def test_a_script_of_known_acceptance_has_its_figures(runtime, new, rounds, cut, survival):
    """Drafts 4, 9, 14, 19 of the text are wrong; the limit cuts the last round of 17 tokens, which counts."""
    target = small_pair()[0]
    text = own_text(target, PROMPT, new)
    script = Scripted(1, ROOM + 8, 4)
    wrong = [token if at % 5 < 4 else (token + 1) % VOCAB for at, token in enumerate(text)]
    script.say([[*PROMPT, *wrong, *[1] * 8]])
    given = engine(target, script, runtime, GivenText(ROOM))
    count = replay(given, [PROMPT], [text], [])
    again, texts = decode(engine(target, script, runtime), [PROMPT], new, [])
    assert texts == [text]
    for found in count, again:
        assert (found.rounds, found.cut) == ([rounds], [cut])
        assert found.tokens_per_round == (new - 1) / len(rounds)
        assert found.survival == [survival] * 3
    other = [(token + 7) % VOCAB for token in text]  # a text that the target would not say
    assert sum(replay(given, [PROMPT], [other], []).rounds[0]) == new - 1


def test_replays_are_decoding_of_ragged_rows_and_trees():
    target, drafter = make_pair("qwen3")
    prompts, new = [PROMPT, [3, 1], [9] * 7], 14
    for drafts in drafter, td.TreeProposer(drafter, rows=8), td.Union(td.NGramProposer(), drafter, rows=8):
        decoded, texts = decode(engine(target, drafts, batch_size=2), prompts, new, [])
        replayed = replay(engine(target, drafts, "eager", GivenText(ROOM), batch_size=2), prompts, texts, [])
        assert replayed.rounds == decoded.rounds and replayed.cut == decoded.cut
        assert texts == [own_text(target, prompt, new) for prompt in prompts]


def test_figures_of_a_count():
    count = Count([[4, 1], [2, 2, 2], [1]], [False, True, False])
    assert count.tokens_per_round == 12 / 6
    assert count.survival == [3 / 5, 1 / 5, 1 / 5]  # the cut round is no evidence of a depth
    mean = 2.0
    squares = (5 - 2 * mean) ** 2 + (6 - 3 * mean) ** 2 + (1 - mean) ** 2
    assert count.standard_error == pytest.approx(math.sqrt(squares * 3 / 2) / 6)
    assert Count([[3] * 30 + [2] * 10], [False]).conditional == [1.0, 0.75]
    assert Count([[3, 2]], [False]).conditional == [None, None]
    assert Count().row()["tokens_per_round"] is None


def test_walls_are_those_of_the_clock_and_a_slow_method_is_seen():
    now = [0.0]

    def method(*costs):
        def answer(ids, new, show):
            for cost, count in costs:
                now[0] += cost
                show([1] * count)

        return answer

    plain, quick = method((9, 1), (2, 1), (2, 1)), method((1, 1), (2, 2))
    slow, single = method((0, 1), (6, 1)), method((1, 1))
    named = {"plain": plain, "quick": quick, "slow": slow, "single": single}
    times = time_methods(named, [[1], [2]], 3, repeats=2, clock=lambda: now[0])
    rows = {name: wall_row(times, "plain", name) for name in named}
    assert [rows[name]["speedup"] for name in named] == [1.0, 2.0, round(1 / 3, 4), None]
    assert rows["quick"]["seconds_per_token"] == 1.0 and rows["quick"]["quartiles"] == [2.0, 2.0]
    assert rows["slow"]["spread"] == [[6.0, 6.0], [6.0, 6.0]]


def test_words_name_methods():
    words = read_words(
        "lookup, lookup:128,hf-lookup,dflash=a,dflash:4=a,tree:16,union:8=b,hf-dflash,dflash:3=c,plain"
    )
    assert [word.name for word in words][:3] == ["plain", "lookup", "lookup:128"]
    loads = []

    def load(source, causal):
        loads.append((source, "LM") if causal else source)
        return make_pair("qwen3")[1]

    methods = {method.name: method for method in make_methods(words, load)}
    assert loads == ["a", "b", "c"] and methods["plain"].plain and not methods["hf-lookup"].plain
    assert methods["lookup:128"].drafter.width == 128 and methods["tree:16"].drafter.rows == 16
    assert methods["dflash:4"].verify_width == 4 and methods["dflash"].verify_width is None
    assert methods["hf-dflash"].theirs["speculation_type"] == "dflash"
    assert methods["hf-lookup"].theirs == {"prompt_lookup_num_tokens": 7}
    bad = {
        "fast": "no such method",
        "lookup,lookup": "named twice",
        "tree=a": "give rows",
        "union:65=a": "give rows",
        "tree:8": "of no drafter",
        "hf-dflash": "of no drafter",
        "medusa": "name its drafter",
        "lookahead=a": "has no drafter",
        "dflash:65=a": "give rows from 2 to 64",
        "lookahead:8": "no such method",
    }
    for text, message in bad.items():
        with refuses(ValueError, message):
            read_words(text)


def test_sets_are_wrapped_and_others_texts_are_left_out(tmp_path, monkeypatch):
    raw = [Prompt("aime24", ["What is 1 + 1?\n"])]
    monkeypatch.setitem(SETS, "aime24", SETS["aime24"]._replace(raw=checksum(raw)))
    one, other, own = (tmp_path / f"{name}.jsonl" for name in ("aime24", "alpaca", "mine"))
    one.write_text('{"turns":["What is 1 + 1?\\n"]}\n')
    other.write_text('{"turns": ["Not of the set."]}\n')
    own.write_text('{"prompt": "Hello"}\n')
    sets, left_out = read_sets([tmp_path])
    assert sets["aime24"][0].turns == [MATHS.format("What is 1 + 1?")]
    assert sets["mine"][0].turns == ["Hello"] and list(left_out) == ["alpaca"]
    assert "data/README.md" in left_out["alpaca"]
    with refuses(StageError, "another file is called"):
        read_sets([tmp_path, one])
    with refuses(StageError, "no set is left"):
        read_sets([other])


@pytest.mark.parametrize("name", [name for name, known in SETS.items() if known.shipped])
def test_shipped_sets_have_their_checksums(name):
    from support import ROOT

    (path,) = (ROOT / "data").glob(f"*/{name}.jsonl")
    assert checksum(read_prompts([path])) == SETS[name].shipped
    assert read_sets([path])[1] == {}


def test_the_law_of_the_width():
    assert tokens_by_law([0.5, 0.25, 0.125], 4) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert tokens_by_law([0.6, 0.6], 3) == pytest.approx(2.2)
    assert tokens_by_law([], 8) == 1


def figures():
    count = {"tokens_per_round": 3.0, "parted": 0, "ties": 0}
    counts = {
        "gsm8k": {"left_out": 2, "methods": {"plain": count | {"tokens_per_round": 1.0}, "dflash": count}}
    }
    walls = {"gsm8k": {"methods": {
        "plain": {"speedup": 1.0, "seconds_per_token": 0.1},
        "dflash": {"speedup": 2.0, "seconds_per_token": 0.05},
    }}}  # fmt: skip
    rounds = {
        "plain": {"round_bytes": 100, "roofline_ms": 1.0},
        "dflash": {"round_bytes": 150, "roofline_ms": 1.5},
    }
    derived = {"topology": "v5p:2x2x1", "context": 4096, "methods": rounds}
    return {"counts": counts, "walls": walls, "derived": derived}


def test_derived_figures_and_prices_stand_apart():
    results = figures()
    results["bounds"] = bounds(results)
    assert results["bounds"] == {"plain": {"gsm8k": 1.0}, "dflash": {"gsm8k": 2.0}}
    assert dollars(3.6, 1, 1000) == pytest.approx(1.0)
    add_dollars(results, 3.6, 2)
    cost = results["dollars"]
    assert cost["batch"] == 1 and cost["measured"]["dflash"] == {"gsm8k": 100.0}
    assert cost["derived"]["dflash"] == {"gsm8k": 1.0}
    titles = [
        line
        for line in tables(results).splitlines()
        if "gsm8k" not in line and not line[:6].strip() == "plain"
    ]
    kinds = [line.partition(":")[0] for line in titles if line.startswith(("counted", "measured", "derived"))]
    assert kinds == ["counted", "measured", "derived", "measured", "derived"]
    assert all("batch 1" in line for line in titles if "dollars" in line)


def line(world, tmp_path, *more):
    json_file, texts = tmp_path / "figures.json", tmp_path / "texts.json"
    options = ("--limit", 2, "--max-new-tokens", 16, "--decoded", 1, "--runtime", "eager", "--batch-size", 2)
    files = ("--json", json_file, "--texts", texts)
    words = ("bench", "--target", world.path, *options, *files, *more)
    return [str(word) for word in words], json_file, texts


def test_the_command_on_every_method(world, tmp_path, capsys, monkeypatch):
    """Two sets of two prompts, one of two turns; again without work; other options are refused."""
    first, second = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    bare = {"mask_token_id": None, "layers": None}
    kinds = {
        "dflash": shape(),
        "dflash2": shape(head="dflash2", selector_rank=4, selector_top_k=4),
        "medusa": shape(head="medusa", block_size=4, layers=1, mask_token_id=None, taps=None),
        "eagle3": shape(head="eagle3", block_size=4, **bare, taps=Layers((0, 2, 3))),
    }
    for name, one in kinds.items():
        new_drafter(world.target, one).save_pretrained(tmp_path / name)
    first.write_text('{"turns": ["alpha", "be"]}\n{"prompt": "gamma"}\n')
    second.write_text('{"prompt": "eta?"}\n{"prompt": "' + "long " * 40 + '"}\n')
    methods = ",".join(["lookup,lookahead,hf,hf-lookup", *(f"{name}={tmp_path / name}" for name in kinds)])
    methods += f",hf-dflash={tmp_path / 'dflash'},tree:8={tmp_path / 'dflash'},union:8={tmp_path / 'dflash'}"
    words, json_file, texts = line(world, tmp_path, "--methods", methods, "--prompts", first, second)
    words += ["--walls", "1", "--price", "4.2"]
    assert main(words) == 0
    said = capsys.readouterr().out
    found = json.loads(json_file.read_text())
    assert [*found["counts"]] == ["one", "two"] and found["counts"]["two"]["left_out"] == 1
    rows = found["counts"]["one"]["methods"]
    assert [*rows] == ["plain", *(word.partition("=")[0] for word in methods.split(","))]
    assert all(rows[name]["by"] == "replayed" and rows[name]["equal_to_replay"] == 1 for name in kinds)
    assert rows["lookup"]["by"] == "decoded" and rows["lookup"]["answers"] == 3
    assert rows["plain"]["tokens_per_round"] == 1 and all(row["parted"] == 0 for row in rows.values())
    assert [*found["walls"]["two"]["methods"]] == [*rows] and "dollars a million" in said
    plain = json.loads(texts.read_text())["sets"]["two"]["answers"]
    assert plain[0][1] == own_text(world.target, plain[0][0], 16, world.target.generation_config.eos_token_id)
    before = json_file.read_text()
    monkeypatch.setattr(bench_run, "decode", None)
    assert main(words) == 0 and json_file.read_text() == before
    assert main([*words, "--limit", "1"]) == 2 and "limit=2, now 1" in capsys.readouterr().err
    second.write_text('{"prompt": "eta?"}\n{"prompt": "zeta"}\n')
    assert main(words) == 2 and "other prompts" in capsys.readouterr().err
    monkeypatch.undo()
    words[words.index("--texts") + 1] = str(tmp_path / "new.json")
    assert main(words) == 2
    assert "of other texts" in capsys.readouterr().err


def wrong(text):
    return [*text[:3], (text[3] + 1) % 200, *text[4:]]


def test_a_method_that_changes_a_token_is_reported(world, tmp_path, capsys, monkeypatch):
    """The plain text is that of plain decoding: a method that lies about its own text is compared with it.

    One that decodes, one that is replayed, and transformers' own.
    """
    whole, theirs = bench_run.decode, bench_run.transformers_own

    def altered(engine, *given):
        count, texts = whole(engine, *given)
        lies = isinstance(engine.pair.proposer, NGramProposer | DFlashProposer)
        return count, [wrong(text) if lies else text for text in texts]

    def altered_too(*given, **more):
        def answer(*asked):
            found = theirs(*given, **more)(*asked)
            return SimpleNamespace(pieces=found.pieces, tokens=wrong(found.tokens))

        return answer

    prompts = tmp_path / "one.jsonl"
    prompts.write_text('{"prompt": "alpha"}\n{"prompt": "be"}\n')
    monkeypatch.setattr(bench_run, "decode", altered)
    monkeypatch.setattr(bench_run, "transformers_own", altered_too)
    new_drafter(world.target, shape()).save_pretrained(tmp_path / "v1")
    methods = f"lookup,lookahead,hf-lookup,dflash={tmp_path / 'v1'}"
    words, json_file, _ = line(world, tmp_path, "--methods", methods, "--prompts", prompts)
    assert main(words) == 1
    rows = json.loads(json_file.read_text())["counts"]["one"]["methods"]
    parted = {name: (row["parted"], row["ties"]) for name, row in rows.items()}
    known = {"plain": (0, 0), "lookup": (2, 0), "lookahead": (0, 0), "hf-lookup": (1, 0), "dflash": (1, 0)}
    assert parted == known
    assert "4 decoded texts part from plain decoding's, 0 of them at a tie" in capsys.readouterr().out


def test_figures_of_another_drafter_are_no_rows(world, tmp_path, capsys):
    """A row knows its drafter; words name a kind; further walls are timed; a price is one run's."""
    prompts, long = tmp_path / "one.jsonl", tmp_path / "long.jsonl"
    prompts.write_text('{"prompt": "alpha"}\n')
    long.write_text('{"prompt": "' + "long " * 40 + '"}\n')
    for seed in (0, 1):
        new_drafter(world.target, shape(init_seed=seed)).save_pretrained(tmp_path / f"v{seed}")
    heads = shape(head="medusa", block_size=4, layers=1, mask_token_id=None, taps=None)
    new_drafter(world.target, heads).save_pretrained(tmp_path / "medusa")

    def run(methods, *more):
        words, json_file, _ = line(world, tmp_path, "--methods", methods, "--prompts", prompts, long)
        status, said = main([*words, *map(str, more)]), capsys.readouterr()
        return status, said.out, said.err, json.loads(json_file.read_text()) if json_file.exists() else {}

    status, out, _, found = run(f"dflash={tmp_path / 'v0'}", "--walls", 1, "--price", 4)
    assert status == 0 and "1 x $4" in out and "1 questions beyond" in out
    assert found["counts"]["long"] == {"left_out": 1, "checksum": checksum_of_answers([]), "methods": {}}
    assert [*found["walls"]["one"]["methods"]] == ["plain", "dflash"]
    status, out, _, found = run(f"dflash={tmp_path / 'v0'},lookup", "--walls", 1)
    assert status == 0 and "$" not in out and "dollars" not in found
    assert [*found["walls"]["one"]["methods"]] == ["plain", "dflash", "lookup"]
    before = found
    status, _, err, found = run("lookup,lookahead", "--walls", 1)
    assert status == 2 and "times of dflash are kept" in err and found["walls"] == before["walls"]
    status, _, err, _ = run("lookup", "--walls", 2)
    assert status == 2 and "times of dflash are kept" in err
    shape_of = tmp_path / "v0" / "config.json"
    whole = shape_of.read_text()
    shape_of.write_text(json.dumps(json.loads(whole) | {"rms_norm_eps": 0.1}))
    status, _, err, _ = run(f"dflash={tmp_path / 'v0'}")
    assert status == 2 and "are of another drafter" in err
    shape_of.write_text(whole)
    for methods, words in (
        (f"dflash={tmp_path / 'v1'}", "are of another drafter; name another --json file"),
        (f"dflash={tmp_path / 'medusa'}", "is medusa, not dflash"),
        (f"hf-dflash={tmp_path / 'medusa'}", "is medusa, not dflash"),
        (f"dflash:9={tmp_path / 'v0'}", "this drafter's block has 6 rows"),
        (",", "name at least one of"),
    ):
        status, _, err, _ = run(methods)
        assert (status, words in err) == (2, True), (methods, err)
    for more, words in (
        (("--price", "nan"), "--price nan: must be a number"),
        (("--context", 8), "--context 8: is for --chip"),
        (("--chip", "v9x"), "--chip v9x: is none of v5p"),
        (("--max-new-tokens", 500), "max_new_tokens=16, now 500"),
    ):
        status, _, err, _ = run("lookup", *more)
        assert (status, words in err) == (2, True), (more, err)


def test_a_target_with_options_of_its_own_is_compared_without_them(world, tmp_path, capsys):
    """Its penalty and beams would change texts, and no command compiles them; a small model assists."""
    prompts, folder = tmp_path / "one.jsonl", tmp_path / "target"
    prompts.write_text('{"prompt": "alpha"}\n')
    shutil.copytree(world.path, folder)
    options = folder / "generation_config.json"
    own = {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "num_beams": 2}
    options.write_text(json.dumps(json.loads(options.read_text()) | own))
    methods = f"lookup,hf,hf-lookup,hf-assistant={world.path}"
    words, json_file, _ = line(world, tmp_path, "--methods", methods, "--prompts", prompts, "--walls", 1)
    words[words.index("--target") + 1] = str(folder)
    assert main(words) == 0
    rows = json.loads(json_file.read_text())["counts"]["one"]["methods"]
    assert not any(row["parted"] for row in rows.values())
    assert rows["hf-assistant"]["tokens_per_round"] >= 2  # the target itself
    template = folder / "chat_template.jinja"
    template.write_text("SYS " + template.read_text())
    capsys.readouterr()
    assert main(words) == 2 and "settings_checksum" in capsys.readouterr().err


@pytest.mark.slow
def test_the_bundled_pair(tmp_path, capsys):
    """Drafts are accepted, replays are decoding, and no text parts elsewhere than at a tie."""
    from support import ROOT

    json_file, prompts = tmp_path / "figures.json", ROOT / "data/eval/gsm8k.jsonl"
    words = ["bench", "--target", "demo", "--methods", "lookup,dflash=demo,tree:8,union:8,hf-dflash"]
    words += ["--prompts", str(prompts), "--limit", "2", "--max-new-tokens", "24", "--decoded", "2"]
    assert main([*words, "--runtime", "eager", "--dtype", "float32", "--json", str(json_file)]) == 0
    rows = json.loads(json_file.read_text())["counts"]["gsm8k"]["methods"]
    assert all(row["parted"] == row["ties"] for row in rows.values())
    assert rows["dflash"]["equal_to_replay"] == rows["union:8"]["equal_to_replay"] == 2
    assert 1.5 < rows["dflash"]["tokens_per_round"] <= rows["union:8"]["tokens_per_round"] < 8


def test_replay_that_is_no_decoding_is_an_error(world, monkeypatch):
    drafter = new_drafter(world.target, shape()).eval()
    method = Method("dflash", drafter, weights=1)
    options = BenchOptions(max_new_tokens=8, batch_size=1, decoded=1, runtime="eager")
    bench = Bench(world.target, world.tokenizer, [Method("plain"), method], options)
    texts = bench.texts("one", [Prompt("one", ["alpha"])])
    assert bench.count("one", method, texts["answers"])["equal_to_replay"] == 1
    monkeypatch.setattr(bench_run, "replay", lambda *given: Count([[8]], [False]))
    with refuses(StageError, "one, dflash: decoded rounds"):
        bench.count("one", method, texts["answers"])


def test_questions_that_do_not_fit_are_an_error(world, tmp_path, capsys):
    prompts = tmp_path / "one.jsonl"
    prompts.write_text('{"prompt": "alpha"}\n')
    words, _, _ = line(world, tmp_path, "--methods", "lookup", "--prompts", prompts)
    assert main([*words, "--max-prompt-tokens", "1"]) == 2
    assert "no question of one is at most 1 tokens long" in capsys.readouterr().err


def test_what_is_done_is_kept(world, tmp_path, capsys, monkeypatch):
    counted = Bench.count

    def interrupted(self, name, method, answers):
        if method.name == "lookahead":
            raise KeyboardInterrupt
        return counted(self, name, method, answers)

    prompts = tmp_path / "one.jsonl"
    prompts.write_text('{"prompt": "alpha"}\n')
    words, json_file, _ = line(world, tmp_path, "--methods", "lookup,lookahead", "--prompts", prompts)
    monkeypatch.setattr(Bench, "count", interrupted)
    assert main(words) == 130
    kept = json.loads(json_file.read_text())["counts"]["one"]["methods"]
    assert [*kept] == ["plain", "lookup"] and "run the same command again" in capsys.readouterr().err
    monkeypatch.setattr(Bench, "count", counted)
    assert main(words) == 0
    after = json.loads(json_file.read_text())["counts"]["one"]["methods"]
    assert {name: after[name] for name in kept} == kept and "lookahead" in after


def test_ties_are_told_from_other_texts():
    logits = torch.zeros(1, 1, 9)
    logits[..., 3], logits[..., 4], logits[..., 5] = 2.0, 2.0, 1.9
    target = SimpleNamespace(device="cpu", dtype=torch.float32)
    model = lambda ids, logits_to_keep: SimpleNamespace(logits=logits)  # noqa: E731
    named = type(
        "Target", (), {"__call__": lambda self, *given, **more: model(*given, **more)} | vars(target)
    )()
    assert parting(named, [1], [7, 3], [7, 3]) is None
    assert parting(named, [1], [7, 3, 8], [7, 4, 8]) == "tie"
    assert parting(named, [1], [7, 3], [7, 5]) == "other" == parting(named, [1], [7], [7, 5])


def test_tokens_per_round_counts_the_round_that_the_limit_cuts():
    target, drafter = make_pair("qwen3")
    ids = torch.tensor([PROMPT])
    out = td.generate(
        target, drafter, ids, max_new_tokens=6, runtime="eager", do_sample=False, return_dict_in_generate=True
    )
    stats = replace(out.stats, acceptance_lengths=[[4, 2]], capped=[True])
    assert stats.tokens_per_round == 3 and stats.mean_acceptance_length == 4
