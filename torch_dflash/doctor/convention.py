"""What a drafter's numbers mean: all that a config, a loader or a trainer may hold otherwise."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import Any, cast

import torch
from accelerate import init_empty_weights

from torch_dflash.proposers.dflash.model import DFlashDraftModel


@dataclass(frozen=True)
class Convention:
    """How blocks are drafted.

    Attributes:
        taps: blocks of the target whose outputs are read, 0-based; -1 is the embedding's output.
        normed: whether they are read behind the target's final norm.
        mask_id: the id whose embedding stands for a token to be drafted.
        scale: factor on the target's raw embedding.
        layers: of each draft layer its window (None: all) and whether its block is causal.
        rope: the rotary parameters, as JSON.
        skipped: norms of the drafter that are left out, of ``hidden_norm`` and ``norm``.
        first_row: 1 where a row says the token of its own place, 0 where it says the one after it.
        tied: whether tokens are read off the target's embedding instead of its head.
        dtype: of the drafter's arithmetic.
    """

    taps: tuple[int, ...]
    mask_id: int
    scale: float
    layers: tuple[tuple[int | None, bool], ...]
    rope: str
    dtype: torch.dtype
    normed: bool = False
    skipped: frozenset[str] = frozenset()
    first_row: int = 1
    tied: bool = False

    @classmethod
    def of(cls, drafter: DFlashDraftModel) -> Convention:
        """What the drafter's own config says."""
        config, blocks = drafter.config, cast(Any, drafter.layers)
        return cls(
            taps=tuple(config.target_layer_ids),
            mask_id=config.mask_token_id,
            scale=config.input_embedding_scale,
            layers=tuple((layer.self_attn.window, layer.self_attn.causal) for layer in blocks),
            rope=as_text(config.rope_parameters),
            dtype=drafter.dtype,
            first_row=int(not config.sample_from_anchor),
        )

    def applied(self, drafter: DFlashDraftModel) -> Any:
        """A drafter of this convention that shares its weights with ``drafter``, which stays as it is."""
        config = copy.deepcopy(drafter.config)
        config.mask_token_id, config.input_embedding_scale = self.mask_id, self.scale
        config.rope_parameters = json.loads(self.rope)
        with init_empty_weights(include_buffers=False):
            twin: Any = type(drafter)(config)
        twin.load_state_dict(drafter.state_dict(), assign=True)
        twin.lm_head = None  # rows are read by the head that is handed over, its own or another
        for layer, (window, causal) in zip(twin.layers, self.layers, strict=True):
            layer.self_attn.window, layer.self_attn.causal = window, causal
        for name in self.skipped:
            setattr(twin, name, torch.nn.Identity())
        return twin.to(drafter.device, self.dtype).train(drafter.training)


def as_text(parameters: dict[str, Any]) -> str:
    """Parameters in one form, so that equal ones are equal."""
    return json.dumps(parameters, sort_keys=True)
