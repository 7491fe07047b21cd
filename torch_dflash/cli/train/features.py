"""``torch-dflash train features``: caches the target's tapped states."""

from __future__ import annotations

from types import SimpleNamespace

from torch_dflash.cli.arguments import check_device, template_options
from torch_dflash.cli.command import options_of, read_options
from torch_dflash.cli.train.stage import load, longest_text, paths_option, stage
from torch_dflash.train.options import FeatureOptions


@stage(
    "features",
    [paths_option("--answers"), *options_of(FeatureOptions)],
    "Cache the target's tapped states.",
    template=True,
)
def run(arguments: SimpleNamespace) -> int:
    """Write the features; returns the exit status."""
    from torch_dflash.train.answers.data import read_answers
    from torch_dflash.train.answers.provenance import describe, with_template, write_data
    from torch_dflash.train.features.extract import cache_features, encode_answers

    options = read_options(FeatureOptions, arguments)
    check_device(arguments)
    answers = with_template(read_answers(arguments.answers), template_options(arguments))
    loaded = load(arguments)
    sequences = encode_answers(loaded.tokenizer, answers, longest_text(loaded.target, options.max_length))
    cache_features(loaded.target, sequences, arguments.out, options)
    write_data(arguments.out, describe(answers, arguments.answers))
    return 0
