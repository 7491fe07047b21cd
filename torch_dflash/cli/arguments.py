"""What a user of ``generate`` asked for: input read, options checked, before anything is decoded."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from torch_dflash.checks import CACHES, check_mesh, context_of
from torch_dflash.cli.errors import UserError
from torch_dflash.cli.loading import DRAFTERS, DTYPES, TARGETS, Loaded
from torch_dflash.engine.defaults import default_stop_ids, penalty_of
from torch_dflash.storage.json_text import parse_json

NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
SHOWN = 60
"""Characters of a value that an error repeats."""
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size")


def add_call_options(parser: argparse.ArgumentParser) -> None:
    """Declare what `call_options` and `torch_dflash.cli.job.Job` read: the pair, and how it decodes."""
    add = parser.add_argument
    names = f"directory, hub id or {', '.join(TARGETS)}"
    add("--target", required=True, metavar="T", help=f"the model whose text comes out: {names}")
    names = f"directory, hub id or {', '.join(DRAFTERS)}"
    add("--drafter", required=True, metavar="D", help=f"what drafts for it: {names}")
    add("--system", metavar="TEXT", help="system message of the chat template")
    add("--chat-template-kwargs", metavar="JSON", help="e.g. '{\"enable_thinking\": false}'")
    add("--max-new-tokens", type=int, default=256, metavar="N")
    add("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    add("--top-k", type=int, default=0, help="0 (default): off")
    add("--top-p", type=float, default=1.0)
    add("--min-p", type=float, default=0.0)
    for name in PENALTIES:
        kind = int if name.endswith("size") else float
        add(f"--{name.replace('_', '-')}", type=kind, metavar="N", help="unset: what the model asks for")
    add("--stop", action="append", metavar="TEXT", help="end with this text; may be given more than once")
    add("--seed", type=int, default=0, help="line n of --jsonl draws from seed + n - 1")
    add("--ignore-eos", action="store_true", help="never stop before --max-new-tokens")
    add("--dtype", choices=DTYPES, default="auto")
    add("--runtime", choices=("xla", "eager"), default="xla")
    add("--mesh", type=number_or_word, metavar="N", help="chips that share each weight, or auto for all")
    add("--cache", choices=CACHES, default="static", help="of the target (default static)")
    add("--no-verify", dest="verify", action="store_false", help="decode a class that is not tested, unseen")
    add("--device", help="torch device of --runtime eager, such as cuda")
    add("--block-size", type=int, metavar="W", help="drafted block, the anchor included")
    add("--verify-width", type=number_or_word, metavar="M", help="how much of the block is verified, or auto")


def read_input(arguments: argparse.Namespace) -> bytes:
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


def read_schema(arguments: argparse.Namespace) -> str | None:
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


def check_options(arguments: argparse.Namespace) -> None:
    """Refuse what needs no model to be refused: loading one takes minutes."""
    if arguments.batch_size is not None and arguments.batch_size < 1:
        raise UserError(f"--batch-size {arguments.batch_size}: must be an integer of at least 1.")
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


def check_call_options(arguments: argparse.Namespace) -> None:
    """Refuse values of `add_call_options` that need no model to be refused."""
    if arguments.max_new_tokens < 1:
        raise UserError(f"--max-new-tokens {arguments.max_new_tokens}: must be an integer of at least 1.")
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


def number_or_word(text: str) -> int | str:
    """The value of ``--verify-width`` or ``--mesh``, to be checked: a number, or a word such as "auto"."""
    return int(text) if text.lstrip("-").isdecimal() else text


def check_device(arguments: argparse.Namespace) -> None:
    """Refuse --device where XLA would not heed it."""
    if arguments.device and arguments.runtime == "xla":
        raise UserError(
            f"--device {arguments.device} with --runtime xla: XLA runs on JAX's default device; leave it out "
            "or use --runtime eager."
        )


def template_options(arguments: argparse.Namespace) -> dict[str, Any] | None:
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


def call_options(arguments: argparse.Namespace, loaded: Loaded) -> dict[str, Any]:
    """The options of every call on the pair; the seed comes with each call."""
    options: dict[str, Any] = {
        "max_new_tokens": arguments.max_new_tokens,
        "do_sample": arguments.temperature != 0,
        "eos_token_id": [] if arguments.ignore_eos else default_stop_ids(loaded.target, loaded.tokenizer),
    }
    if options["do_sample"]:
        for name in ("temperature", *NEUTRAL):
            options[name] = getattr(arguments, name)
    options |= {name: getattr(arguments, name) for name in PENALTIES}
    if arguments.stop:
        options |= {"stop_strings": arguments.stop, "tokenizer": loaded.tokenizer}
    return {name: value for name, value in options.items() if value is not None}


def tell_penalty(command: str, target: Any) -> bool:
    """Say that a drafter learns and is judged without the model's repetition penalty; whether it has one."""
    penalty = penalty_of(target)
    if penalty:
        print(
            f"torch-dflash {command}: the model's repetition_penalty={penalty} is not applied",
            file=sys.stderr,
        )
    return bool(penalty)


def prompt_room(max_new_tokens: int, target: Any) -> int:
    """Most tokens a prompt may have beside --max-new-tokens in the target's context."""
    context = context_of(target)
    if max_new_tokens >= context:
        raise UserError(
            f"--max-new-tokens {max_new_tokens}: the target's max_position_embeddings={context} "
            "leaves no room for a prompt; lower it."
        )
    return context - max_new_tokens


def check_room(ids: list[int], room: int) -> None:
    """Raise `UserError` for a prompt of more than ``room`` tokens."""
    if len(ids) > room:
        raise UserError(
            f"prompt of {len(ids)} tokens: the context leaves room for {room} beside the new tokens; shorten "
            "it or lower --max-new-tokens."
        )
