"""Tiny random targets with recurrent layers, one for each kind of state, and the error of a walk."""

from typing import cast

import pytest
import torch
import transformers as hf
from packaging.version import Version

from support.tiny import BASE, VOCAB, randomise
from torch_dflash.checks import Cache
from torch_dflash.decode import Pair
from torch_dflash.plan import DecodePlan
from torch_dflash.proposers.plain import PlainProposer
from torch_dflash.targets.adapter import Target
from torch_dflash.verify.check import collect_tensors

BEFORE = Version(hf.__version__) < Version("5.24")
"""Recurrent layers of this transformers are refused by name."""
DELTA = {"head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2}
DELTA |= {"linear_num_value_heads": 4}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2}
ATTENDS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
KINDS = {
    "qwen3_5": (hf.Qwen3_5ForCausalLM, hf.Qwen3_5TextConfig, DELTA | ATTENDS),
    "kimi_linear": (
        getattr(hf, "KimiLinearForCausalLM", None),
        getattr(hf, "KimiLinearConfig", None),
        ATTENDS
        | {"linear_head_dim": 8, "linear_num_heads": 4, "kv_lora_rank": 16, "q_lora_rank": None}
        | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse"]},
    ),
    "falcon_h1": (
        hf.FalconH1ForCausalLM,
        hf.FalconH1Config,
        MAMBA | {"num_hidden_layers": 2, "mamba_d_ssm": 64, "head_dim": 8},
    ),
    "lfm2": (
        hf.Lfm2ForCausalLM,
        hf.Lfm2Config,
        {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "tie_word_embeddings": False},
    ),
}
"""Gated delta rule; a decay per channel with latent attention; Mamba-2 with attention; convolutions."""
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
EXPERTS |= {"shared_expert_intermediate_size": 16}
BY_FOUR = DELTA | ATTENDS | {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
SLICEABLE = {
    "qwen3_5": (hf.Qwen3_5ForCausalLM, hf.Qwen3_5TextConfig, BY_FOUR),
    "qwen3_5_whole": (hf.Qwen3_5ForCausalLM, hf.Qwen3_5TextConfig, DELTA | ATTENDS),
    "qwen3_5_moe": (
        getattr(hf, "Qwen3_5MoeForCausalLM", None),
        getattr(hf, "Qwen3_5MoeTextConfig", None),
        BY_FOUR | EXPERTS,
    ),
    "qwen3_next": (hf.Qwen3NextForCausalLM, hf.Qwen3NextConfig, BY_FOUR | EXPERTS),
}
"""Kinds with heads that divide over four chips, and one with two key heads and whole recurrent layers."""


def make_hybrid(kind: str = "qwen3_5", seed: int = 0, gain: float = 2.0, **overrides):
    """A random target of a kind in `KINDS`, fp32, without stop ids."""
    cls, config, extra = KINDS[kind]
    if BEFORE:
        pytest.skip("recurrent layers of this transformers are refused by name")
    torch.manual_seed(seed)
    return randomise(cls(config(**(BASE | extra | overrides))), seed, gain)


def own_greedy(target, ids: list[int], new: int) -> list[int]:
    """The target's own text, by forwards without a cache: its cached ones are wrong in some families."""
    ids = list(ids)
    with torch.no_grad():
        for _ in range(new):
            ids.append(int(target(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[-new:]


def walk_gap(
    target, cache: str = "static", rounds: int = 6, poison: float | None = None, width: int = 6
) -> float:
    """The largest distance, relative, of logits in a walk of random acceptance from an uncached forward's.

    Three ragged prompts are read in two chunks, then blocks of ``width`` rows are verified, and none to
    all rows are kept; the others are other tokens, or ``poison`` embeddings, as padding is. One row's
    occupant changes in mid-walk.
    """
    generator = torch.Generator().manual_seed(5)
    plan = DecodePlan(3, 128, width, width, cache=cast(Cache, cache), page_size=16)
    pair = Pair(Target(target), PlainProposer(), plan)
    params = collect_tensors(pair.target.model, target, "target.model.")
    ids = torch.randint(0, VOCAB - 2, (3, 128), generator=generator, dtype=torch.int32)
    table = None
    if cache == "paged":
        table = 1 + torch.arange(3 * plan.row_pages, dtype=torch.int32).view(3, -1)
    with torch.no_grad():
        if poison is not None:
            target.get_input_embeddings().weight[VOCAB - 1] = poison
        whole = target(input_ids=ids.long(), use_cache=False).logits
    layers = pair.run(lambda pair: pair.target.start(plan), params)
    start, worst = torch.zeros(3, dtype=torch.int32), 0.0

    def step(given, count):
        return pair.run(lambda pair: pair.target(given, start, layers, (), table, count), params)

    def rows(height):
        at = start[:, None].long() + torch.arange(height)
        return ids.gather(1, at.clamp(max=127)), at

    def compare(logits, at):
        theirs = whole.gather(1, at[:, :, None].expand(-1, -1, whole.shape[2]))
        return (logits - theirs).abs().amax(dim=2) / whole.abs().max()

    def note(gaps, kept):
        nonlocal worst
        seen = torch.where(torch.arange(gaps.shape[1]) < kept[:, None], gaps, 0.0)
        worst = max(worst, float(seen.nan_to_num(nan=1e9).max()))

    def read(counts):
        nonlocal layers, start
        count = torch.tensor(counts, dtype=torch.int32)
        given, at = rows(16)
        given = torch.where(torch.arange(16) < count[:, None], given, VOCAB - 1)  # padding
        out = step(given, count)
        layers = out.cache
        last = (count - 1).clamp(min=0)[:, None].long()
        note(compare(out.logits, at.gather(1, last)), (count > 0).int())
        start = start + count

    read([16, 5, 1])
    read([11, 0, 1])
    for turn in range(rounds):
        kept = torch.randint(0, width + 1, (3,), generator=generator, dtype=torch.int32)
        kept[turn % 3] = (0, width)[turn % 2]
        given, at = rows(width)
        other = (given + 1) % (VOCAB - 2) if poison is None else torch.full_like(given, VOCAB - 1)
        given = torch.where(torch.arange(width) < kept[:, None], given, other)
        out = step(given, None)
        note(compare(out.logits, at), kept)
        layers = tuple(layer.commit(kept, None) for layer in out.cache)
        start = start + kept
        if turn == rounds // 2:
            leaves = torch.tensor([False, True, False])
            layers = tuple(layer.reset(leaves) for layer in layers)
            start = torch.where(leaves, 0, start)
            read([0, 9, 0])
    return worst
