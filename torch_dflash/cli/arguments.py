"""Arguments of commands that decode: refused, and input read, before torch is imported."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch_dflash.checks import check_mesh, context_of
from torch_dflash.cli.errors import UserError
from torch_dflash.published.rows import checkpoints
from torch_dflash.storage.json_text import parse_json

NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
SHOWN = 60
"""Characters of a value that an error repeats."""
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size")


def read_input(arguments: SimpleNamespace) -> bytes:
    """The bytes of --prompt, --file or stdin, of which there must be exactly one."""
    given = {"--prompt": arguments.prompt, "--file": arguments.file, "-": arguments.stdin}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) != 1:
        what = " and ".join(given) + ": two inputs" if given else "no input"
        raise UserError(f"{what}; give exactly one of --prompt TEXT, --file PATH and -.")
    if arguments.prompt is not None:
        return arguments.prompt.encode("utf-8", "surrogateescape")
    if arguments.stdin or arguments.file == "-":
        return sys.stdin.buffer.read()
    return _read_file("--file", arguments.file)


def read_schema(arguments: SimpleNamespace) -> str | None:
    """The text of --json-schema, which is JSON; None: it was not given."""
    if arguments.json_schema is None:
        return None
    if arguments.regex is not None:
        raise UserError("--json-schema and --regex both say what an answer may be; give one of them.")
    try:
        text = _read_file("--json-schema", arguments.json_schema).decode("utf-8-sig")
        parse_json(text)
        return text
    except ValueError as error:
        raise UserError(f"--json-schema {arguments.json_schema}: no JSON ({error}); mend the file.") from None


def _read_file(option: str, name: str) -> bytes:
    try:
        return Path(name).expanduser().read_bytes()
    except OSError as error:
        raise UserError(f"{option} {name}: {error.strerror}; give a file that can be read.") from None


def check_options(arguments: SimpleNamespace) -> None:
    """Refuse what needs no model to be refused: loading one takes minutes."""
    if arguments.batch_size is not None and not arguments.jsonl:
        raise UserError(
            f"--batch-size {arguments.batch_size} with one prompt: it is for --jsonl; leave it out."
        )
    if arguments.replicas != 1 and not arguments.jsonl:
        raise UserError(
            f"--replicas {arguments.replicas} with one prompt: they share lines of --jsonl; leave it out."
        )
    if (arguments.logprobs or arguments.top_logprobs is not None) and not arguments.jsonl:
        raise UserError("--logprobs, --top-logprobs: they stand in JSON lines; pass --jsonl.")
    if arguments.prompt is not None and arguments.jsonl:
        raise UserError("--jsonl with --prompt: JSON lines come from --file PATH or -; leave --jsonl out.")
    check_call_options(arguments)


def check_call_options(arguments: SimpleNamespace) -> None:
    """Refuse values of `add_call_options` that need no model to be refused."""
    for name, off in NEUTRAL.items():
        value = getattr(arguments, name)
        if arguments.temperature == 0 and value != off:
            raise UserError(
                f"--{name.replace('_', '-')} {value} at temperature 0: greedy decoding filters nothing; set "
                "--temperature."
            )
    check_device(arguments)
    try:
        check_mesh(arguments.mesh, arguments.runtime, getattr(arguments, "replicas", 1))
    except ValueError as error:
        raise UserError(f"--{error}") from None
    template_options(arguments)


def check_device(arguments: SimpleNamespace) -> None:
    """Refuse --device where XLA would not heed it."""
    if arguments.device and arguments.runtime == "xla":
        raise UserError(
            f"--device {arguments.device} with --runtime xla: XLA runs on JAX's default device; leave it out "
            "or use --runtime eager."
        )


def template_options(arguments: SimpleNamespace) -> dict[str, Any] | None:
    """The chat template's further variables; None: none given."""
    given = arguments.chat_template_kwargs
    if given is None:
        return None
    shown = given if len(given) <= SHOWN else f"{given[:SHOWN]}..."
    try:
        parsed = parse_json(given)
    except ValueError as error:
        raise UserError(f"--chat-template-kwargs {shown}: must be one JSON object ({error}).") from None
    if not isinstance(parsed, dict):
        raise UserError(f"--chat-template-kwargs {shown}: must be one JSON object.")
    return parsed


def prompt_room(max_new_tokens: int, target: Any) -> int:
    """Most tokens a prompt may have beside --max-tokens in the target's context."""
    context = context_of(target)
    if max_new_tokens >= context:
        raise UserError(
            f"--max-tokens {max_new_tokens}: the target's max_position_embeddings={context} "
            "leaves no room for a prompt; lower it."
        )
    return context - max_new_tokens


def plainly(target: str, command: str) -> str:
    """The line that a command prints when it decodes ``target`` without a drafter."""
    known = [row.drafter for row in checkpoints if row.drafter and row.verdict[0] and row.is_of(target)]
    known = ["demo"] if target == "demo" else known
    hint = f"pass --draft-model {known[0]}" if known else "torch-dflash list shows published ones"
    return f"{command}: no --draft-model, so decoding is plain; {hint}."


def check_room(ids: list[int], room: int) -> None:
    """Raise `UserError` for a prompt of more than ``room`` tokens."""
    if len(ids) > room:
        raise UserError(
            f"prompt of {len(ids)} tokens: the context leaves room for {room} beside the new tokens; shorten "
            "it or lower --max-tokens."
        )
