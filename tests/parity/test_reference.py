"""The pure-JAX drafter equals the authors' implementation (the ``dflash`` package)."""

import ast
import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from dflash.model import (
    DFlashDraftModel,
    _crop_to,
    _make_cache,
    _raw_input_embeddings,
    build_target_layer_ids,
)
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

import jax_bridge.reference
from jax_bridge.reference import default_taps, forward, load_drafter, logits, noise_embeddings
from jax_bridge.reference.config import LayerMask, read_config
from jax_bridge.reference.rope import read_rope

BATCH, WIDTH, VOCAB, HIDDEN, TAPS = 2, 6, 64, 32, [1, 4]
ROUNDS = (9, 3, 1, 5)  # new context rows per call: the prompt, then what each round committed
SLIDING = ["sliding_attention"] * 3
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
THETA = {"rope_theta": 10_000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, **THETA}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32, **THETA,
}  # fmt: skip


def window(kinds, size, **more):
    return {"layer_types": kinds, "sliding_window": size, "use_sliding_window": True, **more}


CASES = {
    "full": {}, "full_causal": {"is_causal": True}, "sliding_causal": window(SLIDING, 4),
    "sliding_causal_wide": window(SLIDING, 12), "sliding_symmetric": window(SLIDING, 4, is_causal=False),
    "mixed": window(MIXED, 5), "mixed_symmetric": window(MIXED, 5, is_causal=False),
    "bias": {"attention_bias": True}, "one_kv_head": {"num_key_value_heads": 1},
    "no_grouping": {"num_key_value_heads": 4},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, **THETA}},
    "yarn": {"rope_parameters": YARN}, "llama3": {"rope_parameters": LLAMA3},
    "everything": window(MIXED, 5, attention_bias=True, is_causal=False, rope_parameters=YARN),
}  # fmt: skip


def build(folder, seed=0, dtype=torch.float32, **overrides):
    """A random drafter of the authors' class, saved in z-lab's layout; norms and biases random."""
    fields = {
        "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB, "max_position_embeddings": 128,
        "num_target_layers": 8, "rope_parameters": {"rope_type": "default", **THETA},
        "dflash_config": {"block_size": WIDTH, "mask_token_id": 63, "target_layer_ids": TAPS},
    }  # fmt: skip
    model = DFlashDraftModel(Qwen3Config(**{**fields, **overrides})).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.3 * noise if "norm" in name else 0.2 * noise)
    model = model.to(dtype)
    model.save_pretrained(folder)
    return model


def inputs(rows, start, seed):
    """(noise embeddings, context hidden states, positions) for ``rows`` new rows from ``start``."""
    generator = np.random.default_rng(seed)
    noise = generator.standard_normal((BATCH, WIDTH, HIDDEN), np.float32)
    context = generator.standard_normal((BATCH, rows, len(TAPS) * HIDDEN), np.float32)
    positions = np.tile(np.arange(start, start + rows + WIDTH), (BATCH, 1))
    return noise, context, positions


@torch.inference_mode()
def theirs(model, cache, noise, context, positions):
    """One draft call and the crop to the committed length, as ``dflash_generate`` does it."""
    hidden = model(
        noise_embedding=torch.from_numpy(noise).to(model.dtype),
        target_hidden=torch.from_numpy(context).to(model.dtype),
        position_ids=torch.from_numpy(positions),
        past_key_values=cache,
        use_cache=True,
    )
    _crop_to(cache, int(positions[0, -1]) + 1 - WIDTH)
    return hidden.float().numpy()


def ours(params, config, cache, noise, context, positions):
    dtype = params["norm.weight"].dtype
    hidden, cache = forward(
        params, config, jnp.asarray(noise, dtype), jnp.asarray(context, dtype), jnp.asarray(positions), cache
    )
    return np.asarray(hidden, np.float32), cache


def replay(model, params, config, rounds):
    """Largest difference of hidden states over all rounds, and both caches at the end."""
    cache, their_cache, start, worst = None, _make_cache(model.config), 0, 0.0
    for seed, rows in enumerate(rounds):
        arrays = inputs(rows, start, seed)
        hidden, cache = ours(params, config, cache, *arrays)
        worst = max(worst, np.abs(hidden - theirs(model, their_cache, *arrays)).max())
        start += rows
    return worst, cache, their_cache


@pytest.mark.parametrize("name", CASES)
def test_every_round_equals_the_authors_code(tmp_path, name):
    model = build(tmp_path, **CASES[name])
    # Every head count compiles anew: two rounds are enough where only that differs.
    rounds = ROUNDS[:2] if "num_key_value_heads" in CASES[name] else ROUNDS
    worst, cache, their_cache = replay(model, *load_drafter(tmp_path), rounds)
    assert worst < 1e-5
    for (keys, values), layer in zip(cache, their_cache.layers, strict=True):
        assert keys.shape == (BATCH, model.config.num_key_value_heads, sum(rounds), 16)
        rows = layer.keys.shape[2]  # sliding layers of theirs drop what left the window
        np.testing.assert_allclose(keys[:, :, -rows:], layer.keys, atol=1e-5)
        np.testing.assert_allclose(values[:, :, -rows:], layer.values, atol=1e-5)


def test_it_shares_no_code_with_what_it_is_compared_to():
    imported = set()
    for file in Path(jax_bridge.reference.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module)
    ours = {name for name in imported if name.startswith("jax_bridge.reference")}
    others = {name.split(".")[0] for name in imported - ours} - sys.stdlib_module_names
    assert others == {"jax", "jaxtyping", "numpy", "safetensors"}


def test_the_comparison_sees_each_wrong_convention(tmp_path):
    model = build(tmp_path, **window(MIXED, 5, rope_parameters=YARN))
    params, config = load_drafter(tmp_path)
    right = config.masks[0]
    wrong = {
        "causal": LayerMask(False, right.window),
        "window one wider": LayerMask(True, right.window + 1),
        "window one narrower": LayerMask(True, right.window - 1),
        "no window": LayerMask(True, None),
    }
    for name, mask in wrong.items():
        masks = (mask, *config.masks[1:])
        assert replay(model, params, dataclasses.replace(config, masks=masks), ROUNDS)[0] > 1e-3, name
    unscaled = dataclasses.replace(config, rope=dataclasses.replace(config.rope, scale=1.0))
    assert replay(model, params, unscaled, ROUNDS)[0] > 1e-3
    for norm in ("hidden_norm.weight", "layers.1.self_attn.k_norm.weight", "norm.weight"):
        flat = {**params, norm: jnp.ones_like(params[norm])}
        assert replay(model, flat, config, ROUNDS)[0] > 1e-3, norm


def test_bf16_shards_and_casting(tmp_path):
    model = build(tmp_path / "one", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 1
    params, config = load_drafter(tmp_path / "one")
    sharded, _ = load_drafter(tmp_path / "many")
    wide, _ = load_drafter(tmp_path / "one", dtype=jnp.float32)
    for name, weight in model.named_parameters():
        assert params[name].dtype == sharded[name].dtype == jnp.bfloat16
        expected = weight.detach().float().numpy()
        for read in (params, sharded, wide):
            np.testing.assert_array_equal(np.asarray(read[name], np.float32), expected)
    # Read back: casting a live module would have rounded its rotary frequencies too.
    for read, dtype, bound in ((params, torch.bfloat16, 0.1), (wide, torch.float32, 1e-5)):
        model = DFlashDraftModel.from_pretrained(tmp_path / "one", dtype=dtype)
        assert replay(model, read, config, ROUNDS[:2])[0] < bound


def test_forward_jits_with_the_config_as_a_static(tmp_path):
    build(tmp_path, **window(MIXED, 5))
    params, config = load_drafter(tmp_path)
    noise, context, positions = map(jnp.asarray, inputs(4, 0, 0))
    eager, _ = forward(params, config, noise, context, positions)
    jitted, cache = jax.jit(forward, static_argnums=1)(params, config, noise, context, positions)
    np.testing.assert_allclose(eager, jitted, atol=1e-5)
    # A round that commits nothing new sees the same context through the cache.
    again, _ = forward(params, config, noise, context[:, :0], positions[:, 4:], cache)
    np.testing.assert_allclose(eager, again, atol=1e-5)


def test_embeddings_and_logits(tmp_path):
    switches = {"input_embedding_scale": 1.7, "output_multiplier": 0.3, "final_logit_softcapping": 2.0}
    nested = {"block_size": WIDTH, "mask_token_id": 63, "target_layer_ids": TAPS, **switches}
    model = build(tmp_path, dflash_config=nested)
    _, config = load_drafter(tmp_path)
    target = torch.nn.Module()
    target.get_input_embeddings = lambda: embed
    embed, head = torch.nn.Embedding(VOCAB, HIDDEN), torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    block = torch.full((BATCH, WIDTH), 63)
    block[:, 0] = torch.tensor([5, 11])
    with torch.inference_mode():
        expected = _raw_input_embeddings(target, block, switches["input_embedding_scale"])
        scores = model.compute_logits(expected, head)
    found = noise_embeddings(config, jnp.asarray(embed.weight.detach()), jnp.array([5, 11]))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    np.testing.assert_allclose(logits(config, found, jnp.asarray(head.weight.detach())), scores, atol=1e-5)
    assert noise_embeddings(config, jnp.ones((VOCAB, 4)), jnp.array([1]), width=2).shape == (1, 2, 4)


def test_layer_kinds_follow_from_depth_when_not_listed(tmp_path):
    build(tmp_path)
    depth = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    expected = build(tmp_path / "listed", **depth).config.layer_types
    derived = read_config(raw_config(tmp_path, layer_types=None, **depth))
    assert derived == load_drafter(tmp_path / "listed")[1]
    assert [mask.window is not None for mask in derived.masks] == [False, True, True]
    assert expected == ["full_attention", "sliding_attention", "sliding_attention"]
    off = {**depth, "use_sliding_window": False}
    assert read_config(raw_config(tmp_path, layer_types=None, **off)).masks == (LayerMask(),) * 3


def test_default_taps():
    for targets in range(4, 65):
        for layers in range(1, 9):
            assert list(default_taps(targets, layers)) == build_target_layer_ids(targets, layers)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        LLAMA3 | {"original_max_position_embeddings": 8192},
        {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
        {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
        | {"truncate": False, "original_max_position_embeddings": 4096},
        {"rope_type": "yarn", "factor": 64.0, "beta_fast": 16.0, "mscale": 1.0}
        | {"mscale_all_dim": 0.7, "original_max_position_embeddings": 4096},
        {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.25},
        {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 2},
    ],
    ids=lambda rope: "-".join(str(value) for value in rope.values()),
)
def test_rope_in_both_layouts_equals_transformers(rope):
    sizes = {"head_dim": 128, "max_position_embeddings": 131072}
    new = {**rope, "rope_theta": 150_000.0}
    old = {"type" if key == "rope_type" else key: value for key, value in rope.items()}
    old.pop("rope_theta", None)
    expected = Qwen3RotaryEmbedding(Qwen3Config(rope_parameters=dict(new), **sizes))
    for layout in ({"rope_parameters": new}, {"rope_scaling": old, "rope_theta": 150_000.0}):
        found = read_rope({**sizes, **layout}, 128)
        np.testing.assert_allclose(found.inv_freq, expected.inv_freq, rtol=5e-7)
        assert found.scale == pytest.approx(expected.attention_scaling, rel=1e-12)


def raw_config(folder, **changes):
    """The saved config.json with fields changed; a change to None removes the field."""
    raw = {**json.loads((folder / "config.json").read_text()), **changes}
    return {key: value for key, value in raw.items() if value is not None}


def test_fields_at_top_level_read_the_same(tmp_path):
    build(tmp_path)
    nested = raw_config(tmp_path)
    flat = raw_config(tmp_path, **nested["dflash_config"], dflash_config=None)
    assert read_config(flat) == read_config(nested)
    bare = raw_config(tmp_path, dflash_config={"mask_token_id": 3})
    assert read_config(bare).target_layer_ids == (1, 3, 5)
    assert read_config(bare).block_size == 16


def test_what_would_be_wrong_without_an_error_is_refused(tmp_path):
    build(tmp_path)
    for changes, error in (
        ({"dflash_config": None}, KeyError),
        ({"rope_parameters": {"rope_type": "yarn"}}, KeyError),
        ({"layer_types": ["chunked_attention"] * 3}, KeyError),
        ({"hidden_act": "gelu"}, ValueError),
        ({"sample_from_anchor": True}, ValueError),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, ValueError),
        ({"rope_parameters": {"full_attention": {}}}, ValueError),
        ({"partial_rotary_factor": 0.5}, ValueError),
    ):
        with pytest.raises(error):
            read_config(raw_config(tmp_path, **changes))
    tensors = load_file(tmp_path / "model.safetensors")
    for saved in ({**tensors, "lm_head.weight": torch.ones(4)}, {**tensors, "norm.weight": torch.ones(4)}):
        save_file(saved, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match="tensors do not fit"):
            load_drafter(tmp_path)
