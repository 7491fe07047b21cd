"""Classes of transformers whose decoding was held against their own (`docs/families.md`)."""

from __future__ import annotations

import transformers
from packaging.version import Version

WITH = "5.23"
"""The newest transformers they were tested with: what a later one changed is not known."""
TESTED = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "GptOssForCausalLM"})


def is_tested(kind: type) -> bool:
    """Whether ``kind`` is transformers' own class of a tested name; a user's subclass is not."""
    newer = Version(transformers.__version__).release[:2] > Version(WITH).release
    return kind.__name__ in TESTED and kind.__module__.startswith("transformers.models.") and not newer
