"""``torch-dflash demo``: the bundled pair answers questions, plainly and with DFlash."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import click

from torch_dflash.checks import check_arithmetic
from torch_dflash.cli.arguments import DEVICE, DTYPES, NEW, check_device, runtime
from torch_dflash.cli.command import COUNT, FILE, PATH, command, number_or_word, option
from torch_dflash.cli.errors import UserError, refusing, unwritten
from torch_dflash.cli.outputs import check_writable
from torch_dflash.demo.questions import QUESTIONS

KIND, PROMPTS = "maths", Path("data/eval")


@command(
    "demo",
    [
        option("--question", help="A question of your own, instead of those of --kind."),
        option("--kind", type=click.Choice((*QUESTIONS, "all")), help="The fixed questions asked (maths)."),
        option("--draw", type=click.IntRange(min=0), default=0, metavar="N",
               help="And N drawn from --prompts."),
        option("--prompts", type=PATH, metavar="DIR", help="Of --draw (data/eval)."),
        option(*NEW, type=COUNT, default=64, metavar="N", help="Most tokens of an answer."),
        option("--verify-width", type=number_or_word, metavar="M",
               help="Rows verified (8; of several auto)."),
        option("--drafts", type=click.Choice(("union", "drafter")), default="union",
               help="Lookup and drafter in a tree of 8 rows beside the drafter, or that alone (union)."),
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
    check=lambda arguments: check_writable(json=arguments.json, png=arguments.png),
)  # fmt: skip
def run(arguments: SimpleNamespace) -> int:
    """Answer, compare, print. Exit status 1 where our text is another (no mere tie), 2 on wrong usage."""
    from torch_dflash.cli.comparison import compare_methods
    from torch_dflash.demo.target import DemoModelError
    from torch_dflash.storage.files import StageError

    try:
        with refusing(DemoModelError):
            return compare_methods(arguments, _questions(arguments))
    except StageError as error:
        return unwritten("demo", error)


def _questions(arguments: SimpleNamespace) -> list[tuple[str, str]]:
    """The questions, each with its kind; refuses arguments that need no model to be refused."""
    from torch_dflash.demo.pair import demo_block_size
    from torch_dflash.storage.files import StageError
    from torch_dflash.train.answers.data import draw

    check_device(arguments)
    rows, block = arguments.verify_width, demo_block_size()
    if rows not in (None, "auto") and (isinstance(rows, str) or not 2 <= rows <= block):
        raise UserError(f"--verify-width {rows}: must be an integer from 2 to {block}, or auto.")
    try:
        check_arithmetic("auto", arguments.quantize, arguments.runtime)
    except ValueError:
        raise UserError(
            f"--quantize {arguments.quantize}: --runtime {arguments.runtime} has no such products; "
            "leave one of the two out."
        ) from None
    if arguments.prompts is not None and not arguments.draw:
        raise UserError(f"--prompts {arguments.prompts}: nothing is drawn from it; give --draw too.")
    with refusing(StageError, before=f"--draw {arguments.draw}: "):
        drawn = draw(arguments.prompts or PROMPTS, arguments.draw) if arguments.draw else []
    return _fixed(arguments) + drawn


def _fixed(arguments: SimpleNamespace) -> list[tuple[str, str]]:
    """The user's question, or those of the kind asked for."""
    kind, own = arguments.kind, arguments.question
    if own is None:
        return [(name, QUESTIONS[name]) for name in (QUESTIONS if kind == "all" else [kind or KIND])]
    if kind is not None:
        raise UserError(f"--kind {kind}: --question asks one of your own; leave one of the two out.")
    if not own.strip():
        raise UserError(f"--question {own!r}: it is empty; give at least one word.")
    try:
        own.encode()
    except UnicodeEncodeError:  # a byte that the shell gave as it was
        raise UserError(f"--question {own!a}: it is not UTF-8; check the terminal's encoding.") from None
    return [("yours", own)]
