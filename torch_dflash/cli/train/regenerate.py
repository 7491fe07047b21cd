"""``torch-dflash train regenerate``: the target answers prompts."""

from __future__ import annotations

import random
from types import SimpleNamespace

from torch_dflash.cli.arguments import check_device, template_options
from torch_dflash.cli.command import COUNT, option, options_of, read_options
from torch_dflash.cli.train.stage import TEMPLATE, load, note_penalty, paths_option, stage
from torch_dflash.train.options import RegenerateOptions


@stage(
    "regenerate",
    [
        paths_option("--prompts", metavar="FILE"),
        option("--limit", type=COUNT, metavar="N", help="Only N prompts, a fair sample."),
        *options_of(RegenerateOptions, without=(TEMPLATE,)),
    ],
    "The target answers prompts.",
    template=True,
)
def run(arguments: SimpleNamespace) -> int:
    """Write the answers; returns the exit status."""
    from torch_dflash.train.answers.data import read_prompts
    from torch_dflash.train.answers.regenerate import regenerate

    options = read_options(RegenerateOptions, arguments, **{TEMPLATE: template_options(arguments)})
    check_device(arguments)
    prompts = read_prompts(arguments.prompts)
    if arguments.limit is not None:
        prompts = random.Random(options.seed).sample(prompts, min(arguments.limit, len(prompts)))
    loaded = load(arguments)
    if not options.sampled:
        note_penalty("train regenerate", loaded.target)
    regenerate(loaded.target, loaded.tokenizer, prompts, arguments.out, options)
    return 0
