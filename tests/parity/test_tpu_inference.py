"""Drafter attention equals tpu-inference's ``dflash_concat_attention``, where the package is installed.

Only the function's own module is loaded: the package as a whole wants vLLM and another jax.
"""

import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.tiny import make_pair

from jax_bridge.reference.attention import Seen, attend
from torch_dflash.ops.attention import KeyValue, grouped_attention

CONTEXT, WIDTH = (5, 2), 6  # context rows of two requests; rows of their blocks
MODULE = "tpu_inference.layers.common.dflash_attention_interface"
METADATA = "tpu_inference.layers.common.attention_metadata"


class Metadata(NamedTuple):  # the two fields of its attention metadata that the function reads
    query_start_loc: Any
    request_distribution: Any = None


@pytest.fixture
def concat_attention(monkeypatch):
    package = find_spec("tpu_inference")
    if package is None or not package.submodule_search_locations:
        pytest.skip("tpu-inference is not installed: no comparison with its dflash_concat_attention")
    file = Path(package.submodule_search_locations[0], *MODULE.split(".")[1:]).with_suffix(".py")
    if not file.exists():
        pytest.skip(f"this tpu-inference has no {MODULE}: no comparison with its dflash_concat_attention")
    stub: Any = ModuleType(METADATA)
    stub.AttentionMetadata = Metadata
    parents = [METADATA.rsplit(".", depth)[0] for depth in (3, 2, 1)]
    for name in parents:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, METADATA, stub)
    spec = spec_from_file_location(MODULE, file)
    assert spec and spec.loader
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        pytest.skip(f"{MODULE} does not import here ({type(error).__name__}: {error}): no comparison with it")
    return module.dflash_concat_attention


@torch.no_grad()
def test_concat_attention_equals_ours_and_the_references(concat_attention):
    _, drafter = make_pair("qwen3")
    layer = drafter.layers[0].self_attn
    generator = torch.Generator().manual_seed(0)
    hidden = drafter.config.hidden_size
    streams, ours, theirs = [], [], []
    for rows in CONTEXT:
        context = torch.randn(1, rows, hidden, generator=generator)
        block = torch.randn(1, WIDTH, hidden, generator=generator)
        cos, sin = drafter.rotary_emb(block, torch.arange(rows + WIDTH)[None])
        query = layer.query(block, (cos[:, rows:], sin[:, rows:]))
        past = layer.key_value(context, (cos[:, :rows], sin[:, :rows]))
        own = layer.key_value(block, (cos[:, rows:], sin[:, rows:]))
        parts = [KeyValue(*past, None), KeyValue(*own, None)]
        ours.append(grouped_attention(query, parts, layer.scale)[0])
        arrays = [jnp.asarray(tensor.numpy()) for tensor in (query, *past, *own)]
        seen = [jnp.ones((1, WIDTH, count), bool) for count in (rows, WIDTH)]
        mixed = attend(arrays[0], [Seen(*arrays[1:3], seen[0]), Seen(*arrays[3:], seen[1])])
        theirs.append(np.asarray(mixed).reshape(WIDTH, -1, layer.head_dim))
        # Its layout: tokens of all requests after one another, [tokens, heads, head_dim].
        streams.append([array[0].transpose(1, 0, 2) for array in arrays])
    q, k_ctx, v_ctx, k_noise, v_noise = (jnp.concatenate(parts) for parts in zip(*streams, strict=True))
    out = concat_attention(
        q,
        k_ctx,
        k_noise,
        v_ctx,
        v_noise,
        Metadata(jnp.arange(len(CONTEXT) + 1) * WIDTH),
        jnp.array([0, *np.cumsum(CONTEXT)]),
        max_query_len=WIDTH,
        sm_scale=layer.scale,
    )
    expected = np.split(np.asarray(out), len(CONTEXT))
    for one, two, three in zip(ours, theirs, expected, strict=True):
        np.testing.assert_allclose(one, three, atol=1e-5)
        np.testing.assert_allclose(two, three, atol=1e-5)
    backwards = [np.flip(piece, axis=0) for piece in expected]
    assert np.abs(backwards[0] - np.asarray(ours[0])).max() > 1e-2  # rows differ
