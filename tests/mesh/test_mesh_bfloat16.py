"""In bfloat16 a pair on four devices says what plain decoding says there, and what one device says."""

import pytest
from support.slices import run_on_four

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
