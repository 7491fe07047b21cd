"""Does this drafter fit this target? Asked before anything is built."""

from __future__ import annotations

import copy
from typing import cast

from torch import Tensor
from transformers import PreTrainedModel

from torch_dflash.checks import check_counts
from torch_dflash.proposers import DFlashProposer, PlainProposer, Proposer
from torch_dflash.proposers.dflash.model import DFlashDraftModel


def check_pair(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    """Raise ``ValueError`` naming the first field in which ``drafter`` does not fit ``target``."""
    config, base = drafter.config, target.config.get_text_config()
    embedding: Tensor = target.get_input_embeddings().weight  # pyright: ignore[reportAssignmentType]
    layers = base.num_hidden_layers
    if base.hidden_size != embedding.shape[1]:
        raise ValueError(
            f"hidden_size={base.hidden_size} of the target's layers, but its embedding has "
            f"{embedding.shape[1]} columns, which it projects; a drafter needs both alike: pass drafter=None "
            "or NGramProposer()."
        )
    if config.hidden_size != embedding.shape[1]:
        raise ValueError(
            f"hidden_size={config.hidden_size} of the drafter, but the target's is {embedding.shape[1]}; "
            "use the drafter trained for this target."
        )
    if config.num_target_layers not in (None, layers):
        raise ValueError(
            f"num_target_layers={config.num_target_layers} in the drafter, but the target has {layers} "
            "layers; use the drafter trained for this target."
        )
    outside = [tap for tap in config.target_layer_ids if not 0 <= tap < layers]
    if outside:
        raise ValueError(
            f"target_layer_ids={config.target_layer_ids}: {outside} lie outside the target's {layers} layers "
            "(ids are 0-based block indices; speculators' aux_hidden_state_layer_ids are one higher)."
        )
    taps = drafter.fc.in_features / config.hidden_size
    if taps != len(config.target_layer_ids):
        raise ValueError(
            f"target_layer_ids names {len(config.target_layer_ids)} taps, but fc takes {taps:g}; "
            "the config and the weights are of different drafters."
        )
    if config.vocab_size not in (0, base.vocab_size):
        raise ValueError(
            f"vocab_size={config.vocab_size} of the drafter, but the target's is {base.vocab_size}; "
            "the two must share the vocabulary."
        )
    if config.mask_token_id is None:
        raise ValueError(
            "mask_token_id is missing from the drafter's config; set the id it was trained with "
            "(config.mask_token_id = ...)."
        )
    if not 0 <= config.mask_token_id < embedding.shape[0]:
        raise ValueError(
            f"mask_token_id={config.mask_token_id} has no row in the target's embedding "
            f"({embedding.shape[0]} rows); set the id the drafter was trained with."
        )
    # A loaded target has no torch device; a drafter's tensors are copied to wherever it is.
    if drafter.device != target.device and target.device.type != "meta":
        raise ValueError(
            f"the drafter is on {drafter.device}, the target on {target.device}; move them together."
        )


def check_drafter(drafter) -> None:
    """Raise ``TypeError`` unless ``drafter`` is a drafter model, a proposer, or None."""
    if isinstance(drafter, PreTrainedModel) and not isinstance(drafter, DFlashDraftModel):
        if hasattr(drafter.config, "dflash_config"):
            raise TypeError(
                f"drafter={type(drafter).__name__}: a drafter's files read as another model, with weights "
                "missing; load them with torch_dflash.DFlashDraftModel.from_pretrained."
            )
    if not (drafter is None or isinstance(drafter, Proposer | DFlashDraftModel)):
        raise TypeError(
            f"drafter={type(drafter).__name__}: pass a DFlashDraftModel (see its from_pretrained), a "
            "Proposer such as NGramProposer(), or None for plain decoding."
        )


def make_proposer(target: PreTrainedModel, drafter, block_size: int | None) -> Proposer:
    """The proposer for what a user passes as ``drafter``: a drafter model, a proposer, or None.

    Raises:
        TypeError, ValueError: not something that drafts, or it does not fit the target.
    """
    check_drafter(drafter)
    check_counts(block_size=block_size)
    if isinstance(drafter, DFlashDraftModel):
        check_pair(target, drafter)
        if block_size is not None and block_size < 2:
            raise ValueError(
                f"block_size={block_size}: a block is the anchor and at least one draft; pass drafter=None "
                "to decode without drafting."
            )
        return DFlashProposer(drafter, block_size)
    # A copy without weights: an engine must not keep the user's module alive, nor touch it.
    proposer = PlainProposer() if drafter is None else copy.deepcopy(drafter)
    if not isinstance(getattr(proposer, "name", None), str):
        raise TypeError(
            f"drafter={type(proposer).__name__}: it has no name; give the class one (name = 'mine'), which "
            "states saved with it will carry."
        )
    if not hasattr(proposer, "width"):
        raise TypeError(
            f"drafter={type(proposer).__name__}: it has no width; set how many rows it drafts, the anchor "
            "included (width = 8)."
        )
    check_counts(width=proposer.width)
    if block_size not in (None, proposer.width):
        raise ValueError(
            f"block_size={block_size}, but {type(proposer).__name__} drafts {proposer.width}; set it there."
        )
    return cast(Proposer, proposer.to("meta"))
