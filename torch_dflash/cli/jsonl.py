"""Reads JSON lines and writes one result line each, in order, flushed when all before it are done."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch_dflash.cli.arguments import NEUTRAL, PENALTIES, SHOWN, check_prompt_length
from torch_dflash.cli.errors import UserError, one_line
from torch_dflash.cli.job import Job
from torch_dflash.cli.text import asks
from torch_dflash.engine.engine import Engine
from torch_dflash.engine.outputs import GenerateOutput
from torch_dflash.storage.json_text import parse_json

FIELDS = {
    "prompt": "a string",
    "turns": "a list of strings",
    "messages": 'a list of {"role": ..., "content": ...} with strings',
}
ECHOED = ("id", "custom_id", *FIELDS)
_NAMES = (
    "temperature stop ignore_eos logprobs top_logprobs chat_template_kwargs chat_template n best_of "
    "stream echo suffix stop_token_ids stop_strings eos_token_id min_tokens min_new_tokens min_length "
    "max_length n_predict logit_bias sequence_bias bad_words bad_words_ids suppress_tokens "
    "allowed_token_ids response_format grammar json_schema guided_json guided_regex guided_choice "
    "guided_grammar structured_outputs structural_tag tools tool_choice functions function_call "
    "length_penalty use_beam_search num_beams num_return_sequences do_sample typical_p epsilon_cutoff "
    "eta_cutoff repeat_penalty prompt_logprobs logprob_token_ids logits_processors truncate_prompt_tokens "
    "add_generation_prompt continue_final_message add_special_tokens reasoning_effort "
    "include_stop_str_in_output skip_special_tokens thinking_token_budget generation_config "
    "sampling_params extra_body enable_thinking modalities"
).split()
_IDLE: dict[str, Any] = dict.fromkeys(
    ("n", "best_of", "num_beams", "num_return_sequences", "length_penalty"), 1
)
_IDLE |= dict.fromkeys(("add_generation_prompt", "skip_special_tokens", "add_special_tokens"), True)
_IDLE |= {"tool_choice": "none", "response_format": {"type": "text"}}
"""Values with which an option asks for nothing, besides null, and false and what is empty of all others."""
_OFF = {"presence_penalty": 0, "frequency_penalty": 0, "logprobs": 0, "top_logprobs": 0}
_OFF |= {"modalities": ["text"], "truncate_prompt_tokens": -1}
"""Values that clients send by default. Each asks for nothing where the command leaves the option out, for no
model's config has one of its own."""
_BODY = (
    "model user metadata store service_tier stream_options request_id priority cache_salt safety_identifier "
    "prompt_cache_key return_token_ids parallel_tool_calls"
).split()
"""Fields of a batch file's ``body`` that change no text."""
_URLS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}
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


def read_items(data: bytes, encode: Callable[[list], list[int]], longest: int, arguments: Any) -> list[Item]:
    """Encode every line that is not blank; a bad line keeps its place with an ``error``.

    Args:
        data: the whole input.
        encode: chat messages to prompt ids.
        longest: the most tokens of a prompt.
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
            body = record.get("body")
            known = (body, record) if isinstance(body, dict) else (record,)
            item.echo = {key: one[key] for key in ECHOED for one in known if key in one}
            record = _flat(record)
            _check_options(record, arguments)
            item.seed = record.get("seed")
            messages = _messages(record)
            if "prompt" not in record and not asks(messages):
                raise UserError(f"{_shown(record)}: no user says a word in it; give one text of a user.")
            item.ids = encode(messages)
            check_prompt_length(item.ids, longest)
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
    return record


def _flat(record: dict[str, Any]) -> dict[str, Any]:
    """A line of OpenAI's and vLLM's batch form with the fields of its body; any other as it is."""
    body = record.get("body")
    if not isinstance(body, dict):
        return record
    for name in record:
        if name in FIELDS or name in OPTIONS or name == "seed":
            raise UserError(f"{name} beside body: a batch file has it inside of body; give it in one place.")
    for name, value in body.items():
        if value is not None and name not in (*FIELDS, *OPTIONS, *_BODY, "seed"):
            raise UserError(f"body has {name}: generate has no such option; leave it out.")
    if (url := record.get("url")) is not None and (not isinstance(url, str) or _URLS.get(url) not in body):
        known = " or ".join(f"{one} with {name}" for one, name in _URLS.items())
        raise UserError(f"url={json.dumps(url)[:SHOWN]}: must be {known} in its body.")
    return record | body


def _check_options(record: dict[str, Any], arguments: Any) -> None:
    """Raise `UserError` for an option of a line that is not the command's."""
    if not isinstance(seed := record.get("seed", 0), int | None) or isinstance(seed, bool):
        raise UserError(f"seed={json.dumps(seed)[:SHOWN]}: must be an integer.")
    if record.get("url") == "/v1/completions" and not arguments.raw:
        raise UserError(f'url="{record["url"]}": its prompts are raw text; pass --raw.')
    if record.get("url") == "/v1/chat/completions" and arguments.raw:
        raise UserError(f'url="{record["url"]}": its prompts are chats; leave --raw out.')
    for name, value in record.items():
        idle = arguments.temperature == 0 and name in NEUTRAL  # greedy text has no use for it
        if name not in OPTIONS or idle or value is None or not _asks(name, value):
            continue
        own = getattr(arguments, OPTIONS[name], None)
        own = list(own) if isinstance(own, tuple) else own
        if own in (None, False) and name in _OFF and value == _OFF[name]:
            continue
        value = [value] if name == "stop" and isinstance(value, str) else value
        if value != own or type(value) is not type(own) and bool in (type(value), type(own)):
            known = f"every line has the command's, {json.dumps(own)}; give this one to a command of its own."
            fix = known if hasattr(arguments, OPTIONS[name]) else "generate has no such option; leave it out."
            raise UserError(f"{name}={json.dumps(value)[:SHOWN]}: {fix}")


def _asks(name: str, value: Any) -> bool:
    if name in _IDLE or name.endswith(("_json", "_schema")):
        return value != _IDLE.get(name)
    return not (value is False or value in ("", [], {}))


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


def run_lines(engine: Engine | None, items: list[Item], job: Job) -> list[GenerateOutput]:
    """Decode all good lines and write every line to stdout in its turn; returns the outputs.

    Line n draws from its own seed or ``--seed`` + n - 1, modulo 2**64.
    """
    good, found = [item for item in items if item.error is None], iter(())
    if engine is not None:
        first = job.arguments.seed - 1
        seeds = [first + item.number if item.seed is None else item.seed for item in good]
        prompts, options = [item.ids for item in good], [{"seed": seed % 2**64} for seed in seeds]
        found = engine.map(prompts, options, **job.options)
    outputs = []
    for item in items:
        if item.error is not None:
            _write({"line": item.number, **item.echo, "error": item.error})
            continue
        outputs.append(next(found))
        _write(_result(item, outputs[-1], job))
    return outputs


def _result(item: Item, output: GenerateOutput, job: Job) -> dict[str, Any]:
    options, stats, (new,) = job.options, output.stats, output.new_tokens
    text = job.loaded.tokenizer.decode(new, skip_special_tokens=True)
    ended = len(new) < options["max_new_tokens"] or new[-1] in options["eos_token_id"]
    stopped = ended or any(stop in text for stop in options.get("stop_strings", ()))
    later = (stats.time_per_output_token or 0.0) * (len(new) - 1)
    return {
        "line": item.number,
        **item.echo,
        "text": text,
        "prompt_tokens": len(item.ids),
        "new_tokens": len(new),
        **_logprobs(output, new),
        "acceptance_lengths": stats.acceptance_lengths[0],
        "finish_reason": "stop" if stopped else "length",
        "seconds": round(stats.time_to_first_token + later, 6),
    }


def _logprobs(output: GenerateOutput, new: list[int]) -> dict[str, Any]:
    """The row's ids and log-probabilities, as far as they were asked for."""
    found: dict[str, Any] = {}
    if output.logprobs is not None:
        found = {"tokens": new, "logprobs": output.logprobs[0].tolist()}
    if output.top_ids is not None and output.top_logprobs is not None:
        both = output.top_ids[0].tolist(), output.top_logprobs[0].tolist()
        pairs = [list(zip(ids, logs, strict=True)) for ids, logs in zip(*both, strict=True)]
        found["top_logprobs"] = pairs
    return found


def _write(record: dict[str, Any]) -> None:
    line = json.dumps(record, ensure_ascii=False)
    try:
        line.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # standard output is ASCII, say
        line = json.dumps(record)
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
