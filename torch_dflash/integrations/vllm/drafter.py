"""A DFlash drafter over keys and values that somebody else keeps: three steps, all of them stateless."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from torch_dflash.proposers.dflash.config import DFlashConfig
from torch_dflash.proposers.dflash.model import DFlashDraftModel

Attend = Callable[[Any, Tensor, Tensor, Tensor, float], Tensor]
"""``(attention layer, query [B, Q, W, D], key [B, G, W, D], value, scale) -> [B, W, Q, D]``."""


def most_drafts(config: Any) -> int:
    """The tokens that a drafter of this config was trained to draft at once.

    Raises:
        ValueError: the config is of no DFlash, DFlash2 or DSpark drafter.
    """
    if not isinstance(config, DFlashConfig):
        kind = type(config).__name__
        raise ValueError(f"a drafter of {kind}: pass a DFlash, DFlash2 or DSpark drafter.")
    return config.block_size - int(not config.sample_from_anchor)


def check_drafts(config: Any, drafts: int) -> None:
    """Raise ``ValueError`` if a drafter of this config was not trained to draft so many tokens at once."""
    most = most_drafts(config)
    if not 1 <= drafts <= most:
        raise ValueError(
            f"num_speculative_tokens={drafts}: this drafter drafts 1 to {most} tokens at once "
            f"(block_size={config.block_size}); pass a number in that range."
        )


def check_logits(config: Any, target: Any) -> None:
    """Raise ``ValueError`` for a drafter that would add to logits behind the target's cap or factor.

    vLLM hands out the target's logits as it samples them. The order of a row's tokens is the same there, so
    a drafter that takes the best loses nothing.

    Args:
        config: the drafter's.
        target: the config of the target's text.
    """
    adds = getattr(config, "selector_rank", 0) or config.markov_rank
    for name in ("final_logit_softcapping", "output_multiplier", "logit_scale", "logits_scaling"):
        value = getattr(target, name, None)
        if adds and not config.own_head and value not in (None, 1):
            raise ValueError(
                f"{name}={value} in the target: this drafter scores its tokens by the target's head before "
                "that, and vLLM has them only behind it; pass a drafter with a head of its own."
            )


class PagedDrafter(nn.Module):
    """The steps `project`, `remember` and `draft` of a drafter, each by its name through ``forward``.

    So ``torch.func.functional_call`` reaches every step with given weights.

    Args:
        drafter: a DFlash or DFlash2 drafter.
        drafts: K, the tokens drafted at once.

    Raises:
        ValueError: the drafter was not trained to draft so many.
    """

    def __init__(self, drafter: DFlashDraftModel, drafts: int):
        super().__init__()
        self.drafter: Any = drafter
        check_drafts(drafter.config, drafts)
        self.first_row = int(not drafter.config.sample_from_anchor)
        self.rows = drafts + self.first_row

    def forward(self, step: str, *args: Any) -> Any:
        return getattr(self, step)(*args)

    def project(self, features: Float[Tensor, "R nH"]) -> Float[Tensor, "R H"]:
        """Target features, tap beside tap, to context rows."""
        return self.drafter.project(features[None].to(self.drafter.fc.weight.dtype))[0]

    def remember(self, context: Float[Tensor, "R H"], at: Int[Tensor, " R"], write: Callable) -> None:
        """Call ``write(layer index, key [R, G, D], value [R, G, D])`` for each layer, with context rows' own.

        ``at``: the rows' positions.
        """
        rows = context[None]
        rope = self.drafter.rotary_emb(rows, at[None])
        for layer in self.drafter.layers:
            key, value = layer.self_attn.key_value(layer.context_rows(rows), rope)
            write(layer.self_attn.index, key[0].transpose(0, 1), value[0].transpose(0, 1))

    def draft(
        self,
        anchor: Int[Tensor, " B"],
        length: Int[Tensor, " B"],
        attend: Attend,
        embed: Callable[[Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
    ) -> Int[Tensor, "B K"]:
        """K drafts after ``anchor``, which stands at position ``length``; the target's ids.

        ``attend``: attention of a block's rows to the context and to each other.
        ``embed``, ``head``: the target's, ``ids -> rows`` and ``rows -> logits``.
        """
        drafter = self.drafter
        masks = torch.full_like(anchor, drafter.config.mask_token_id)[:, None]
        ids = torch.cat([anchor[:, None], masks.expand(-1, self.rows - 1)], dim=1)
        noise = drafter.embed(ids, embed, drafter.fc.weight.dtype)
        at = length[:, None] + torch.arange(self.rows, device=length.device)

        def memory(attention, key, value):
            return lambda query, scale: attend(attention, query, key, value, scale)

        hidden = drafter.block(noise, noise[:, :0], at, memory)
        return drafter.choose(hidden[:, self.first_row :], anchor, head)
