"""``torch-dflash generate`` on saved pairs: text is the target's, errors are one line, nothing is lost."""

import io
import json
import shutil
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from support.tiny import make_drafter, make_target
from support.tokenizers import TEMPLATE, byte_tokenizer

import torch_dflash as td
from torch_dflash.cli import main
from torch_dflash.cli.text import StdoutStreamer
from torch_dflash.engine.slots import Handle

NEW = "12"
CONTEXT = 128


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target = make_target(
        "qwen3", vocab_size=257, max_position_embeddings=CONTEXT, eos_token_id=0, pad_token_id=0
    )
    drafter = make_drafter(target)
    tokenizer = byte_tokenizer(TEMPLATE)
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    drafter.save_pretrained(folder / "drafter")
    plain = byte_tokenizer()
    target.save_pretrained(folder / "untemplated")
    plain.save_pretrained(folder / "untemplated")
    other = make_target("qwen3", vocab_size=257, hidden_size=64)
    make_drafter(other).save_pretrained(folder / "misfit")
    return SimpleNamespace(
        folder=folder,
        model=target,
        tokenizer=tokenizer,
        target=str(folder / "target"),
        drafter=str(folder / "drafter"),
        untemplated=str(folder / "untemplated"),
        misfit=str(folder / "misfit"),
    )


def wanted(pair, text, new=int(NEW), sampled=None):
    """The target's own text after ``text``, which is sent as it is."""
    ids = torch.tensor([pair.tokenizer(text)["input_ids"]])
    out = pair.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    return pair.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def chat(text):
    return f"<user>{text}</s>>"


def generate(pair, *options, drafter=None, target=None, runtime="eager"):
    return main(
        ["generate", "--target", target or pair.target, "--drafter", drafter or pair.drafter]
        + ["--runtime", runtime, "--max-new-tokens", NEW, *options]
    )


@pytest.mark.parametrize("drafter", ["dflash", "none", "ngram"])
def test_text_is_the_targets_own_through_the_chat_template(pair, capsys, drafter):
    assert generate(pair, "--prompt", "naïve €5", drafter=None if drafter == "dflash" else drafter) == 0
    out, err = capsys.readouterr()
    assert out == wanted(pair, chat("naïve €5")) + "\n"
    for word in ("acceptance length", "TTFT", "TPOT", "tokens/s", f"{NEW} tokens"):
        assert word in err.strip().splitlines()[-1]


@pytest.mark.parametrize("options", [("--union",), ("--rows", "4"), ("--union", "--rows", "8")])
def test_trees_and_unions_are_options(pair, capsys, options):
    assert generate(pair, "--prompt", "naïve €5", "--verify-width", "auto", *options) == 0
    assert capsys.readouterr().out == wanted(pair, chat("naïve €5")) + "\n"


def test_what_is_odd_about_a_pair_is_said_once_in_one_line(pair, tmp_path, capsys):
    shutil.copytree(pair.drafter, tmp_path / "odd")
    config = json.loads((tmp_path / "odd/config.json").read_text())
    (tmp_path / "odd/config.json").write_text(json.dumps(config | {"max_position_embeddings": 100}))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert generate(pair, "--prompt", "a", drafter=str(tmp_path / "odd")) == 0
        said = [line for line in capsys.readouterr().err.splitlines() if "note: " in line or ".py" in line]
        assert len(said) == 1 and said[0].startswith("torch-dflash: note: max_position_embeddings=100: ")
        assert generate(pair, "--prompt", "a", "--quiet", drafter=str(tmp_path / "odd")) == 0
    assert not capsys.readouterr().err


def test_xla_gives_the_same_text(pair, capsys):
    options = ["--block-size", "6", "--verify-width", "4", "--cache", "paged"]
    assert generate(pair, "--prompt", "hello", *options, drafter="ngram", runtime="xla") == 0
    out, err = capsys.readouterr()
    assert out == wanted(pair, chat("hello")) + "\n"
    assert "compiling" in err


def test_the_width_may_be_chosen_while_decoding(pair, capsys):
    assert generate(pair, "--prompt", "hello", "--verify-width", "auto") == 0
    assert capsys.readouterr().out == wanted(pair, chat("hello")) + "\n"


def test_raw_system_and_template_options(pair, capsys, tmp_path, monkeypatch):
    file = tmp_path / "prompt.txt"
    file.write_text("two\nlines\n")
    assert generate(pair, "--file", str(file), "--raw") == 0
    assert capsys.readouterr().out == wanted(pair, "two\nlines") + "\n"
    assert generate(pair, "--prompt", "x", "--system", "be brief") == 0
    assert capsys.readouterr().out == wanted(pair, "<system>be brief</s>" + chat("x")) + "\n"
    assert generate(pair, "--prompt", "x", "--chat-template-kwargs", '{"terse": true}') == 0
    assert capsys.readouterr().out == wanted(pair, chat("x")[:-1] + "!>") + "\n"
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO("größe".encode())))
    assert generate(pair, "-", target=pair.untemplated) == 0
    assert capsys.readouterr().out == wanted(pair, "größe") + "\n"


def test_sampling_is_that_of_plain_decoding_with_the_same_seed(pair, capsys):
    texts = []
    for drafter, seed in ((pair.drafter, "3"), ("none", "3"), ("none", "4")):
        options = ["--temperature", "0.9", "--top-p", "0.95", "--top-k", "40", "--seed", seed]
        assert generate(pair, "--prompt", "hello", *options, drafter=drafter) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_stop_ids_end_the_text_unless_ignored(pair, capsys, tmp_path):
    """The model's stop id is the first token of its text."""
    model = make_target("qwen3", vocab_size=257, max_position_embeddings=CONTEXT)
    ids = torch.tensor([pair.tokenizer(chat("hello"))["input_ids"]])
    first = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, pad_token_id=0)[0, -1]
    model.generation_config.eos_token_id = int(first)
    model.generation_config.repetition_penalty = 1.1
    model.save_pretrained(tmp_path)
    pair.tokenizer.save_pretrained(tmp_path)
    lines = tmp_path / "in.jsonl"
    lines.write_text('{"prompt": "hello"}\n')
    for options, reason, tokens in (([], "stop", 1), (["--ignore-eos"], "length", int(NEW))):
        assert generate(pair, "--jsonl", "--file", str(lines), *options, target=str(tmp_path)) == 0
        out, err = capsys.readouterr()
        result = json.loads(out)
        assert (result["finish_reason"], result["new_tokens"]) == (reason, tokens)
        assert "acceptance length" in err


def test_penalties_and_stop_texts(pair, capsys):
    def say(*options, drafter=pair.drafter):
        assert generate(pair, "--prompt", "hello", *options, drafter=drafter) == 0
        return capsys.readouterr().out

    plain, penalty = say(), ("--repetition-penalty", "2.5", "--no-repeat-ngram-size", "2")
    assert plain != say(*penalty) == say(*penalty, drafter="none")
    stop = next(letter for letter in plain[1:] if letter.isascii() and letter.isprintable())
    assert say("--stop", "never", "--stop", stop).strip() == plain[: plain.index(stop) + len(stop)].strip()


@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_answers_of_a_grammar(pair, capsys, tmp_path, runtime):
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["yes", "no"]}')
    assert generate(pair, "--prompt", "hello", "--json-schema", str(schema), runtime=runtime) == 0
    assert json.loads(capsys.readouterr().out) in ("yes", "no")
    if runtime == "eager":
        lines = tmp_path / "lines"
        lines.write_text('{"prompt": "a"}\n{"prompt": "bb"}\n')
        assert generate(pair, "--jsonl", "--file", str(lines), "--regex", "[0-9]{2}x") == 0
        texts = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
        assert generate(pair, "--prompt", "x", "--regex", "abab", "--no-repeat-ngram-size", "1") == 2
        assert "none was left" in capsys.readouterr().err.splitlines()[-1]
        assert [text[2:] for text in texts] == ["x", "x"] and all(text[:2].isdecimal() for text in texts)


BAD = "x" * 200
LINES = [
    ('{"prompt": "one", "id": "a"}', chat("one")),
    ("not json", "line 2: 'not json' is not JSON"),
    ('{"turns": ["two", "never"]}', chat("two")),
    ("", None),
    (
        json.dumps({"prompt": BAD}),
        f"line 5: prompt of {len(BAD) + 8} tokens: the context leaves room for 116",
    ),
    (
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "é"}]}',
        "<system>s</s>" + chat("é"),
    ),
    ('{"prompt": ""}', "line 7: prompt='': it is empty"),
    ('{"prompt": 3}', "line 8: prompt=3: must be a string"),
    ('{"text": "x"}', "line 9: fields ['text']: give exactly one of prompt, turns, messages"),
    ("[1]", "line 10: '[1]' is no JSON object"),
    (
        '{"messages": [{"role": "user", "content": "x"}, {"role": "tool", "content": "y"}]}',
        "line 11: messages: the tok",
    ),
    ('{"prompt": "last"}', chat("last")),
]


@pytest.mark.parametrize("batch_size", ["1", "3"])
def test_json_lines_keep_their_order_and_bad_ones_say_why(pair, capsys, tmp_path, batch_size):
    file = tmp_path / "in.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(line for line, _ in LINES).encode())
    assert generate(pair, "--jsonl", "--file", str(file), "--batch-size", batch_size) == 1
    out, err = capsys.readouterr()
    results = [json.loads(line) for line in out.splitlines()]
    expected = [(number, line, text) for number, (line, text) in enumerate(LINES, 1) if text is not None]
    assert [result["line"] for result in results] == [number for number, _, _ in expected]
    for result, (_, line, text) in zip(results, expected, strict=True):
        if text.startswith("line "):
            assert result["error"].startswith(text) and "text" not in result
            continue
        assert result["text"] == wanted(pair, text)
        assert {key: result[key] for key in json.loads(line)} == json.loads(line)
        assert result["prompt_tokens"] == len(pair.tokenizer(text)["input_ids"])
        assert result["new_tokens"] == 1 + sum(result["acceptance_lengths"]) == int(NEW)
        assert result["finish_reason"] == "length" and result["seconds"] > 0
    assert "7 of 11 lines failed; line 2" in err and "acceptance length" in err


def test_json_lines_with_log_probabilities(pair, capsys, tmp_path):
    file = tmp_path / "in.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "longer"}\n')
    assert generate(pair, "--jsonl", "--file", str(file), "--logprobs", "--top-logprobs", "2") == 0
    for line in capsys.readouterr().out.splitlines():
        result = json.loads(line)
        ids = pair.tokenizer(chat(result["prompt"]))["input_ids"]
        logits = pair.model(torch.tensor([ids + result["tokens"]])).logits[0, len(ids) - 1 : -1]
        log = logits.log_softmax(-1)
        own = log.gather(1, torch.tensor(result["tokens"])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(result["logprobs"]), own, rtol=1e-4, atol=1e-4)
        found = torch.tensor(result["top_logprobs"])
        assert found.shape == (int(NEW), 2, 2) and torch.equal(found[..., 0].long(), log.topk(2).indices)
        torch.testing.assert_close(found[..., 1], log.topk(2).values, rtol=1e-4, atol=1e-4)


def test_sampled_lines_do_not_depend_on_their_batch(pair, capsys, tmp_path):
    file = tmp_path / "in.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("same", "same", "other")))
    seen = []
    for size in ("1", "2", "3"):
        assert generate(pair, "--jsonl", "--file", str(file), "--temperature", "1", "--batch-size", size) == 0
        seen.append([json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()])
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][0] != seen[0][1]


def test_lines_are_out_before_the_next_one_is_decoded(pair, capsys, tmp_path, monkeypatch):
    """A killed process has written all finished lines to stdout."""
    file = tmp_path / "in.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"}\n')
    result, calls = Handle.result, []

    def killed(self, *args, **options):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return result(self, *args, **options)

    monkeypatch.setattr(Handle, "result", killed)
    assert generate(pair, "--jsonl", "--file", str(file), "--batch-size", "1") == 130
    assert [json.loads(line)["prompt"] for line in capsys.readouterr().out.splitlines()] == ["a", "b"]


def test_json_lines_from_stdin_without_a_good_one(pair, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b'{"prompt": "\xff"}\n')))
    assert generate(pair, "-", "--jsonl") == 1
    out, err = capsys.readouterr()
    assert "line 1" in json.loads(out)["error"] and "Traceback" not in err


def errors(pair, tmp_path):
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    empty = tmp_path / "empty"
    empty.mkdir()
    prompt = ["--prompt", "x"]
    return [
        (["--prompt", "x", "--file", "y"], ["--prompt and --file: two inputs", "exactly one"]),
        ([], ["no input", "--prompt TEXT"]),
        (["--prompt", "  "], ["prompt=''", "empty", "give"]),
        (["--prompt", BAD], ["prompt of 208 tokens", "room for 116", "shorten"]),
        (["--file", str(tmp_path / "none.txt")], ["--file", "none.txt", "No such file"]),
        (["--file", str(binary)], ["not UTF-8", "convert"]),
        (["--prompt", "x", "--jsonl"], ["--jsonl with --prompt", "leave --jsonl out"]),
        (["--jsonl", "--file", str(tmp_path / "void")], ["no lines"]),
        ([*prompt, "--batch-size", "2"], ["--batch-size 2", "leave it out"]),
        ([*prompt, "--replicas", "2"], ["--replicas 2", "--jsonl", "leave it out"]),
        (["--jsonl", "--replicas", "2", "-"], ["--replicas=2 without a mesh", "mesh=2"]),
        (["--jsonl", "--replicas", "0", "-"], ["--replicas=0", "at least 1"]),
        (["--prompt", "x", "--logprobs"], ["--logprobs", "pass --jsonl"]),
        (["--prompt", "x", "--top-logprobs", "2"], ["--top-logprobs", "pass --jsonl"]),
        (["--jsonl", "--batch-size", "0", "-"], ["'--batch-size'", "0 is not in the range x>=1"]),
        ([*prompt, "--max-new-tokens", "0"], ["'--max-tokens' / '--max-new-tokens'", "0 is not in"]),
        ([*prompt, "--max-new-tokens", "128"], ["--max-tokens 128", "max_position_embeddings=128", "lower"]),
        ([*prompt, "--top-p", "0.5"], ["--top-p 0.5", "temperature 0", "set --temperature"]),
        ([*prompt, "--temperature", "-1"], ["temperature=-1.0", "must be"]),
        ([*prompt, "--temperature", "1", "--top-k", "-2"], ["top_k=-2", "must be"]),
        ([*prompt, "--seed", str(2**70)], ["seed=", "2**64"]),
        ([*prompt, "--runtime", "xla", "--device", "cuda"], ["--device cuda", "--runtime eager"]),
        ([*prompt, "--device", "nowhere"], ["--device nowhere", "such as cpu"]),
        ([*prompt, "--device", "meta"], ["--device meta", "no values", "such as cpu"]),
        ([*prompt, "--chat-template-kwargs", "[1]"], ["--chat-template-kwargs [1]", "JSON object"]),
        ([*prompt, "--system", "s", "--raw"], ["--raw sends text as it is", "without --system"]),
        ([*prompt, "--target", str(tmp_path / "gone")], ["--target", "gone", "no such directory"]),
        ([*prompt, "--drafter", str(tmp_path / "gone")], ["--drafter", "gone", "no such directory", "ngram"]),
        ([*prompt, "--target", str(empty)], ["--target", "no config.json"]),
        ([*prompt, "--drafter", pair.target], ["--drafter", "not a DFlash drafter"]),
        ([*prompt, "--target", pair.drafter], ["--target", pair.drafter]),
        ([*prompt, "--drafter", pair.misfit], ["hidden_size=64 of the drafter", "trained for this target"]),
        ([*prompt, "--drafter", "none", "--block-size", "4"], ["block_size=4 without a drafter"]),
        ([*prompt, "--drafter", "ngram", "--block-size", "1"], ["--drafter ngram", "width=1", "from 2"]),
        ([*prompt, "--drafter", "ngram", "--union"], ["--union", "goes with a drafter"]),
        ([*prompt, "--drafter", "none", "--rows", "8"], ["--rows 8", "goes with a drafter"]),
        ([*prompt, "--rows", "65"], ["--rows", "65", "2<=x<=64"]),
        ([*prompt, "--regex", "(["], ["Grammar.regex('([')", "unclosed character class"]),
        ([*prompt, "--regex", "a", "--json-schema", "f"], ["--json-schema and --regex", "one of them"]),
        ([*prompt, "--json-schema", str(tmp_path / "none")], ["--json-schema", "No such file"]),
        ([*prompt, "--json-schema", str(binary)], ["--json-schema", "no JSON", "mend"]),
        ([*prompt, "--regex", "a", "--ignore-eos"], ["eos_token_id=[]", "no way to end"]),
        ([*prompt, "--verify-width", "99"], ["verify_width=99", "block_size=6"]),
        ([*prompt, "--verify-width", "wide"], ["verify_width='wide'", '"auto"']),
    ]


def test_errors_are_one_line_and_status_2(pair, capsys, tmp_path):
    (tmp_path / "void").write_text("\n\n")
    for options, words in errors(pair, tmp_path):
        assert generate(pair, *options) == 2, options
        out, err = capsys.readouterr()
        lines = [line for line in err.splitlines() if line.startswith("torch-dflash generate: ")]
        assert out == "" and len(lines) == 1 and lines[0] == err.splitlines()[-1], (options, err)
        assert "Traceback" not in err
        for word in words:
            assert word in lines[0], (options, err)


def test_a_target_that_lacks_weights_is_refused(pair, capsys, tmp_path):
    from safetensors.torch import load_file, save_file

    pair.model.save_pretrained(tmp_path)
    pair.tokenizer.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert generate(pair, "--prompt", "x", target=str(tmp_path)) == 2
    assert "its weights lack ['model.layers.1.mlp.up_proj.weight']" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_one_line(pair, capsys, tmp_path):
    for side, source in (("target", pair.model), ("drafter", make_drafter(pair.model))):
        folder = tmp_path / side
        source.save_pretrained(folder)
        pair.tokenizer.save_pretrained(folder)
        for file, content in (("model.safetensors", b"\x08"), ("config.json", b"{")):
            (folder / file).write_bytes(content)
            assert generate(pair, "--prompt", "x", **{side: str(folder)}) == 2
            last = capsys.readouterr().err.splitlines()[-1]
            assert last.startswith(f"torch-dflash generate: --{side} {folder}: "), last
            assert ("weights are damaged" in last) == file.endswith("safetensors"), last


def test_text_is_written_before_the_end(pair, capsys):
    streamer = StdoutStreamer(pair.tokenizer)
    for ids, shown in (("prompt", ""), ("a", "a"), ("é", "é"), ("b", "b")):
        streamer.put(torch.tensor(pair.tokenizer(ids)["input_ids"]))
        assert capsys.readouterr().out == shown
    streamer.put(torch.tensor(pair.tokenizer("€")["input_ids"][:1]))
    assert capsys.readouterr().out == ""
    streamer.end()
    assert capsys.readouterr().out == "\ufffd\n"


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_no_half_characters_and_nothing_is_lost(size):
    tokenizer = byte_tokenizer()
    text = "héllo €uro 😀, naïve\n¿qué?" * 3
    ids = tokenizer(text)["input_ids"]
    pieces = td.TextStream(tokenizer)
    shown = [pieces.push(ids[at : at + size]) for at in range(0, len(ids), size)]
    assert not any("\ufffd" in piece for piece in shown)
    assert "".join(shown) + pieces.push([], final=True) == text


def test_bytes_that_are_no_text_are_shown_in_the_end():
    tokenizer = byte_tokenizer()
    ids = torch.randint(1, 257, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    pieces = td.TextStream(tokenizer)
    shown = "".join(pieces.push([one]) for one in ids) + pieces.push([], final=True)
    assert "\ufffd" in shown
    half = tokenizer("€")["input_ids"][:2]
    pieces = td.TextStream(tokenizer)
    assert pieces.push(tokenizer("a")["input_ids"] + half) == "a"
    assert pieces.push([]) == "" and pieces.push([], final=True) == "\ufffd"
