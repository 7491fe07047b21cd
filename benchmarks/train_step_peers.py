"""The peers' steps, their imports, and a check that all contenders compute the same."""

from __future__ import annotations

import importlib
import math
import sys
import types
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn
from train_step_ours import Contender, Setting, autocast, product, stack_flops
from transformers import Qwen3Config

from torch_dflash.train.fit.objective import default_gamma

CHUNK_BLOCKS = 128  # SpecForge's default: blocks whose logits exist at a time
AGREE = 1e-4


def find_peers() -> dict[str, Any]:
    """Version of each peer and the modules replaced for its import, or the reason of its absence.

    The replaced modules serve speculators' data generation and its readers of data sets; no step uses them.
    """
    peers: dict[str, Any] = {}
    for name, module in (
        ("specforge", "specforge.algorithms.common.dflash_family_model"),
        ("speculators", "speculators.models.dflash.core"),
    ):
        replaced: list[str] = []
        while True:
            try:
                importlib.import_module(module)
                peers[name] = {"version": _version(name), "replaced": replaced}
            except ModuleNotFoundError as error:
                missing = error.name or ""
                if missing.split(".")[0] in ("openai", "datasets") and len(replaced) < 9:
                    replaced.append(missing)
                    sys.modules[missing] = _Replaced(missing)
                    # A module imported halfway would be taken for whole.
                    for half in [key for key in sys.modules if key.split(".")[0] == name]:
                        del sys.modules[half]
                    continue
                peers[name] = {"missing": str(error)}
            except Exception as error:  # a peer may fail on other versions of its dependencies
                peers[name] = {"missing": f"{type(error).__name__}: {error}"}
            break
    return peers


class _Replaced(types.ModuleType):
    """A module with names alone."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def specforge(setting: Setting, dtype: str, own: bool = False) -> Contender:
    """SpecForge's ``OnlineDFlashModel``; ``own``: its recipe for bf16, bf16 weights and float32 masters."""
    size, batch = setting.size, setting.batch
    online = _specforge_model(setting)
    drafter = online.draft_model
    anchors = batch.anchors.long()
    keep = torch.ones_like(anchors, dtype=torch.bool)
    online._sample_anchor_positions = lambda *_: (anchors, keep)
    ids, mask = batch.ids.long(), torch.ones(batch.ids.shape)
    features = batch.features.bfloat16() if own else batch.features
    if own:
        online = online.to(torch.bfloat16)

    def run() -> float:
        with nullcontext() if own else autocast(dtype):
            loss, _, _ = online(ids, features, mask)
        loss.backward()
        return float(loss.detach())

    head = 3 * product(size.blocks * size.width, size.hidden, size.vocabulary)
    seen = size.anchors * size.width
    name = "SpecForge" + (", weights in bf16" if own else "")
    contender = Contender(name, drafter, run, stack_flops(size, seen) + head)
    if own:
        optimizer = importlib.import_module("specforge.optimizer").BF16Optimizer(
            drafter, lr=1e-5, weight_decay=0.01, max_grad_norm=1.0, total_steps=1000
        )
        contender.update = optimizer.step  # clips and clears by itself
    return contender


def _specforge_model(setting: Setting) -> Any:
    model = importlib.import_module("specforge.algorithms.common.dflash_family_model")
    draft = importlib.import_module("specforge.modeling.draft.dflash")
    size = setting.size
    config = _layer_config(setting)
    config.block_size, config.num_target_layers = size.width, size.taps + 2
    config.dflash_config = {
        "target_layer_ids": list(range(size.taps)),
        "mask_token_id": setting.drafter.config.mask_token_id,
    }
    config._attn_implementation = "sdpa"
    drafter = draft.DFlashDraftModel(config)
    drafter.load_state_dict(setting.drafter.state_dict())
    return model.OnlineDFlashModel(
        drafter,
        _frozen(nn.Linear(size.hidden, size.vocabulary, bias=False), setting),
        _frozen(nn.Embedding(size.vocabulary, size.hidden), setting),
        setting.drafter.config.mask_token_id,
        block_size=size.width,
        attention_backend="sdpa",
        num_anchors=size.anchors,
        loss_decay_gamma=default_gamma(size.width),
        objective_chunk_blocks=CHUNK_BLOCKS,
    )


def speculators(setting: Setting, dtype: str) -> Contender:
    """speculators' ``DFlashDraftModel``, sequence by sequence with summed gradients.

    Its trainer packs all sequences in one. A dense mask over all of them is what its flex attention exists
    to avoid, and that has no backward on a CPU; one sequence at a time is the kinder comparison.
    """
    core: Any = importlib.import_module("speculators.models.dflash.core")
    losses = importlib.import_module("speculators.losses")
    size, batch = setting.size, setting.batch
    model, inputs = _speculators_model(core, setting), _speculators_inputs(setting)
    loss_config = losses.resolve_loss_config("ce", "eager")
    gamma = default_gamma(size.width)
    # Its loss is a mean over rows of decayed losses; ours divides by the decays' sum.
    decays = sum(math.exp(-step / gamma) for step in range(size.width - 1))
    scale = (size.width - 1) / decays / size.sequences

    def run() -> float:
        total = 0.0
        for anchors, given in zip(batch.anchors.long(), inputs, strict=True):
            core.select_anchors = lambda *_, anchors=anchors: (anchors, anchors >= 0)
            with autocast(dtype):
                _, loss, _ = model(**given, loss_config=loss_config, gamma=gamma)
            (loss * scale).backward()
            total += float(loss.detach()) * scale
        return total

    rows = size.blocks * size.width
    # It scores the target's states at the blocks' rows, or at all tokens where those are fewer.
    scored = min(rows, size.sequences * size.tokens)
    head = product(2 * rows + scored, size.hidden, size.vocabulary)
    flops = stack_flops(size, size.anchors * size.width) + head
    return Contender("speculators, one sequence at a time", model, run, flops)


def _speculators_model(core: Any, setting: Setting) -> Any:
    size = setting.size
    config = _layer_config(setting)
    config._attn_implementation = "sdpa"
    model = core.DFlashDraftModel(
        core.DFlashSpeculatorConfig(
            transformer_layer_config=config,
            draft_vocab_size=size.vocabulary,
            block_size=size.width,
            aux_hidden_state_layer_ids=list(range(1, size.taps + 1)),
            mask_token_id=setting.drafter.config.mask_token_id,
        )
    )
    given = model.load_state_dict(setting.drafter.state_dict(), strict=False)
    expected = {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
    if given.unexpected_keys or set(given.missing_keys) != expected:
        raise RuntimeError(f"speculators has another layout of weights: {given}")
    weight = setting.target.get_output_embeddings().weight
    for module in (model.embed_tokens, model.lm_head, model.verifier_lm_head):
        module.weight = nn.Parameter(weight, requires_grad=False)
    nn.init.ones_(model.verifier_norm.weight)
    return model


def _speculators_inputs(setting: Setting) -> list[dict[str, Any]]:
    size, batch = setting.size, setting.batch
    last: Any = batch.last
    return [
        {
            "hidden_states": batch.features[row, None],
            "input_ids": batch.ids[row, None].long(),
            "loss_mask": torch.ones(1, size.tokens),
            "verifier_last_hidden_states": last[row, None],
            "document_ids": torch.zeros(1, size.tokens, dtype=torch.long),
            "position_ids": torch.arange(size.tokens)[None],
            "max_anchors": size.anchors,
        }
        for row in range(size.sequences)
    ]


def _layer_config(setting: Setting) -> Qwen3Config:
    names = (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "vocab_size rms_norm_eps max_position_embeddings rope_parameters layer_types attention_bias"
    )
    return Qwen3Config(**{name: getattr(setting.drafter.config, name) for name in names.split()})


def _frozen(module: Any, setting: Setting) -> Any:
    module.weight = nn.Parameter(setting.target.get_output_embeddings().weight, requires_grad=False)
    return module


def agreement(runners: list[Contender], dtype: str) -> dict[str, dict[str, float]]:
    """Loss and largest relative difference of gradients from the first contender's; the warm-up of all.

    Raises:
        RuntimeError: in float32, a contender over the whole vocabulary computes something else.
    """
    found, reference = {}, {}
    for runner in runners:
        loss = runner.run()
        worst = 0.0
        for name, value in runner.trained.named_parameters():
            if value.grad is None:
                continue
            gradient = value.grad.detach().float().clone()
            wanted = reference.setdefault(name, gradient)
            worst = max(worst, float((gradient - wanted).norm() / wanted.norm()))
        found[runner.name] = {"loss": loss, "gradient_difference": worst}
        runner.update()
        first = found[runners[0].name]["loss"]
        same = abs(loss - first) <= AGREE * abs(first) and worst <= AGREE * 10
        if dtype == "fp32" and runner.exact and not same:
            raise RuntimeError(
                f"{runner.name} does not compute what ours does: {found[runner.name]}, {first=}"
            )
    return found
