"""Reads checkpoint directories into jax arrays; names and shapes must be those of the config."""

import json
import os
from pathlib import Path

import jax
from jax.typing import DTypeLike
from safetensors.flax import load_file

from jax_bridge.reference.config import DrafterConfig, TargetConfig, read_config, read_target_config
from jax_bridge.reference.dflash2 import SELECTOR

_INDEX = "model.safetensors.index.json"


def load_drafter(
    path: str | os.PathLike[str], dtype: DTypeLike | None = None
) -> tuple[dict[str, jax.Array], DrafterConfig]:
    """Reads a drafter in z-lab's layout: ``config.json`` and ``model.safetensors`` or its shards.

    Args:
        path: the checkpoint directory.
        dtype: dtype of every tensor; by default each keeps its stored dtype.

    Returns:
        ``(params, config)``. ``params`` maps checkpoint names to arrays in the checkpoint's own
        layout: matrices are [out, in], norms and biases are vectors.

    Raises:
        KeyError, ValueError: as `read_config`; or the tensors do not fit the config.
    """
    config = read_config(Path(path) / "config.json")
    return _read(Path(path), drafter_shapes(config), dtype), config


def load_target(
    path: str | os.PathLike[str], dtype: DTypeLike | None = None
) -> tuple[dict[str, jax.Array], TargetConfig]:
    """Reads a Llama or Qwen3 causal LM as transformers saves it; otherwise as ``load_drafter``.

    A tied head is left out even if the checkpoint stores it: the embedding is the head.
    """
    config = read_target_config(Path(path) / "config.json")
    tied = ("lm_head.weight",) if config.tie_word_embeddings else ()
    return _read(Path(path), target_shapes(config), dtype, tied), config


def _read(
    folder: Path, shapes: dict[str, tuple[int, ...]], dtype: DTypeLike | None, left_out: tuple[str, ...] = ()
) -> dict[str, jax.Array]:
    files, params = ["model.safetensors"], {}
    if (folder / _INDEX).exists():
        files = sorted(set(json.loads((folder / _INDEX).read_text())["weight_map"].values()))
    for file in files:
        params |= load_file(folder / file)
    params = {name: tensor for name, tensor in params.items() if name not in left_out}
    found = {name: tensor.shape for name, tensor in params.items()}
    if found != shapes:
        odd = sorted(name for name, _ in found.items() ^ shapes.items())
        raise ValueError(f"{folder}: tensors do not fit config.json: {odd[:4]}")
    return params if dtype is None else {name: tensor.astype(dtype) for name, tensor in params.items()}


def drafter_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Shapes by tensor name: 3, and 11 or with biases 15 per layer; DFlash2 adds 3, and 4 per layer."""
    hidden = config.hidden_size
    return {
        "fc.weight": (hidden, len(config.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        **_layer_shapes(config, "layers", qk_norm=True),
        **_dflash2_shapes(config),
    }


def _dflash2_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    sizes, hidden = config.dflash2, config.hidden_size
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
    """Shapes by tensor name; ``lm_head.weight`` only where the head is not tied."""
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
