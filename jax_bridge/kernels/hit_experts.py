"""Experts that some row is routed to, each read once: a Pallas kernel on a TPU, elsewhere a loop.

Both add experts in ascending order in float32, and nothing for a row that is not routed to an expert: a row
of a block gets what it gets alone, whatever experts the other rows hit.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from math import comb
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from jax_bridge.kernels.online_softmax import VMEM, product
from jax_bridge.weights.padding import enlarged
from torch_dflash.ops.paged_attention import LANES

MOST_ROWS = 128
"""Most rows of a prompt's chunk that read the experts they hit: more hit all of them."""
ROOM = VMEM // 2
"""Bytes on the chip for experts, two at a time."""
STACKS = slice(-2, None)
"""Operands of the kernel's call that hold all experts."""
NAME = "hit_experts"
"""The start of a name; rows, their experts, all experts, and the chips that share them follow."""
_UNKNOWN = "erfc"
"""The operation of a gate that Mosaic does not know: GELU's own form has one."""
_OF_A_VALUE = 20
"""Bytes on the chip for each value of a row: itself and its sum twice, and an expert's result."""
_TILE = 16
"""Rows of a tile in half precision."""


class Routes(NamedTuple):
    """Shares [experts, R, 1] of rows; experts in the ``order`` of their reads, of which ``count`` are hit.

    Behind the ``count`` the last one is repeated: a kernel copies no block that it has.
    """

    share: Any
    order: Any
    count: Any


def routes_of(index: Int[Array, "R k"], weights: Float[Array, "R k"], experts: int) -> Routes:
    """The routes of a router's choice, without a sort and without a scatter."""
    expert = jnp.arange(experts, dtype=jnp.int32)
    own = index[:, :, None] == expert
    share = jnp.where(own, weights[:, :, None].astype(jnp.float32), 0).sum(1).T[:, :, None]
    hit: Bool[Array, " experts"] = own.any((0, 1))
    count = hit.sum(dtype=jnp.int32)
    place = (hit & (expert < expert[:, None])).sum(1, dtype=jnp.int32)  # of hit ones before it
    step = jnp.minimum(jnp.arange(min(experts, index.size), dtype=jnp.int32), count - 1)
    order = jnp.where(hit & (place == step[:, None]), expert, 0).sum(1, dtype=jnp.int32)
    return Routes(share, order, count)


def most_rows(hidden: int) -> int:
    """Rows of one call, whose values and sums lie on the chip beside two experts; a pass of more is cut."""
    return max(MOST_ROWS, 1 << (VMEM * 3 // 8 // (_OF_A_VALUE * hidden)).bit_length() - 1)


def expected_hits(rows: float, chosen: int, experts: int) -> float:
    """Experts that ``rows`` hit, each ``chosen`` of them, where every choice is as likely."""
    return experts * (1 - (1 - chosen / experts) ** rows)


def fullest_hits(rows: float, chosen: int, experts: int, chips: int) -> float:
    """`expected_hits` of the chip with most of them, where ``chips`` have equal shares; as if independent."""
    share, hit = experts // chips, expected_hits(rows, chosen, experts) / experts
    at_most = accumulate(
        comb(share, count) * hit**count * (1 - hit) ** (share - count) for count in range(share)
    )
    return sum(1 - min(part, 1.0) ** chips for part in at_most)


def hits_of(name: str) -> tuple[float, int] | None:
    """`fullest_hits` of the rows of a call or loop of this ``name``, and a chip's experts; None: none."""
    found = re.search(rf"{NAME}_(\d+)x(\d+)of(\d+)by(\d+)", name)
    if found is None:
        return None
    rows, chosen, experts, chips = map(int, found.groups())
    return fullest_hits(rows, chosen, experts, chips), experts // chips


def name_of(rows: int, chosen: int, experts: int, chips: int) -> str:
    """The name that `hits_of` reads, for a chip of ``experts``."""
    return f"{NAME}_{rows}x{chosen}of{experts * chips}by{chips}"


def hit_experts_jax(
    rows: Float[Array, "R H"],
    index: Int[Array, "R k"],
    weights: Float[Array, "R k"],
    up: Float[Array, "experts P H"],
    down: Float[Array, "experts H inner"],
    *,
    gate: Callable,
    by_columns: bool,
    apply: Callable,
    chips: int = 1,
) -> Float[Array, "R H"]:
    """The sum of each row's experts in float32; ``gate`` [..., P] -> [..., inner] stands between products.

    ``by_columns``: the gate makes each column of the inner width from that column of the P. ``apply``,
    ``chips``: as in `loop_over_hits`.
    """
    if len(rows) > (most := most_rows(rows.shape[1])):
        cut = (slice(first, first + most) for first in range(0, len(rows), most))
        parts = ((rows[part], index[part], weights[part], up, down) for part in cut)
        mix = partial(hit_experts_jax, gate=gate, by_columns=by_columns, apply=apply, chips=chips)
        return jnp.concatenate([mix(*part) for part in parts])

    def kernel(rows: Array, index: Array, weights: Array, up: Array, down: Array) -> Array:
        routes = routes_of(index, weights, len(up))
        return pallas_hit_experts(rows, routes, up, down, gate=gate, chosen=index.shape[1], chips=chips)

    def loop(rows: Array, index: Array, weights: Array, *stacks: Array) -> Array:
        return loop_over_hits(rows, index, weights, experts=len(down), apply=apply, chips=chips)

    tile = _tile_of(up, down)
    known = _UNKNOWN not in str(jax.make_jaxpr(gate)(jax.ShapeDtypeStruct((1, up.shape[1]), jnp.float32)))
    on_tpu = kernel if known and tile and (by_columns or tile == down.shape[2]) else loop
    return jax.lax.platform_dependent(rows, index, weights, up, down, tpu=on_tpu, default=loop)


def loop_over_hits(
    rows: Array, index: Array, weights: Array, *, experts: int, apply: Callable, chips: int = 1
) -> Float[Array, "R H"]:
    """`hit_experts_jax` in plain jnp, for any experts.

    ``apply``: ([1, R, H], the expert's number [1]) -> [1, R, H]. ``chips``: with as many experts each. A row
    has the number ``experts`` where its expert is another chip's.
    """
    routes = routes_of(index, weights, experts)

    def add(step: Array, total: Array) -> Array:
        expert = jax.lax.dynamic_slice_in_dim(routes.order, step, 1)
        out = apply(rows[None], expert)[0].astype(jnp.float32)
        share = jax.lax.dynamic_index_in_dim(routes.share, expert[0], keepdims=False)
        return total + jnp.where(share != 0, out * share, 0)

    with jax.named_scope(name_of(len(rows), index.shape[1], experts, chips)):
        return jax.lax.fori_loop(0, routes.count, add, jnp.zeros(rows.shape, jnp.float32))


def pallas_hit_experts(
    rows: Array,
    routes: Routes,
    up: Array,
    down: Array,
    *,
    gate: Callable,
    chosen: int,
    chips: int = 1,
    room: int = ROOM,
    interpret: bool | pltpu.InterpretParams = False,
) -> Array:
    """`hit_experts_jax` in one call: while one expert is multiplied the next hit one is copied to the chip.

    ``gate`` gets float32. Experts of which two take more than ``room`` bytes come in tiles of their inner
    width. ``interpret``: run on the CPU, slowly, for tests.
    """
    experts, hidden, inner = down.shape
    parts = up.shape[1] // inner
    tile = _tile_of(up, down, room) or inner
    count = -(-len(rows) // _TILE) * _TILE
    fed, share = enlarged(rows, 0, count), enlarged(routes.share, 1, count)
    steps = len(routes.order)

    def at(*rest: Any) -> Callable:
        """The index map of a block of the step's expert; ``rest``: True where the tile's number stands."""

        def place(step: Any, part: Any, order: Any, count: Any) -> tuple:
            # Idle steps stay at the last tile of the last expert, whose block they have.
            part = jnp.where(step < count[0], part, inner // tile - 1)
            return order[step], *(part if tiled else 0 for tiled in rest)

        return place

    whole = pl.BlockSpec(fed.shape, lambda *_: (0, 0))
    stack = up.reshape(experts, parts, inner, hidden)
    out = pl.pallas_call(
        partial(_add, gate),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(steps, inner // tile),
            in_specs=[
                whole,
                pl.BlockSpec((1, count, 1), at(False, False)),
                pl.BlockSpec((1, parts, tile, hidden), at(False, True, False)),
                pl.BlockSpec((1, hidden, tile), at(False, True)),
            ],
            out_specs=whole,
        ),
        out_shape=jax.ShapeDtypeStruct(fed.shape, jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=VMEM
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * steps * count * (parts + 1) * hidden * inner,
            transcendentals=steps * count * inner,
            bytes_accessed=steps * (parts + 1) * hidden * inner * up.dtype.itemsize,
        ),
        interpret=interpret,
        name=name_of(len(rows), chosen, experts, chips),
    )(routes.order, routes.count[None], fed, share, stack, down)
    return out[: len(rows)]


def _add(gate, order, count, rows, share, up, down, out):
    """One tile of one expert: its products, gate and share, added to ``out``."""
    step, part = pl.program_id(0), pl.program_id(1)

    @pl.when((step == 0) & (part == 0))
    def _():
        out[...] = jnp.zeros_like(out)

    @pl.when(step < count[0])
    def _():
        width = up.shape[1] * up.shape[2]
        inner = gate(product(rows[...], up[0].reshape(width, -1), 1)).astype(rows.dtype)
        summed, own = product(inner, down[0], 1), share[0]
        out[...] += jnp.where(own != 0, summed * own, 0)


def _tile_of(up: Array, down: Array, room: int = ROOM) -> int | None:
    """The largest part of the inner width with whole registers that fits twice; None: there is none."""
    inner = down.shape[2]
    column = 2 * (up.shape[1] // inner + 1) * down.shape[1] * up.dtype.itemsize
    fitting = (size for size in range(inner, 0, -1) if not inner % size and size * column <= room)
    return next((size for size in fitting if size == inner or not size % LANES), None)
