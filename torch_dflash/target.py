"""Any Hugging Face causal LM as a target: taps, raw embedding, logits, cached forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from torch_dflash.attention import visible
from torch_dflash.cache import CacheView, LayerSpec, RecordingCache, allocate
from torch_dflash.checks import check_target
from torch_dflash.config import check_static_rope
from torch_dflash.rows import take_row
from torch_dflash.skeleton import WINDOWS, build_skeleton
from torch_dflash.state import DecodePlan


@dataclass(frozen=True)
class TargetOutput:
    """``logits`` [B, M or 1, V], ``features`` [B, M, n*H] (None without taps), ``cache`` per-layer states."""

    logits: Tensor
    features: Tensor | None
    cache: tuple


class Target(nn.Module):
    """The target's architecture without weights. Methods run inside a functional call that binds them.

    Args:
        model: a live causal LM; only its class and a copy of its config are used.

    Raises:
        TypeError: not a transformers causal LM. ValueError: something tracing cannot do, by name.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        check_target(model)
        check_static_rope(model.config)
        self.model: Any = build_skeleton(model)
        self.specs = trace_layers(self.model)

    @property
    def config(self):
        """The skeleton's (copied) config."""
        return self.model.config

    @property
    def vocab_size(self) -> int:
        """Rows of the input embedding: the ids a prompt may contain."""
        return self.model.get_input_embeddings().weight.shape[0]

    @property
    def hidden_size(self) -> int:
        """Width H of the hidden states."""
        return self.model.get_input_embeddings().weight.shape[1]

    def start(self, plan: DecodePlan) -> tuple:
        """Empty cache for ``plan``, on the weights' device and in their dtype."""
        weight = self.model.get_input_embeddings().weight
        return tuple(allocate(spec, plan, weight.dtype, weight.device) for spec in self.specs)

    def embed(self, ids: Int[Tensor, "B W"]) -> Float[Tensor, "B W H"]:
        """The raw embedding weight: Gemma-like modules scale in their forward, drafters are fed unscaled."""
        return F.embedding(ids, self.model.get_input_embeddings().weight)

    def head(self, hidden: Float[Tensor, "B N H"]) -> Float[Tensor, "B N V"]:
        """The output head alone, as drafters share it."""
        head = self.model.get_output_embeddings()
        return head(hidden.to(head.weight.dtype))  # the drafter may be of another dtype

    def forward(
        self,
        ids: Int[Tensor, "B M"],
        start: Int[Tensor, " B"],
        cache: tuple,
        taps: tuple[int, ...] = (),
        row: Int[Tensor, " B"] | None = None,
    ) -> TargetOutput:
        """One cached forward of M rows per sequence at positions ``start[b] .. start[b]+M-1``.

        Args:
            ids: tokens; rows past what is committed later are harmless.
            start: first position of each sequence's rows.
            cache: per-layer states, consumed.
            taps: layers whose outputs (before the final norm) are joined into ``features``.
            row: head applied to this one row per sequence (prefill) instead of to all of them.
        """
        view = CacheView(cache, start)
        position = start[:, None] + torch.arange(ids.shape[1], device=ids.device, dtype=start.dtype)
        outputs: dict[int, Tensor] = {}
        with ExitStack() as hooks:
            hooks.enter_context(tapped(self.model, taps, outputs))
            if row is not None:
                head = self.model.get_output_embeddings()
                hook = head.register_forward_pre_hook(lambda _, args: (take_row(args[0], row),))
                hooks.callback(hook.remove)
            logits = self.model(
                input_ids=ids,
                position_ids=position,
                attention_mask=self._masks(position, cache),
                past_key_values=view,
                use_cache=True,
            ).logits
        features = torch.cat([outputs[tap] for tap in taps], dim=-1) if taps else None
        return TargetOutput(logits, features, tuple(view.states))

    def _masks(self, position: Tensor, cache: tuple) -> Tensor | dict[str, Tensor]:
        """4-D boolean masks; one per layer type where windows differ, else transformers drops the window."""
        slots = torch.arange(cache[0].key.shape[2], device=position.device, dtype=position.dtype)[None]
        windows = {spec.window for spec in self.specs}
        if len(windows) == 1:
            return visible(position, slots, windows.pop(), causal=True)
        return {
            kind: visible(position, slots, spec.window, causal=True)
            for kind, spec in zip(self.config.layer_types, self.specs, strict=True)
        }


@contextmanager
def tapped(skeleton: Any, taps: tuple[int, ...], outputs: dict[int, Tensor]) -> Iterator[None]:
    """While open, a forward of ``skeleton`` leaves the outputs of the layers ``taps`` in ``outputs``."""
    with ExitStack() as hooks:
        for tap in taps:
            hook = _layer(skeleton, tap).register_forward_hook(_keep(outputs, tap))
            hooks.callback(hook.remove)
        yield


def _layer(skeleton: Any, tap: int) -> nn.Module:
    return skeleton.get_decoder().layers[tap]


def _keep(outputs: dict[int, Tensor], tap: int):
    def hook(module, args, output):
        outputs[tap] = output[0] if isinstance(output, tuple) else output

    return hook


def trace_layers(skeleton: Any) -> tuple[LayerSpec, ...]:
    """Learn each layer's cache from one forward on meta tensors: configs disagree about K, V and windows.

    Raises:
        ValueError: a layer keeps something other than keys and values (recurrent or shared layers).
    """
    cache, windows = RecordingCache(), {}
    token = WINDOWS.set(windows)
    ids = torch.zeros(1, 2, dtype=torch.int32, device="meta")
    mask = torch.ones(1, 1, 2, 2, dtype=torch.bool, device="meta")
    masks = dict.fromkeys(getattr(skeleton.config, "layer_types", None) or (), mask)
    try:
        with torch.no_grad():
            skeleton(
                input_ids=ids,
                position_ids=torch.zeros_like(ids),
                attention_mask=masks if len(masks) > 1 else mask,
                past_key_values=cache,
                use_cache=True,
            )
    except Exception as error:  # whatever a model of another kind trips over
        raise ValueError(
            f"target={type(skeleton).__name__}: its forward needs a cache other than keys and values "
            f"({error}); supported are attention-only decoders such as Llama, Qwen2, Qwen3 and gpt-oss."
        ) from error
    finally:
        WINDOWS.reset(token)
    layers = len(getattr(skeleton.get_decoder(), "layers", ()))
    missing = sorted(set(range(layers)) - set(cache.shapes))
    if not layers:
        raise ValueError(
            f"target={type(skeleton).__name__}: its decoder has no `layers` to tap; supported are decoders "
            "built like Llama, Qwen2, Qwen3 and gpt-oss."
        )
    if missing:
        raise ValueError(
            f"target={type(skeleton).__name__}: layers {missing} keep no keys and values of their own; "
            "supported are attention-only decoders such as Llama, Qwen2, Qwen3 and gpt-oss."
        )
    return tuple(LayerSpec("attention", *cache.shapes[index], windows.get(index)) for index in range(layers))
