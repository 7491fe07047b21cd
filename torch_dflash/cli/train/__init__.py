"""``torch-dflash train``: the stages that make a drafter for a target, and all of them in order."""

from __future__ import annotations

import shlex
from types import SimpleNamespace

import click

from torch_dflash.cli.command import Invocation, flag, option, quiet_flag
from torch_dflash.cli.errors import UserError
from torch_dflash.cli.train import evaluate, features, fit, regenerate, vocabulary
from torch_dflash.cli.train.stage import stage
from torch_dflash.progress import print_status

PASSED_ON = ("regenerate", "features", "fit", "evaluate")
"""Stages whose further options ``train all`` takes, each in one text."""
FURTHER = 'Further options of the stage in one text, as --{}="--batch-size 8".'


@stage(
    "all",
    [
        option("--prompts", many=True, required=True, metavar="FILE...", help="Prompts that are answered."),
        option("--eval-prompts", many=True, required=True, metavar="FILE...", help="Prompts that judge it."),
        option("--taps", metavar="LAYERS", help="For features and fit; unset: z-lab's."),
        flag("--online", help="No features on disk: the target is in the loop."),
        *(
            option(f"--{name}", default="", show_default=False, metavar="TEXT", help=FURTHER.format(name))
            for name in PASSED_ON
        ),
    ],
    "Every stage in order.",
)
def every(arguments: SimpleNamespace) -> int:
    """Run each stage, which goes on where it stopped; all options are checked before the first stage."""
    out, taps = arguments.out, ["--taps", arguments.taps] if arguments.taps else []
    learnt = ["--answers", out / "answers"] if arguments.online else ["--features", out / "features"]
    lines = {
        "regenerate": ["--prompts", *arguments.prompts, "--out", out / "answers"],
        "features": ["--answers", out / "answers", "--out", out / "features", *taps],
        "fit": [*learnt, "--out", out / "fit", *taps],
        "evaluate": ["--drafter", out / "fit" / "drafter", "--prompts", *arguments.eval_prompts]
        + ["--json", out / "figures.json", "--card"],
    }
    if arguments.online:
        if arguments.features:
            raise UserError(f"--features {arguments.features!r} with --online: there is no such stage.")
        del lines["features"]
    stages = []
    for name, line in lines.items():
        stage = _parsed(arguments, name, line)
        if not isinstance(stage, Invocation):
            return stage or 0
        stages.append(stage)
    for stage in stages:
        print_status(f"torch-dflash {stage.name}")
        if status := stage():
            return status
    return 0


def _parsed(arguments: SimpleNamespace, name: str, line: list) -> Invocation | int | None:
    from torch_dflash.cli import parse

    common = ["--target", arguments.target, "--target-dtype", arguments.target_dtype]
    common += ["--device", arguments.device] if arguments.device else []
    further = shlex.split(getattr(arguments, name))
    return parse(["train", name, *map(str, [*common, *line]), *further])


train = click.Group(
    "train",
    params=[quiet_flag()],
    commands=[regenerate.run, features.run, fit.run, evaluate.run, vocabulary.run, every],
    help="Make a drafter for a target.\n\nA stage goes on where it stopped if its command is run again.",
    short_help="Make a drafter for a target.",
)
