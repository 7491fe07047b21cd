"""Every tensor of a checkpoint against the network that its config describes, before that is allocated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch

_LAYER, _SELECTOR = "layers.0.", "candidate_selector."
SAID_BY = {
    "hidden_size": "norm.weight",
    "intermediate_size": _LAYER + "mlp.gate_proj.weight",
    "head_dim": _LAYER + "self_attn.q_norm.weight",
    "num_attention_heads": _LAYER + "self_attn.q_proj.weight",
    "num_key_value_heads": _LAYER + "self_attn.k_proj.weight",
    "target_layer_ids": "fc.weight",
    "markov_rank": "markov_head.markov_w1.weight",
    "conv_kernel_size": _LAYER + "attention_conv.base_kernel",
    "conv_group_size": _LAYER + "attention_conv.kernel_projection.weight",
    "selector_rank": _SELECTOR + "hidden_projection.weight",
    "vocab_size": _SELECTOR + "predecessor_codebook",
}
"""For each field a tensor whose shape it gives, once those before it are right."""


def check_tensors(found: Mapping[str, tuple[int, ...]], kind: Any, config: Any, source: Any) -> None:
    """Raise ``ValueError`` unless names and shapes are those of a ``kind`` drafter of ``config``.

    Args:
        found: shapes by the names that the network has. kind: its class. source: for the message.
    """
    layers = {name.split(".")[1] for name in found if name.startswith("layers.")}
    wrong = "config and weights are of different drafters."
    if config.num_hidden_layers > len(layers):
        raise ValueError(
            f"num_hidden_layers={config.num_hidden_layers} in {source}: its weights have {len(layers)} "
            f"layers; {wrong}"
        )
    try:
        with torch.device("meta"):
            own = {name: tuple(one.shape) for name, one in kind(config).state_dict().items() if name != "d2t"}
    except RuntimeError as error:  # a product of sizes that no tensor has
        sizes = ", ".join(f"{name}={getattr(config, name)}" for name in list(SAID_BY)[:4])
        raise ValueError(f"{sizes} in {source}: no tensor is so large; {wrong}") from error
    others = {name: shape for name, shape in own.items() if name in found and found[name] != shape}
    for field, name in SAID_BY.items():
        if name in others:
            raise ValueError(
                f"{field}={getattr(config, field)} in {source}: {name} would have shape {own[name]}, in its "
                f"file it is {found[name]}; {wrong}"
            )
    for problem, names in (
        ("missing_keys", own.keys() - found.keys()),
        ("mismatched_keys", [f"{name} {found[name]}, not {shape}" for name, shape in others.items()]),
        ("unexpected_keys", {name for name in found.keys() - own.keys() if not name.endswith("inv_freq")}),
    ):
        if names:
            refuse_weights(problem, names, source, kind.kind)


def refuse_weights(problem: str, names: Iterable[Any], source: Any, kind: str) -> NoReturn:
    """Raise ``ValueError`` for weights that are not the config's; ``problem`` in transformers' words."""
    raise ValueError(
        f"{problem}={sorted(map(str, names))[:5]} in {source}: the weights are not those of a {kind} drafter "
        "with this config; check both files."
    )
