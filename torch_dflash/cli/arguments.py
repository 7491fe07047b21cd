"""Options of the commands that decode, and their checks, made before torch is imported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import click

from torch_dflash.checks import CACHES, check_mesh, context_of
from torch_dflash.cli.command import COUNT, MODEL, flag, number_or_word, option
from torch_dflash.cli.errors import UserError, refusing
from torch_dflash.published.rows import checkpoints
from torch_dflash.runtime_kinds import RUNTIMES
from torch_dflash.storage.json_text import parse_json

DTYPES = ("auto", "float32", "bfloat16")
DRAFTER = ("--draft-model", "--drafter", "drafter")
NEW = ("--max-tokens", "--max-new-tokens", "max_new_tokens")
DEVICE = "torch device of --runtime eager, such as cuda"
TEMPLATE = option("--chat-template-kwargs", metavar="JSON", help="e.g. '{\"enable_thinking\": false}'")
NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
SHOWN = 60
"""Characters of a value that an error repeats."""
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size")


def runtime(default: str = "xla", **more: Any) -> click.Option:
    """``--runtime``, as `torch_dflash.generate` takes it."""
    return option("--runtime", type=click.Choice(RUNTIMES), default=default, **more)


def target_option(help: str = "Directory, hub id or demo.", metavar: str = "T") -> click.Option:
    """``--model``, also called ``--target``."""
    return option("--model", "--target", "target", type=MODEL, required=True, metavar=metavar, help=help)


def decoding() -> list[click.Parameter]:
    """The pair, and how it decodes; `torch_dflash.cli.job.Job` reads these."""
    kinds = {name.replace("_", "-"): int if name.endswith("size") else float for name in PENALTIES}
    unset = "Unset: what the model asks for."
    penalties = [option(f"--{name}", type=kind, metavar="N", help=unset) for name, kind in kinds.items()]
    return [
        target_option(),
        option(*DRAFTER, type=MODEL, metavar="D", help="Directory, hub id, demo, ngram or none (unset)."),
        option("--system", metavar="TEXT", help="System message of the chat template."),
        TEMPLATE,
        option(*NEW, type=COUNT, default=256, metavar="N", help="Most tokens of an answer."),
        option("--temp", "--temperature", "temperature", type=float, default=0.0, help="0 is greedy."),
        option("--top-k", type=int, default=0, help="0: off."),
        option("--top-p", type=float, default=1.0),
        option("--min-p", type=float, default=0.0),
        *penalties,
        option("--stop", multiple=True, metavar="TEXT", help="End with this text; may be repeated."),
        option("--seed", type=int, default=0, help="Line n of --jsonl draws from seed + n - 1."),
        flag("--ignore-eos", help="Never stop before --max-tokens."),
        option("--dtype", type=click.Choice(DTYPES), default="auto", help="Of weights; auto: as stored."),
        runtime(),
        option("--mesh", type=number_or_word, metavar="N", help="Chips that share each weight, or auto."),
        option("--cache", type=click.Choice(CACHES), default="static", help="Of the target."),
        flag("--no-verify", "verify", flag_value=False, default=True, help="Decode an untested class."),
        option("--device", help=DEVICE),
        option("--block-size", type=COUNT, metavar="W", help="Drafted block, the anchor included."),
        option("--verify-width", type=number_or_word, metavar="M", help="Rows that are verified, or auto."),
        flag("--union", help="Prompt lookup beside the drafter."),
        option("--rows", type=click.IntRange(2, 64), metavar="R", help="Verify trees of drafts with R rows."),
    ]  # fmt: skip


def check_call_options(arguments: SimpleNamespace) -> None:
    """Refuse values of `decoding` options that need no model to be refused."""
    for name, off in NEUTRAL.items():
        value = getattr(arguments, name)
        if arguments.temperature == 0 and value != off:
            raise UserError(
                f"--{name.replace('_', '-')} {value} at temperature 0: greedy decoding filters nothing; set "
                "--temperature."
            )
    check_device(arguments)
    with refusing(ValueError, before="--"):
        check_mesh(arguments.mesh, arguments.runtime, getattr(arguments, "replicas", 1))
    template_options(arguments)


def check_device(arguments: SimpleNamespace) -> None:
    """Refuse ``--device`` with ``--runtime xla``, which ignores it."""
    if arguments.device and RUNTIMES[arguments.runtime].needs_jax:
        raise UserError(
            f"--device {arguments.device} with --runtime xla: XLA runs on JAX's default device; leave it out "
            "or use --runtime eager."
        )


def template_options(arguments: SimpleNamespace) -> dict[str, Any] | None:
    """The extra variables of the chat template, from ``--chat-template-kwargs``; None: unset."""
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


def longest_prompt(max_new_tokens: int, target: Any) -> int:
    """The most tokens of a prompt that leave room for ``--max-tokens`` in the target's context."""
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


def check_prompt_length(ids: list[int], longest: int) -> None:
    """Raise `UserError` for a prompt of more than ``longest`` tokens."""
    if len(ids) > longest:
        raise UserError(
            f"prompt of {len(ids)} tokens: the context leaves room for {longest} beside the new tokens; "
            "shorten it or lower --max-tokens."
        )
