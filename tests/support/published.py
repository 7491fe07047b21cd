"""Drafter directories in the published form."""

import json

import torch
from safetensors.torch import save_file

# The fields of z-lab's config.json files, with small sizes. No embedding, no head, remote code on offer.
PUBLISHED = {
    "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "attention_bias": False, "attention_dropout": 0.0, "block_size": 8,
    "dflash_config": {"mask_token_id": 96, "target_layer_ids": [0, 2]}, "dtype": "bfloat16", "head_dim": 16,
    "hidden_act": "silu", "hidden_size": 32, "initializer_range": 0.02, "intermediate_size": 48,
    "layer_types": ["full_attention", "full_attention"], "max_position_embeddings": 512,
    "max_window_layers": 2, "model_type": "qwen3", "num_attention_heads": 4, "num_hidden_layers": 2,
    "num_key_value_heads": 2, "num_target_layers": 4, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False, "use_cache": True,
    "use_sliding_window": False, "vocab_size": 97,
}  # fmt: skip


SLIDING = "sliding_attention"


FULL = "full_attention"


YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64, "beta_fast": 32.0}


def tensors_for(config, seed=0):
    """Tensors under z-lab's published names, shaped by a config.json."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    kv, inner = config["num_key_value_heads"] * config["head_dim"], config["intermediate_size"]
    taps = len(
        config.get("dflash_config", {}).get("target_layer_ids") or config.get("target_layer_ids") or [1, 1]
    )
    shapes = {"fc": (hidden, taps * hidden), "hidden_norm": (hidden,), "norm": (hidden,)}
    kinds = {"q_proj": (heads, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden)}
    kinds |= {"o_proj": (hidden, heads)}
    kinds |= {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    kinds |= {"q_norm": (config["head_dim"],), "k_norm": (config["head_dim"],)}
    for index in range(config["num_hidden_layers"]):
        for name in LAYER:
            shapes[f"layers.{index}.{name}"] = kinds.get(name.split(".")[-1], (hidden,))
    named = {f"{name}.weight": shape for name, shape in shapes.items()}
    if config.get("attention_bias"):
        biased = [name for name in shapes if "self_attn" in name and name.endswith("proj")]
        named |= {f"{name}.bias": shapes[name][:1] for name in biased}
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).bfloat16() * 0.4 for name, shape in named.items()}


def publish(folder, tensors=None, **changes):
    """Writes a directory in z-lab's published form; a change to ... removes the field."""
    config = {name: value for name, value in (PUBLISHED | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "dflash.py").write_text("raise RuntimeError('remote code ran')\n")
    tensors = tensors_for(config) if tensors is None else tensors
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def same_tensors(model, tensors):
    state = model.state_dict()
    assert state.keys() == tensors.keys()
    assert all(torch.equal(state[name], tensors[name]) for name in state)


def draft(drafter, seed=5):
    """Hidden states of one draft pass on fixed inputs, in fp32."""
    generator = torch.Generator().manual_seed(seed)
    hidden, taps = drafter.config.hidden_size, len(drafter.config.target_layer_ids)
    noise = torch.randn(1, drafter.config.block_size, hidden, generator=generator)
    context = torch.randn(1, 9, taps * hidden, generator=generator)
    position = torch.arange(9 + noise.shape[1])[None]
    with torch.no_grad():
        return drafter.float()(noise, context, position).last_hidden_state


FIELDS = {"mask_token_id": 95, "target_layer_ids": [1, 3], "input_embedding_scale": 5.5}
FIELDS |= {"output_multiplier": 0.25, "final_logit_softcapping": 20.0, "block_size": 4}


LAYER = [
    *("input_layernorm", "post_attention_layernorm"),
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
]
