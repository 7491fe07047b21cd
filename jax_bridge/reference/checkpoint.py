"""Reads checkpoint directories into jax arrays, checked name by name and shape by shape."""

import json
import os
from pathlib import Path

import jax
from jax.typing import DTypeLike
from safetensors.flax import load_file

from jax_bridge.reference.config import DrafterConfig, TargetConfig, read_config, read_target_config
from jax_bridge.reference.dflash2 import SELECTOR

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def load(
    path: str | os.PathLike[str], dtype: DTypeLike | None = None
) -> tuple[dict[str, jax.Array], DrafterConfig]:
    """Reads a drafter in z-lab's layout: ``config.json`` and ``model.safetensors`` or its shards.

    Args:
        path: the checkpoint directory.
        dtype: cast every tensor to this dtype; by default each keeps its stored one.

    Returns:
        ``(params, config)``. ``params`` maps checkpoint names to arrays in the checkpoint's own
        layout: matrices are [out, in], norms and biases are vectors.

    Raises:
        FileNotFoundError: no config.json or no safetensors file in the directory.
        ValueError: a config field, tensor name or tensor shape that no DFlash drafter has.
    """
    folder = Path(path)
    config = read_config(folder / "config.json")
    params = _read(folder)
    _check(params, expected_shapes(config), folder, "num_hidden_layers and attention_bias")
    return _cast(params, dtype), config


def load_target(
    path: str | os.PathLike[str], dtype: DTypeLike | None = None
) -> tuple[dict[str, jax.Array], TargetConfig]:
    """Reads a Llama or Qwen3 causal LM as transformers saves it; otherwise as ``load``.

    A tied head that is stored all the same is left out: the embedding stands for it.
    """
    folder = Path(path)
    config = read_target_config(folder / "config.json")
    params = _read(folder)
    if config.tie_word_embeddings:
        params.pop("lm_head.weight", None)
    fields = "num_hidden_layers, attention_bias and tie_word_embeddings"
    _check(params, target_shapes(config), folder, fields)
    return _cast(params, dtype), config


def _read(folder: Path) -> dict[str, jax.Array]:
    params: dict[str, jax.Array] = {}
    for file in _files(folder):
        params.update(load_file(file))
    return params


def _cast(params: dict[str, jax.Array], dtype: DTypeLike | None) -> dict[str, jax.Array]:
    return params if dtype is None else {name: tensor.astype(dtype) for name, tensor in params.items()}


def _files(folder: Path) -> list[Path]:
    if (folder / _INDEX).exists():
        shards = json.loads((folder / _INDEX).read_text())["weight_map"].values()
        return [folder / name for name in sorted(set(shards))]
    if not (folder / _SINGLE).exists():
        raise FileNotFoundError(f"{folder} has neither {_SINGLE} nor {_INDEX}")
    return [folder / _SINGLE]


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes: 3 and 11 per layer, plus 4 with biases; of DFlash2 3 and 4 per layer more."""
    hidden = config.hidden_size
    return {
        "fc.weight": (hidden, len(config.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        **_layer_shapes(config, "layers", qk_norm=True),
        **_second_shapes(config),
    }


def _second_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    sizes, hidden = config.second, config.hidden_size
    if sizes is None:
        return {}
    taps, book = sizes.conv_kernel_size, (config.vocab_size, sizes.selector_rank)
    shapes: dict[str, tuple[int, ...]] = {
        f"{SELECTOR}.hidden_projection.weight": (sizes.selector_rank, hidden),
        f"{SELECTOR}.predecessor_codebook": book,
        f"{SELECTOR}.successor_codebook": book,
    }
    for layer in range(config.num_hidden_layers):
        for name in ("attention_conv", "mlp_conv"):
            shapes[f"layers.{layer}.{name}.base_kernel"] = (2, taps, hidden)
            groups = hidden // sizes.conv_group_size
            shapes[f"layers.{layer}.{name}.kernel_projection.weight"] = (2 * taps * groups, hidden)
    return shapes


def target_shapes(config: TargetConfig) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes of a target; an untied head has a tensor of its own."""
    table = (config.vocab_size, config.hidden_size)
    return {
        "model.embed_tokens.weight": table,
        "model.norm.weight": table[1:],
        **({} if config.tie_word_embeddings else {"lm_head.weight": table}),
        **_layer_shapes(config, "model.layers", config.qk_norm),
    }


def _layer_shapes(
    config: DrafterConfig | TargetConfig, prefix: str, qk_norm: bool
) -> dict[str, tuple[int, ...]]:
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    matrices = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    norms = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    if qk_norm:
        norms |= {"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)}
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(config.num_hidden_layers):
        for name, shape in {**matrices, **norms}.items():
            shapes[f"{prefix}.{layer}.{name}.weight"] = shape
            if config.attention_bias and name in matrices and name.startswith("self_attn"):
                shapes[f"{prefix}.{layer}.{name}.bias"] = shape[:1]
    return shapes


def _check(
    params: dict[str, jax.Array], shapes: dict[str, tuple[int, ...]], folder: Path, fields: str
) -> None:
    missing, extra = sorted(set(shapes) - set(params)), sorted(set(params) - set(shapes))
    if missing or extra:
        raise ValueError(
            f"{folder}: tensors do not fit config.json: missing {missing[:4]} ({len(missing)}), "
            f"unexpected {extra[:4]} ({len(extra)}); check {fields}"
        )
    for name, shape in shapes.items():
        if params[name].shape != shape:
            raise ValueError(f"{folder}: {name} has shape {params[name].shape}; config.json asks for {shape}")
