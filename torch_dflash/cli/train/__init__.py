"""``torch-dflash train``: answers of the target, features, a fitted drafter, its figures; stage by stage."""

from __future__ import annotations

import click

from torch_dflash.cli.command import quiet_flag
from torch_dflash.cli.train import all_stages, evaluate, features, fit, regenerate, vocabulary

train = click.Group(
    "train",
    params=[quiet_flag()],
    commands=[regenerate.run, features.run, fit.run, evaluate.run, vocabulary.run, all_stages.run],
    help="Make a drafter for a target.\n\nA stage goes on where it stopped if its command is run again.",
    short_help="Make a drafter for a target.",
)
