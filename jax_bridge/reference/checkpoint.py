"""Reads a z-lab checkpoint directory into jax arrays, checked name by name and shape by shape."""

import json
import os
from pathlib import Path

import jax
from jax.typing import DTypeLike
from safetensors.flax import load_file

from jax_bridge.reference.config import DrafterConfig, read_config

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def load(
    path: str | os.PathLike[str], dtype: DTypeLike | None = None
) -> tuple[dict[str, jax.Array], DrafterConfig]:
    """Reads ``config.json`` and ``model.safetensors`` (or its shards) from a directory.

    Args:
        path: the checkpoint directory.
        dtype: cast every tensor to this dtype; by default each keeps its stored one.

    Returns:
        ``(params, config)``. ``params`` maps checkpoint names to arrays in the checkpoint's own
        layout: matrices are [out, in], norms and biases are vectors.

    Raises:
        FileNotFoundError: no config.json or no safetensors file in the directory.
        ValueError: a config field, tensor name or tensor shape the v1 drafter does not have.
    """
    folder = Path(path)
    config = read_config(folder / "config.json")
    params: dict[str, jax.Array] = {}
    for file in _files(folder):
        params.update(load_file(file))
    _check(params, expected_shapes(config), folder)
    if dtype is not None:
        params = {name: tensor.astype(dtype) for name, tensor in params.items()}
    return params, config


def _files(folder: Path) -> list[Path]:
    if (folder / _INDEX).exists():
        shards = json.loads((folder / _INDEX).read_text())["weight_map"].values()
        return [folder / name for name in sorted(set(shards))]
    if not (folder / _SINGLE).exists():
        raise FileNotFoundError(f"{folder} has neither {_SINGLE} nor {_INDEX}")
    return [folder / _SINGLE]


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes of a v1 drafter: 3 and 11 per layer, plus 4 with biases."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    matrices = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    norms = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
    }
    for layer in range(config.num_hidden_layers):
        for name, shape in {**matrices, **norms}.items():
            shapes[f"layers.{layer}.{name}.weight"] = shape
            if config.attention_bias and name in matrices and name.startswith("self_attn"):
                shapes[f"layers.{layer}.{name}.bias"] = shape[:1]
    return shapes


def _check(params: dict[str, jax.Array], shapes: dict[str, tuple[int, ...]], folder: Path) -> None:
    extra = sorted(set(params) - set(shapes))
    if any("attention_conv" in name or name.startswith("candidate_selector") for name in extra):
        raise ValueError(f"{folder} is a DFlash2 checkpoint; this reference covers DFlash v1 only")
    missing = sorted(set(shapes) - set(params))
    if missing or extra:
        raise ValueError(
            f"{folder}: tensors do not fit config.json: missing {missing[:4]} ({len(missing)}), "
            f"unexpected {extra[:4]} ({len(extra)}); check num_hidden_layers and attention_bias"
        )
    for name, shape in shapes.items():
        if params[name].shape != shape:
            raise ValueError(f"{folder}: {name} has shape {params[name].shape}; config.json asks for {shape}")
