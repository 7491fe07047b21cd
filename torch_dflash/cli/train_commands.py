"""``train`` and its stages, declared."""

from __future__ import annotations

from types import SimpleNamespace

import click

from torch_dflash.checks import RUNTIMES
from torch_dflash.cli.call import command, quiet_flag
from torch_dflash.cli.errors import UserError
from torch_dflash.cli.options import COUNT, MODEL, PATH, Command, flag, option, options_of
from torch_dflash.cli.writable import check_folder
from torch_dflash.train.fit.options import DrafterShape, FitOptions, Objective
from torch_dflash.train.options import EvaluateOptions, FeatureOptions, RegenerateOptions

TEMPLATE = "chat_template_kwargs"
DRAFTER = ("--draft-model", "--drafter", "drafter")
MAX_LENGTH = 3072
"""Tokens of a sequence that ``train fit`` reads from answers."""
ROWS = 8192
"""Ids that ``train vocabulary`` keeps."""
PASSED_ON = ("regenerate", "features", "fit", "evaluate")
"""Stages whose further options ``train all`` takes, each in one text."""


def _stage(
    name: str, params: list[click.Parameter], help: str, out: bool = True, template: bool = False
) -> Command:
    common: list[click.Parameter] = [
        option(
            "--model",
            "--target",
            "target",
            type=MODEL,
            required=True,
            metavar="T",
            help="Directory, hub id or demo.",
        ),
        option("--target-dtype", type=click.Choice(("auto", "float32", "bfloat16")), default="auto"),
        option("--device", help="torch device, with --runtime eager."),
    ]
    if out:
        common.append(option("--out", type=PATH, required=True, metavar="DIR"))
    if template:
        text = "e.g. '{\"enable_thinking\": false}'; unset: what is recorded with the answers, else none."
        common.append(option("--chat-template-kwargs", metavar="JSON", help=text))
    return command(name, [*common, *params], help, module="train", check=_check)


def _check(arguments: SimpleNamespace) -> None:
    if hasattr(arguments, "out"):
        check_folder(arguments.out)
    if arguments.command == "fit" and (arguments.features is None) == (arguments.answers is None):
        given = "both were given" if arguments.features else "neither was given"
        raise UserError(f"--features, --answers: {given}; pass one of them.")


def _paths(name: str, help: str = "", required: bool = True, metavar: str = "PATH") -> click.Option:
    return option(name, many=True, type=PATH, required=required, metavar=f"{metavar}...", help=help)


regenerate = _stage(
    "regenerate",
    [
        _paths("--prompts", metavar="FILE"),
        option("--limit", type=COUNT, metavar="N", help="Only N prompts, a fair sample."),
        *options_of(RegenerateOptions, without=(TEMPLATE,)),
    ],
    "The target answers prompts.",
    template=True,
)
features = _stage(
    "features",
    [_paths("--answers"), *options_of(FeatureOptions)],
    "Cache the target's tapped states.",
    template=True,
)
fit = _stage(
    "fit",
    [
        _paths("--features", "From the features stage.", False, "DIR"),
        _paths("--answers", "Compute features as they are needed instead.", False),
        option("--max-length", type=COUNT, default=MAX_LENGTH, metavar="N", help="With --answers."),
        option(
            "--runtime",
            type=click.Choice(RUNTIMES),
            default="eager",
            help="What takes the steps: XLA, on all of JAX's devices, or torch (eager); a fit begun with one "
            "may go on with the other.",
        ),
        option("--start-from", metavar="D", help="A drafter to continue from; unset: a new one."),
        *options_of(DrafterShape, optional=("mask_token_id",)),
        *options_of(Objective),
        *options_of(FitOptions),
    ],
    "Train a drafter.",
    template=True,
)
evaluate = _stage(
    "evaluate",
    [
        option(*DRAFTER, type=MODEL, required=True, metavar="D"),
        _paths("--prompts", metavar="FILE"),
        option("--json", type=PATH, metavar="FILE", help="Sets already in it are kept, not decoded again."),
        flag("--card", help="Put the figures of --json into the drafter's card."),
        *options_of(EvaluateOptions, without=(TEMPLATE,)),
    ],
    "Acceptance on held-out prompts.",
    out=False,
    template=True,
)  # fmt: skip
vocabulary = _stage(
    "vocabulary",
    [
        option(*DRAFTER, type=MODEL, required=True, metavar="D"),
        _paths("--answers"),
        option(
            "--rows", type=COUNT, default=ROWS, metavar="N", help="Ids that are drafted, the most frequent."
        ),
    ],
    "Let a drafter draft frequent ids only.",
)
every = _stage(
    "all",
    [
        option("--prompts", many=True, required=True, metavar="FILE...", help="Prompts that are answered."),
        option("--eval-prompts", many=True, required=True, metavar="FILE...", help="Prompts that judge it."),
        option("--taps", metavar="LAYERS", help="For features and fit; unset: z-lab's."),
        flag("--online", help="No features on disk: the target is in the loop."),
        *(
            option(
                f"--{name}",
                default="",
                show_default=False,
                metavar="TEXT",
                help=f'Further options of the stage in one text, as --{name}="--batch-size 8".',
            )
            for name in PASSED_ON
        ),
    ],
    "Every stage in order.",
)  # fmt: skip

train = click.Group(
    "train",
    params=[quiet_flag()],
    commands=[regenerate, features, fit, evaluate, vocabulary, every],
    help="Make a drafter for a target.\n\nA stage goes on where it stopped if its command is run again.",
    short_help="Make a drafter for a target.",
)
