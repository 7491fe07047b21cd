"""A prompt chunk through the whole of both models, compiled for TPU."""

from math import prod

import jax
import pytest
from support.wide import qwen3_4b_width

from jax_bridge.aot import compile as aot
from jax_bridge.aot.floor import prefill_floor
from jax_bridge.aot.hlo import Instruction, Program, array_bytes, forbidden

CONTEXT, ROWS = 4096, 512
SCORES = 2 * 32 * ROWS * CONTEXT
"""Bytes of [heads, rows, context] in bfloat16."""


def made(hlo: str) -> list[Instruction]:
    """Lists the results in HBM that are as large as the scores; inner values of fusions never reach HBM."""
    outside = [one for one in Program(hlo).computations["ENTRY"].values() if one.op != "parameter"]
    return [
        one
        for one in outside
        if any(size >= SCORES and in_hbm for size, in_hbm in array_bytes(one.type)) and one.op != "bitcast"
    ]


@pytest.mark.aot
@pytest.mark.parametrize("cache", ["paged", "static"])
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v5e:2x2", "v6e:2x2"])
def test_prefill_compiles_in_place_and_pages_need_no_scores_in_memory(topology, cache, capsys):
    model = qwen3_4b_width(1, layers=2, cache=cache)
    compiled = aot.compile_step(model, "prefill", topology=topology, prompt_rows=ROWS)
    leaves = jax.tree_util.tree_leaves_with_path(model.state)
    paths = [jax.tree_util.keystr(path) for path, _ in leaves]
    kept = ".cache[1].pool" if cache == "paged" else ".cache[1].value"
    assert {".tokens", kept, ".proposer.layers[4].key", ".proposer.context"} < set(paths)
    assert compiled.aliases == {path: f"[1]{path}" for path in paths} and not compiled.unaliased
    assert compiled.alias_bytes >= sum(prod(leaf.shape) * leaf.dtype.itemsize for _, leaf in leaves)
    program = Program(compiled.hlo)
    assert not forbidden(compiled.hlo) and not program.collectives()
    assert not {"scatter", "while"} & {one.op for one in program.instructions()}
    floor = prefill_floor(model.pair, model.params, CONTEXT, ROWS)
    with capsys.disabled():
        print(f"\n{topology}, {cache}: {compiled.traffic_bytes / floor:.3f} of its floor", end=", ")
        print(f"{compiled.temp_bytes / 1e6:.0f} MB of temporaries, {compiled.compile_seconds:.1f} s")
    kernels = compiled.hlo.count('custom_call_target="tpu_custom_call"')
    if cache == "static":  # the checks below see scores where there are some
        assert made(compiled.hlo) and compiled.temp_bytes > SCORES and kernels == 0
    else:
        assert not made(compiled.hlo) and compiled.temp_bytes < SCORES / 2 and kernels == 2
        assert floor < compiled.traffic_bytes < 1.35 * floor
