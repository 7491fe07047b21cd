"""Learns each layer's cache shapes, mask and window from one forward on meta tensors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from operator import is_
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
from torch_dflash.targets.hooks import restoring_hooks
from torch_dflash.targets.latents import EXPAND, WEIGHT, Latents, absorbing, find_latents
from torch_dflash.targets.masks import read_window
from torch_dflash.targets.scans import Scans, find_scans, scanning
from torch_dflash.targets.skeleton import build_skeleton, using_cache

SUPPORTED = (
    "supported are decoders of causal attention, with or without gated delta rules, Mamba-2 or short "
    "convolutions, such as Llama, Qwen3, Qwen3.5, Gemma 3 and gpt-oss"
)
# Arguments of attention that change no score: a round passes positions and cache itself.
HARMLESS = set(
    "dropout position_ids cache_position use_cache is_causal logits_to_keep output_attentions "
    "output_hidden_states output_router_logits return_dict".split()
)
HONOURED = {"sliding_window", "s_aux", "softcap", "indices"}

INDEXERS = {
    "deepseek_v4": "it caches compressed entries",
    "glm5_next": "its indexer pools keys",
    "minimax_m3_vl": "its key heads choose blocks",
    "qwen4_exp": "its indexer chooses compressed blocks",
}
"""Why sparse attention of these model types is refused; of positions that all heads share it is not."""


class Refusal(ValueError):
    """A layer is not supported: raised inside the model's forward."""


class Unabsorbed(Exception):
    """A layer attends to other latents than it caches: they are then expanded, as transformers does."""


class RecordingCache(Cache):
    """Records shapes, masks and states of each layer in one forward on meta tensors."""

    def __init__(self, dtype: torch.dtype, calls: CallRecorder):
        super().__init__(layers=[])
        self.dtype = dtype  # of the model
        self.calls = calls
        self.start = torch.zeros(1, dtype=torch.int32, device="meta")
        self.shapes: dict[int, tuple[int, int, int]] = {}
        self.masks: dict[int, Callable] = {}
        self.windows: dict[int, int | None] = {}
        self.latent: set[int] = set()
        self.shared: set[int] = set()
        self.convs: dict[int, tuple[int, int]] = {}
        self.scans: dict[int, tuple[int, int, int]] = {}
        self.indexes: dict[int, int] = {}
        self.wide: set[int] = set()
        self.beyond_sdpa: set[str] = set()
        self._made: list[tuple[Tensor, Callable]] = []
        self._handed: dict[int, tuple[Tensor, Tensor]] = {}
        # Layers that asked for a state and have not used it.
        self._pending_states: dict[int, tuple[int, Tensor | None]] = {}

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if layer_idx in self.shapes:
            raise Refusal(f"layer {layer_idx} caches keys and values more than once a forward")
        self._handed[layer_idx] = key_states, value_states
        self.shapes[layer_idx] = (key_states.shape[1], key_states.shape[3], value_states.shape[3])
        return key_states, value_states

    def update_indexer(self, indexer_key_states, layer_idx, *args, **kwargs):
        rows = indexer_key_states
        if layer_idx in self.indexes or rows.ndim != 3 or args or kwargs:
            raise Refusal(f"layer {layer_idx} caches other keys of an indexer than one a position")
        if rows.dtype not in (self.dtype, torch.float32):
            raise Refusal(f"layer {layer_idx} caches {rows.dtype} keys of an indexer")
        self.indexes[layer_idx] = rows.shape[2]
        if rows.dtype != self.dtype:
            self.wide.add(layer_idx)
        return rows

    def make_mask(self, rule: Callable, rows: int, keys: int) -> Tensor:
        """A placeholder mask for ``rule``, which transformers passes to every layer."""
        self._made.append((torch.ones(1, 1, rows, keys, dtype=torch.bool, device="meta"), rule))
        return self._made[-1][0]

    def expands(self, _: int) -> bool:
        """No layer's latents are expanded."""
        return False

    def attend(
        self, layer_idx: int, inputs: AttentionInputs, mask: Any, more: dict[str, Any]
    ) -> Float[Tensor, "B M Q Dv"]:
        """Record the layer's mask and window; ``more``: the other arguments of its attention, by name."""
        if layer_idx in self.masks:
            raise Refusal(f"layer {layer_idx} attends more than once a forward")
        unknown = sorted(n for n in more.keys() - HARMLESS - HONOURED if more[n] is not None)
        if unknown:
            raise Refusal(f"layer {layer_idx} passes {unknown[0]} to its attention, which would be ignored")
        if more.get("is_causal") is False:
            raise Refusal(
                f"layer {layer_idx} says is_causal=False, which some attention implementations follow and "
                "others do not (use_bidirectional_attention in its config?)"
            )
        self._check_choice(layer_idx, inputs, more.get("indices"))
        self.beyond_sdpa |= {n for n in ("softcap", "s_aux") if more.get(n) is not None}
        self.masks[layer_idx] = self._rule_of(mask, layer_idx)
        self.windows[layer_idx] = more.get("sliding_window")
        self.calls.attended(layer_idx)
        given = (inputs.value, inputs.key) if inputs.shared else (inputs.key, inputs.value)
        source = next((at for at, pair in self._handed.items() if all(map(is_, given, pair))), None)
        if inputs.shared:
            # Of a layer that expands, an engine's cache hands all positions, not the rows' own.
            if source is None or source in self.latent:
                raise Unabsorbed
            self.shared.add(layer_idx)
            width, inputs = inputs.value.shape[3], inputs.joined()
            self.shapes[layer_idx] = 1, inputs.key.shape[3], width
            return attend_densely(inputs, inputs.key, inputs.value[..., :width], None)
        if source is None or source != max(self._handed):
            self.latent.add(layer_idx)
        return attend_densely(inputs, inputs.key, inputs.value, None)

    def _check_choice(self, layer: int, inputs: AttentionInputs, choice: Any) -> None:
        """Raise `Refusal` unless a layer hands on positions for each row where it has an indexer, or none."""
        if choice is None and layer not in self.indexes:
            return
        rows = inputs.query.shape[0], inputs.query.shape[2]
        shape = choice.shape if isinstance(choice, Tensor) and not choice.is_floating_point() else ()
        if len(shape) != 3 or shape[:2] != rows or not self.indexes:
            raise Refusal(f"layer {layer} has an indexer that does not choose positions for each row")

    def _rule_of(self, mask: Any, layer_idx: int) -> Callable:
        for made, rule in self._made:
            # The mask itself or a whole view; a write into the mask would be missed.
            whole = mask is made or getattr(mask, "_base", None) is made and mask.stride() == made.stride()
            if whole and mask.shape == made.shape and made._version == 0:
                return rule
        kind = "no mask" if mask is None else "a mask of its own"
        raise Refusal(f"layer {layer_idx} passes {kind} to its attention, not one that transformers made")

    def get_conv_state(self, layer_idx, state_idx=0):
        return None  # so that every pass has several rows, as in `CacheView`

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
        """Note that a layer asks for a state, which `convolve` or `scan` then uses."""
        if layer in known or state:
            raise Refusal(f"layer {layer} keeps more than one convolution, or more than one recurrent state")
        self.calls.attended(layer)
        self._pending_states[id(known)] = layer, given

    def _answer(self, known: dict[int, Any], rows: Tensor | None, what: str) -> int:
        layer, given = self._pending_states.pop(id(known), (-1, None))
        if layer < 0 or given is not rows:
            raise Refusal(f"a layer {what} other rows than those of its state")
        return layer

    def convolve(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Record the shapes of a layer's convolution."""
        layer = self._answer(self.convs, rows, "convolves")
        if rows.dtype != self.dtype:
            raise Refusal(f"layer {layer} convolves {rows.dtype} rows in a model of {self.dtype}")
        self.convs[layer] = rows.shape[1], weight.shape[1] - 1
        return rows.to(weight.dtype)

    def scan(self, rows: Any) -> Tensor:
        """Record the shapes of a layer's recurrent state."""
        layer = self._answer(self.scans, None, "scans")
        self.scans[layer] = rows.key.shape[1], rows.key.shape[3], rows.value.shape[3]
        return torch.empty_like(rows.value)

    def check_answered(self) -> None:
        """Raise `Refusal` if a layer asked for a state and used it in an unsupported way."""
        for layer, _ in self._pending_states.values():
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
        return 0


class Traced(NamedTuple):
    """The result of a trace: each layer's cache, the decoder blocks, and the modules that hand latents."""

    specs: tuple[LayerSpec, ...]
    blocks: Blocks
    latents: Latents


def trace_layers(skeleton: Any, implementation: str | None = None, latents: Latents | None = None) -> Traced:
    """Trace one forward on meta tensors: configs disagree about K, V, windows and names.

    Args:
        skeleton: the target's architecture with our attention.
        implementation: the live target's attention implementation, unless its weights are on meta.
        latents: modules of the live target that may hand latents (`find_latents`).

    Raises:
        ValueError: a layer is neither causal attention over its own keys and values, with or without a
            sliding window, nor a supported recurrence; names the layer.
    """
    try:
        with torch.inference_mode(False):  # inference mode counts no writes
            try:
                return _trace(skeleton, implementation, latents or {})
            except Unabsorbed:
                return _trace(skeleton, implementation, {})
    except ValueError as error:
        end = f"; {SUPPORTED}." if isinstance(error, Refusal) else ""
        raise ValueError(f"target={type(skeleton).__name__}: {error}{end}") from error


def _trace(skeleton: Any, implementation: str | None, latents: Latents) -> Traced:
    if "position_ids" not in inspect.signature(type(skeleton).forward).parameters:
        raise Refusal("its forward names no position_ids, so it may count positions itself")
    scans = find_scans(skeleton)
    kind = skeleton.get_input_embeddings().weight.dtype
    cache = RecordingCache(kind, calls := CallRecorder(skeleton))
    try:
        with calls.recording(), absorbing(skeleton, latents):
            _run(skeleton, cache, scans, rows=1, length=2)
        cache.check_answered()
    except (Refusal, TurnsAutocastOn, Unabsorbed):
        raise
    except Exception as error:  # unsupported models may raise any error
        # Recurrent layers read their own state from the cache, and find no entry.
        kind = skeleton.config.get_text_config().model_type.removesuffix("_text")
        own = INDEXERS.get(kind, "a layer looks for a state of its own")
        reason = own if isinstance(error, IndexError) else repr(error)
        text = f"its forward cannot be traced with a cache of keys and values ({reason})"
        raise Refusal(text) from error
    if implementation == "sdpa" and cache.beyond_sdpa:
        raise ValueError(
            f"its layers pass {min(cache.beyond_sdpa)} to their attention, which sdpa drops in some "
            "releases of transformers; load the target with attn_implementation='eager'."
        )
    specs = _specs(cache, skeleton, latents)
    return Traced(specs, find_blocks(calls, len(specs)), latents)


def blocks_of(model: Any) -> Blocks:
    """The decoder blocks of a live model.

    Raises:
        ValueError: as in `trace_layers`.
    """
    skeleton = build_skeleton(model)
    with restoring_hooks(skeleton, refuse=False):
        return trace_layers(skeleton, latents=find_latents(model)).blocks


class _OnMeta(TorchDispatchMode):
    """While open, a real tensor, such as a hook's vector, becomes a meta tensor among meta ones."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        places = {leaf.device.type for leaf in leaves if leaf.ndim}
        if len(places) > 1 and "meta" in places:
            args, kwargs = pytree.tree_map_only(Tensor, lambda leaf: leaf.to("meta"), (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _run(skeleton: Any, cache: RecordingCache, scans: Scans, rows: int, length: int) -> None:
    ids = torch.zeros(rows, length, dtype=torch.int32, device="meta")
    position = torch.arange(length, dtype=torch.int32, device="meta").expand(rows, length)
    with torch.no_grad(), using_cache(cache), scanning(skeleton, scans), _OnMeta(), uncast():
        skeleton(input_ids=ids, position_ids=position, **{CACHE: cache, "use_cache": True})


def _specs(cache: RecordingCache, skeleton: Any, latents: Latents) -> tuple[LayerSpec, ...]:
    config = skeleton.config.get_text_config()
    recurrent = cache.convs.keys() | cache.scans.keys()
    layers = field_of(config, "num_hidden_layers") or 1 + max(cache.shapes, default=-1)
    unknown = {*range(layers)} - recurrent - cache.shapes.keys() - _without_state(config)
    odd = sorted(unknown | cache.shapes.keys() ^ cache.masks.keys() | (recurrent - {*range(layers)}))
    if odd:
        kept = min(odd)
        removed = kept and odd == [*range(kept, layers)]
        hint = f" (num_hidden_layers={kept} in its config, if the others were removed)" if removed else ""
        if any(hasattr(type(one), EXPAND) and path not in latents for path, one in skeleton.named_modules()):
            hint = f" (a layer that reads another's latents needs every {WEIGHT} plain: no hook, no adapter)"
        raise Refusal(
            f"layers {odd} keep no keys and values of their own, or attend to them by other means than "
            f"transformers' attention interface{hint}"
        )
    context = context_of(skeleton)
    read = functools.cache(functools.partial(read_window, context=context))  # layers share a few masks
    windows = {layer: _window(cache, layer, read, context) for layer in sorted(cache.masks)}
    _check_promises(config, [windows.get(layer) for layer in range(layers)], context)
    return tuple(_spec(cache, layer, windows.get(layer)) for layer in range(layers))


def _spec(cache: RecordingCache, layer: int, window: int | None) -> LayerSpec:
    states = cache.scans.get(layer), cache.convs.get(layer)
    if layer not in cache.shapes:
        return LayerSpec("recurrent", 0, 0, 0, None, *states)
    if any(states) and layer in cache.latent | cache.shared | cache.indexes.keys():
        raise Refusal(f"layer {layer} has a recurrence, and latent attention or an indexer")
    kind = "both" if any(states) else "latent" if layer in cache.latent else "attention"
    kind = "shared" if layer in cache.shared else kind
    index = cache.indexes.get(layer), layer in cache.wide
    return LayerSpec(kind, *cache.shapes[layer], window, *states, *index)


def _without_state(config: Any) -> set[int]:
    """Layers without any state across tokens, by the config."""
    kinds = field_of(config, "layer_types") or []
    return {layer for layer, kind in enumerate(kinds) if kind in ("mlp", "moe")}


def _window(cache: RecordingCache, layer: int, read: Callable, context: int) -> int | None:
    try:
        window = read(cache.masks[layer])
    except Exception as error:  # a mask function may depend on anything, such as chunks or images
        reason = error if isinstance(error, ValueError) else "it asks for more than two positions"
        text = f"the mask of layer {layer} is neither causal nor a causal sliding window ({reason})"
        raise Refusal(text) from error
    if window == 1:
        raise ValueError(
            f"layer {layer} sees itself alone (sliding_window=1), and transformers' own cache then keeps "
            "all positions; use a window of 2 or more."
        )
    named = cache.windows[layer]
    if named is not None and named < context and named != window:
        raise ValueError(
            f"layer {layer} names a window of {named}, its mask one of {window}, and the attention "
            "implementation decides; set sliding_window to the one that it was trained with, or to None."
        )
    return window


def _check_promises(config: Any, windows: list[int | None], context: int) -> None:
    """Raise ``ValueError`` where the config has a window that the layers do not apply."""
    promised = field_of(config, "sliding_window")
    if not promised or promised >= context or field_of(config, "use_sliding_window") is False:
        return
    kinds = field_of(config, "layer_types") or []
    named = zip(kinds, windows, strict=False)
    lacking = [at for at, (kind, window) in enumerate(named) if "sliding" in str(kind) and not window]
    if lacking or not kinds and not any(windows):
        raise ValueError(
            f"sliding_window={promised} in its config, but its layers {lacking or 'all'} see every position; "
            "set sliding_window=None in the config if it was trained so."
        )
