"""transformers' auto class for a target's config."""

from __future__ import annotations

from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
)


def auto_class(config: PreTrainedConfig) -> Any:
    """The auto class of ``config``'s causal LM: another one for most models that also read images."""
    kind: Any = type(config)
    images = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if images else AutoModelForCausalLM
