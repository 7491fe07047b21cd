"""One run of the target over a few texts, with the states of all of its layers kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from torch_dflash.targets.blocks import block_of, check_tappable, tapped
from torch_dflash.targets.skeleton import build_skeleton
from torch_dflash.targets.trace import blocks_of
from torch_dflash.targets.weights import collect_tensors


@dataclass(frozen=True)
class Text:
    """A prompt of ``start`` tokens and the target's own greedy answer to it: ``ids`` [T]."""

    ids: Int[Tensor, " T"]
    start: int


@dataclass(frozen=True)
class Recorded:
    """A text, and ``states``: the embedding's output, then that of each block, before the final norm."""

    text: Text
    states: list[Float[Tensor, "T H"]]


@torch.no_grad()
def record(target: Any, texts: Sequence[Text]) -> list[Recorded]:
    """Run ``target`` over each text once.

    Raises:
        ValueError: its layers cannot be tapped, or it is none that decodes here.
    """
    blocks = blocks_of(target)
    check_tappable(target, blocks)
    skeleton = build_skeleton(target, target.config._attn_implementation)  # no hook of ours in the model
    tensors, outputs, found = collect_tensors(skeleton, target, ""), {}, []

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        outputs[-1] = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))

    block_of(skeleton, blocks, 0).register_forward_pre_hook(keep, with_kwargs=True)
    layers = tuple(range(len(blocks.paths)))
    with tapped(skeleton, blocks, layers, outputs):
        for text in texts:
            step = {"input_ids": text.ids[None].to(target.device), "use_cache": False}
            torch.func.functional_call(skeleton, tensors, (), step)
            found.append(Recorded(text, [outputs[layer][0].detach() for layer in (-1, *layers)]))
    return found
