"""Refuses, by name, targets and drafters that were not tried on a mesh."""

from __future__ import annotations

from typing import Any

from jax_bridge.mesh.mixers import MIXER, part_of_mixer
from jax_bridge.mesh.rules import heads_of
from torch_dflash.decode import Pair
from torch_dflash.plan import DecodePlan
from torch_dflash.processors.grammars import GrammarMatcher
from torch_dflash.proposers import DFlashProposer, NGramProposer, PlainProposer
from torch_dflash.proposers.checkpoint.extras import FLAGS
from torch_dflash.proposers.composed import Several
from torch_dflash.proposers.trees.proposer import BestNodes
from torch_dflash.proposers.union import UnionProposer
from torch_dflash.requests.rules import KINDS
from torch_dflash.targets.scans import find_scans

RECURRENT = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
INDEXED = ("axk2", "deepseek_v32", "glm_moe_dsa", "mistral_large4")
LATENT = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k25", "minicpm3", "mistral4", "youtu")
PLAIN = ("gpt_oss", "llama", "minimax_m2", "qwen2", "qwen3", "qwen3_moe")
FAMILIES = (*PLAIN, *LATENT, *INDEXED, *RECURRENT)
"""``model_type`` of targets whose texts on a mesh were compared with one device's."""
DRAFTERS = (DFlashProposer, NGramProposer, PlainProposer, BestNodes, UnionProposer)
PARTS = dict.fromkeys(FLAGS, False) | {"markov_rank": 0, "gating": None}
"""Fields of a drafter's config for parts that were not tried on a mesh, and their values without the part."""
ALONE = "decode on one device (leave mesh out)"


def check_pair_on_mesh(pair: Pair, plan: DecodePlan) -> None:
    """Raise ``ValueError`` for whatever is not decoded on a mesh."""
    check_target_on_mesh(pair.target)
    _check_proposer(pair.proposer)
    known = {type(kind) for kind in KINDS.values()} - {GrammarMatcher}  # which asks the host
    for processor in plan.processors:
        if type(processor) not in known:
            raise ValueError(
                f"processors holds {type(processor).__name__}, which was not tried on a mesh; {ALONE}."
            )


def check_target_on_mesh(target: Any) -> None:
    """Raise ``ValueError`` for a `torch_dflash.targets.adapter.Target` of a kind that was not tried."""
    check_family(target.model)
    groups = heads_of(target.config).groups
    for at, spec in enumerate(target.specs):
        if spec.kind in ("recurrent", "shared"):
            continue
        if spec.kind != "attention" or spec.heads != groups:
            raise ValueError(
                f"layer {at} of the target caches {spec.heads} heads of kind {spec.kind!r}, and its config "
                f"names {groups} K/V heads: in pieces only layers that cache these were tried, and latents "
                f"without an adapter or a hook on kv_b_proj; {ALONE}."
            )


def check_family(model: Any) -> None:
    """Raise ``ValueError`` for a model of a kind that was not tried, or with weights without a rule."""
    kind, mixers = model.config.model_type, find_scans(model)
    if kind not in FAMILIES:
        layers, tried = ("recurrent layers", RECURRENT) if mixers else ("layers", FAMILIES)
        raise ValueError(
            f"model_type={kind!r} with a mesh: its {layers} were not tried in pieces, which those of "
            f"{', '.join(tried)} were; {ALONE}."
        )
    for path in mixers:
        for name, _ in model.get_submodule(path).named_parameters():
            if part_of_mixer(name) not in MIXER:
                raise ValueError(
                    f"{path}.{name} with a mesh: no rule says how this weight of a recurrent layer is cut; "
                    f"merge an adapter into the weights, or {ALONE}."
                )


def _check_proposer(proposer: Any) -> None:
    for part in proposer.parts if isinstance(proposer, Several) else ():
        _check_proposer(part)
    if type(proposer) not in DRAFTERS:
        raise ValueError(
            f"drafter={type(proposer).__name__} with a mesh: it was not tried in pieces; {ALONE}."
        )
    config = getattr(getattr(proposer, "drafter", None), "config", None)
    for name, off in PARTS.items():
        value = getattr(config, name, off)
        if value != off:
            raise ValueError(
                f"{name}={value!r} of the drafter with a mesh: it was not tried in pieces; {ALONE}."
            )
