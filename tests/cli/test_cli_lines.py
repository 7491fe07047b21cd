"""``generate --jsonl``: a bad line is that line's error, and no decoded line is lost."""

import io
import json
import sys
from types import SimpleNamespace

import pytest
from support.tiny import make_target
from support.tokenizers import TEMPLATE, byte_tokenizer

from torch_dflash.cli import main
from torch_dflash.engine.slots import Handle


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    make_target("llama", vocab_size=257, eos_token_id=0, pad_token_id=0).save_pretrained(folder)
    byte_tokenizer(TEMPLATE).save_pretrained(folder)
    return str(folder)


def generate(target, *options):
    given = ["--target", target, "--drafter", "ngram", "--runtime", "eager", "--max-new-tokens", "3"]
    return main(["generate", *given, *options])


def decode(target, monkeypatch, lines, *options):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"\n".join(lines))))
    return generate(target, "-", "--jsonl", *options)


def refuse(word):
    pytest.fail(f"{word} is no JSON")


def read(out):
    return [json.loads(line, parse_constant=refuse) for line in out.splitlines()]


BAD = {
    b'{"prompt": "x", "id": "\\ud800"}': "'\\ud800' is half a surrogate pair",
    b'{"prompt": "\\udfff"}': "half a surrogate pair",
    b'{"messages": [{"role": "\\ud800", "content": "x"}]}': "half a surrogate pair",
    b'{"turns": ["x", {"\\ud800": 1}]}': "half a surrogate pair",
    b'{"prompt": "\xed\xa0\x80"}': "invalid continuation byte",
    b"[" * 100_000: "nested more than 200 levels deep",
    b'{"prompt": "x", "id": ' + b"[" * 300 + b"]" * 300 + b"}": "nested more than 200 levels deep",
    b'{"prompt": "x", "id": NaN}': "NaN is no JSON",
    b'{"prompt": "x", "id": -Infinity}': "-Infinity is no JSON",
    b'{"prompt": "x", "id": 1e999}': "1e999 is beyond the largest float",
    b'{"prompt": "x", "id": ' + b"9" * 5000 + b"}": "a number of 5000 digits",
    '["{}"]'.format("é" * 40).encode(): "is no JSON object",
    b'{"turns": [null]}': "must be a list of strings",
    b'{"turns": [" ", "x"]}': 'turns=[" ", "x"]: no user says a word',
    b'{"messages": [{"role": "wizard", "content": "x"}]}': 'messages=[{"role": "wizard", "content"',
    b'{"prompt": " "}': "prompt='': it is empty",
}


def test_a_bad_line_is_that_lines_error_whatever_stands_in_it(target, monkeypatch, capsys):
    good = b'{"prompt": "x", "id": ["\\ud83d\\ude00", 12345678901234567890]}'
    assert decode(target, monkeypatch, [good, *BAD, good]) == 1
    out, err = capsys.readouterr()
    first, *found, last = read(out)
    assert first["text"] == last["text"] and first["id"] == last["id"] == ["😀", 12345678901234567890]
    for number, (line, words) in enumerate(zip(found, BAD.values(), strict=True), 2):
        assert line["line"] == number and line["error"].startswith(f"line {number}: ")
        assert words in line["error"] and len(line["error"]) < 250
    assert f"{len(BAD)} of {len(BAD) + 2} lines failed" in err


def test_fields_that_are_not_used_are_ignored_and_the_last_of_two_counts(target, monkeypatch, capsys):
    lines = [
        b'{"prompt": "x", "note": "\\ud800", "\\udc00": {"\\udfff": 1, "a": 2, "a": 3}}',
        b'{"prompt": ["y"], "id": "\\ud800", "prompt": "x", "id": 2}',
        b'{"\\ud800": 1}',
    ]
    assert decode(target, monkeypatch, lines) == 1
    one, two, three = read(capsys.readouterr().out)
    assert one["prompt"] == two["prompt"] == "x" and one["text"] == two["text"] and two["id"] == 2
    assert "fields ['\\ud800']: give exactly one of" in three["error"]


def test_the_last_seeds_are_counted_on_from_0(target, monkeypatch, capsys):
    found = []
    for seed in (2**64 - 1, -1):  # the same, modulo 2**64
        assert (
            decode(target, monkeypatch, [b'{"prompt": "x"}'] * 3, "--temperature", "1", "--seed", str(seed))
            == 0
        )
        found.append([line["text"] for line in read(capsys.readouterr().out)])
    assert found[0] == found[1] and len({*found[0]}) > 1


def test_an_output_that_holds_ascii_alone(target, monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert decode(target, monkeypatch, ['{"prompt": "é", "id": "€"}'.encode()]) == 0
    (line,) = read(out.buffer.getvalue().decode())
    assert (line["prompt"], line["id"]) == ("é", "€") and line["text"]


@pytest.mark.parametrize("error", [RuntimeError, RecursionError, ValueError])
def test_an_error_of_the_programs_own_comes_after_what_was_decoded(target, monkeypatch, capsys, error):
    once, calls = Handle.result, []

    def broken(self, *args, **options):
        calls.append(1)
        if len(calls) == 3:
            raise error("of the program")
        return once(self, *args, **options)

    monkeypatch.setattr(Handle, "result", broken)
    lines = [b'{"prompt": "a"}', b"[" * 2000, b'{"prompt": "b"}', b'{"prompt": "c"}', b'{"prompt": "d"}']
    with pytest.raises(error, match="of the program"):
        decode(target, monkeypatch, lines, "--batch-size", "1")
    found = read(capsys.readouterr().out)
    assert [line["line"] for line in found] == [1, 2, 3] and "text" in found[0] and "text" in found[2]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"type": NaN}', '["\\ud800"]'])
@pytest.mark.parametrize("option", ["--json-schema", "--chat-template-kwargs"])
def test_options_that_are_no_json(target, capsys, tmp_path, option, text):
    if option == "--json-schema":
        file = tmp_path / "schema.json"
        file.write_text(text)
        text = str(file)
    assert generate(target, "--prompt", "x", option, text) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"torch-dflash generate: {option} ") and "JSON" in line and len(line) < 400


def test_a_line_of_a_batch_file_says_its_custom_id(target, monkeypatch, capsys):
    lines = [
        b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", '
        b'"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "top_p": 0.9, '
        b'"seed": 5, "n": 1}}',
        b'{"prompt": "x", "custom_id": "b", "body": "data", "stop": null, "stream": false}',
        b'{"custom_id": "c", "body": {"input": "x"}}',
    ]
    assert decode(target, monkeypatch, lines) == 1
    one, two, three = read(capsys.readouterr().out)
    assert [line["custom_id"] for line in (one, two, three)] == ["a", "b", "c"]
    assert one["text"] == two["text"] and one["messages"] == [{"role": "user", "content": "x"}]
    assert "body has input" in three["error"]


BATCH_ERRORS = {
    '"prompt": "x", "body": {"max_tokens": 3}': "prompt beside body",
    '"temperature": 1, "body": {"prompt": "x"}': "temperature beside body",
    '"body": {"prompt": "x", "audio": {}}': "body has audio",
    '"url": "/v1/completions", "body": {"prompt": "x"}': "pass --raw",
    '"url": [], "body": {"prompt": "x"}': "must be /v1/chat/completions with messages",
    '"url": "/v1/embeddings", "body": {"prompt": "x"}': "must be /v1/chat/completions with messages",
}


@pytest.mark.parametrize("fields", BATCH_ERRORS)
def test_what_a_batch_file_asks_for_is_followed_or_an_error(target, monkeypatch, capsys, fields):
    assert decode(target, monkeypatch, [f'{{"custom_id": "a", {fields}}}'.encode()]) == 1
    (bad,) = read(capsys.readouterr().out)
    assert BATCH_ERRORS[fields] in bad["error"] and bad["custom_id"] == "a"
    raw = b'{"url": "/v1/completions", "body": {"prompt": "x"}}'
    assert decode(target, monkeypatch, [raw, b'{"prompt": "x"}'], "--raw") == 0
    one, two = read(capsys.readouterr().out)
    assert one["text"] == two["text"]


OWN = [
    ('"max_tokens": 2', ("--max-tokens", "2")), ('"temperature": 0.7', ("--temperature", "0.7")),
    ('"stop": "-"', ("--stop", "-")), ('"stop": ["-", "."]', ("--stop", "-", "--stop", ".")),
    ('"repetition_penalty": 1.5', ("--repetition-penalty", "1.5")), ('"ignore_eos": true', ("--ignore-eos",)),
    ('"temperature": 0.7, "top_p": 0.5', ("--temp", "0.7", "--top-p", "0.5")),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "options"), OWN)
def test_a_lines_own_option_is_the_commands_or_an_error(target, monkeypatch, capsys, fields, options):
    line = f'{{"prompt": "x", {fields}}}'.encode()
    assert decode(target, monkeypatch, [line, b'{"prompt": "x"}']) == 1
    bad, good = read(capsys.readouterr().out)
    assert "every line has the command's" in bad["error"] and "command of its own" in bad["error"]
    assert fields.partition(":")[0].strip('"') in bad["error"] and "text" in good
    assert decode(target, monkeypatch, [line], *options) == 0
    assert read(capsys.readouterr().out)[0]["text"]


def test_values_that_clients_send_by_default_ask_for_nothing(target, monkeypatch, capsys):
    fields = '"presence_penalty": 0.0, "frequency_penalty": 0, "top_logprobs": 0, "logprobs": 0'
    fields += ', "modalities": ["text"], "truncate_prompt_tokens": -1'
    plain = b'{"prompt": "x"}'
    lines = [f'{{"prompt": "x", {fields}}}'.encode(), b'{"body": {"prompt": "x", "audio": null}}', plain]
    assert decode(target, monkeypatch, lines) == 0
    assert len({line["text"] for line in read(capsys.readouterr().out)}) == 1
    assert decode(target, monkeypatch, lines[:1], "--presence-penalty", "0.5") == 1
    assert "presence_penalty=0.0: every line has" in read(capsys.readouterr().out)[0]["error"]


NO_COMMANDS = ['"n": 2', '"tools": [{}]', '"response_format": {"type": "json_object"}']
NO_COMMANDS += ['"eos_token_id": 0', '"n": 0', '"skip_special_tokens": false', '"prompt_logprobs": 0']
NO_COMMANDS += ['"guided_choice": ["a"]']
NO_COMMANDS += [
    '"guided_json": {}',
    '"allowed_token_ids": [1]',
    '"extra_body": {"top_k": 1}',
    '"max_length": 9',
]


@pytest.mark.parametrize("fields", NO_COMMANDS)
def test_an_option_that_no_command_has_is_a_lines_error(target, monkeypatch, capsys, fields):
    assert decode(target, monkeypatch, [f'{{"prompt": "x", {fields}}}'.encode()]) == 1
    (bad,) = read(capsys.readouterr().out)
    assert f"{fields.partition(':')[0][1:-1]}=" in bad["error"] and "no such option; leave it" in bad["error"]


def test_a_line_draws_from_its_own_seed(target, monkeypatch, capsys):
    lines = [b'{"prompt": "x"}', b'{"prompt": "x", "seed": 7}', b'{"prompt": "x", "seed": "7"}']
    assert decode(target, monkeypatch, lines, "--temperature", "1", "--seed", "7") == 1
    one, two, bad = read(capsys.readouterr().out)
    assert one["text"] == two["text"] and 'seed="7": must be an integer' in bad["error"]


def test_a_stop_text_is_why_an_answer_ended(target, monkeypatch, capsys):
    long = ("--max-new-tokens", "40", "--ignore-eos")
    assert decode(target, monkeypatch, [b'{"prompt": "line 1"}'], *long) == 0
    (whole,) = read(capsys.readouterr().out)
    assert whole["finish_reason"] == "length" and whole["new_tokens"] == 40
    stop = next(letter for letter in whole["text"][4:] if letter.isascii() and letter.isprintable())
    assert decode(target, monkeypatch, [b'{"prompt": "line 1"}'], *long, "--stop", stop) == 0
    (cut,) = read(capsys.readouterr().out)
    assert cut["text"].endswith(stop) and cut["finish_reason"] == "stop" and cut["new_tokens"] < 40
    exact = ("--max-new-tokens", str(cut["new_tokens"]), "--ignore-eos", "--stop", stop)
    assert decode(target, monkeypatch, [b'{"prompt": "line 1"}'], *exact) == 0
    assert read(capsys.readouterr().out)[0]["finish_reason"] == "stop"
