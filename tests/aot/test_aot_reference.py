"""The cost of lowering: our round against the reference's, by the TPU compiler, on the same dimensions."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from support.wide import qwen3_4b_width

from jax_bridge import ops
from jax_bridge._torchax import call_torch
from jax_bridge.aot import compile as aot
from jax_bridge.aot.hlo import Program
from jax_bridge.reference import loop
from jax_bridge.reference.checkpoint import drafter_shapes, target_shapes
from jax_bridge.reference.config import read_config, read_target_config
from torch_dflash.ops.block_attention import block_attention

CLOSE = 0.02


def reference_round(model: aot.AbstractPair) -> aot.CompiledStep:
    """The reference's round for the configs, batch and capacity of ``model``.

    It has our jobs, stop ids and acceptance counts included, but one: it is greedy, and ours also holds
    the branch that samples, which a greedy batch does not run. For that branch ours writes the logits out
    (10 MB and their reading), where the reference's argmax is fused with the head. Traffic counts the
    cheaper branch; FLOPs count the dearer, whose hashing of the vocabulary is 0.3 % of the round.
    """
    target, drafter = model.pair.target.config, model.pair.proposer.drafter.config
    models = loop.Models(
        *(
            read(json.loads(config.to_json_string(use_diff=False)))
            for read, config in ((read_target_config, target), (read_config, drafter))
        )
    )

    def shapes(named):
        return {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in named.items()}

    plan = model.pair.plan
    weights = loop.PairParams(shapes(target_shapes(models.target)), shapes(drafter_shapes(models.drafter)))
    state = jax.eval_shape(
        lambda: loop.empty_state(models, jnp.bfloat16, plan.batch_size, plan.slots, plan.stop_slots)
    )
    return aot.compile_function(partial(loop.decode_round, models), weights, state, topology="v5p:2x2x1")


@pytest.mark.aot
def test_lowered_round_costs_what_the_jax_round_costs(capsys, monkeypatch):
    model = qwen3_4b_width(1)
    with_kernel, theirs = aot.compile_round(model), reference_round(model)
    # The reference's attention is plain JAX, so ours has to be, too, for a comparison of the lowering.
    plain = partial(call_torch, block_attention.plain)
    monkeypatch.setattr(ops, "block_attention_jax", lambda inputs, past, causal: plain(inputs, past, causal))
    ours = aot.compile_round(model)
    assert with_kernel.traffic_bytes < theirs.traffic_bytes
    costs = {
        "HBM bytes": (ours.traffic_bytes, theirs.traffic_bytes),
        "FLOPs": (ours.cost["flops"], theirs.cost["flops"]),
        "argument bytes": (ours.argument_bytes, theirs.argument_bytes),
    }
    fusions = [fusion_counts(compiled.hlo) for compiled in (ours, theirs)]
    with capsys.disabled():
        print("\nv5p, one round, lowered and plain JAX:")
        for name, (one, other) in costs.items():
            print(f"  {name}: {one:.6g} and {other:.6g}, {one / other - 1:+.2%}")
        less = with_kernel.traffic_bytes / theirs.traffic_bytes - 1
        print(f"  HBM bytes with the kernel for the block's attention: {less:+.2%}")
        print(f"  fusions outside branches, and all: {fusions[0]} and {fusions[1]}")
        print(f"  temporary bytes: {ours.temp_bytes} and {theirs.temp_bytes}")
    for name, (one, other) in costs.items():
        assert abs(one / other - 1) < CLOSE, name


def fusion_counts(hlo: str) -> tuple[int, int]:
    """Fusions that every round runs, and those of all computations, nested ones included."""
    bodies = Program(hlo).computations
    counts = {name: sum(i.op == "fusion" for i in body.values()) for name, body in bodies.items()}
    return counts["ENTRY"], sum(counts.values())
