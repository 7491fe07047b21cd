"""`DrafterConfig`: a drafter's Qwen3-style network, in the fields that all kinds of drafters share."""

from __future__ import annotations

from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from torch_dflash.checks import check_counts, check_static_rope
from torch_dflash.proposers.checkpoint.fields import check_fields, check_rope, check_window
from torch_dflash.proposers.layouts.layout import Fields, refused_field


class DrafterConfig(Qwen3Config):
    """Base of the configs of drafters that layouts describe; a subclass reads a layout by `in_our_fields`."""

    def __post_init__(self, **kwargs):
        if self.layer_types and "sliding_attention" in self.layer_types:
            self.use_sliding_window = True  # Qwen3Config drops the window without it
        super().__post_init__(**kwargs)

    @classmethod
    def in_our_fields(cls, read: Fields, where: Any) -> Fields:
        """A config.json of any layout, in this class's fields.

        Raises:
            ValueError: another kind of drafter, or a field that cannot be honoured.
        """
        raise NotImplementedError

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        """Read ``config.json``; errors as `in_our_fields`."""
        read, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        return cls.in_our_fields(read, pretrained_model_name_or_path), kwargs

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """As in transformers, but a field of the wrong type is a ``ValueError``."""
        try:
            return super().from_dict(config_dict, **kwargs)
        except StrictDataclassError as error:
            raise refused_field(error, config_dict, "the drafter's config") from error

    def check_network(self) -> None:
        """Raise ``ValueError`` for a field from which no layers can be built."""
        given: Any = self
        check_fields(self)  # again: any may have been set since
        if not given.target_layer_ids:
            taps = given.target_layer_ids
            raise ValueError(f"target_layer_ids={taps!r}: give these or num_target_layers.")
        for tap in given.target_layer_ids:
            check_counts(least=0, target_layer_ids=tap)
        if given.num_attention_heads % (given.num_key_value_heads or 1):
            heads, groups = given.num_attention_heads, given.num_key_value_heads
            raise ValueError(f"num_attention_heads={heads} is no multiple of num_key_value_heads={groups}.")
        layer_types = given.layer_types or []
        unknown = set(layer_types) - {"full_attention", "sliding_attention"}
        if unknown:
            raise ValueError(f"layer_types holds {sorted(unknown)}; use full_attention or sliding_attention.")
        if len(layer_types) != given.num_hidden_layers:
            count = f"num_hidden_layers={given.num_hidden_layers}"
            raise ValueError(f"layer_types has {len(layer_types)} entries for {count}; give one per layer.")
        check_window(self)
        check_static_rope(self)
        check_rope(given.rope_parameters)
