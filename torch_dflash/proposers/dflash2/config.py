"""The configuration of a DFlash2 drafter: v1's, and the sizes of convolutions and selector."""

from __future__ import annotations

from typing import ClassVar

from torch_dflash.checks import check_counts
from torch_dflash.proposers.dflash.config import NESTED_FIELDS, DFlashConfig

SIZES = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


class DFlash2Config(DFlashConfig):
    """Configuration of a DFlash2 drafter. Its fields lie beside v1's, nested or at the top.

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
    second: ClassVar[bool] = True

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
                f"conv_group_size={self.conv_group_size} does not divide hidden_size={self.hidden_size}; set "
                "the one the drafter was trained with."
            )
        size = self.draft_vocab_size or self.vocab_size
        if self.selector_top_k > size:
            raise ValueError(f"selector_top_k={self.selector_top_k} of a vocabulary of {size}; lower it.")
