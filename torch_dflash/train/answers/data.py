"""Prompts and the target's answers to them, as JSON lines."""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch_dflash.storage.files import StageError, write_atomically
from torch_dflash.train.stages import check_shards

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Prompt:
    """User turns of one conversation, answered in order."""

    source: str
    turns: list[str]


@dataclass(frozen=True)
class Answer:
    """One answer of the target: the conversation before, and the ids (with the stop id if reached).

    ``chat_template_kwargs`` are the template variables of the question; None: not recorded.
    """

    source: str
    messages: Messages
    response_ids: list[int]
    chat_template_kwargs: dict[str, Any] | None = None


def read_prompts(paths: Iterable[Path | str]) -> list[Prompt]:
    """Prompts of JSON-lines files (plain or .gz), each ``{"turns": [...]}`` or ``{"prompt": "..."}``.

    A line may name its ``source``; the default is the file's name.

    Raises:
        StageError: an empty file, or a line of another form; the message names file and line.
    """
    return [prompt for path in paths for prompt in _prompts(Path(path))]


def read_answers(paths: Sequence[Path | str]) -> list[Answer]:
    """Answers of JSON-lines files or of directories of them, in the order of their names.

    Raises:
        StageError: no file, a missing shard, no answer in any, or a line without ``response_ids`` and
            ``messages`` (or ``prompt``).
    """
    files = [file for path in paths for file in _answer_files(Path(path))]
    answers = [_answer(*line) for file in files for line in _lines(file)]
    if not answers:
        raise StageError(f"{', '.join(map(str, paths))}: no answers in there; regenerate some first.")
    return answers


def count_answers(path: Path) -> int:
    """Number of answers in a shard; 0 if all prompts were left out."""
    return sum(1 for _ in _lines(path))


def write_answers(path: Path, answers: list[Answer]) -> None:
    """Write a shard of answers, whole or not at all."""
    records = ({name: value for name, value in asdict(one).items() if value is not None} for one in answers)
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    # No time stamp inside: the same answers make the same file.
    write_atomically(path, lambda part: part.write_bytes(gzip.compress(text.encode(), mtime=0)))


def encode_conversation(
    tokenizer: Any, messages: Messages, template: dict[str, Any] | None = None
) -> list[int]:
    """Ids of a conversation by the tokenizer's chat template, up to the assistant's turn.

    Args:
        template: further variables of the chat template, such as ``enable_thinking``.

    Raises:
        StageError: several messages, and no template to join them.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        if len(messages) > 1:
            raise StageError(
                f"a conversation of {len(messages)} messages, but the tokenizer has no chat template to join "
                "them; use prompts of one turn, or give the tokenizer a template."
            )
        return tokenizer(messages[-1]["content"])["input_ids"]
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, **(template or {})
    )
    return list(encoded["input_ids"])


def _answer_files(path: Path) -> list[Path]:
    # Hidden files are partial writes of killed processes.
    files = sorted(path.glob("[!.]*.jsonl*")) if path.is_dir() else [path]
    if not files:
        raise StageError(f"{path} holds no *.jsonl or *.jsonl.gz: regenerate answers into it first.")
    if path.is_dir():
        again = "run regenerate again, which makes those that are missing, or name the files themselves"
        check_shards(path, files, f"{again} to use these alone.")
    return files


def _prompts(path: Path) -> list[Prompt]:
    prompts = [_prompt(*line) for line in _lines(path)]
    if not prompts:
        raise StageError(f"{path} holds no prompts; write one on each line, or leave the file out.")
    return prompts


def _lines(path: Path) -> Iterator[tuple[Path, int, dict]]:
    opener = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        if path.suffix == ".gz" and not path.stat().st_size:  # gzip takes it for a file of no lines
            raise EOFError("it is empty")
        with opener(path, "rt", encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield path, number, json.loads(line)
    except UnicodeDecodeError as error:
        raise StageError(
            f"{path} is not UTF-8 after line {number} ({error}); convert it. If a stage wrote it, delete it "
            "and run that stage again: only this file is made anew."
        ) from error
    except (ValueError, RecursionError) as error:
        raise StageError(f"{path}:{number} is not JSON ({error}); write one object on each line.") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise StageError(
            f"{path} is damaged after line {number} ({error}); delete it and run the stage that wrote it "
            "again: only this file is made anew."
        ) from error
    except OSError as error:
        raise StageError(f"{path}: {error.strerror}; pass a file of JSON lines.") from error


def _prompt(path: Path, number: int, line: Any) -> Prompt:
    fields = line if isinstance(line, dict) else {}
    turns: Any = fields.get("turns") or [fields.get("prompt")]
    if not isinstance(turns, list) or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise StageError(
            f'{path}:{number} has no text to answer ({str(line)[:80]}): write {{"turns": ["..."]}} or '
            '{"prompt": "..."} on each line.'
        )
    _check_text(path, number, turns)
    return Prompt(_source(path, number, fields), turns)


def _answer(path: Path, number: int, line: Any) -> Answer:
    fields = line if isinstance(line, dict) else {}
    messages = fields.get("messages") or [{"role": "user", "content": fields.get("prompt")}]
    ids: Any = fields.get("response_ids")
    valid = isinstance(messages, list) and all(
        isinstance(item, dict) and isinstance(item.get("content"), str) for item in messages
    )
    if not valid or not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
        raise StageError(
            f"{path}:{number} is not an answer of the target ({str(line)[:80]}): needs messages (or prompt) "
            "and response_ids; `torch-dflash train regenerate` writes such files."
        )
    _check_text(path, number, [item["content"] for item in messages])
    template = fields.get("chat_template_kwargs")
    if template is not None and not isinstance(template, dict):
        raise StageError(f"{path}:{number} has chat_template_kwargs={template!r}: must be a JSON object.")
    return Answer(_source(path, number, fields), messages, ids, template)


def _source(path: Path, number: int, fields: dict) -> str:
    source = fields.get("source")
    if source is None or source == "":
        source = path.name.split(".")[0]
    if not isinstance(source, str):
        raise StageError(f"{path}:{number} has source={source!r}: must be a text, or left out.")
    _check_text(path, number, [source])
    return source


def _check_text(path: Path, number: int, texts: list[str]) -> None:
    # JSON may spell half of a surrogate pair, which no tokenizer takes.
    for text in texts:
        half = next((letter for letter in text if 0xD800 <= ord(letter) <= 0xDFFF), None)
        if half is not None:
            raise StageError(f"{path}:{number} holds half a surrogate pair ({half!a}); remove it.")


def draw(directory: Path, count: int, seed: int = 0) -> list[tuple[str, str]]:
    """``count`` first turns of the prompts in ``directory``, JSON lines as `read_prompts` takes, by ``seed``.

    Returns each question with its file's name; the files take turns.

    Raises:
        StageError: no such folder, too few prompts, or as of `read_prompts`.
    """
    if not directory.is_dir():
        raise StageError(f"{directory}: is not a folder; name one that holds *.jsonl or *.jsonl.gz.")
    generator, decks = random.Random(seed), []
    for path in sorted(directory.glob("[!.]*")):
        if not path.name.endswith((".jsonl", ".jsonl.gz")):
            continue
        prompts = read_prompts([path])
        name = path.name.split(".")[0]
        decks.append([(name, one.turns[0]) for one in generator.sample(prompts, len(prompts))])
    drawn = [
        deck[place] for place in range(max(map(len, decks), default=0)) for deck in decks if place < len(deck)
    ]
    if len(drawn) < count:
        raise StageError(f"{directory}: {len(drawn)} prompt(s) in its *.jsonl and *.jsonl.gz; ask for fewer.")
    return drawn[:count]
