"""The command line: each command's words, declared without importing what it runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import click

from torch_dflash import __version__
from torch_dflash.checks import CACHES, RUNTIMES
from torch_dflash.cli.arguments import PENALTIES, check_call_options, check_device, check_options
from torch_dflash.cli.call import PROGRAM, command, quiet_flag
from torch_dflash.cli.errors import UserError
from torch_dflash.cli.options import COUNT, FILE, MODEL, PATH, flag, number_or_word, option
from torch_dflash.cli.tpu_commands import aot, fit_memory
from torch_dflash.cli.train_commands import train
from torch_dflash.cli.writable import check_outputs
from torch_dflash.demo.questions import QUESTIONS

DTYPES = ("auto", "float32", "bfloat16")
TARGET, DRAFTER = ("--model", "--target", "target"), ("--draft-model", "--drafter", "drafter")
NEW = ("--max-tokens", "--max-new-tokens", "max_new_tokens")
DEVICE = "torch device of --runtime eager, such as cuda"
TEMPLATE = option("--chat-template-kwargs", metavar="JSON", help="e.g. '{\"enable_thinking\": false}'")


def runtime(default: str = "xla", **more: Any) -> click.Option:
    """``--runtime``, as `torch_dflash.generate` takes it."""
    return option("--runtime", type=click.Choice(RUNTIMES), default=default, **more)


def decoding() -> list[click.Parameter]:
    """The pair, and how it decodes: what `torch_dflash.cli.job.Job` reads."""
    penalties: list[click.Parameter] = [
        option(
            f"--{name.replace('_', '-')}",
            type=int if name.endswith("size") else float,
            metavar="N",
            help="Unset: what the model asks for.",
        )
        for name in PENALTIES
    ]
    return [
        option(*TARGET, type=MODEL, required=True, metavar="T", help="Directory, hub id or demo."),
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


def _dash(word: str) -> str:
    if word != "-":
        raise click.UsageError(f"{word!r} has no option before it; a prompt is --prompt TEXT.")
    return word


generate = command(
    "generate",
    [
        *decoding(),
        click.Argument(["stdin"], required=False, type=_dash, metavar="[-]"),
        option("--prompt", metavar="TEXT"),
        option(
            "--file",
            type=FILE,
            metavar="PATH",
            help="The whole file is one prompt; with --jsonl, one prompt per line.",
        ),
        flag(
            "--jsonl",
            help='Input lines {"prompt": ...}, {"turns": [...]} (the first is used) or {"messages": [...]}; '
            "one result line each, in order.",
        ),
        flag("--raw", help="Send the text as it is, without the chat template."),
        flag("--logprobs", help="With --jsonl: each new id and its log-probability."),
        option(
            "--top-logprobs", type=int, metavar="K", help="With --jsonl: also those of the K likeliest ids."
        ),
        option(
            "--json-schema",
            type=FILE,
            metavar="FILE",
            help="Answer with JSON that fits the schema in this file.",
        ),
        option(
            "--regex", metavar="R", help="Answer with text that this regular expression matches as a whole."
        ),
        option(
            "--batch-size",
            type=COUNT,
            metavar="B",
            help="Lines decoded together with --jsonl (8), by each replica.",
        ),
        option(
            "--replicas",
            type=int,
            default=1,
            metavar="N",
            help="With --jsonl: copies of the pair, each on its part of --mesh, that share the lines.",
        ),
    ],
    "Decode prompts with a target and a drafter.",
    "Decodes one prompt to streamed text, or JSON lines to JSON lines; - reads them from stdin. Text "
    "goes to stdout, statistics and errors to stderr. Exit status: 0 done, 1 some lines failed, 2 wrong "
    "usage.",
    check=check_options,
)

chat = command(
    "chat",
    [
        *decoding(),
        option(
            "--max-length",
            type=int,
            metavar="N",
            help="Positions of the whole conversation (4096, or the target's context).",
        ),
    ],
    "Talk to a target and a drafter.",
    "Each line of stdin is a message, or a command: /help lists them. A turn reads only what is new. "
    "Answers go to stdout, statistics and errors to stderr. Exit status: 0 done, 1 some messages failed, "
    "2 wrong usage.",
    check=check_call_options,
)

demo = command(
    "demo",
    [
        option("--question", help="A question of your own, instead of those of --kind."),
        option("--kind", type=click.Choice((*QUESTIONS, "all")), help="The fixed questions asked (maths)."),
        option(
            "--draw", type=click.IntRange(min=0), default=0, metavar="N", help="And N drawn from --prompts."
        ),
        option("--prompts", type=PATH, metavar="DIR", help="Of --draw (data/eval)."),
        option(*NEW, type=COUNT, default=64, metavar="N", help="Most tokens of an answer."),
        option(
            "--verify-width", type=number_or_word, metavar="M", help="Rows verified (8; of several auto)."
        ),
        option(
            "--drafts",
            type=click.Choice(("union", "drafter")),
            default="union",
            help="Lookup and drafter in a tree of 8 rows beside the drafter, or that alone (union).",
        ),
        option("--dtype", type=click.Choice(DTYPES[1:]), default="bfloat16", help="Of the pair's weights."),
        option("--quantize", type=click.Choice(("int8",)), help="Keep linear weights in 8 bits."),
        runtime(),
        option("--device", help=DEVICE),
        option("--repeats", type=COUNT, default=1, help="Ask all questions so often; median times."),
        option("--json", type=FILE, metavar="FILE", help="Write the figures with their provenance."),
        option("--png", type=PATH, metavar="FILE", help="Draw the acceptance length of every round."),
    ],
    "Ask the pair that comes with the library a question.",
    "With several questions (--kind all, --draw) transformers' generate in float32 and its own DFlash are "
    "timed, too; with one its generate says 16 tokens. Exit status: 0 same text, 1 another text "
    "than plain decoding, 2 wrong usage.",
    check=lambda arguments: check_outputs(json=arguments.json, png=arguments.png),
)

doctor = command(
    "doctor",
    [
        option(*TARGET, type=MODEL, required=True, metavar="T", help="Directory, hub id or demo."),
        option(
            *DRAFTER,
            type=MODEL,
            required=True,
            metavar="D",
            help="A DFlash drafter: directory, hub id or demo.",
        ),
        option(
            "--prompts",
            type=FILE,
            metavar="FILE",
            help='JSON lines of {"prompt": ...} or {"turns": [...]}; unset: three questions.',
        ),
        option("--limit", type=COUNT, default=8, metavar="N", help="Prompts that are answered."),
        option(*NEW, type=COUNT, default=128, metavar="N", help="Of each answer."),
        option("--blocks", type=COUNT, default=256, metavar="N", help="Drafted by each convention."),
        TEMPLATE,
        option("--dtype", type=click.Choice(DTYPES), default="auto"),
        option("--device", help="torch device, such as cuda."),
        flag("--fix", help="Write what is wrong into the drafter's config.json; the old one stays."),
        option("--json", type=FILE, metavar="FILE", help="Write everything there."),
        option("--png", type=FILE, metavar="FILE", help="Draw acceptance by convention there."),
    ],
    "Tell why few drafts of a pair are accepted.",
    "Reads both configs, has the target answer a few prompts, and drafts its answers under other "
    "conventions: taps, masks, windows, norms. Exit status: 0 healthy, weak or too few blocks to tell, 1 a "
    "convention is wrong, 2 wrong usage.",
    check=lambda arguments: check_outputs(json=arguments.json, png=arguments.png),
)


def _check_list(arguments: SimpleNamespace) -> None:
    if arguments.cache_dir is not None and not arguments.check:
        raise UserError(f"--cache-dir {arguments.cache_dir}: it is for --check; pass that too.")


list_pairs = command(
    "list",
    [
        click.Argument(["name"], required=False, metavar="[TEXT]"),
        flag("--decodes", help="Only pairs that decode here."),
        flag("--json", help="Print every field, its source and what is unknown."),
        flag("--check", help="Load and check what the hub's cache holds."),
        option(
            "--cache-dir",
            type=FILE,
            metavar="DIR",
            help="A hub cache other than huggingface_hub's own, for --check.",
        ),
    ],
    "Show the published pairs of target and drafter.",
    "Shows the pairs with TEXT in their names, targets or drafters, one a line; ? is unknown. With --check, "
    "loads and checks those whose drafter the hub's cache holds; nothing is fetched. Exit status: 0, 1 if "
    "one of those does not load or fit, 2 wrong usage or no pair.",
    module="pairs",
    check=_check_list,
)


def _check_selftest(arguments: SimpleNamespace) -> None:
    if arguments.size and arguments.quick:
        raise UserError(f"--size {arguments.size} with --quick: nothing is timed; leave one of them out.")
    check_device(arguments)
    check_outputs(json=arguments.json)


selftest = command(
    "selftest",
    [
        runtime(),
        option("--device", help=DEVICE),
        flag("--quick", help="One family, no batch of one, no timings."),
        option(
            "--size",
            type=click.Choice(("tiny", "small", "base")),
            help="Pair that is timed (small on a CPU, else base).",
        ),
        option("--json", type=FILE, metavar="FILE", help="Write everything with its provenance."),
    ],
    "Check this device: parity, losslessness and hidden costs; time its passes.",
    "Random pairs, no download. Exit status: 0 every check passed, 1 some did not, 2 wrong usage.",
    check=_check_selftest,
)

environment = command(
    "env",
    [flag("--json", help="Print it as JSON.")],
    "Print what a bug report needs: versions, devices, caches.",
    module="environment",
)


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"{PROGRAM} {__version__}")
        ctx.exit()


root = click.Group(
    PROGRAM,
    params=[
        flag("--version", help="Print the version.", is_eager=True, expose_value=False, callback=_version),
        quiet_flag(),
    ],
    commands=[aot, chat, demo, doctor, environment, fit_memory, generate, list_pairs, selftest, train],
    help="DFlash: block-diffusion speculative decoding for PyTorch.",
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
        "token_normalize_func": lambda word: word.lower().replace("_", "-"),
    },
)
