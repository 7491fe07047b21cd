"""A mixture on a slice: each chip reads its experts that some row hits, and one sum over chips follows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jax_bridge._torchax import call_jax, call_torch
from jax_bridge.mesh.current import WHOLE, P, Slice
from jax_bridge.mesh.cut import Cut, Partition, specs_of
from jax_bridge.mesh.mixers import as_kept, replaced
from jax_bridge.mesh.products import rounded
from jax_bridge.mesh.shape import ALL
from jax_bridge.weights.formats import bound, stored_as


def experts_on_slice(own: Slice, mix: Callable, rows: Any, index: Any, weights: Any, module: Any) -> Any:
    """`torch_dflash.targets.experts.mix_experts`; where chips do not divide the experts, each has all.

    Args:
        mix: the same of one chip's experts; ``chips=`` is how many have a part.
    """
    count, params = module.num_experts, dict(module.named_parameters())

    def on_chips(rows: Array, index: Array, weights: Array, params: dict[str, Array]) -> Array:
        cut = isinstance(stored_as(params["down_proj"]), Cut)
        chips = own.mesh.size if cut else 1

        def partition(weight: Any) -> Partition:
            if isinstance(kept := stored_as(weight), Cut):
                return kept.partition
            biases = cut and weight.ndim > 1 and weight.shape[0] == count
            return Partition(own.mesh, P(ALL) if biases else WHOLE)

        given = {name: as_kept(weight) for name, weight in params.items()}
        specs = {name: specs_of(given[name], partition(weight)) for name, weight in params.items()}

        def on_chip(rows: Array, index: Array, weights: Array, params: dict[str, Any]) -> Array:
            mine = own_numbers(index, count // chips) if cut else index
            with bound(params) as arrays:
                sums = call_torch(partial(of_module, chips), rows, mine, weights, arrays)
            return jax.lax.psum(sums.astype(jnp.float32), ALL) if cut else sums

        def of_module(chips: int, rows: Any, index: Any, weights: Any, arrays: dict[str, Any]) -> Any:
            with replaced(module, arrays, {"num_experts": count // chips}):
                return mix(rows, index, weights, module, chips=chips)

        sums = own.on_parts(on_chip, (WHOLE, WHOLE, WHOLE, specs), WHOLE)(rows, index, weights, given)
        return rounded(sums, rows.dtype)

    return call_jax(on_chips, rows, index, weights, params)


def own_numbers(index: Int[Array, "R k"], share: int) -> Int[Array, "R k"]:
    """The numbers of experts among a chip's own; ``share``, which none has, for those of other chips."""
    mine = index - jax.lax.axis_index(ALL) * share
    return jnp.where((mine >= 0) & (mine < share), mine, share)
