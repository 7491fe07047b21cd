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

__all__ = ["BASE", "FAMILIES", "MASK", "VOCAB", "YARN", "correlate", "make_drafter", "make_pair"]
__all__ += ["make_target", "ragged_prompts", "randomise", "small_pair"]


def small_pair(family: str = "qwen3", seed: int = 0, agree: float = 0.0, **drafter):
    """`make_pair` with half the layers, for tests that do not depend on depth: XLA takes half the time."""
    windows = {"max_window_layers": 1} if family == "qwen2" else {}
    target = make_target(family, seed, num_hidden_layers=2, **windows)
    drafts = make_drafter(
        target, seed + 1, **({"num_hidden_layers": 1, "target_layer_ids": [0, 1]} | drafter)
    )
    if agree:
        correlate(target, drafts, agree)
    return target, drafts
