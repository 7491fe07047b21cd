"""Recurrent layers on a slice: each chip runs the layer's own forward on its heads.

States of the gated delta rule (Qwen3-Next and its successors) are cut by value heads. The channels of the
convolution are a block of queries, one of keys and one of values: each block is cut by heads, so that a chip
holds matching heads of all three.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from jax.sharding import Mesh, PartitionSpec
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from jax_bridge._torchax import call_jax, call_torch
from jax_bridge.mesh.current import WHOLE, P, Slice
from jax_bridge.mesh.cut import BLOCKS, COLUMN, ROW, Cut, InBlocks, Partition, specs_of
from jax_bridge.mesh.shape import ALL
from jax_bridge.tails import cut_tail, whole_tail
from jax_bridge.weights.formats import bound, stored_as
from torch_dflash.cache.recurrent import FreshState
from torch_dflash.targets.skeleton import current_cache, using_cache

BY_HEADS = ("in_proj_qkvz", "in_proj_ba", "in_proj_z", "in_proj_b", "in_proj_a", "A_log", "dt_bias")
"""Weights ordered by heads: a chip has contiguous rows."""
BY_BLOCKS = ("in_proj_qkv", "conv1d")
"""Weights with a row per channel of the convolution."""
MIXER = (*BY_HEADS, *BY_BLOCKS, "norm", "out_proj")
COUNTS = ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim")
"""Attributes of a layer's module that its forward reads and that a chip has a share of."""


def blocks_of(config: Any, mesh: Mesh) -> tuple[int, ...]:
    """Channels of queries, keys and values in the convolutions of a target's config.

    Empty without recurrent layers, and where heads do not divide over the chips: each then has whole layers.
    """
    text = config.get_text_config()
    if "linear_attention" not in (getattr(text, "layer_types", None) or ()):
        return ()
    keys, values = text.linear_num_key_heads, text.linear_num_value_heads
    if keys % mesh.size or values % mesh.size:
        return ()
    key, value = keys * text.linear_key_head_dim, values * text.linear_value_head_dim
    return key, key, value


def part_of_mixer(name: str) -> str:
    """The entry of `MIXER` for a weight's name in the layer."""
    return name.removesuffix(".weight")


def mixer_partition(name: str, mesh: Mesh, blocks: tuple[int, ...]) -> Partition:
    """The partition of a recurrent layer's weight by its name in the layer."""
    part = part_of_mixer(name)
    if part == "out_proj":
        return Partition(mesh, P(None, ALL), ROW)
    if part in BY_BLOCKS:
        return Partition(mesh, P(ALL), BLOCKS, blocks)
    if part in BY_HEADS:
        return Partition(mesh, P(ALL), COLUMN if part != name else None)
    return Partition(mesh)


def mixer_on_slice(own: Slice, module: Any, forward: Callable, args: tuple, kwargs: dict) -> Tensor:
    """`torch_dflash.targets.scans.run_mixer`: the layer's state is kept in the current cache.

    Where heads are cut, the output projection runs outside, with the layer's only sum over all chips.
    """
    cache, at = current_cache(), module.layer_idx
    leaves, kind = pytree.tree_flatten((args, kwargs))
    weights = dict(module.named_parameters())
    if own.blocks:
        weights.pop("out_proj.weight")

    def run(tensors: list, weights: dict, layer: Any, count: Any, tree: Any) -> tuple[Tensor, Any]:
        view, given = copy.copy(cache), iter(tensors)
        view.states, view.count, view.tree = {at: whole_tail(layer)}, count, tree
        mine = [next(given) if isinstance(one, Tensor) else view if one is cache else one for one in leaves]
        args, kwargs = pytree.tree_unflatten(mine, kind)
        with using_cache(view), _of_one_chip(own, module, weights):
            out = forward(module, *args, **kwargs)
        made = view.states[at]
        # The pass's initial layer stays on the chip.
        made = replace(made, layer=None) if isinstance(made, FreshState) else cut_tail(made, _share(own))
        return out, made

    def on_chips(tensors: list, weights: dict, *more: Any) -> Any:
        heads, out = _heads(own), P(None, None, ALL) if own.blocks else WHOLE
        weights = {name: as_kept(weight) for name, weight in weights.items()}
        specs = {name: specs_of(weight, _cut(own, name)) for name, weight in weights.items()}
        given = WHOLE, specs, heads, WHOLE, WHOLE
        return own.on_parts(on_chip, given, (out, heads))(tensors, weights, *more)

    def on_chip(tensors: list, weights: dict, *more: Any) -> Any:
        with bound(weights) as arrays:
            return call_torch(run, tensors, arrays, *more)

    layer, tensors = cache.states[at], [one for one in leaves if isinstance(one, Tensor)]
    found: Any = call_jax(on_chips, tensors, weights, layer, cache.count, cache.tree)
    out, made = found
    cache.states[at] = replace(made, layer=layer) if isinstance(made, FreshState) else made
    return module.out_proj(out) if own.blocks else out


def absorb_on_slice(own: Slice, absorb: Callable, count: Any, fresh: Any, path: Any) -> Any:
    """`torch_dflash.cache.recurrent.absorb`: each chip's states and channels from its own results."""

    def local(count: Any, fresh: Any, path: Any) -> Any:
        return cut_tail(absorb(count, replace(fresh, layer=whole_tail(fresh.layer)), path), _share(own))

    heads = _heads(own)
    return own.on_parts(local, (WHOLE, heads, WHOLE), heads)(count, fresh, path)


def _heads(own: Slice) -> PartitionSpec:
    """The spec of a recurrent layer's state: heads and channels are its second axis."""
    return P(None, ALL) if own.blocks else WHOLE


def _share(own: Slice) -> tuple[int, ...]:
    return tuple(size // own.mesh.size for size in own.blocks)


def _cut(own: Slice, name: str) -> Partition:
    return mixer_partition(name, own.mesh, own.blocks) if own.blocks else Partition(own.mesh)


def as_kept(weight: Any) -> Any:
    """The array, or codes and scales, in its stored order."""
    kept = stored_as(weight)
    return kept.array if isinstance(kept, Cut | InBlocks) else weight if kept is None else kept


@contextmanager
def _of_one_chip(own: Slice, module: nn.Module, weights: dict[str, Tensor]) -> Iterator[None]:
    """While open, ``module`` has these weights and their number of heads."""
    counts = {name: getattr(module, name) // own.mesh.size for name in COUNTS if own.blocks}
    out_proj = module._modules["out_proj"]
    try:
        with replaced(module, weights, counts):
            module._modules["out_proj"] = nn.Identity() if own.blocks else out_proj
            yield
    finally:
        module._modules["out_proj"] = out_proj


@contextmanager
def replaced(module: nn.Module, weights: dict[str, Tensor], counts: dict[str, int]) -> Iterator[None]:
    """While open, ``module`` has these weights, by name, and attributes."""
    parts = [name.rpartition(".") for name in weights]
    places: Any = [(module.get_submodule(path)._parameters, key) for path, _, key in parts]
    before, known = [store[key] for store, key in places], {name: getattr(module, name) for name in counts}
    try:
        for (store, key), weight in zip(places, weights.values(), strict=True):
            store[key] = weight
        vars(module).update(counts)
        yield
    finally:
        for (store, key), weight in zip(places, before, strict=True):
            store[key] = weight
        vars(module).update(known)
