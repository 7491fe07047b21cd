"""vLLM's groups of pages for a target with windows in part of its layers, and for a drafter."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.core import kv_cache_planning as planning
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from jax_bridge.vllm.proposer import LAYER, Proposer
from jax_bridge.vllm.worker import padded_page_specs

DRAFTERS = {"one shape": (2, 128), "a smaller shape": (1, 64), "a larger shape": (4, 128)}


def spec(heads, dim, window=None):
    kind, more = (SlidingWindowSpec, {"sliding_window": window}) if window else (FullAttentionSpec, {})
    size = 16 * heads * 2 * dim * 2  # tpu-inference's form
    common = {"block_size": 16, "num_kv_heads": heads, "head_size": dim, "dtype": torch.bfloat16}
    return kind(page_size_padded=size, **common, **more)


def specs(heads, dim, layers=("full", "window") * 2):
    """Page specifications of a target with windows in part of its layers, and of a drafter of two layers."""
    found = {f"layer.{at}": spec(2, 128, 8 if kind == "window" else None) for at, kind in enumerate(layers)}
    return found | {LAYER.format(at): spec(heads, dim) for at in range(2)}


def groups_of(found):
    return planning._get_kv_cache_groups_uniform_page_size(planning.unify_kv_cache_spec_page_size(found))


@pytest.mark.parametrize("shape", DRAFTERS)
def test_places_are_found_by_name(shape):
    groups = groups_of(padded_page_specs(specs(*DRAFTERS[shape])))
    assert len(groups) == 3
    index = {name: at for at, name in enumerate(name for group in groups for name in group.layer_names)}
    runner = SimpleNamespace(
        kv_cache_config=SimpleNamespace(kv_cache_groups=groups), layer_name_to_kvcache_index=index
    )
    proposer = SimpleNamespace(runner=runner, config=SimpleNamespace(num_hidden_layers=2))
    for layer, (group, array) in enumerate(Proposer.places(proposer)):
        assert LAYER.format(layer) in groups[group].layer_names
        assert array == index[LAYER.format(layer)]
    own = {group for group, _ in Proposer.places(proposer)}
    assert own == (
        {0, 1} if shape == "one shape" else {2}
    )  # the last group is the target's, then the drafter's


@pytest.mark.parametrize("shape", DRAFTERS)
def test_pages_are_counted_with_each_array_that_is_taken(shape):
    """tpu-inference takes an array for each place in a group and each shape; vLLM counts a group's pages."""
    found = padded_page_specs(specs(*DRAFTERS[shape]))
    groups = groups_of(found)
    counted = max(sum(found[name].page_size_bytes for name in group.layer_names) for group in groups)
    places = {(at, found[name].num_kv_heads, found[name].head_size)
              for group in groups for at, name in enumerate(group.layer_names)}  # fmt: skip
    assert counted >= sum(16 * heads * 2 * dim * 2 for _, heads, dim in places)


def test_specifications_of_one_kind_stay_as_they_are():
    found = specs(1, 64, layers=("full",) * 4)
    assert padded_page_specs(found) is found


def test_vllm_makes_no_groups_of_pages_of_two_sizes_alone():
    """vLLM's limit is the reason for `counted_alike`."""
    with pytest.raises(AssertionError):
        groups_of(specs(1, 64))
