"""Experts without a copy of their weights equal transformers' own, for every kind of experts module."""

import runpy

import jax
import numpy as np
import pytest
import torch
import transformers as hf
from support import ROOT
from support.experts import CHOSEN, COUNT, FLAGS, Experts, routed
from torch.func import functional_call
from transformers.integrations.moe import batched_mm_experts_forward

import jax_bridge as jb
from jax_bridge._torchax import call_torch
from jax_bridge.aot import compile as aot
from jax_bridge.aot.floor import floor_of
from jax_bridge.aot.hlo import Program
from jax_bridge.programs.lower import EXACT, tracing
from torch_dflash.cli.loading import load_configs
from torch_dflash.targets.experts import FEW_PAIRS, ordinary, static_experts

CONFIGS = ROOT / "benchmarks/configs/qwen3-coder-30b-a3b"
FAMILIES = runpy.run_path(str(ROOT / "benchmarks/family_configs.py"))


@pytest.mark.parametrize(
    "case, says", [("hy_v4", True), ("minimax_m3_vl_text", True), ("lfm2_moe", True), ("gpt_oss", False)]
)
def test_modules_of_transformers_are_ordinary_or_not(case, says):
    """Some have no ``act_fn``, and a gate of their own in its place."""
    if case not in hf.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {case}")
    own = FAMILIES["build"](case).modules()
    found = [ordinary(one) for one in own if type(one).__name__.endswith("Experts")]
    assert found and set(found) == {says}


def test_a_gate_with_weights_is_not_ordinary():
    experts = Experts(True, False, False, False)
    assert ordinary(experts)
    experts.act_fn = torch.nn.PReLU()
    assert not ordinary(experts)


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("rows", [1, FEW_PAIRS // CHOSEN, FEW_PAIRS // CHOSEN + 1, 33])
def test_equal_to_transformers(flags, rows):
    torch.manual_seed(1)
    experts, given = Experts(*flags), routed(rows)
    with torch.no_grad():
        wanted, got = batched_mm_experts_forward(experts, *given), static_experts(experts, *given)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_an_expert_that_overflows_on_another_s_row_changes_nothing():
    torch.manual_seed(1)
    experts, (rows, index, weights) = Experts(*FLAGS[0]), routed(33)
    index = torch.where(index == 7, (index + 1) % COUNT, index)
    with torch.no_grad():
        wanted = static_experts(experts, rows, index, weights)
        experts.gate_up_proj[7] = torch.inf
        assert torch.equal(static_experts(experts, rows, index, weights), wanted)


def test_gradients_flow_as_in_transformers():
    torch.manual_seed(1)
    experts, (rows, index, weights) = Experts(*FLAGS[1]), routed(33)
    found = []
    for forward in (static_experts, batched_mm_experts_forward):
        leaf = rows.clone().requires_grad_()
        forward(experts, leaf, index, weights).square().sum().backward()
        found.append((leaf.grad, experts.down_proj.grad))
        experts.zero_grad()
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_row_of_a_block_gets_what_it_would_get_alone(transposed):
    """The outputs are equal bit by bit in bfloat16 on a CPU: the next router has near-ties."""
    torch.manual_seed(1)
    experts = Experts(True, False, transposed, False).bfloat16()
    weights = {name: jb.to_jax(leaf.detach()) for name, leaf in experts.named_parameters()}
    rows, index, shares = routed(33)
    given = jb.to_jax((rows.bfloat16(), index.int(), shares.bfloat16()))

    def mix(weights, *given):
        return call_torch(lambda held, *given: functional_call(experts, held, given), weights, *given)

    def compiled(*given):
        with tracing("highest"):
            return jax.jit(mix).lower(weights, *given).compile(EXACT)(weights, *given)

    block = compiled(*given)
    for row in range(3):
        alone = compiled(*(part[row : row + 1] for part in given))
        np.testing.assert_array_equal(alone, block[row : row + 1])


@pytest.mark.aot
def test_no_expert_is_copied_on_a_tpu():
    """One layer of Qwen3-Coder-30B-A3B, 10 rows: 80 pairs on 128 experts."""
    target, drafter = load_configs(str(CONFIGS), str(CONFIGS) + "-dflash", None, layers=1)
    model = aot.abstract_pair(target, drafter, capacity=512, verify_width=10)
    step, floor = aot.compile_step(model, "verify"), floor_of(model.pair, model.params, 512)
    experts = sum(
        shape.size * shape.dtype.itemsize for name, shape in model.params.items() if ".experts." in name
    )
    assert floor.verify < step.traffic_bytes < 1.05 * floor.verify  # of the experts that are hit
    assert step.temp_bytes < 0.02 * experts
    inside = [one.type for one in Program(step.hlo).instructions() if one.op != "parameter"]
    assert not [
        kind for kind in inside if kind.startswith(("bf16[80,1536,", "bf16[80,2048,768", "(bf16[80,1536,"))
    ]
