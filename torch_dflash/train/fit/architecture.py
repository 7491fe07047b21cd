"""A new, untrained drafter shaped after its target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from torch_dflash.checks import check_counts
from torch_dflash.proposers.dflash.config import DFlashConfig, default_target_layer_ids
from torch_dflash.proposers.dflash.model import DFlashDraftModel
from torch_dflash.targets.final_norm import final_norm
from torch_dflash.train.features.extract import Layers, check_layers
from torch_dflash.train.fit.heads import SIZES_OF_HEADS, check_head, with_head

# Of the target's own shape, so that the drafter's cost per layer is the target's.
COPIED = ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings")


@dataclass(frozen=True)
class DrafterShape:
    """What is chosen about a new drafter; the rest is its target's.

    Args:
        mask_token_id: an id that no text holds, with a row in the target's embedding: a special token that
            the chat template does not use, or a padding row past the tokenizer's last id.
        layers: draft layers.
        block_size: rows W of a block, the anchor included.
        taps: tapped layers of the target (0-based), as in 1,9,17; unset: five evenly spaced, as z-lab's.
        intermediate_size: width of the MLPs; unset: the target's.
        sliding_window: window of every draft layer, causal in the block; unset: full attention.
        head: dflash, v1; convolutions, v1 with those of DFlash2; dflash2, these and its candidate selector;
            dspark, v1 that drafts from the anchor's row on, with a Markov head.
            Unset: dflash, or that of the drafter to continue from.
        selector_rank: columns of the selector's codebooks; unset: 256, as published.
        selector_top_k: candidates that the selector chooses among; unset: 16, as published.
        conv_group_size: channels that share a convolution's dynamic kernel; unset: 16, as published.
        markov_rank: of the Markov head; unset: 256, as published.
        init_seed: of the random weights.

    Raises:
        ValueError: a value out of range.
    """

    mask_token_id: int
    layers: int = 5
    block_size: int = 16
    taps: Layers | None = None
    intermediate_size: int | None = None
    sliding_window: int | None = None
    head: str | None = None
    selector_rank: int | None = None
    selector_top_k: int | None = None
    conv_group_size: int | None = None
    markov_rank: int | None = None
    init_seed: int = 0

    def __post_init__(self):
        check_counts(least=0, mask_token_id=self.mask_token_id)
        check_counts(layers=self.layers, block_size=self.block_size, sliding_window=self.sliding_window)
        check_counts(intermediate_size=self.intermediate_size)
        check_counts(selector_rank=self.selector_rank, selector_top_k=self.selector_top_k)
        check_counts(conv_group_size=self.conv_group_size, markov_rank=self.markov_rank)
        check_head(self.head, **self.sizes)
        if self.taps is not None:
            check_layers(self.taps)

    @property
    def sizes(self) -> dict[str, int | None]:
        """Of the parts that v1 does not have."""
        return {name: getattr(self, name) for name in SIZES_OF_HEADS}


def new_drafter(target: Any, shape: DrafterShape) -> DFlashDraftModel:
    """A drafter with random weights for ``target``, its layers as wide as the target's.

    Raises:
        ValueError: no drafter can be built so; the message names the field.
    """
    base = target.config.get_text_config()
    layers = base.num_hidden_layers
    taps = shape.taps or default_target_layer_ids(layers, min(5, max(1, layers - 3)))
    copied = {name: getattr(base, name) for name in COPIED if getattr(base, name, None) is not None}
    kind = "sliding_attention" if shape.sliding_window else "full_attention"
    config = DFlashConfig(
        **copied,
        hidden_size=target.get_input_embeddings().weight.shape[1],
        vocab_size=base.vocab_size,
        intermediate_size=shape.intermediate_size or base.intermediate_size,
        num_hidden_layers=shape.layers,
        num_target_layers=layers,
        rope_parameters=dict(base.rope_parameters),
        layer_types=[kind] * shape.layers,
        sliding_window=shape.sliding_window,
        tie_word_embeddings=False,
        block_size=shape.block_size,
        mask_token_id=shape.mask_token_id,
        target_layer_ids=list(taps),
        sample_from_anchor=shape.head == "dspark",
        architectures=["DFlashDraftModel"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(shape.init_seed)
        drafter = DFlashDraftModel(config)
    norm: Any = final_norm(target)
    if getattr(norm, "weight", None) is not None:
        # The head was trained on states of this scale; with ones, the first losses are many times too high.
        drafter.norm.weight.data.copy_(norm.weight.detach())
    # Every head begins with the weights of v1.
    return with_head(drafter, shape.head or "dflash", shape.init_seed, **shape.sizes).to(target.device)
