"""Prompts of models that also read images, videos or sound: text alone is decoded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from transformers import PreTrainedConfig

from torch_dflash.checks import field_of, is_count

MEDIA = re.compile("image|img|pixel|video|vision|visual|audio|speech|media|input_features|mm_")
"""Names of arguments and fields that speak of something else than text."""
_ID = re.compile("_(id|index)$")
_EDGE = re.compile("^[be]o[aiv]_")  # where an image, a video or sound begins or ends


def check_text_alone(rows: list[np.ndarray], target: Any) -> None:
    """Raise ``ValueError`` if a prompt holds a token that stands for an image, a video or sound.

    What belongs there is not read here, nor do the rows of an image see each other.

    Args:
        rows: ids of each prompt.
        target: its config, and the configs in it, name such tokens.
    """
    text = target.config.get_text_config()
    marks = [field_of(text, f"{name}_token_id") for name in ("bos", "pad", "eos")]
    usual = set(np.ravel(marks[:2])) | set(np.ravel(marks[2]))
    named = {token: name for token, name in media_tokens(target.config) if token not in usual}
    for row, prompt in enumerate(rows):
        found = np.isin(prompt, list(named)).nonzero()[0]
        if found.size:
            token = int(prompt[found[0]])
            raise ValueError(
                f"input_ids of row {row} holds {token}, the {named[token]} of the target's config: block "
                f"decoding reads text alone. Use the target's own generate for this prompt, or leave out "
                "what the token stands for."
            )


def media_tokens(config: PreTrainedConfig) -> Iterator[tuple[int, str]]:
    """Ids that stand for media, or begin or end them, by a config's own fields and those of its parts."""
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from media_tokens(value)
        elif _ID.search(name) and (MEDIA.search(name) or _EDGE.search(name)) and is_count(value):
            yield int(value), name
