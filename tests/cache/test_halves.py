"""Two cores share sequences, or halves of the keys, in both kernels where K/V heads do not divide."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_block_attention as block
import test_paged_attention as paged
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from jax_bridge.kernels import block_attention, halves, pallas_paged
from jax_bridge.kernels.halves import Halves
from jax_bridge.kernels.online_softmax import LANES, SoftmaxRefs
from jax_bridge.kernels.pallas_paged import pallas_paged_attention
from torch_dflash.ops.block_attention import Past

NOTHING, LATER = 0, 103
EDGES = [("one K/V head", 13), ("one K/V head", 31), ("one K/V head", 64)]


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(halves, "has_two_cores", lambda: True)


def paged_gap(shape: paged.Shape, start: int, row_tile: int = 2048, interpret=True) -> float:
    """Largest difference from the definition, of outputs and of pages; all other places are NaN."""
    call = paged.Call(shape, seed=start)
    call.start[:] = [start, 5, 40][: shape.batch]
    wanted, kept = call.expected()
    own = np.full_like(call.pool, np.nan)
    for b, end in enumerate(call.start.tolist()):
        for p in range(end):
            place = call.table[b, p // shape.page], slice(None), p % shape.page
            own[place] = call.pool[place]
    call.pool = own
    out, pool = call.jax(partial(pallas_paged_attention, row_tile=row_tile, interpret=interpret))
    written = [np.abs(call.rows_of(pool, b) - rows).max() for b, rows in enumerate(kept)]
    return float(np.max([np.abs(out - wanted).max(), *written]))  # NaN if there is one


def block_gap(shape: block.Shape, start: int, interpret=True) -> float:
    """Largest difference from the definition; values of blocks that are not in use are NaN."""
    call, keys = block.Call(shape, start, np.array([start, 5, 40][: shape.batch], np.int32)), 32
    wanted = call.expected()
    for b, row in enumerate(call.position):
        used = max(np.flatnonzero(row >= 0), default=-1) + 1
        call.past_value[b, :, -(-used // keys) * keys :] = np.nan

    def attend(query, key, value, past_key, past_value, position, start):
        past, how = Past(past_key, past_value, position), {"block_keys": keys, "interpret": interpret}
        return block_attention.pallas_block_attention(query, key, value, start, past, **how, **call.rule)

    return float(np.abs(call.jax(attend) - wanted).max())


def far(gap: float, dtype: str = "float32") -> bool:
    return not gap < (2e-6 if dtype == "float32" else 2e-2)


PAGED = {
    "one K/V head": paged.Shape(groups=1, heads=8, rows=10, batch=1, sinks=True),
    "three, soft cap": paged.Shape(groups=3, heads=2, batch=1, softcap=5.0),
    "three sequences": paged.Shape(groups=1, sinks=True, batch=3),
    "two sequences": paged.Shape(groups=1, heads=2, sinks=True, batch=2),
    "two sequences, three heads": paged.Shape(groups=3, heads=2, batch=2, window=7),
    "window": paged.Shape(groups=1, batch=1, window=7, sinks=True, softcap=5.0),
    "window over pages": paged.Shape(groups=3, batch=1, window=60, sinks=True, dim=128),
    "tiles": paged.Shape(groups=1, rows=32, page=32, batch=1, sinks=True),
    "tiles, window": paged.Shape(groups=3, heads=1, rows=32, page=32, batch=1, window=9),
    "bfloat16": paged.Shape(groups=1, dim=128, batch=1, dtype="bfloat16"),
}
BLOCKS = {
    "one K/V head": block.Shape(groups=1, heads=8, width=10, slots=128, batch=1),
    "three": block.Shape(groups=3, heads=2, slots=128, batch=1),
    "three sequences": block.Shape(groups=1, slots=140),
    "two sequences": block.Shape(groups=1, slots=128, batch=2),
    "two sequences, three heads": block.Shape(groups=3, slots=128, batch=2, window=9),
    "causal, window": block.Shape(groups=1, slots=110, causal=True, window=7, batch=1),
    "head dim 128": block.Shape(groups=1, dim=128, slots=128, window=60, batch=1),
    "a ring": block.Shape(groups=1, ring=True, window=40, slots=51, batch=1),
    "fewer slots than a block": block.Shape(groups=3, slots=20, ring=True, window=15, batch=1),
    "bfloat16": block.Shape(groups=1, dim=128, slots=128, dtype="bfloat16", batch=1),
}


@pytest.mark.parametrize(
    ("case", "start"), [("one K/V head", NOTHING), ("one K/V head", LATER), ("two sequences", LATER)]
)
def test_both_kernels_are_their_definitions(case, start):
    assert not far(paged_gap(PAGED[case], start))
    assert not far(block_gap(BLOCKS[case], start))


@pytest.mark.heavy
@pytest.mark.parametrize(("case", "start"), [*product(PAGED, [NOTHING, LATER]), *EDGES])
def test_pages_of_odd_heads(case, start):
    shape = PAGED[case]
    cores = pltpu.InterpretParams(num_cores_or_threads=2)
    assert not far(paged_gap(shape, start, row_tile=64, interpret=cores), shape.dtype)


@pytest.mark.heavy
@pytest.mark.parametrize(("case", "start"), [*product(BLOCKS, [NOTHING, LATER]), *EDGES])
def test_blocks_of_odd_heads(case, start):
    shape = BLOCKS[case]
    cores = pltpu.InterpretParams(num_cores_or_threads=2)
    assert not far(block_gap(shape, start, interpret=cores), shape.dtype)


def watched(case: str, mode: str) -> bool:
    """Whether the interpreter finds a race between two cores."""
    how = {"detect_races": True, "dma_execution_mode": mode, "num_cores_or_threads": 2}
    paged_gap(PAGED[case], 60, 32, interpret=pltpu.InterpretParams(**how))
    assert interpret_pallas_call.races is not None
    return interpret_pallas_call.races.races_found


@pytest.mark.heavy
@pytest.mark.parametrize("mode", ["on_wait", "eager"])
@pytest.mark.parametrize("case", ["one K/V head", "three sequences", "two sequences", "tiles, window"])
def test_cores_do_not_meet_in_a_page(case, mode):
    assert not watched(case, mode)


@pytest.mark.heavy
def test_cores_that_meet_in_a_page_are_seen(monkeypatch):
    def all_but_the_last(self, half, begin, end):
        return jnp.where(half == 0, begin, end), end

    monkeypatch.setattr(Halves, "blocks", all_but_the_last)
    assert watched("one K/V head", "eager")


def both_have_the_sinks(self, first):
    return jnp.concatenate([first, first])


def both_have_all_keys(self, half, begin, end):
    return begin, end


def both_have_new_rows(self, half):
    return True


def the_odd_block_is_lost(self, half, begin, end):
    count = jax.lax.div(end - begin, 2)
    return begin + half * count, begin + (half + 1) * count


def without_weights(parts, dtype):
    first, second = jnp.split(parts[..., LANES:], 2, axis=1)
    return ((first + second) / 2).astype(dtype)


def of_nothing_too(self, head):
    logsum = self.top[head] + jnp.log(self.total[head])
    return jnp.concatenate([logsum, self.result(head)], axis=1)


BROKEN = {"begin": (both_have_the_sinks, LATER), "blocks": (both_have_all_keys, LATER)}
BROKEN |= {"has_new": (both_have_new_rows, LATER), "blocks, odd": (the_odd_block_is_lost, 30)}
BROKEN |= {"joined": (without_weights, LATER), "part": (of_nothing_too, NOTHING)}


@pytest.mark.heavy
@pytest.mark.parametrize("name", BROKEN)
def test_wrong_halves_are_seen(name, monkeypatch):
    broken, start = BROKEN[name]
    name = name.split(",")[0]
    for place in {"joined": [pallas_paged, block_attention], "part": [SoftmaxRefs]}.get(name, [Halves]):
        monkeypatch.setattr(place, name, broken)
    assert far(paged_gap(PAGED["one K/V head"], start))
    if name != "begin":  # the block's kernel knows no sinks
        assert far(block_gap(BLOCKS["one K/V head"], start))


PAGED_TPU = {
    "verify 16": paged.Shape(1, 8, 16, 128, 64, 66, batch=1, dtype="bfloat16"),
    "one row, window, sinks": paged.Shape(1, 8, 1, 64, 64, 66, 128, None, True, 1, "bfloat16"),
    "five heads, prompt chunk": paged.Shape(5, 8, 512, 128, 64, 66, batch=1, dtype="bfloat16"),
    "three heads, float32": paged.Shape(3, 3, 8, 64, 16, 20, batch=3),
    "two sequences": paged.Shape(1, 8, 16, 128, 64, 66, batch=2, dtype="bfloat16"),
}
BLOCKS_TPU = {
    "block of 16": block.Shape(1, 8, 16, 128, 4128, batch=1, dtype="bfloat16"),
    "block of 64, head dim 80": block.Shape(3, 3, 64, 80, 4224, batch=1, dtype="bfloat16"),
    "a ring, head dim 64": block.Shape(1, 8, 8, 64, 2080, window=2048, ring=True, batch=1, dtype="bfloat16"),
    "head dim 40, float32": block.Shape(5, 1, 16, 40, 1040),
    "two sequences": block.Shape(1, 8, 16, 256, 4128, batch=2, dtype="bfloat16"),
}


def parts_of(shape: paged.Shape | block.Shape, rows: int) -> int:
    """Bytes of both halves' float32 results, in whole tiles of lanes."""
    width = LANES + -(-shape.dim // LANES) * LANES
    both = 2 if shape.batch % 2 else 0
    return both * shape.batch * shape.groups * shape.heads * rows * width * 4


@pytest.mark.aot
@pytest.mark.parametrize("case", PAGED_TPU)
def test_pages_of_odd_heads_compile(case):
    shape = PAGED_TPU[case]
    paged.assert_compiles(shape, "v5p:2x2x1", parts_of(shape, shape.rows))


@pytest.mark.aot
@pytest.mark.parametrize("case", BLOCKS_TPU)
def test_blocks_of_odd_heads_compile(case):
    shape = BLOCKS_TPU[case]
    block.assert_compiles(shape, "v5p:2x2x1", parts_of(shape, shape.width))


@pytest.mark.parametrize("cores, keys", [(1, 1), (2, 2)])
def test_keys_are_halved_where_a_slice_has_two_cores_a_chip(cores, keys, monkeypatch):
    monkeypatch.undo()
    known = {"platform": "tpu"} if jax.__version_info__ >= (0, 10) else {}
    device = AbstractDevice(device_kind="TPU v5", num_cores=cores, **known)
    assert Halves.of(1, 1).grid == (1, 1)  # no slice: unknown
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        assert Halves.of(1, 1).keys == Halves.of(3, 5).keys == keys
        assert Halves.of(2, 3).grid == (2, 1) and Halves.of(3, 2).grid == (2, 3)
