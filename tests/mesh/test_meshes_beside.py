"""One pair on several meshes in one process: each has its programs, and its weights lie where it decodes."""

from __future__ import annotations

import pytest
from support.slices import run_on_four

BESIDE = """
import jax, numpy as np, torch_dflash as td
from jax.sharding import Mesh
from support.slices import make_sliceable, prompts
import jax_bridge.programs.lower as lower, jax_bridge.runtime as runtime
from jax_bridge.mesh.cut import Partition
from torch_dflash.engine.registry import _engines
# One for all engines: only its keys tell meshes apart.
shared = lower.Programs("highest")
runtime.Programs = lambda *sizes: shared
BREAK
target, drafter = make_sliceable("FAMILY", "2x2", "v1")
devices = jax.devices()
last = Mesh(np.array(devices[2:]), ("model",))
places = {None: devices[:1], 2: devices[:2], 4: devices, last: devices[2:]}
asked = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
texts, compiled = [], []
for turn in range(2):
    for mesh in places:
        out = td.generate(target, drafter, *prompts(), mesh=mesh, **asked)
        texts.append(out.sequences.tolist())
        compiled.append(out.stats.compilations)
engines = [engine for entries in _engines[target].values() for engine in entries.values()]
held = [jax.tree.leaves(engine.runtime._weights._arrays) for engine in engines]
found = [{device for array in arrays for device in array.devices()} for arrays in held]
assert all(text == texts[0] for text in texts)
assert all(compiled[:4]) and not any(compiled[4:]), compiled
assert found == [set(where) for where in places.values()], found
print("checked")
"""
BREAKS = {
    "a program without its mesh": "lower._signature = lambda leaf: (leaf.shape, leaf.dtype)",
    "an engine without its mesh": "from torch_dflash.engine import registry as r\n"
    "from dataclasses import replace\n"
    "key = r._key\n"
    "r._key = lambda model, drafter, options: key(model, drafter, replace(options, mesh=None))",
    "weights without their mesh": "Partition.__hash__ = lambda way: hash(way.spec)\n"
    "Partition.__eq__ = lambda way, other: isinstance(other, Partition) and way.spec == other.spec",
}


@pytest.mark.heavy
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_meshes_of_one_pair_do_not_meet(family):
    code = BESIDE.replace("BREAK", "").replace("FAMILY", family)
    assert run_on_four(["-c", code]).strip().endswith("checked")


@pytest.mark.heavy
@pytest.mark.parametrize("broken", BREAKS)
def test_what_forgets_its_mesh_is_noticed(broken):
    with pytest.raises(AssertionError):  # the process fails
        run_on_four(["-c", BESIDE.replace("BREAK", BREAKS[broken]).replace("FAMILY", "qwen3")])
