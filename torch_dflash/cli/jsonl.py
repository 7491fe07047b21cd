"""Reads JSON lines and writes one result line each, in order, flushed when its batch is done."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch_dflash.cli.arguments import NEUTRAL, PENALTIES, SHOWN, check_room
from torch_dflash.cli.errors import UserError, one_line
from torch_dflash.cli.job import Job
from torch_dflash.cli.text import asks
from torch_dflash.engine.engine import Engine
from torch_dflash.engine.outputs import GenerateOutput
from torch_dflash.requests.prompts import pad_rows
from torch_dflash.storage.json_text import parse_json

FIELDS = {
    "prompt": "a string",
    "turns": "a list of strings",
    "messages": 'a list of {"role": ..., "content": ...} with strings',
}
ECHOED = ("id", "custom_id", *FIELDS)
_NAMES = (
    "temperature stop ignore_eos logprobs top_logprobs chat_template_kwargs n best_of stream echo suffix "
    "stop_token_ids min_tokens logit_bias response_format guided_json guided_regex structured_outputs tools "
    "bad_words length_penalty use_beam_search do_sample prompt_logprobs"
).split()
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_new_tokens")
OPTIONS = dict.fromkeys(_LENGTHS, "max_new_tokens") | {name: name for name in (*_NAMES, *NEUTRAL, *PENALTIES)}
"""Options that lines of batch files may hold, with the command's own names."""


@dataclass
class Item:
    """A line of input: its ``number`` from 1, fields to echo, its ``ids`` and ``seed``, or its ``error``."""

    number: int
    echo: dict[str, Any] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)
    error: str | None = None
    seed: int | None = None


def read_items(data: bytes, encode: Callable[[list], list[int]], room: int, arguments: Any) -> list[Item]:
    """Encode every line that is not blank; a bad line keeps its place with an ``error``.

    Args:
        data: the whole input.
        encode: chat messages to prompt ids.
        room: the most tokens of a prompt.
        arguments: the command's, which all lines share.
    """
    items = []
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        item = Item(number)
        items.append(item)
        try:
            record = _record(line.strip())
            item.echo = {key: record[key] for key in ECHOED if key in record}
            _check_options(record, arguments)
            item.seed = record.get("seed")
            messages = _messages(record)
            if "prompt" not in record and not asks(messages):
                raise UserError(f"{_shown(record)}: no user says a word in it; give one text of a user.")
            item.ids = encode(messages)
            check_room(item.ids, room)
        except UserError as error:
            item.error = f"line {number}: {one_line(error)}"
    return items


def _record(line: bytes) -> dict[str, Any]:
    shown = line[:SHOWN].decode("utf-8", "replace")
    try:
        record = parse_json(line.decode("utf-8"), used=(*ECHOED, "body"))
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError among them
        raise UserError(f"{shown!r} is not JSON ({error}); write one object per line.") from None
    if not isinstance(record, dict):
        raise UserError(f'{shown!r} is no JSON object; write {{"prompt": "..."}}.')
    body = record.get("body")  # OpenAI's and vLLM's batch form
    return record | body if isinstance(body, dict) and not any(name in record for name in FIELDS) else record


def _check_options(record: dict[str, Any], arguments: Any) -> None:
    """Raise `UserError` for an option of a line that is not the command's."""
    if not isinstance(seed := record.get("seed", 0), int | None) or isinstance(seed, bool):
        raise UserError(f"seed={json.dumps(seed)[:SHOWN]}: must be an integer.")
    for name, value in record.items():
        idle = arguments.temperature == 0 and name in NEUTRAL  # greedy text has no use for it
        if name not in OPTIONS or idle or name in ("n", "best_of") and value == 1:
            continue
        own = getattr(arguments, OPTIONS[name], None)
        own = list(own) if isinstance(own, tuple) else own
        if (([value] if name == "stop" and isinstance(value, str) else value) or None) != (own or None):
            known = f"every line has the command's, {json.dumps(own)}; give this one to a command of its own."
            fix = known if hasattr(arguments, OPTIONS[name]) else "generate has no such option; leave it out."
            raise UserError(f"{name}={json.dumps(value)[:SHOWN]}: {fix}")


def _messages(record: dict[str, Any]) -> list[dict[str, Any]]:
    given = [name for name in FIELDS if name in record]
    if len(given) != 1:
        found = " and ".join(given) if given else f"fields {sorted(record)}"
        raise UserError(f"{found}: give exactly one of {', '.join(FIELDS)}.")
    value = record[given[0]]
    if given[0] == "prompt" and isinstance(value, str):
        return [{"role": "user", "content": value}]
    if given[0] == "turns" and isinstance(value, list) and value and isinstance(value[0], str):
        return [{"role": "user", "content": value[0]}]
    entries = value if isinstance(value, list) and all(isinstance(entry, dict) for entry in value) else []
    texts = [entry.get(name) for entry in entries for name in ("role", "content")]
    if given[0] == "messages" and texts and all(isinstance(text, str) for text in texts):
        return value
    raise UserError(f"{_shown(record)}: must be {FIELDS[given[0]]}.")


def _shown(record: dict[str, Any]) -> str:
    """The field that holds the prompt, and its value."""
    return next(f"{name}={json.dumps(record[name])[:SHOWN]}" for name in FIELDS if name in record)


def batches(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Runs of items in their order, with at most ``size`` good ones in each."""
    batch: list[Item] = []
    for item in items:
        if item.error is None and sum(other.error is None for other in batch) == size:
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


def decode_items(engine: Engine, items: list[Item], seed: int, options: dict[str, Any]) -> GenerateOutput:
    """Decode the good items of a batch; line n draws from its own seed or ``seed + n - 1``, modulo 2**64."""
    own = [seed + item.number - 1 if item.seed is None else item.seed for item in items]
    options = options | {"seed": [one % 2**64 for one in own], "return_dict_in_generate": True}
    output: Any = engine.generate(*pad_rows([item.ids for item in items]), **options)
    return output


def run_lines(engine: Engine | None, items: list[Item], job: Job, batch_size: int) -> list[GenerateOutput]:
    """Decode all batches and write their lines to stdout; returns the outputs."""
    outputs = []
    for batch in batches(items, batch_size):
        good, results = [item for item in batch if item.error is None], iter(())
        if good and engine is not None:
            started = time.perf_counter()
            output = decode_items(engine, good, job.arguments.seed, job.options)
            seconds = time.perf_counter() - started
            outputs.append(output)
            results = _results(good, output, seconds, job)
        for item in batch:
            failed = {"line": item.number, **item.echo, "error": item.error}
            _write(failed if item.error is not None else next(results))
    return outputs


def _results(items: list[Item], output: GenerateOutput, seconds: float, job: Job) -> Iterator[dict]:
    options, tokenizer = job.options, job.loaded.tokenizer
    rows = zip(items, output.new_tokens, output.stats.acceptance_lengths, strict=True)
    for row, (item, new, lengths) in enumerate(rows):
        text, stops = tokenizer.decode(new, skip_special_tokens=True), options.get("stop_strings", ())
        ended = len(new) < options["max_new_tokens"] or new[-1] in options["eos_token_id"]
        yield {
            "line": item.number,
            **item.echo,
            "text": text,
            "prompt_tokens": len(item.ids),
            "new_tokens": len(new),
            **_logprobs(output, row, new),
            "acceptance_lengths": lengths,
            "finish_reason": "stop" if ended or any(stop in text for stop in stops) else "length",
            "seconds": round(seconds, 6),
        }


def _logprobs(output: GenerateOutput, row: int, new: list[int]) -> dict[str, Any]:
    """A row's ids and log-probabilities, as far as they were asked for."""
    found: dict[str, Any] = {}
    if output.logprobs is not None:
        found = {"tokens": new, "logprobs": output.logprobs[row, : len(new)].tolist()}
    if output.top_ids is not None and output.top_logprobs is not None:
        both = output.top_ids[row].tolist(), output.top_logprobs[row].tolist()
        pairs = [list(zip(ids, logs, strict=True)) for ids, logs in zip(*both, strict=True)]
        found["top_logprobs"] = pairs[: len(new)]
    return found


def _write(record: dict[str, Any]) -> None:
    line = json.dumps(record, ensure_ascii=False)
    try:
        line.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # standard output is ASCII, say
        line = json.dumps(record)
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
