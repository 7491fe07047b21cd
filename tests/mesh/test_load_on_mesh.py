"""A checkpoint that loads onto a mesh reads each part once, and nothing else; the text is the same."""

import pytest
from support.families import MORE
from support.hybrids import BEFORE, KINDS
from support.quantised import publish
from support.slices import make_sliceable, run_on_four
from support.tiny import BASE

LOAD = """
import jax, numpy as np, torch
import jax_bridge as jb, torch_dflash as td
from jax_bridge.weights.formats import unwrap
from support.slices import make_sliceable, prompts
from torch_dflash.storage.weight_files import Stored
folder = "FOLDER"
largest, read = [0], [0]
part, whole = Stored.read_part, Stored.read
def count(tensor):
    read[0] += tensor.nbytes
    largest[0] = max(largest[0], tensor.nbytes)
    return tensor
Stored.read_part = lambda self, index: count(part(self, index))
Stored.read = lambda self: count(whole(self))
loaded = jb.load(folder, mesh=4)
stored = sum(file.stat().st_size for file in __import__("pathlib").Path(folder).glob("*.safetensors"))
assert 0.9 * stored < read[0] <= stored, (read, stored)  # each byte once, headers apart
target, drafter = make_sliceable("FAMILY", "2x2", "v1")
live = {name: tensor for name, tensor in target.named_parameters()}
biggest = max(tensor.nbytes for tensor in live.values())
assert largest[0] <= biggest / 2, (largest, biggest)
arrays = unwrap(loaded.arrays)
for name, tensor in live.items():
    assert np.array_equal(np.asarray(arrays[name]), tensor.detach().numpy()), name
held = sum(shard.data.nbytes for array in arrays.values() for shard in array.addressable_shards[:1])
assert held < 0.4 * stored, (held, stored)
options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
fixed = {"max_length": 48, "batch_size": 3, "prefill_chunk_size": 32, "filters": False}
texts = [td.generate(target, drafter, *prompts(), runtime="eager", **options)]
texts.append(td.compile(loaded, drafter, mesh=4, **fixed).generate(*prompts(), **options))
assert torch.equal(*texts)
for given, words in (({"mesh": 2}, "4 devices"), ({"runtime": "eager"}, "runtime='xla'")):
    try:
        td.generate(loaded, drafter, *prompts(), **options, **given)
    except ValueError as error:
        assert words in str(error), error
    else:
        raise AssertionError(given)
try:
    td.generate(jb.load(folder), drafter, *prompts(), mesh=4, **options)
except ValueError as error:
    assert "JAX's default device" in str(error) and "jb.load" in str(error), error
    assert "[0, 1, 2, 3]" in str(error), error
reverse = jax.sharding.Mesh(np.array(jax.devices()[::-1]), ("model",))
try:
    td.generate(loaded, drafter, *prompts(), mesh=reverse, **options)
except ValueError as error:
    assert "[3, 2, 1, 0]" in str(error) and "[0, 1, 2, 3] in this order" in str(error), error
Stored.read_part, Stored.read = part, whole
quantised = {mesh: unwrap(jb.load(folder + "/fp8", mesh=mesh).arrays) for mesh in (None, 4)}
cut = [name for name, array in quantised[4].items() if array.addressable_shards[0].data.size < array.size]
assert sum("proj" in name for name in cut) == 14, cut  # seven of each layer
for name, array in quantised[None].items():
    assert np.array_equal(np.asarray(array), np.asarray(quantised[4][name])), name
print("checked")
"""


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_each_part_is_read_once_and_says_the_same(tmp_path, family):
    target, _ = make_sliceable(family, "2x2", "v1")
    target.save_pretrained(tmp_path, max_shard_size="30KB")
    (tmp_path / "fp8").mkdir()
    publish("fp8", tmp_path / "fp8", block=32)  # a device's part of 16 ends inside of a block
    code = LOAD.replace("FOLDER", str(tmp_path)).replace("FAMILY", family)
    assert run_on_four(["-c", code]).strip().endswith("checked")


STATES = """
import sys, torch, torch_dflash as td
from support.slices import make_sliceable, prompts
target, drafter = make_sliceable("FAMILY", "2x2", "v1")
fixed = {"max_length": 64, "batch_size": 3, "prefill_chunk_size": 32, "cache": "CACHE"}
fixed |= {"rounds_per_chunk": 2, "filters": False}
where = {"four": {"mesh": 4}, "two": {"mesh": 2}, "one": {}, "eager": {"runtime": "eager"}}
engines = {name: td.compile(target, drafter, **fixed, **more) for name, more in where.items()}
asked = {"max_new_tokens": 24, "do_sample": True, "seed": 3, "top_k": 0, "eos_token_id": None}
wanted = engines["one"].generate(*prompts(), **asked)
def finish(engine, state):
    while not bool(torch.tensor(engine.runtime.fetch(state.done)).all()):
        state = engine.advance(state)
    return engine.runtime.fetch(state.tokens)
import jax_bridge as jb
for first, then in (("four", "two"), ("four", "one"), ("four", "eager"), ("eager", "four"), ("one", "four")):
    state = engines[first].advance(engines[first].start(*prompts(), **asked))
    td.save_state(state, "FILE", engines[first])
    tokens = finish(engines[then], td.load_state("FILE", engines[then]))
    for row, (ids, mask) in enumerate(zip(*prompts())):
        length = int(mask.sum()) + 24
        assert tokens[row, :length].tolist() == wanted[row, -length:].tolist(), (first, then, row)
for first, then in (("four", "one"), ("one", "four"), ("four", "two")):  # as it is, without a file
    tokens = finish(engines[then], engines[first].advance(engines[first].start(*prompts(), **asked)))
    for row, (ids, mask) in enumerate(zip(*prompts())):
        length = int(mask.sum()) + 24
        assert tokens[row, :length].tolist() == wanted[row, -length:].tolist(), (first, then, row)
print("checked")
"""


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("family", "cache"),
    [("qwen3", "static"), ("qwen3", "paged"), ("qwen3_5", "paged"), ("glm_moe_dsa", "paged")],
)
def test_a_state_moves_between_meshes(tmp_path, family, cache):
    code = STATES.replace("FILE", str(tmp_path / "state")).replace("CACHE", cache).replace("FAMILY", family)
    assert run_on_four(["-c", code]).strip().endswith("checked")


OTHER = """
import jax_bridge as jb
for kind in ("mistral", "falcon_h1"):
    try:
        jb.load("FOLDER/" + kind, mesh=2)
    except ValueError as error:
        print(error)
"""


def test_a_model_that_is_not_decoded_on_a_mesh_is_not_loaded_on_one(tmp_path):
    for kind in ("mistral", "falcon_h1"):
        cls, config, extra = (MORE | KINDS)[kind]
        cls(config(**(BASE | extra))).save_pretrained(tmp_path / kind)
    said = run_on_four(["-c", OTHER.replace("FOLDER", str(tmp_path))])
    assert "model_type='mistral' with a mesh: its layers" in said
    assert "model_type='falcon_h1' with a mesh: its recurrent layers" in said or BEFORE
