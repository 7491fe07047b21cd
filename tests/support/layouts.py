"""Drafters of every published layout at reduced size, and the same drafters in z-lab's fields."""

import json
import re

import torch
from safetensors.torch import save_file

import torch_dflash as td
from support import ROOT
from support.tiny import MASK, VOCAB, correlate, make_target, randomise
from torch_dflash.proposers.checkpoints import drafter_of

FOLDER = ROOT / "tests/fixtures/layouts"
LAYOUTS = sorted(path.stem for path in FOLDER.glob("*.json"))
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
SECOND = {"selector_rank": 12, "selector_top_k": 4, "conv_group_size": 8, "conv_kernel_size": 2}
OWN = {"own_embedding": True, "own_head": True, "draft_vocab_size": 40}
HEADED = {"sample_from_anchor": True, "markov_rank": 8}
EXPECTED = {
    "assistant": SLIDING | {"sliding_window": 10, "is_causal": False, "rope_theta": 1e6, "vocab_size": 0},
    "deepspec": HEADED | {"own_embedding": True, "own_head": True},
    "deepspec_dflash": {"sample_from_anchor": True, "own_embedding": True, "own_head": True},
    "laguna": SLIDING
    | {"rope_theta": 1e4, "is_causal": True, "gating": "per-head"}
    | {"aux_hidden_norms": True, "context_layernorm": True},
    "liquid_dspark": HEADED,
    "mimo": SLIDING
    | {"is_causal": False, "attention_bias": True, "attention_sink_bias": True, "mask_embedding": True},
    "specforge": MIXED | {"rope_theta": 1e7},
    "specforge_dspark": HEADED | {"rope_theta": 1e7},
    "speculators": OWN,
    "speculators_anchor": MIXED | {"sample_from_anchor": True},
    "speculators_dspark": OWN | {"sample_from_anchor": True, "markov_rank": 8},
    "speculators_dflash2": SLIDING | SECOND | {"is_causal": False},
    "zlab_flat": {},
}
"""The meaning of each layout's fields in ours; other fields are those of `expected`."""


def fixture(name):
    """(config.json, shapes by name) of a published drafter."""
    kept = json.loads((FOLDER / f"{name}.json").read_text())
    return kept["config"], kept["tensors"]


def expected(name):
    """Our drafter, written down field by field without the fixture; random weights."""
    fields = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
        "target_layer_ids": [0, 2], "block_size": 6, "mask_token_id": MASK, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    own = {field: value for field, value in EXPECTED[name].items() if field != "rope_theta"}
    rope = {"rope_type": "default", "rope_theta": EXPECTED[name].get("rope_theta", 1e6)}
    kind = td.DFlash2Config if "selector_rank" in own else td.DFlashConfig
    return randomise(drafter_of(kind(**fields | own, rope_parameters=rope)), seed=1)


def pair(name):
    """A target, and `expected`; a drafter's own embedding and head, if any, are the target's for some ids."""
    target, drafter = make_target("qwen3"), expected(name)
    correlate(target, drafter, 8.0)
    embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    with torch.no_grad():
        if drafter.embed_tokens is not None:
            drafter.embed_tokens.weight.copy_(embedding)
        if drafter.lm_head is not None and drafter.d2t is None:
            drafter.lm_head.weight.copy_(head)
        elif drafter.lm_head is not None:
            ids = said_ids(head)
            drafter.lm_head.weight.copy_(head[ids])
            drafter.d2t.copy_(ids - torch.arange(len(ids)))
        if drafter.markov_head is not None:
            drafter.markov_head.markov_w2.weight.mul_(10)  # enough to change drafts
        if drafter.mask_embedding is not None:
            drafter.mask_embedding.copy_(embedding[MASK - 1])
    return target, drafter


def with_more_ids(target, rows=VOCAB + 15):
    """``target``, resized in place: its text often holds the last id, which no drafter knows."""
    target.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        head = target.get_output_embeddings().weight
        head[-1] = head[head[:VOCAB].norm(dim=1).argmax()] * 1.05
    return target


def said_ids(head):
    """40 ids in order, among them those that `correlate` lets both networks choose; far from 0, 1, 2, ..."""
    loudest = head.norm(dim=1).argsort(descending=True)
    others = [token for token in range(1, VOCAB, 2) if token not in loudest[:2]]
    return torch.tensor(sorted([*loudest[:2].tolist(), *others[-38:]]))


def published(name, drafter):
    """The weights of ``drafter`` under the names of a layout, and the config; written by hand."""
    state = {tensor: value.detach().clone() for tensor, value in drafter.state_dict().items()}
    if name == "assistant":
        state["encoder.fc.weight"] = state.pop("fc.weight")
        state["encoder.output_norm_enc.weight"] = state.pop("hidden_norm.weight")
    if name == "laguna":
        for at in range(2):
            attention, mlp = f"layers.{at}.self_attn.", f"layers.{at}.mlp."
            fused = [state.pop(f"{attention}{one}_proj.weight") for one in "qkv"]
            state[attention + "qkv_proj.weight"] = torch.cat(fused)
            fused = [state.pop(f"{mlp}{one}_proj.weight") for one in ("gate", "up")]
            state[mlp + "gate_up_proj.weight"] = torch.cat(fused)
    if "markov_head.markov_w1.weight" in state:  # our drafters have no confidence head
        state["confidence_head.proj.weight"] = torch.ones(1, 40)
        state["confidence_head.proj.bias"] = torch.ones(1)
    if name == "liquid_dspark":  # channels that turn together lie side by side: 0 and 8 of 16, then 1 and 9
        beside = [half + pair for pair in range(8) for half in (0, 8)]
        for tensor in [one for one in state if re.search(r"[qk]_(proj|norm)\.weight", one)]:
            heads = state[tensor].unflatten(0, (-1, 16))
            state[tensor] = heads[:, beside].flatten(0, 1)
    if name in ("speculators", "speculators_dspark"):
        ids = torch.arange(40) + state["d2t"]
        state["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return state


def publish(folder, name, drafter, **changes):
    """Write a directory of layout ``name``; a changed field of ... is left out, one of ``tensors`` added."""
    more = changes.pop("tensors", {})
    config, shapes = fixture(name)
    config = {key: value for key, value in (config | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    state = published(name, drafter)
    mask = state.pop("mask_embedding", None)
    if mask is not None:
        torch.save({"mask_token_id": MASK, "embedding": mask}, folder / "mask_embedding.pt")
    if not more and not changes:
        assert {key: list(value.shape) for key, value in state.items()} == shapes
    state = {key: value.contiguous() for key, value in (state | more).items() if value is not None}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
