"""Weights that are codes on a mesh: the values, the text and the parts of one device's engine."""

import numpy as np
import pytest
import torch
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from support.slices import run_on_four

from jax_bridge.checkpoints.quantised import Dequantised
from jax_bridge.mesh.cut import (
    BLOCKS,
    COLUMN,
    EXPERTS,
    ROW,
    Partition,
    chip_by_chip,
    fitted,
    fitting,
    specs_of,
)
from jax_bridge.mesh.put import share_of
from jax_bridge.mesh.shape import ALL, KV
from jax_bridge.weights.codes import Blocks, Groups, Scaled, of_codes
from jax_bridge.weights.formats import plain

MESH = AbstractMesh((2, 2), ALL)


def blocks(out=48, size=64, block=(16, 16)):
    torch.manual_seed(1)
    codes = torch.randint(-100, 100, (out, size), dtype=torch.int8)
    scale = torch.rand(-(-out // block[0]), size // block[1]) + 0.1
    return of_codes(codes, scale, block, torch.float32, None)


def test_scales_are_cut_with_their_outputs_and_groups():
    by_rows, both = blocks(block=(1, 64)), blocks()
    assert type(by_rows) is Scaled and type(both) is Blocks
    column, row = Partition(MESH, P(KV), COLUMN), Partition(MESH, P(None, ALL), ROW)
    assert specs_of(by_rows, column).scale == P(KV) and specs_of(by_rows, row).scale == P(None)
    assert specs_of(by_rows, row).array == P(None, ALL)
    assert (specs_of(both, column).array, specs_of(both, column).scale) == (P(None, None, KV), P(None, KV))
    assert (specs_of(both, row).array, specs_of(both, row).scale) == (P(ALL, None, None), P(ALL, None))
    stack = Groups.shapes((8, 64, 24), torch.bfloat16)
    experts = specs_of(stack, Partition(MESH, P(ALL), EXPERTS))
    assert experts.array == experts.scale == P(ALL)
    assert specs_of(plain(both), row) == P(None, ALL)


def test_no_block_is_on_two_chips():
    kept = blocks(block=(16, 32))
    row, column = Partition(MESH, P(None, ALL), ROW), Partition(MESH, P(ALL), COLUMN)
    assert fitting(kept, row) == Partition(MESH) and fitting(blocks(), row) == row
    assert fitting(kept, column) == column and column.unit(kept.shape) == 12
    finer = fitted(kept, column)
    assert finer.outputs == 4 and finer.scale.shape == (2, 12) and fitted(finer, column) is finer
    np.testing.assert_array_equal(plain(finer), plain(kept))
    part = share_of(kept, column)
    assert (part.array.shape, part.scale.shape) == ((2, 32, 12), (2, 3))
    assert share_of(kept, row).array.shape == kept.array.shape


def test_rows_of_several_blocks_lie_chip_by_chip_with_their_scales():
    """Queries, keys and values of a recurrent layer: 16, 16 and 32 rows of four chips."""
    partition = Partition(MESH, P(ALL), BLOCKS, (16, 16, 32))
    rows = [[*range(4 * at, 4 * at + 4), *range(16 + 4 * at, 20 + 4 * at), *range(32 + 8 * at, 40 + 8 * at)]
            for at in range(4)]  # fmt: skip
    for block in ((1, 48), (8, 16), (16, 16)):
        kept = fitted(whole := blocks(64, 48, block), partition)
        assert getattr(kept, "outputs", 1) <= partition.unit(kept.shape) == 4
        laid = chip_by_chip(kept, partition)
        np.testing.assert_array_equal(plain(laid), np.asarray(plain(whole))[np.concatenate(rows)])


class Given:
    """A tensor in memory, read as a stored one is."""

    def __init__(self, tensor):
        self.tensor, self.shape = tensor, tuple(tensor.shape)

    def read(self):
        return self.tensor

    def read_part(self, index):
        return self.tensor[index]


@pytest.mark.parametrize("block", [(16, 16), (8, 16), (1, 64), (20, 16), (48, 64)])
def test_parts_of_stored_codes_make_up_the_whole(block):
    torch.manual_seed(2)
    codes = torch.randint(-100, 100, (48, 64), dtype=torch.int8)
    scale = torch.rand(-(-48 // block[0]), 64 // block[1]) + 0.1
    stored = Dequantised("w", (48, 64), torch.float32, Given(codes), Given(scale), None, block)
    wanted = plain(of_codes(codes, scale, block, torch.float32, None))
    by_rows = block[1] == 64
    for rows, columns, unit in ((12, 64, 12), (48, 16, 0)):
        for at in range(4):
            own = slice(at * rows, at * rows + rows) if rows < 48 else slice(None)
            inputs = slice(at * columns, at * columns + columns) if columns < 64 else slice(None)
            *part, size = stored.read_codes_of(own, inputs, unit)
            kept = of_codes(*part, size, torch.float32, None, by_rows=by_rows)
            assert type(kept) is (Scaled if by_rows else Blocks)
            np.testing.assert_array_equal(plain(kept), wanted[own, inputs])


INT8 = """
from support.coded import *
as_off_the_cpu()
BREAK
target, drafter = (model.to(torch.DTYPE) for model in make_sliceable("FAMILY", "2x2", "v1"))
fixed = ROOM | {"quantize": "int8"}
wanted = said(td.compile(target, None, **fixed))
for mesh in MESHES:
    engine = td.compile(target, drafter, mesh=mesh, **fixed)
    assert drafted(engine) == wanted, mesh
    arrays = engine.runtime._weights._arrays
    alike(arrays)
    assert share(arrays) < 1.4 / mesh
    assert {"int8"} == {w.array.array.dtype.name for n, w in arrays.items() if n.endswith("proj.weight")}
    if mesh == 4:
        weight = next(one for name, one in target.named_parameters() if name.endswith("o_proj.weight"))
        with torch.no_grad():
            weight.mul_(-8)
        changed = drafted(engine)
        assert changed == said(td.compile(target, None, **fixed)) != wanted
        weight.data.div_(-8)
        engine.refresh()
        assert drafted(engine) == wanted
print("checked")
"""


def run(script, **words):
    for word, value in words.items():
        script = script.replace(word, str(value))
    return run_on_four(["-c", script])


def test_int8_on_four_devices_says_what_it_says_on_one_and_follows_changes():
    run(INT8, FAMILY="qwen3", MESHES="(4,)", DTYPE="bfloat16", BREAK="")


@pytest.mark.heavy
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt_oss", "qwen3_5", "qwen3_next", "minimax_m2"])
def test_int8_of_every_kind(family):
    run(INT8, FAMILY=family, MESHES="(2, 4)", DTYPE="float32", BREAK="")


BREAKS = {
    "a scale applied on each chip and after the sum": """
import jax_bridge.mesh.products as products
row = products._row
products._row = lambda rows, part: row(rows, part) * part.scale
""",
    "sums rounded on each chip": """
import jax_bridge.mesh.products as products
row = products._row
class Rounded:
    shape = property(lambda own: own.part.shape)
    def __init__(self, part): self.part = part
    def product(self, rows): return self.part.product(rows).astype("bfloat16").astype("float32")
products.Multiplier = (products.Multiplier, Rounded)
products._row = lambda rows, part: row(rows, Rounded(part))
""",
}


@pytest.mark.heavy
@pytest.mark.parametrize("broken", BREAKS)
def test_a_wrong_sum_is_noticed(broken):
    with pytest.raises(AssertionError, match="AssertionError"):
        run(INT8, FAMILY="qwen3", MESHES="(4,)", DTYPE="bfloat16", BREAK=BREAKS[broken])


LOADED = """
from support.coded import *
as_off_the_cpu()
BREAK
folder = publish_as("FORM", "FOLDER")
asked = {"dtype": torch.float32, "keep_codes": True, "quantize": QUANTIZE}
one = jb.load(folder, **asked)
wanted = said(td.compile(one, None, **ROOM))
from jax_bridge.weights.codes import Groups
products, calls = Groups.products, []
Groups.products = lambda own, rows: calls.append(rows.shape[0]) or products(own, rows)
for mesh in MESHES:
    calls.clear()
    loaded = jb.load(folder, mesh=mesh, **asked)
    alike(loaded.arrays)
    same_values(one.arrays, loaded.arrays)
    assert share(loaded.arrays) < MOST / mesh, share(loaded.arrays)
    drafting = td.compile(loaded, td.NGramProposer(4), mesh=mesh, **ROOM)
    assert drafting.runtime._place.share({}, ()) == ({}, ())
    assert said(drafting) == wanted, mesh
    # Experts multiply on their chips, one at a time.
    assert set(calls) == ({1} if "FORM" in ("fp8_experts", "mxfp4", "int4") else set()), calls
print("checked")
"""


def loaded(folder, form, meshes, quantize=None, most=1.3, broken=""):
    given = {"FORM": form, "FOLDER": folder, "MESHES": meshes, "MOST": most}
    run(LOADED, QUANTIZE=repr(quantize), BREAK=broken, **given)


def test_a_checkpoint_keeps_its_codes_on_four_devices(tmp_path):
    loaded(tmp_path, "fp8_experts", (4,))


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("form", "quantize", "most"),
    [("fp8", None, 1.3), ("fp8", "int8", 1.3), ("fp8 32", None, 1.7), ("fp8_tensor", None, 1.3),
     ("mxfp4", None, 1.3), ("int4", None, 1.3), ("fp8_experts", None, 1.3), ("hybrid 8", None, 1.3),
     ("hybrid 16", None, 1.6), ("hybrid 32", None, 1.6)],
)  # fmt: skip
def test_every_form_of_a_checkpoint(tmp_path, form, quantize, most):
    """A part of four devices would end inside of a block in "fp8 32" and "int4": those weights are whole."""
    loaded(tmp_path, form, (2, 4), quantize, most)


@pytest.mark.heavy
def test_experts_that_do_not_divide_stay_codes_on_each_device(tmp_path):
    loaded(tmp_path, "mxfp4", (3,), most=4)


NEIGHBOURS = """
import jax_bridge.mesh.products as chips
from dataclasses import replace
row, around = chips._row, [(at, (at + 1) % 4) for at in range(4)]
def turned(rows, part):
    return row(rows, replace(part, scale=jax.lax.ppermute(part.scale, chips.ALL, around)))
chips._row = turned
"""


@pytest.mark.heavy
def test_scales_of_the_neighbour_are_noticed(tmp_path):
    with pytest.raises(AssertionError, match="AssertionError: 4"):
        loaded(tmp_path, "fp8", (4,), broken=NEIGHBOURS)


DOORS = """
from support.coded import *
as_off_the_cpu()
target, drafter = make_sliceable("qwen3", "2x2", "v1")
target.save_pretrained("FOLDER")
fixed = ROOM | {"quantize": "int8"}
engines = {mesh: td.compile(target, drafter, mesh=mesh, **fixed) for mesh in (None, 2, 4)}
wanted = drafted(engines[None])
for replicas in (2, 4):
    assert drafted(td.compile(target, drafter, mesh=4, replicas=replicas, **fixed)) == wanted
for mesh, whole in ((2, 4), (None, 4)):
    loaded = jb.load("FOLDER", mesh=mesh, quantize="int8")
    replicas = whole // (mesh or 1)
    several = td.compile(loaded, drafter, mesh=whole, replicas=replicas, **fixed)
    assert drafted(several) == wanted, (mesh, whole)
asked = {name: value for name, value in MIXED.items() if name != "return_dict_in_generate"}
for first, then in ((4, None), (None, 4), (4, 2)):
    state = engines[first].advance(engines[first].start(*pad_rows(PROMPTS), **asked))
    td.save_state(state, "FOLDER/state", engines[first])
    own = engines[then]
    state = td.load_state("FOLDER/state", own)
    while not bool(torch.tensor(own.runtime.fetch(state.done)).all()):
        state = own.advance(state)
    tokens = own.runtime.fetch(state.tokens)
    for row, prompt in enumerate(PROMPTS):
        end = len(prompt) + MIXED["max_new_tokens"]
        assert tokens[row, len(prompt) : end].tolist() == wanted[row], (first, then, row)
print("checked")
"""


@pytest.mark.heavy
def test_replicas_and_saved_states_of_codes(tmp_path):
    run(DOORS, FOLDER=tmp_path)


REPLICAS = """
from support.coded import *
folder = publish_as("FORM", "FOLDER")
asked = {"dtype": torch.float32, "keep_codes": True}
wanted = said(td.compile(jb.load(folder, **asked), None, **ROOM))
for mesh, replicas in ((2, 2), (None, 4)):
    several = td.compile(jb.load(folder, mesh=mesh, **asked), None, mesh=4, replicas=replicas, **ROOM)
    assert said(several) == wanted, mesh
    held = [engine.runtime._weights._arrays for engine in several.engines]
    for arrays in held:
        alike(arrays)
        same_values(held[0], arrays)
print("checked")
"""


@pytest.mark.heavy
@pytest.mark.parametrize("form", ["fp8", "mxfp4", "int4"])
def test_replicas_get_copies_of_a_checkpoints_codes(tmp_path, form):
    run(REPLICAS, FOLDER=tmp_path, FORM=form)


@pytest.mark.heavy
def test_memory_is_counted_by_parts_of_codes(tmp_path):
    code = """
from support.coded import *
from jax_bridge.device_memory import bytes_of
as_off_the_cpu()
import jax_bridge.checkpoints.load as loading
import jax_bridge.runtime as runtimes
folder = publish_as("fp8", "FOLDER")
counted = []
loading.check_memory = runtimes.check_memory = lambda needed, *rest: counted.append(needed["weights"])
runtimes.memory_of = lambda devices: 1
for asked in ({"keep_codes": True}, {"keep_codes": True, "quantize": "int8"}, {}):
    loaded = jb.load(folder, mesh=4, **asked)
    exact = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(loaded.arrays))
    assert 0.97 * exact <= counted[-1] <= 1.03 * exact, (asked, exact, counted)
    td.compile(loaded, None, mesh=4, **ROOM)
    assert counted[-1] == exact, (asked, exact, counted)
target, drafter = make_sliceable("qwen3", "2x2", "v1")
engine = td.compile(target, drafter, mesh=4, quantize="int8", **ROOM)
guessed = counted[-1]
said(engine)
arrays = jax.tree.leaves(engine.runtime._weights._arrays)
assert guessed == sum(leaf.addressable_shards[0].data.nbytes for leaf in arrays)
print("checked")
"""
    run(code, FOLDER=tmp_path)
