"""Options of the stages regenerate, features and evaluate; the command line reads them without torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch_dflash.checks import Runtime, check_counts, check_runtime


class Layers(tuple):
    """Layer numbers (0-based), also from a text such as ``1,9,17``."""

    def __new__(cls, layers):
        if isinstance(layers, str):
            layers = [int(layer) for layer in layers.split(",")]
        return super().__new__(cls, layers)


def check_layers(taps: Iterable[int]) -> None:
    """Raise ``ValueError`` unless ``taps`` names at least one layer, and each once."""
    taps = list(taps)
    if not taps:
        raise ValueError("taps=[]: name at least one layer.")
    twice = sorted({tap for tap in taps if taps.count(tap) > 1})
    if twice:
        raise ValueError(f"taps={taps}: {twice} occur more than once; name each layer once.")


@dataclass(frozen=True)
class FeatureOptions:
    """Options for caching features.

    Args:
        taps: target layers (0-based), also those of several drafters; unset: five, evenly spaced as z-lab's.
        max_length: longer conversations are cut at the end.
        batch_size: rows per target pass. shard_size: answers per file.
        dtype: "bfloat16" (2 bytes a value) or "float32". runtime: as in `torch_dflash.generate`.
    """

    taps: Layers | None = None
    max_length: int = 3072
    batch_size: int = 16
    shard_size: int = 128
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    runtime: Runtime = "xla"

    def __post_init__(self):
        check_counts(**{name: getattr(self, name) for name in ("max_length", "batch_size", "shard_size")})
        if self.taps is not None:
            check_layers(self.taps)
        check_runtime(self.runtime)
        if self.dtype not in ("bfloat16", "float32"):
            raise ValueError(f"dtype={self.dtype!r}: choose 'bfloat16' or 'float32'.")


@dataclass(frozen=True)
class RegenerateOptions:
    """Options for the target's answers.

    Args:
        max_new_tokens: longest answer, in tokens.
        max_prompt_tokens: longer prompts, and prompts without room for the longest answer in the target's
            context, are left out and counted.
        batch_size: rows decoded together.
        shard_size: prompts per file; a file is written once all prompts are answered.
        sampled: answer with the model's own ``generation_config`` sampling, else greedily.
        seed: of the order of prompts and of sampled answers.
        runtime: as in `torch_dflash.generate`.
        chat_template_kwargs: further variables of the chat template; recorded with every answer.
    """

    max_new_tokens: int = 512
    max_prompt_tokens: int = 1024
    batch_size: int = 32
    shard_size: int = 256
    sampled: bool = False
    seed: int = 0
    runtime: Runtime = "xla"
    chat_template_kwargs: dict[str, Any] | None = None

    def __post_init__(self):
        counts = ("max_new_tokens", "max_prompt_tokens", "batch_size", "shard_size")
        check_counts(**{name: getattr(self, name) for name in counts})
        check_runtime(self.runtime)


@dataclass(frozen=True)
class EvaluateOptions:
    """Options of an evaluation, which decodes greedily: texts do not depend on the drafter.

    Args:
        limit: first prompts of each set. max_new_tokens: per turn. batch_size: rows decoded together.
        verify_width: verified rows of a block, the anchor included; unset: all.
        shuffled: the control: each row drafts from another row's features.
        runtime: as in `torch_dflash.generate`.
        chat_template_kwargs: further variables of the chat template.
    """

    limit: int = 100
    max_new_tokens: int = 256
    batch_size: int = 8
    verify_width: int | None = None
    shuffled: bool = False
    runtime: Runtime = "xla"
    chat_template_kwargs: dict[str, Any] | None = None

    def __post_init__(self):
        counts = ("limit", "max_new_tokens", "batch_size", "verify_width")
        check_counts(**{name: getattr(self, name) for name in counts})
        check_runtime(self.runtime)
        if self.shuffled and self.batch_size < 2:
            raise ValueError(f"batch_size={self.batch_size} with shuffled=True: needs 2 rows to shuffle.")
