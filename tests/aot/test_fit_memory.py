"""The assumptions of `fit_memory` hold in the TPU compiler."""

import re

import jax
import jax.numpy as jnp
import pytest
from support import ROOT

from jax_bridge import aot
from jax_bridge.aot import sizes
from jax_bridge.aot.sizes import HBM
from jax_bridge.aot.traffic import Laid
from torch_dflash.cli.loading import load_configs

pytestmark = pytest.mark.aot
CONFIGS = ROOT / "benchmarks/configs"
TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}


def model_of(pair: str, layers: int, **plan):
    configs = load_configs(str(CONFIGS / pair), str(CONFIGS / f"{pair}-dflash"), None, layers)
    return aot.abstract_pair(*configs, capacity=4096, matmul_precision="default", **plan)


@pytest.mark.parametrize("generation", HBM)
def test_a_chip_has_the_memory_that_its_compiler_says(generation):
    large = jax.ShapeDtypeStruct((200 * 10**9,), jnp.uint8)
    small = jax.ShapeDtypeStruct((8,), jnp.uint8)
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        aot.compile_function(
            lambda given, state: state + given[:8], large, small, topology=TOPOLOGIES[generation]
        )
    said = re.search(r"available HBM \(([\d.]+)G\)", str(raised.value))
    assert said and HBM[generation] == pytest.approx(float(said[1]) * 2**30, abs=0.006 * 2**30)


@pytest.mark.parametrize(("pair", "cache"), [("gpt-oss-20b", "paged"), ("qwen3-8b", "static")])
def test_arguments_are_filled_up_as_their_layouts_say(pair, cache):
    model = model_of(pair, 2, cache=cache)
    step = aot.compile_step(model, "round", topology="v5e:2x2")
    laid = Laid(step.hlo, (model.params, model.state))
    assert laid.total == laid.of((model.params, model.state)) == pytest.approx(step.argument_bytes, rel=1e-4)


def test_temporaries_grow_by_little_with_the_layers():
    few, more = (
        sizes.temporaries(
            aot.compile_step(model_of("qwen3-8b", layers, cache="paged"), "chunk", topology="v5e:2x2")
        )
        for layers in (5, 10)
    )
    assert abs(few - more) < 5 * 3e6


def test_the_largest_fits_and_a_little_more_does_not():
    target, drafter = load_configs(str(CONFIGS / "qwen3-4b"), str(CONFIGS / "qwen3-4b-dflash"), None, 6)
    asked = {"cache": "paged", "matmul_precision": "default"}
    found = aot.fit_memory(
        target, drafter, topology="v5e:2x2", chips=1, context=4096, search=("context",), **asked
    )
    assert found["largest"]["context"]["confirmed"] and found["layers_compiled"] == 5
    assert found["needed_bytes"] < found["largest"]["context"]["needed_bytes"] <= found["hbm_bytes"]
    best = found["largest"]["context"]["value"]
    if best < target.max_position_embeddings:
        model = aot.abstract_pair(target, drafter, capacity=best + best // 20, **asked)
        with pytest.raises(jax.errors.JaxRuntimeError, match="HBM"):
            aot.compile_step(model, "chunk", topology="v5e:2x2")
