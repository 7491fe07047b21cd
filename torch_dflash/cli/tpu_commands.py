"""``aot`` and ``fit-memory``, declared: a pair by its configs, how it decodes, ``--json``."""

from __future__ import annotations

from types import SimpleNamespace

import click

from torch_dflash.cli.call import command
from torch_dflash.cli.errors import UserError
from torch_dflash.cli.options import COUNT, MODEL, flag, option, options_of
from torch_dflash.cli.writable import check_outputs
from torch_dflash.plan import DecodePlan

STDOUT = "-"
PASSES = ("verify", "draft", "round")
SOUGHT = ("batch", "context")
# Fields of the plan that have an option of their own here, change nothing in one round, or are for outputs.
BY_HAND = (
    "batch_size",
    "capacity",
    "block_size",
    "verify_width",
    "stop_slots",
    "rounds_per_chunk",
    "processors",
    "outputs",
    "top_logprobs",
    "depth",  # of the proposer
)
DRAFTED, VERIFIED = (
    "Rows of the draft pass (the drafter's own).",
    "Rows of the verify pass (the whole block).",
)
OF_TREE = "Of a tree of the drafter's block: the round that verifies it, and no pass alone."
PRINTED = "Write all figures there; alone or -: print them."
CONFIG = "Directory, config.json or hub id; of a drafter none or ngram, too."
NEEDS = "Needs configs and libtpu (pip install 'jax[tpu]'), neither weights nor a TPU."


def _pair() -> list[click.Parameter]:
    return [
        option("--model", "--target", "target", type=MODEL, required=True, metavar="CONFIG", help=CONFIG),
        option(
            "--draft-model", "--drafter", "drafter", type=MODEL, default="none", metavar="CONFIG", help=CONFIG
        ),
    ]


def _plan(without: tuple[str, ...] = ()) -> list[click.Parameter]:
    return [
        option("--block-size", "--block", "block", type=COUNT, metavar="W", help=DRAFTED),
        option("--verify-width", "--verify", "verify", type=COUNT, metavar="M", help=VERIFIED),
        option("--context", type=COUNT, default=4096, metavar="N", help="Tokens per row."),
        option("--batch-size", "--batch", "batch", type=COUNT, default=1, metavar="B", help="Rows."),
        *options_of(DecodePlan, without=BY_HAND + without),
        option("--json", is_flag=False, flag_value=STDOUT, metavar="[FILE]", help=PRINTED),
    ]  # fmt: skip


def _check(arguments: SimpleNamespace) -> None:
    if getattr(arguments, "acceptance", None) and not arguments.kflat:
        raise UserError("--acceptance: is for --kflat; add it, or leave this out.")
    if getattr(arguments, "rows", None) and arguments.kflat:
        raise UserError(
            f"--rows {arguments.rows}: --kflat counts every number of rows; leave one of them out."
        )
    check_outputs(json=None if arguments.json == STDOUT else arguments.json)


aot = command(
    "aot",
    [
        *_pair(),
        option("--topology", default="v5p:2x2x1", help="Generation and shape; one chip of it is used."),
        option("--mesh", type=COUNT, default=1, metavar="N", help="Chips of it that share each weight."),
        option("--layers", type=COUNT, metavar="N", help="Keep N of the target's layers."),
        option("--passes", many=True, type=click.Choice(PASSES), default=PASSES, help="What is compiled."),
        *_plan(),
        option("--rows", type=click.IntRange(2, 64), metavar="R", help=OF_TREE),
        option("--dump-hlo", metavar="DIR", help="Write each scheduled program there, as text."),
        flag("--kflat", help="Compile nothing: bytes and FLOPs of 1 to 1,024 verified rows, from shapes."),
        option(
            "--acceptance",
            many=True,
            type=click.FloatRange(0, 1),
            metavar="P",
            help="For --kflat: how often drafts 1 to d are all accepted, for d = 1, 2, ...",
        ),
    ],
    "Compile a round for a TPU that is not there; bytes against their floor.",
    f"{NEEDS} Compiling takes minutes for a large model.",
    check=_check,
)

fit_memory = command(
    "fit-memory",
    [
        *_pair(),
        option("--topology", default="v5e:2x4", help="Generation and shape."),
        option(
            "--mesh",
            type=COUNT,
            metavar="N",
            help="Chips of it that share each weight (all; 1 for a family that is not cut).",
        ),
        option(
            "--largest",
            type=click.Choice((*SOUGHT, "both", "none")),
            default="both",
            help="What is sought: the largest batch, the largest context.",
        ),
        flag("--no-confirm", "confirm", flag_value=False, default=True, help="Compile no whole pair."),
        flag(
            "--shapes-only",
            "programs",
            flag_value=False,
            default=True,
            help="Compile nothing: programs' own memory is left out, and the answer comes at once.",
        ),
        *_plan(without=("pool_pages",)),
    ],
    "Tell what a pair needs of each chip's memory, what fits, and which slice has room.",
    f"{NEEDS} Compiles a few layers, and the whole pair at the largest that fits: minutes for a large model.",
    check=_check,
)  # fmt: skip
