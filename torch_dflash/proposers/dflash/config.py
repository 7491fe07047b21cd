"""`DFlashConfig`: the configuration of v1 drafters of every layout, in z-lab's fields."""

from __future__ import annotations

from typing import Any, ClassVar

from torch_dflash.checks import check_counts, check_types, is_count
from torch_dflash.proposers.checkpoint.config import DrafterConfig
from torch_dflash.proposers.checkpoint.extras import check_extras
from torch_dflash.proposers.checkpoint.fields import (
    check_fields,
    check_layout,
    check_rotation,
    known_fields,
    warn_of,
)
from torch_dflash.proposers.layouts.eagle3 import EAGLE3
from torch_dflash.proposers.layouts.eagle3 import KIND as EAGLE3_KIND
from torch_dflash.proposers.layouts.known import in_zlabs_fields, layout_of
from torch_dflash.proposers.layouts.layout import Fields
from torch_dflash.proposers.layouts.pieces import without_flags
from torch_dflash.proposers.layouts.zlab import CLASSES, DFLASH2_CLASSES

NESTED_FIELDS = ("block_size", "mask_token_id", "target_layer_ids")
NESTED_FIELDS += ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")


def default_target_layer_ids(num_target_layers: int, taps: int | None = None) -> list[int]:
    """z-lab's default taps: evenly from 1 to ``num_target_layers - 3``.

    ``taps``: their number; unset: five, or as many as a small target has.
    Ids are 0-based block indices; the tap is the block's output (Hugging Face ``hidden_states[id + 1]``).
    """
    taps = min(5, max(1, num_target_layers - 3)) if taps is None else taps
    if taps == 1:
        return [num_target_layers // 2]
    return [round(1 + i * (num_target_layers - 4) / (taps - 1)) for i in range(taps)]


def is_dflash2(config: dict[str, Any]) -> bool:
    """Whether a ``config.json`` is of a DFlash2 drafter, by its class or the selector's rank."""
    nested = config.get("dflash_config") or {}
    named = set(DFLASH2_CLASSES) & set(config.get("architectures") or [])
    return bool(named) or "selector_rank" in nested or "selector_rank" in config


class DFlashConfig(DrafterConfig):
    """Configuration of a DFlash v1 drafter (arXiv 2602.06036), a Qwen3-style stack.

    The fields of ``nested_fields`` are read from ``dflash_config`` or from the top level, and written to
    both, so z-lab's loader, transformers' native DFlash and ours read the same directory.

    Args:
        num_target_layers: layers of the target model; gives the default taps.
        block_size: tokens drafted at once, the anchor included (W).
        mask_token_id: id whose embedding stands for a token to be drafted.
        target_layer_ids: tapped target layers, 0-based block indices.
        is_causal: causality inside the block. Absent (None) means causal on sliding layers only; an
            explicit value holds for every layer, and ``False`` makes sliding windows symmetric.
        input_embedding_scale: factor on the target's raw embedding weight.
        output_multiplier: factor on the draft logits, applied before ``final_logit_softcapping``.
        vocab_size: of the target; 0 if the layout has none.
        own_embedding, own_head: whether the drafter has its own embedding (``vocab_size`` rows) or head.
        draft_vocab_size: rows of its own head; None for ``vocab_size``.
        mask_embedding: whether its own vector stands for a token to be drafted.
        sample_from_anchor: row k drafts the token after it, so W rows give W drafts; else its own token.
        attention_sink_bias: a logit per head that takes part in each softmax and carries no value.
        gating: "per-head" or "per-element": attention's output is weighted by softplus of ``g_proj``.
        aux_hidden_norms: a norm for each tap, before ``fc``.
        context_layernorm: whether each layer's ``input_layernorm`` norms the context too.
        markov_rank: of DSpark's Markov head, which adds to a draft's logits by the token before; 0: none.

    Raises:
        ValueError: a field is missing or cannot be honoured; the message names it and the fix.
    """

    model_type = "qwen3"
    nested_fields: ClassVar[tuple[str, ...]] = NESTED_FIELDS
    dflash2: ClassVar[bool] = False

    num_target_layers: int | None = None
    block_size: int = 16
    mask_token_id: int | None = None
    target_layer_ids: Any = None  # list[int]; None until the default is filled in
    is_causal: bool | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    dflash_config: dict[str, Any] | None = None
    draft_vocab_size: int | None = None
    own_embedding: bool = False
    own_head: bool = False
    mask_embedding: bool = False
    sample_from_anchor: bool = False
    attention_sink_bias: bool = False
    gating: str | None = None
    aux_hidden_norms: bool = False
    context_layernorm: bool = False
    markov_rank: int = 0

    def __post_init__(self, **kwargs):
        check_layout({"dflash_config": self.dflash_config}, type(self).__name__)
        for name in self.nested_fields:
            if self.dflash_config and name in self.dflash_config:
                setattr(self, name, self.dflash_config[name])
        check_fields(self)
        self.draft_vocab_size = None if self.draft_vocab_size == self.vocab_size else self.draft_vocab_size
        super().__post_init__(**kwargs)
        if self.target_layer_ids is None and self.num_target_layers is not None:
            self.target_layer_ids = default_target_layer_ids(self.num_target_layers, self.num_hidden_layers)
        self.dflash_config = self._nested()

    def _nested(self) -> dict[str, Any]:
        return (self.dflash_config or {}) | {name: getattr(self, name) for name in self.nested_fields}

    @classmethod
    def in_our_fields(cls, read: Fields, where: Any) -> Fields:
        """A config.json of any layout, in this class's fields.

        Raises:
            ValueError: another kind of drafter, or a field that cannot be honoured.
        """
        check_layout(read, where)
        check_types(read, where)  # a quantization_config is left out: the tensors have their types
        if read.get("vocab_size") == 0:  # our mark of a layout without it
            raise ValueError(f"vocab_size=0 in {where}: set the target's.")
        if layout_of(read) is EAGLE3:
            named = f"speculators_model_type={EAGLE3_KIND!r} in {where}"
            raise ValueError(f"{named}: no DFlash drafter; load it with torch_dflash.load_drafter.")
        config = in_zlabs_fields(read, where)
        architectures = config.get("architectures") or []
        named = f"architectures={architectures} in {where}"
        if is_dflash2(config) != cls.dflash2:
            own, other = ("DFlash v1", "DFlash2") if cls.dflash2 else ("DFlash2", "DFlash v1")
            kinds = f"a {own} drafter, not a {other} one"
            raise ValueError(f"{named}: {kinds}; load it with torch_dflash.load_drafter.")
        if config and "dflash_config" not in config and "target_layer_ids" not in config:
            if not set(CLASSES) & set(architectures):
                raise ValueError(
                    f"{named}: not a DFlash drafter (no dflash_config, no target_layer_ids); pass the "
                    "drafter's directory or id."
                )
        known, unread = known_fields(read, cls)
        config = dict(in_zlabs_fields(known, where))
        check_rotation(config, where)
        config = without_flags(config)
        warn_of(unread, read, where)
        config["model_type"] = cls.model_type  # published drafters have qwen3 or gpt_oss: same network
        if config.get("pad_token_id") == config.get("vocab_size"):
            config.pop("pad_token_id", None)  # as `to_diff_dict` wrote it
        config.pop("auto_map", None)  # points at remote code that we neither need nor re-publish
        return config

    def to_dict(self) -> dict[str, Any]:
        """As in transformers; ``dflash_config`` holds the present values of its fields."""
        return super().to_dict() | {"dflash_config": self._nested()}

    def to_diff_dict(self) -> dict[str, Any]:
        """The content of ``config.json``, with a padding id beyond the vocabulary.

        ``AutoModel`` takes these files for a Qwen3 and would fill the missing embedding at random; with this
        id it fails. Servers know drafters by ``model_type`` "qwen3", so that must stay.
        """
        return super().to_diff_dict() | {"pad_token_id": self.vocab_size}

    def check(self) -> None:
        """Raise ``ValueError`` for a field that no network can be built from."""
        self.check_network()
        check_counts(least=0, mask_token_id=self.mask_token_id)
        if not is_count(self.block_size) or self.block_size < 2:
            raise ValueError(f"block_size={self.block_size!r}: the anchor and at least one draft; set >= 2.")
        check_extras(self)
