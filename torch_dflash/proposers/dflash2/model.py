"""The DFlash2 drafter: v1 with a convolution around each sublayer, and a selector behind the head.

Source: dflash 0.1.0, ``model.py``, class ``DFlash2DraftModel``.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import DFlashCache

from torch_dflash.checks import check_counts
from torch_dflash.proposers.dflash.config import NESTED_FIELDS, DFlashConfig
from torch_dflash.proposers.dflash.model import DFlashDraftModel, DFlashLayer
from torch_dflash.proposers.dflash2.convolution import DynamicConvolution
from torch_dflash.proposers.dflash2.selector import CandidateSelector
from torch_dflash.proposers.trees.nodes import Following


class DFlash2Layer(DFlashLayer):
    """A v1 layer whose attention and MLP each have a convolution before and after. The context has none."""

    def __init__(self, config: Any, index: int):
        super().__init__(config, index)
        sizes = config.hidden_size, config.conv_kernel_size, config.conv_group_size
        self.attention_conv, self.mlp_conv = DynamicConvolution(*sizes), DynamicConvolution(*sizes)

    def attend(self, normed, blocks, *rest) -> Float[Tensor, "B W H"]:
        rows, kernel = self.attention_conv.before(_apart(normed, blocks))
        rows = super().attend(_in_line(rows, blocks), blocks, *rest)
        return _in_line(self.attention_conv.after(_apart(rows, blocks), kernel), blocks)

    def feed(self, normed, blocks) -> Float[Tensor, "B W H"]:
        rows, kernel = self.mlp_conv.before(_apart(normed, blocks))
        return _in_line(self.mlp_conv.after(super().feed(rows, blocks), kernel), blocks)


def _apart(rows: Float[Tensor, "B R H"], blocks: int) -> Tensor:
    """Consecutive blocks as rows of the batch, so no convolution crosses from block to block."""
    return rows.unflatten(1, (blocks, -1)).flatten(0, 1)


def _in_line(rows: Tensor, blocks: int) -> Float[Tensor, "B R H"]:
    return rows.unflatten(0, (-1, blocks)).flatten(1, 2)


SIZES = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


class DFlash2Config(DFlashConfig):
    """Configuration of a DFlash2 drafter; its fields stand with v1's, nested or at the top.

    Args:
        conv_kernel_size: rows of the block that a convolution sees, its own and those just before.
        conv_group_size: channels that share a dynamic kernel; divides ``hidden_size``.
        selector_rank: columns of the selector's codebooks.
        selector_top_k: candidates of a position, among which the selector chooses.

    Source: dflash 0.1.0, ``model.py``.

    Raises:
        ValueError: a field is missing or cannot be honoured; the message names it and the fix.
    """

    nested_fields: ClassVar[tuple[str, ...]] = (*NESTED_FIELDS, *SIZES)
    dflash2: ClassVar[bool] = True

    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16

    def check(self) -> None:
        """Raise ``ValueError`` for a field that the network cannot be built from."""
        super().check()
        for name in SIZES:
            if getattr(self, name) is None:
                raise ValueError(f"{name}=None: set the one the drafter was trained with.")
            check_counts(**{name: getattr(self, name)})
        if self.hidden_size % self.conv_group_size:
            raise ValueError(
                f"conv_group_size={self.conv_group_size} does not divide hidden_size={self.hidden_size}; "
                "set the one it was trained with."
            )
        size = self.draft_vocab_size or self.vocab_size
        if self.selector_top_k > size:
            raise ValueError(f"selector_top_k={self.selector_top_k} of a vocabulary of {size}; lower it.")


class DFlash2DraftModel(DFlashDraftModel):
    """A DFlash2 drafter. As v1's, z-lab's have no embedding and no head.

    Drafts are the selector's best candidates.
    ``from_pretrained`` reads the same layouts as v1's.
    """

    config_class = DFlash2Config
    kind = "DFlash2"
    layer_class = DFlash2Layer
    _no_split_modules = ["DFlash2Layer"]

    def __init__(self, config: Any):
        super().__init__(config)
        sizes = config.vocab_size, config.hidden_size, config.selector_rank
        self.candidate_selector = CandidateSelector(*sizes, config.selector_top_k)
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """As `DFlashDraftModel.from_pretrained`. Codebooks are read with and without ``.weight`` behind."""
        renamed = {rf"({name})\.weight$": r"\1" for name in CandidateSelector.lookups}
        kwargs["key_mapping"] = renamed | kwargs.get("key_mapping", {})
        return super().from_pretrained(*args, **kwargs)

    def _init_weights(self, module) -> None:
        if isinstance(module, DynamicConvolution):
            module.begin_as_nothing()
        elif isinstance(module, CandidateSelector):
            module.begin_as_nothing(self.config.initializer_range)
        else:
            super()._init_weights(module)

    def forward(self, *args, **kwargs):
        """As v1's.

        Raises:
            ValueError: called by transformers' own loop, which drafts without a selector.
        """
        if any(isinstance(given, DFlashCache) for given in (*args, *kwargs.values())):
            raise ValueError(
                "speculation_type='dflash' with a DFlash2 drafter drafts without its selector; use "
                "custom_generate=torch_dflash.dflash(drafter)."
            )
        return super().forward(*args, **kwargs)

    def chosen(
        self, hidden: Float[Tensor, "B N H"], logits: Float[Tensor, "B N V"], anchor: Int[Tensor, " B"]
    ) -> Int[Tensor, "B N"]:
        drafts = self.candidate_selector(hidden, self._coded(logits), anchor, self.targets_ids)
        return drafts.to(torch.int32)

    def followers(self, hidden, logits, scale, most) -> Following:
        return self.candidate_selector.followers(hidden, self._coded(logits), scale, most, self.targets_ids)

    def _coded(self, logits: Tensor) -> Tensor:
        """The logits of ids with a row in the codebooks; other ids are not drafted."""
        return logits[..., : self.config.vocab_size] if self.d2t is None else logits
