"""Kinds of drafters as a fit sees them: the states of drafted rows, and fields of a config."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from jaxtyping import Float
from torch import Tensor

from torch_dflash.proposers.checkpoint.extras import refuse_extras
from torch_dflash.proposers.dflash.config import DFlashConfig
from torch_dflash.proposers.dflash2.model import SIZES
from torch_dflash.proposers.eagle3.model import Eagle3Config
from torch_dflash.proposers.eagle3.unrolled import unrolled_states
from torch_dflash.proposers.layouts.eagle3 import NORMS
from torch_dflash.proposers.medusa.model import MedusaConfig
from torch_dflash.train.fit.blocks import AnchorBatch, draft_blocks, gather_rows

KNOWN = ("sample_from_anchor", "markov_rank")
"""Extras of a DFlash drafter that a fit trains."""


class Kind(ABC):
    """A kind of drafter.

    Attributes:
        title: for the card. head: its word for ``--head``; None: its drafters have several.
        shape: fields of the config that a fit's weights depend on. sizes: further ones, which it may lack.
    """

    title: str
    head: str | None = None
    shape: tuple[str, ...]
    sizes: tuple[str, ...] = ()

    @abstractmethod
    def check(self, config: Any) -> None:
        """Raise ``ValueError`` for a part that a fit does not train."""

    @abstractmethod
    def drafts(self, config: Any) -> int:
        """Tokens of a draft."""

    @abstractmethod
    def states(
        self, drafter: Any, batch: AnchorBatch, embedding: Float[Tensor, "V H"], drafts: int
    ) -> Float[Tensor, "B A N H"]:
        """The states of the drafted rows behind each anchor, as decoding computes them; ready for the head.

        A weight that acts behind them, in ``drafter.logits``, gets no gradient.
        """

    @abstractmethod
    def said(self, config: Any, name: str, weights: str, head: str) -> str:
        """The card's first sentence. ``name``: the target's."""


class DFlash(Kind):
    """v1, DFlash2 and DSpark."""

    title = "DFlash"
    shape = ("num_hidden_layers", "hidden_size", "intermediate_size", "mask_token_id", "sliding_window")
    shape += ("sample_from_anchor", "markov_rank")
    sizes = tuple(SIZES)

    def check(self, config: Any) -> None:
        refuse_extras(config, "training", "train one with the target's embedding and head.", KNOWN)

    def drafts(self, config: Any) -> int:
        return config.block_size - (not config.sample_from_anchor)

    def states(self, drafter, batch, embedding, drafts) -> Float[Tensor, "B A N H"]:
        first = int(not drafter.config.sample_from_anchor)
        return draft_blocks(drafter, batch, embedding, drafts + first)[:, :, first:]

    def said(self, config: Any, name: str, weights: str, head: str) -> str:
        rows = f"blocks of {config.block_size} rows ({self.drafts(config)} drafts)"
        return f"""Drafts {rows} for {name}: {weights} in
{config.num_hidden_layers} layers ({head}), taps {config.target_layer_ids}, mask id {config.mask_token_id}."""


class Medusa(Kind):
    """Heads on the feature before the anchor; their projections are the target's head."""

    title, head = "Medusa", "medusa"
    shape = ("hidden_size", "medusa_num_heads", "medusa_num_layers")

    def check(self, config: Any) -> None:
        if config.own_head:
            raise ValueError(
                "original_lm_head=False of the drafter: training does not know its heads' own projections; "
                "train one with the target's head."
            )

    def drafts(self, config: Any) -> int:
        return config.medusa_num_heads

    def states(self, drafter, batch, embedding, drafts) -> Float[Tensor, "B A N H"]:
        before = (batch.anchors - 1).clamp(min=0)[..., None]
        features = gather_rows(batch.features, before)[:, :, 0].to(drafter.norm.weight.dtype)
        return drafter.states(features, drafts)

    def said(self, config: Any, name: str, weights: str, head: str) -> str:
        blocks = f"{config.medusa_num_layers} residual blocks each"
        return f"""Drafts {self.drafts(config)} tokens for {name}: {weights} in
{config.medusa_num_heads} heads of {blocks} ({head}), tap {config.target_layer_ids}."""


class Eagle3(Kind):
    """A layer that is unrolled over the true tokens, one pass a draft."""

    title, head = "EAGLE-3", "eagle3"
    shape = ("hidden_size", "intermediate_size", "sliding_window", "qk_norm", *NORMS)

    def check(self, config: Any) -> None:
        refuse_extras(config, "training", "train one with the target's embedding and head.")

    def drafts(self, config: Any) -> int:
        return config.block_size - 1

    def states(self, drafter, batch, embedding, drafts) -> Float[Tensor, "B A N H"]:
        return unrolled_states(drafter, batch.ids, batch.features, batch.anchors, embedding, drafts)

    def said(self, config: Any, name: str, weights: str, head: str) -> str:
        return f"""Drafts {self.drafts(config)} tokens for {name}, one pass each: {weights} in
one layer ({head}), taps {config.target_layer_ids}."""


KINDS: dict[type, Kind] = {DFlashConfig: DFlash(), MedusaConfig: Medusa(), Eagle3Config: Eagle3()}


def kind_of(config: Any) -> Kind:
    """The kind of a drafter with this config.

    Raises:
        TypeError: no drafter that a fit trains.
    """
    for known, kind in KINDS.items():
        if isinstance(config, known):
            return kind
    raise TypeError(f"{type(config).__name__}: not the config of a drafter that a fit trains.")
