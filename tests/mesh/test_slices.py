"""A pair has the same text on four devices and on one: trees, bfloat16, several meshes, a shell."""

import json

import pytest
from support.slices import Case, run_cases, run_on_four

CASES = [
    Case("qwen3", "paged", "2x2", "greedy", "v1"),
    Case("gpt_oss", "static", "4x1", "sampled", "v1"),
    Case("llama", "paged", "4x1", "filters", "dflash2"),
    Case("qwen3_moe", "static", "2x2", "greedy", "dflash2"),
]


# Every pair of two values of two of the fields stands in one of these or of those above.
COVER = [
    Case("qwen3", "static", "4x1", "sampled", "dflash2"), Case("qwen3", "static", "2x2", "filters", "v1"),
    Case("llama", "static", "2x2", "sampled", "v1"), Case("llama", "static", "2x2", "greedy", "v1"),
    Case("qwen2", "paged", "2x2", "sampled", "dflash2"), Case("qwen2", "static", "4x1", "greedy", "v1"),
    Case("qwen2", "paged", "4x1", "filters", "v1"), Case("gpt_oss", "paged", "2x2", "greedy", "dflash2"),
    Case("gpt_oss", "static", "2x2", "filters", "v1"), Case("qwen3_moe", "paged", "4x1", "sampled", "v1"),
    Case("qwen3_moe", "static", "4x1", "filters", "v1"),
]  # fmt: skip
TREES = [
    Case("llama", "paged", "4x1", "sampled", "v1 union"),
    Case("qwen3", "static", "2x2", "greedy", "v1 tree"),
    Case("gpt_oss", "paged", "2x2", "filters", "v1 union"),
    Case("qwen3_moe", "static", "4x1", "sampled", "dflash2 union"),
    Case("qwen2", "paged", "2x2", "greedy", "dflash2 tree"),
    Case("qwen3", "paged", "whole", "sampled", "v1 tree"),
    Case("llama", "static", "odd", "greedy", "v1 chain"),
]
PENALTIES = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "no_repeat_ngram_size": 3}
PENALTIES |= {"suppress_tokens": [5, 7], "min_new_tokens": 4, "typical_p": 0.95}
TOLD = {"output_logprobs": True, "top_logprobs": 3, "output_scores": True}
OUTPUTS = {"outputs": ["output_scores", "output_logprobs"], "top_logprobs": 3}
OTHERS = [
    Case("qwen3", "static", "odd", "greedy", "v1"),
    Case("qwen3", "paged", "whole", "greedy", "v1"),
    Case("llama", "static", "2x2", "greedy", "v1", {"verify_width": "auto"}),
    Case("qwen3", "paged", "4x1", "sampled", "dflash2", {"verify_width": "auto"}),
    Case("qwen3", "static", "4x1", "greedy", "plain"),
    Case("llama", "paged", "2x2", "sampled", "ngram"),
    Case("qwen3", "paged", "2x2", "sampled", "v1", {"processors": [*PENALTIES]}, PENALTIES),
    Case("qwen2", "static", "4x1", "greedy", "v1", OUTPUTS, TOLD),
]
TREES += [
    Case("llama", "static", "2x2", "greedy", "v1 union", {"verify_width": "auto"}),
    Case("qwen3", "paged", "2x2", "sampled", "v1 tree", {"processors": [*PENALTIES]}, PENALTIES),
    Case("qwen2", "static", "4x1", "sampled", "v1 union", OUTPUTS, TOLD),
]


LATENTS = [
    Case("glm_moe_dsa", "paged", "4x1", "sampled", "v1"),
    Case("glm_moe_dsa", "static", "whole", "filters", "v1"),
    Case("deepseek_v3", "paged", "4x1", "sampled", "v1 union"),
    Case("deepseek_v3", "paged", "whole", "greedy", "v1"),
    Case("deepseek_v3", "static", "2x2", "greedy", "v1 tree", {"verify_width": "auto"}),
    Case("kimi_k25", "paged", "2x2", "greedy", "dflash2"),
    Case("deepseek_v3", "static", "one", "greedy", "v1"),
    Case("deepseek_v3", "paged", "neither", "sampled", "v1"),
    Case("mistral4", "paged", "4x1", "filters", "v1 union"),
    Case("glm4_moe_lite", "static", "4x1", "sampled", "ngram"),
    Case("axk1", "static", "4x1", "greedy", "v1"),
    Case("deepseek_v2", "paged", "2x2", "sampled", "v1"),
    Case("youtu", "paged", "4x1", "greedy", "v1 tree"),
    Case("minicpm3", "static", "2x2", "sampled", "v1"),
    Case("axk2", "paged", "2x2", "greedy", "v1"),
    Case("deepseek_v32", "static", "4x1", "greedy", "dflash2"),
    Case("mistral_large4", "paged", "4x1", "filters", "v1"),
]


def same(cases: list[Case]) -> None:
    for case, found in zip(cases, run_cases(cases), strict=True):
        assert found["one"] == found["four"], case
        assert not found["again"], case
        assert case.drafter in ("plain", "ngram") or max(map(max, found["one"][0][1])) > 1, case


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case[:5]))
def test_four_devices_say_what_one_says(case):
    same([case._replace(runtime="eager")])


def test_trees_and_chosen_latents_on_four_devices_are_those_of_one():
    same([case._replace(runtime="eager") for case in (TREES[0], LATENTS[0])])


@pytest.mark.heavy
@pytest.mark.parametrize(
    "case", COVER + OTHERS + TREES[1:] + LATENTS[1:], ids=lambda case: "-".join(case[:5])
)
def test_the_same_of_every_kind(case):
    same([case])


@pytest.mark.heavy
def test_the_cover_has_every_pair():
    every = [case[:5] for case in CASES + COVER]
    for first in range(5):
        for second in range(first):
            values = {row[first] for row in every}, {row[second] for row in every}
            found = {(row[first], row[second]) for row in every}
            assert len(found) == len(values[0]) * len(values[1]), (first, second)


@pytest.mark.heavy
@pytest.mark.parametrize("broken", ["wrong copies", "first chip's place"])
def test_a_wrong_cut_is_noticed(broken):
    chips = "odd" if broken == "wrong copies" else "2x2"
    (found,) = run_cases([Case("qwen3", "static", chips, "greedy", "v1", {}, {}, broken)])
    assert found["one"] != found["four"]


@pytest.mark.heavy
def test_drafts_of_another_chip_are_noticed():
    (found,) = run_cases([Case("qwen3", "static", "2x2", "greedy", "v1 tree", {}, {}, "first chip's drafts")])
    assert [text for text, *_ in found["one"]] == [text for text, *_ in found["four"]]
    assert found["one"] != found["four"]


DOORS = """
import torch, torch_dflash as td
from support.slices import make_sliceable, prompts
target, union = make_sliceable("llama", "2x2", "v1 union")
options = {"max_length": 96, "batch_size": 3, "prefill_chunk_size": 32, "cache": "paged"}
options |= {"rounds_per_chunk": 2}
asked = {"max_new_tokens": 24, "eos_token_id": None, "do_sample": False}
one, four = (td.compile(target, union, **options, **where) for where in ({"runtime": "eager"}, {"mesh": 4}))
wanted = one.generate(*prompts(), **asked)
assert torch.equal(four.generate(*prompts(), **asked), wanted)
for first, second in ((four, one), (one, four)):
    td.save_state(first.advance(first.start(*prompts(), **asked)), "FOLDER/state", first)
    state = td.load_state("FOLDER/state", second)
    while not bool(second.runtime.fetch(state.done).all()):
        state = second.advance(state)
    tokens = second.runtime.fetch(state.tokens)
    for row, mask in enumerate(prompts()[1].sum(dim=1).tolist()):
        assert tokens[row, mask : mask + 24].equal(wanted[row, -24:].to(torch.int32)), row
said = []
for engine in (one, four):
    chat, turns = engine.session(), []
    text = [9, 2, 6, 40, 41, 42, 9, 2, 6]
    for more in ([7, 8, 9], [3]):
        own = asked | {"max_new_tokens": 8}
        turns.append([t for gain in chat.gains(text, len(text) - 1, **own) for t in gain.tokens])
        text = text + turns[-1] + more
    said.append(turns)
assert said[0] == said[1], said
gained = [[], [], []]
for rows in four.stream(*prompts(), **asked):
    gained = [a + b for a, b in zip(gained, rows)]
assert torch.tensor(gained).equal(wanted[:, -24:]), gained
two = td.compile(target, union, mesh=4, replicas=2, **options)
assert torch.equal(two.generate(*prompts(), **asked), wanted)
print("checked")
"""


@pytest.mark.heavy
def test_every_door_says_what_one_device_says(tmp_path):
    assert run_on_four(["-c", DOORS.replace("FOLDER", str(tmp_path))]).strip().endswith("checked")


BFLOAT16 = """
import jax, torch, torch_dflash as td
from support.slices import PICKS, make_sliceable, prompts
target, drafter = (model.bfloat16() for model in make_sliceable("FAMILY", "2x2", "v1"))
fixed = {"max_length": 96, "batch_size": 3, "prefill_chunk_size": 32, "filters": False, "cache": "CACHE"}
pairs = {"one": (drafter, None), "four": (drafter, 4), "plain on four": (None, 4)}
engines = {name: td.compile(target, given, mesh=mesh, **fixed) for name, (given, mesh) in pairs.items()}
for pick in ("greedy", "sampled"):
    asked = {"max_new_tokens": 40, "eos_token_id": None, "seed": 5, "return_dict_in_generate": True}
    out = {name: engine.generate(*prompts(), **asked, **PICKS[pick]) for name, engine in engines.items()}
    texts = {name: one.sequences.tolist() for name, one in out.items()}
    assert texts["four"] == texts["plain on four"] == texts["one"], (pick, texts)
    assert max(map(max, out["four"].stats.acceptance_lengths)) > 1
state = engines["four"].start(*prompts(), max_new_tokens=2)
for name, part in (one for cache in state.cache for one in vars(cache).items()):
    wanted = "float32" if name == "state" else "bfloat16"
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(part)} == {wanted}, name
print("checked")
"""


@pytest.mark.heavy
@pytest.mark.parametrize(("family", "cache"), [("qwen3", "paged"), ("llama", "static"), ("qwen3_5", "paged")])
def test_bfloat16_is_as_lossless_on_four_devices(family, cache):
    code = BFLOAT16.replace("FAMILY", family).replace("CACHE", cache)
    assert run_on_four(["-c", code]).strip().endswith("checked")


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


GENERATE = ["-m", "torch_dflash", "generate", "--target", "demo", "--drafter", "demo", "--jsonl", "--file"]
GENERATE += ["-"]
PROMPTS = "\n".join(json.dumps({"prompt": text}) for text in ("Why is the sky blue?", "Count to five."))


def said(*options: str) -> list[str]:
    lines = run_on_four([*GENERATE, "--max-new-tokens", "24", *options], PROMPTS).splitlines()
    return [json.loads(line)["text"] for line in lines]


@pytest.mark.heavy
def test_the_command_says_on_four_devices_what_it_says_on_one():
    texts = said("--mesh", "4")
    assert len(texts) == 2 and all(texts)
    assert texts == said("--mesh", "auto", "--cache", "paged") == said("--runtime", "eager")
    assert texts == said("--mesh", "4", "--union", "--rows", "8")
