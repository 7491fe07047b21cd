"""One run of the target over a few texts, with the states of all of its layers kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from torch_dflash.target.final_norm import final_norm


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
        ValueError: it does not hand out the state behind each of its layers.
    """
    layers = target.config.get_text_config().num_hidden_layers
    found = []
    for text in texts:
        ids = text.ids[None].to(target.device)
        with _inputs_of(final_norm(target)) as seen:
            states = target(ids, output_hidden_states=True, use_cache=False).hidden_states
        if states is None or len(states) != layers + 1:
            count = 0 if states is None else len(states)
            raise ValueError(
                f"target={type(target).__name__} hands out {count} hidden states for {layers} layers; its "
                "conventions cannot be judged, call td.check(target) for what it computes."
            )
        last = [*states[:-1], *seen[-1:]] if seen else states
        found.append(Recorded(text, [state[0].detach() for state in last]))
    return found


@contextmanager
def _inputs_of(norm: torch.nn.Module | None) -> Iterator[list[Tensor]]:
    """What ``norm`` is given while the context is open: transformers hands out the last state behind it."""
    seen: list[Tensor] = []
    if norm is None:
        yield seen
        return
    hook = norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    try:
        yield seen
    finally:
        hook.remove()
