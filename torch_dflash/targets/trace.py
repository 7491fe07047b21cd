"""What a target's layers keep and see, learned from one forward on meta tensors, or refused."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import Cache

from torch_dflash.cache.dense import attend_densely
from torch_dflash.cache.spec import LayerSpec
from torch_dflash.cache.view import CACHE
from torch_dflash.checks import context_of, field_of
from torch_dflash.ops.attention import AttentionInputs
from torch_dflash.targets.autocast import TurnsAutocastOn, uncast
from torch_dflash.targets.blocks import Blocks, CallRecorder, find_blocks
from torch_dflash.targets.hooks import keeping_nothing
from torch_dflash.targets.masks import read_window
from torch_dflash.targets.scans import Scans, find_scans, scanning
from torch_dflash.targets.skeleton import build_skeleton, remembered_in

SUPPORTED = (
    "supported are decoders of causal attention, with or without gated delta rules, Mamba-2 or short "
    "convolutions, such as Llama, Qwen3, Qwen3.5, Gemma 3 and gpt-oss"
)
# What models hand to their attention and what changes no score: a round gives positions and cache itself.
HARMLESS = {
    "dropout",
    "position_ids",
    "cache_position",
    "use_cache",
    "is_causal",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
}
HONOURED = {"sliding_window", "s_aux", "softcap"}


class Refusal(ValueError):
    """A layer does what block decoding cannot: raised inside the model's forward, and not to be hidden."""


class RecordingCache(Cache):
    """Notes what each layer hands over; run once on meta tensors to learn shapes and masks."""

    def __init__(self, dtype: torch.dtype, said: int = 0, calls: CallRecorder | None = None):
        super().__init__(layers=[])
        self.dtype = dtype  # of the model
        self.said = said  # the answer to how many tokens are cached
        self.calls = calls
        self.start = torch.zeros(1, dtype=torch.int32, device="meta")
        self.shapes: dict[int, tuple[int, int, int]] = {}
        self.masks: dict[int, Callable] = {}
        self.windows: dict[int, int | None] = {}
        self.latent: set[int] = set()
        self.convs: dict[int, tuple[int, int]] = {}
        self.scans: dict[int, tuple[int, int, int]] = {}
        self.beyond_sdpa: set[str] = set()
        self._made: list[tuple[Tensor, Callable]] = []
        self._handed: tuple[Tensor, Tensor] | None = None
        self._asked: dict[int, tuple[int, Tensor | None]] = {}  # who asked for a state and has not used it

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if layer_idx in self.shapes:
            raise Refusal(f"layer {layer_idx} caches keys and values more than once a forward")
        self._handed = key_states, value_states
        self.shapes[layer_idx] = (key_states.shape[1], key_states.shape[3], value_states.shape[3])
        return key_states, value_states

    def make_mask(self, rule: Callable, rows: int, keys: int) -> Tensor:
        """A mask that stands for ``rule``, as transformers' mask functions hand one to every layer."""
        self._made.append((torch.ones(1, 1, rows, keys, dtype=torch.bool, device="meta"), rule))
        return self._made[-1][0]

    def attend(
        self, layer_idx: int, inputs: AttentionInputs, mask: Any, more: dict[str, Any]
    ) -> Float[Tensor, "B M Q Dv"]:
        """Note the layer's mask and window; ``more``: what else the model gave its attention, by name."""
        if layer_idx in self.masks:
            raise Refusal(f"layer {layer_idx} attends more than once a forward")
        unknown = sorted(n for n in more.keys() - HARMLESS - HONOURED if more[n] is not None)
        if unknown:
            raise Refusal(f"layer {layer_idx} hands {unknown[0]} to its attention, which would be ignored")
        if more.get("is_causal") is False:
            raise Refusal(
                f"layer {layer_idx} says is_causal=False, which some attention implementations follow and "
                "others do not (use_bidirectional_attention in its config?)"
            )
        self.beyond_sdpa |= {n for n in ("softcap", "s_aux") if more.get(n) is not None}
        self.masks[layer_idx] = self._rule_of(mask, layer_idx)
        self.windows[layer_idx] = more.get("sliding_window")
        if self.calls is not None:
            self.calls.attended(layer_idx)
        if self._handed is None or inputs.key is not self._handed[0] or inputs.value is not self._handed[1]:
            self.latent.add(layer_idx)
        return attend_densely(inputs, inputs.key, inputs.value, None)

    def _rule_of(self, mask: Any, layer_idx: int) -> Callable:
        for made, rule in self._made:
            # As it was made, or all of it again; what was written into it would not be seen.
            whole = mask is made or getattr(mask, "_base", None) is made and mask.stride() == made.stride()
            if whole and mask.shape == made.shape and made._version == 0:
                return rule
        kind = "no mask" if mask is None else "a mask of its own"
        raise Refusal(f"layer {layer_idx} hands {kind} to its attention, not one that transformers made")

    def get_conv_state(self, layer_idx, state_idx=0):
        return None  # so that every pass is one of several rows, as in `CacheView`

    def get_recurrent_state(self, layer_idx, state_idx=0):
        self._ask(layer_idx, self.scans, state_idx, None)

    def update_conv_state(self, conv_states, layer_idx, state_idx=0, **kwargs):
        self._ask(layer_idx, self.convs, state_idx, conv_states)
        return conv_states

    def update_recurrent_state(self, recurrent_states, *args, **kwargs):
        return recurrent_states

    def is_recording_past(self, layer_idx):
        return True

    def _ask(self, layer: int, known: dict[int, Any], state: int, given: Tensor | None) -> None:
        """A layer asks for a state: what it does with it is seen in `convolve` or `scan`."""
        if layer in known or state:
            raise Refusal(f"layer {layer} keeps more than one convolution, or more than one recurrent state")
        if self.calls is not None:
            self.calls.attended(layer)
        self._asked[id(known)] = layer, given

    def _answer(self, known: dict[int, Any], rows: Tensor | None, what: str) -> int:
        layer, given = self._asked.pop(id(known), (-1, None))
        if layer < 0 or given is not rows:
            raise Refusal(f"a layer {what} other rows than those of its state")
        return layer

    def convolve(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Note the shapes of a layer's convolution."""
        layer = self._answer(self.convs, rows, "convolves")
        if rows.dtype != self.dtype:
            raise Refusal(f"layer {layer} convolves {rows.dtype} rows in a model of {self.dtype}")
        self.convs[layer] = rows.shape[1], weight.shape[1] - 1
        return rows.to(weight.dtype)

    def scan(self, rows: Any) -> Tensor:
        """Note the shapes of a layer's recurrent state."""
        layer = self._answer(self.scans, None, "scans")
        self.scans[layer] = rows.key.shape[1], rows.key.shape[3], rows.value.shape[3]
        return torch.empty_like(rows.value)

    def check_answered(self) -> None:
        """Raise `Refusal` if a layer asked for a state and did with it what no cache here follows."""
        for layer, _ in self._asked.values():
            raise Refusal(
                f"layer {layer} keeps a state that is neither a short convolution's nor one of a gated delta "
                "rule, Kimi delta attention or Mamba-2"
            )

    def get_query_offset(self, layer_idx=0):
        return 0

    def get_mask_sizes(self, query_length, layer_idx=0):
        rows = query_length if isinstance(query_length, int) else query_length.shape[0]
        return rows, 0

    def get_seq_length(self, layer_idx=0):
        return self.said


class Traced(NamedTuple):
    """What a forward shows: each layer's cache, and where the layers lie."""

    specs: tuple[LayerSpec, ...]
    blocks: Blocks


def trace_layers(skeleton: Any, implementation: str | None = None) -> Traced:
    """Learn of the layers from one forward on meta tensors: configs disagree about K, V, windows and names.

    Args:
        skeleton: the target's architecture with our attention.
        implementation: the attention implementation that the live target runs with, if it runs.

    Raises:
        ValueError: the target does something else than causal attention, with or without a sliding window,
            over keys and values that each layer keeps; says what and where.
    """
    name = type(skeleton).__name__
    if "position_ids" not in inspect.signature(type(skeleton).forward).parameters:
        raise ValueError(
            f"target={name}: its forward names no position_ids, so it may count positions itself; "
            f"{SUPPORTED}."
        )
    with torch.inference_mode(False):  # there no write would be counted
        return _trace(skeleton, name, implementation)


def _trace(skeleton: Any, name: str, implementation: str | None) -> Traced:
    scans = find_scans(skeleton)
    kind = skeleton.get_input_embeddings().weight.dtype
    cache = RecordingCache(kind, calls=(calls := CallRecorder(skeleton)))
    try:
        with calls.recording():
            _run(skeleton, cache, scans, rows=1, length=2)
        cache.check_answered()
    except Refusal as refusal:
        raise ValueError(f"target={name}: {refusal}; {SUPPORTED}.") from refusal
    except TurnsAutocastOn as error:
        raise ValueError(f"target={name}: {error}") from error
    except Exception as error:  # whatever a model of another kind trips over
        # Recurrent layers look for a state of their own in the cache, and find no entry.
        reason = "a layer looks for a state of its own" if isinstance(error, IndexError) else repr(error)
        raise ValueError(
            f"target={name}: its forward cannot be traced with a cache of keys and values ({reason}); "
            f"{SUPPORTED}."
        ) from error
    if implementation == "sdpa" and cache.beyond_sdpa:
        raise ValueError(
            f"target={name}: its layers hand {min(cache.beyond_sdpa)} to their attention, which sdpa "
            "drops in some releases of transformers; load the target with attn_implementation='eager'."
        )
    specs = _specs(cache, skeleton, name)
    return Traced(specs, find_blocks(calls, len(specs)))


def blocks_of(model: Any) -> Blocks:
    """Where the layers of a live model lie.

    Raises:
        ValueError: as `trace_layers`.
    """
    skeleton = build_skeleton(model)
    with keeping_nothing(skeleton, refuse=False):
        return trace_layers(skeleton).blocks


class _OnMeta(TorchDispatchMode):
    """While open, tensors that a forward takes from elsewhere (a hook's vector) meet meta tensors as such."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        places = {leaf.device.type for leaf in leaves if leaf.ndim}
        if len(places) > 1 and "meta" in places:
            args, kwargs = pytree.tree_map_only(Tensor, lambda leaf: leaf.to("meta"), (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _run(skeleton: Any, cache: RecordingCache, scans: Scans, rows: int, length: int) -> None:
    ids = torch.zeros(rows, length, dtype=torch.int32, device="meta")
    position = torch.arange(length, dtype=torch.int32, device="meta").expand(rows, length)
    with torch.no_grad(), remembered_in(cache), scanning(skeleton, scans), _OnMeta(), uncast():
        skeleton(input_ids=ids, position_ids=position, **{CACHE: cache, "use_cache": True})


def _specs(cache: RecordingCache, skeleton: Any, name: str) -> tuple[LayerSpec, ...]:
    config = skeleton.config.get_text_config()
    recurrent = cache.convs.keys() | cache.scans.keys()
    layers = field_of(config, "num_hidden_layers") or 1 + max(cache.shapes, default=-1)
    unknown = {*range(layers)} - recurrent - cache.shapes.keys() - _without_state(config)
    odd = sorted(unknown | cache.shapes.keys() ^ cache.masks.keys() | (recurrent - {*range(layers)}))
    if odd:
        kept = min(odd)
        fewer = f" (num_hidden_layers={kept} in its config, if the others were removed)"
        raise ValueError(
            f"target={name}: layers {odd} keep no keys and values of their own, or attend to them by other "
            f"means than transformers' attention interface; {SUPPORTED}"
            f"{fewer if kept and odd == [*range(kept, layers)] else ''}."
        )
    context = context_of(skeleton)
    read = functools.cache(functools.partial(read_window, context=context))  # layers share two masks or so
    windows = {layer: _window(cache, layer, read, context, name) for layer in sorted(cache.masks)}
    _check_promises(config, [windows.get(layer) for layer in range(layers)], context, name)
    return tuple(_spec(cache, layer, windows.get(layer), name) for layer in range(layers))


def _spec(cache: RecordingCache, layer: int, window: int | None, name: str) -> LayerSpec:
    states = cache.scans.get(layer), cache.convs.get(layer)
    if layer not in cache.shapes:
        return LayerSpec("recurrent", 0, 0, 0, None, *states)
    if any(states) and layer in cache.latent:
        raise ValueError(f"target={name}: layer {layer} recurs beside latent attention; {SUPPORTED}.")
    kind = "both" if any(states) else "latent" if layer in cache.latent else "attention"
    return LayerSpec(kind, *cache.shapes[layer], window, *states)


def _without_state(config: Any) -> set[int]:
    """Layers of which the config says that they only compute on each token by itself."""
    kinds = field_of(config, "layer_types") or []
    return {layer for layer, kind in enumerate(kinds) if kind in ("mlp", "moe")}


def _window(cache: RecordingCache, layer: int, read: Callable, context: int, name: str) -> int | None:
    try:
        window = read(cache.masks[layer])
    except Exception as error:  # a mask function may hold anything: chunks and images, for two
        reason = error if isinstance(error, ValueError) else "it asks for more than two positions"
        raise ValueError(
            f"target={name}: the mask of layer {layer} is neither causal nor a causal sliding window "
            f"({reason}); {SUPPORTED}."
        ) from error
    if window == 1:
        raise ValueError(
            f"target={name}: layer {layer} sees itself alone (sliding_window=1), and transformers' own "
            "cache then keeps all positions; use a window of 2 or more."
        )
    said = cache.windows[layer]
    if said is not None and said < context and said != window:
        raise ValueError(
            f"target={name}: layer {layer} names a window of {said} beside a mask of {window}; which of "
            "the two holds depends on the attention implementation. Set sliding_window in its config to the "
            "one that it was trained with, or to None."
        )
    return window


def _check_promises(config: Any, windows: list[int | None], context: int, name: str) -> None:
    """Raise ``ValueError`` where the config speaks of a window and the layers show none."""
    promised = field_of(config, "sliding_window")
    if not promised or promised >= context or field_of(config, "use_sliding_window") is False:
        return
    kinds = field_of(config, "layer_types") or []
    lacking = [
        layer
        for layer, kind in enumerate(kinds[: len(windows)])
        if "sliding" in str(kind) and not windows[layer]
    ]
    if lacking or not kinds and not any(windows):
        raise ValueError(
            f"target={name}: sliding_window={promised} in its config, but its layers {lacking or 'all'} see "
            "every position; set sliding_window=None in the config if that is what it was trained with."
        )
