"""``torch-dflash chat``: lines in, the target's own answers out; no stop and no failure loses one."""

import io
import json
import signal
import sys
from types import SimpleNamespace

import pytest
from support.tiny import make_drafter, make_target
from support.tokenizers import GROWING, byte_tokenizer

from torch_dflash.chat import Chat
from torch_dflash.cli import main
from torch_dflash.cli.text import GREEN
from torch_dflash.storage.files import write_whole

NEW = 8
LETTERS = list(range(35, 60))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A saved pair whose text is letters alone, so that the template sends the text back unchanged."""
    folder = tmp_path_factory.mktemp("pair")
    target = make_target("qwen3", vocab_size=257, max_position_embeddings=256, tie_word_embeddings=False)
    drafter = make_drafter(target)
    target.generation_config.suppress_tokens = [i for i in range(257) if i not in LETTERS]
    tokenizer = byte_tokenizer(GROWING)
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    drafter.save_pretrained(folder / "drafter")
    return SimpleNamespace(folder=folder, model=target, tokenizer=tokenizer)


@pytest.fixture
def talk(pair, monkeypatch, capsys):
    """``talk(lines, *options)``: (exit status, stdout's lines, stderr)."""

    def run(lines, *options, terminal=False):
        stdin = io.StringIO("".join(f"{line}\n" for line in lines))
        monkeypatch.setattr(stdin, "isatty", lambda: terminal, raising=False)
        monkeypatch.setattr(sys, "stdin", stdin)
        command = ["chat", "--target", str(pair.folder / "target"), "--drafter", str(pair.folder / "drafter")]
        status = main([*command, "--runtime", "eager", "--max-new-tokens", str(NEW), *options])
        out, err = capsys.readouterr()
        return status, out.splitlines(), err

    return run


def own(pair, messages, new=NEW):
    inputs = pair.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = pair.model.generate(**inputs, max_new_tokens=new, do_sample=False, pad_token_id=0)
    return pair.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def conversation(pair, *questions, start=()):
    messages = list(start)
    for question in questions:
        messages += [{"role": "user", "content": question}]
        messages += [{"role": "assistant", "content": own(pair, messages)}]
    return messages


def answers(messages):
    return [message["content"] for message in messages if message["role"] == "assistant"]


def test_each_line_is_answered_after_all_before(pair, talk):
    status, out, err = talk(["hello", "", "and now?", "/stats", "/exit", "unheard"], "--system", "be brief")
    said = conversation(pair, "hello", "and now?", start=[{"role": "system", "content": "be brief"}])
    assert status == 0 and out == answers(said)
    fresh = 2 + len("<user>and now?") + 1 + len("<assistant>")  # and the answer's last token, and `</s>`
    assert f"last answer: {fresh} prompt tokens read, {NEW} new" in err and "acceptance length" in err
    first = len("<system>be brief") + 1 + len("<user>hello") + 1 + len("<assistant>")
    assert f"all 2: {first + fresh} prompt tokens read, 16 new" in err


def test_a_conversation_is_saved_and_goes_on(pair, talk, tmp_path):
    file = tmp_path / "talk.jsonl"
    status, _, _ = talk(["größe?", f"/save {file}"])
    said = conversation(pair, "größe?")
    assert status == 0 and json.loads(file.read_text()) == {"messages": said}
    status, out, _ = talk([f"/load {file}", "more", "/reset", "größe?"])
    assert status == 0 and out == [own(pair, [*said, {"role": "user", "content": "more"}]), *answers(said)]
    # The file is a line for generate.
    whole = conversation(pair, "größe?", "more")[:3]
    write_whole(file, lambda part: part.write_text(json.dumps({"messages": whole}) + "\n"))
    names = ["--target", str(pair.folder / "target"), "--drafter", str(pair.folder / "drafter")]
    line = ["--jsonl", "--file", str(file), "--runtime", "eager", "--max-new-tokens", str(NEW)]
    assert main(["generate", *names, *line]) == 0


def test_what_fails_is_one_line_and_loses_nothing(pair, talk, tmp_path):
    bad = tmp_path / "bad"
    bad.write_text('{"messages": ["x"]}')
    deep = tmp_path / "deep"
    deep.write_text("[" * 100_000)
    lines = ["hello", "/nope", f"/load {bad}", f"/load {tmp_path / 'none'}", f"/load {deep}"]
    lines += ["/load ~nobody-of-this-name/x", "/save ~nobody-of-this-name/x", "/save", f"/save {bad}/x"]
    lines += ["x" * 240]
    status, out, err = talk([*lines, "go on"])
    assert status == 1 and out == answers(conversation(pair, "hello", "go on"))
    for words in (
        "/nope: no such command; /help lists them.",
        f'/load {bad}: must hold {{"messages":',
        "none: No such file or directory; name another file.",
        f'/load {deep}: must hold {{"messages":',
        "/load ~nobody-of-this-name/x: ",
        "/save ~nobody-of-this-name/x: ",
        "/save: name a file.",
        "x: Not a directory; name another file.",
        "exceed max_length=256",
        "/reset begins anew, and --max-length has more room",
    ):
        assert words in err, words
    assert "Traceback" not in err
    assert talk(["/stats"])[2].strip().endswith("/stats: nothing was said yet.")
    assert "/load FILE" in talk(["/help"])[2]


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_stops_the_answer_and_not_the_program(pair, talk, monkeypatch, tmp_path, presses):
    stream, file = Chat.stream, tmp_path / "talk"

    def pressed(self, messages, **options):
        pieces = stream(self, messages, **options)

        def until():
            for number, piece in enumerate(pieces):
                if number == 2 and len(messages) == 1:
                    for _ in range(presses):
                        signal.raise_signal(signal.SIGINT)
                yield piece

        return until()

    monkeypatch.setattr(Chat, "stream", pressed)
    before = signal.getsignal(signal.SIGINT)
    status, out, _ = talk(["hello", "go on", f"/save {file}"])
    assert status == 0 and signal.getsignal(signal.SIGINT) is before
    messages = json.loads(file.read_text())["messages"]
    said = messages[1]["content"]
    whole = own(pair, messages[:1])
    assert whole.startswith(said) and 0 < len(said) < len(whole)
    assert out[1] == messages[3]["content"] == own(pair, messages[:3])


def test_on_a_terminal_drafts_are_green_and_lines_are_asked_for(pair, talk, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.delitem(sys.modules, "readline", raising=False)
    status, out, err = talk(["hello", "/nope"], "--drafter", "ngram", terminal=True)
    text = "\n".join(out)
    assert status == 0 and text.startswith("> ")  # a typing error is no failure of the program
    assert "Ctrl-D leaves" in err and "readline" in sys.modules  # the module gives `input` a history of lines
    plain = text.replace(GREEN, "").replace("\033[0m", "").replace("> ", "")
    assert plain.strip() == own(pair, [{"role": "user", "content": "hello"}])


def test_wrong_usage_is_one_line(pair, talk):
    for options, words in (
        (["--max-length", "8"], "--max-length 8 leaves no room beside --max-tokens 8"),
        (["--max-length", "9999"], "max_length=9999"),
        (["--top-k", "5"], "--top-k 5 at temperature 0"),
        (["--chat-template-kwargs", "[]"], "must be one JSON object"),
        (["--chat-template-kwargs", '{"tokenize": false}'], "template_options holds 'tokenize'"),
    ):
        status, out, err = talk(["hello"], *options)
        assert (status, out) == (2, []) and words in err and "Traceback" not in err


def test_samples_follow_the_seed_and_the_template_its_options(pair, talk):
    sampled = ["--temperature", "0.8", "--chat-template-kwargs", '{"terse": true}']
    first, again, other = (talk(["hello", "/stats"], *sampled, "--seed", seed) for seed in "334")
    assert first[1] == again[1] != other[1]
    assert f"last answer: {len('<user>hello!<assistant>') + 1} prompt tokens read" in first[2]
