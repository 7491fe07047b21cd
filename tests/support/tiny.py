"""The random models of the tests: those of the package's self-test."""

from torch_dflash.selftest.pairs import (
    BASE,
    FAMILIES,
    MASK,
    VOCAB,
    YARN,
    correlate,
    make_drafter,
    make_pair,
    make_target,
    ragged_prompts,
    randomise,
)

__all__ = [
    "BASE",
    "FAMILIES",
    "MASK",
    "VOCAB",
    "YARN",
    "correlate",
    "make_drafter",
    "make_pair",
    "make_target",
    "ragged_prompts",
    "randomise",
]
