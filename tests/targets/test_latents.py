"""Latent attention with W_k moved to the queries: logits are an uncached forward's, and each fault is seen.

What is not one plain product keeps expanding what it caches, and has no pages.
"""

import runpy
import warnings

import pytest
import torch
import transformers as hf
from support import ROOT
from support.families import MORE
from support.hybrids import walk_gap
from support.refusals import refuses
from support.scripted import own_text, run
from support.tiny import BASE, VOCAB, randomise
from torch import nn
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.mistral4 import modeling_mistral4 as mistral4

import torch_dflash as td
from torch_dflash.ops.latents import Widths, pays_to_expand
from torch_dflash.targets import latents, skeleton
from torch_dflash.targets.adapter import Target

RIGHT, SEEN = 1e-5, 1e-3
CONFIGS = runpy.run_path(str(ROOT / "benchmarks/family_configs.py"))
SCALED = {
    "type": "yarn",
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "llama_4_scaling_beta": 0.2,
}
SCALED |= {"original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 1.0}
CACHES = ("static", "paged")


def deepseek(**fields):
    cls, config, extra = MORE["deepseek_v3"]
    return randomise(cls(config(**(BASE | extra | fields))), 3)


def made(kind: str):
    if kind == "deepseek_v3":
        return deepseek()
    own = {"vocab_size": VOCAB, "max_position_embeddings": 512}
    own |= {"rope_parameters": SCALED} if kind == "mistral4" else {}
    config = CONFIGS["shrink"](hf.CONFIG_MAPPING[kind], CONFIGS["FAMILY"].get(kind, {}) | own)
    cls = mistral4.Mistral4ForCausalLM if kind == "mistral4" else None
    model = hf.AutoModelForCausalLM.from_config(config) if cls is None else cls(config)
    return randomise(model.float().eval(), 3)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", ["deepseek_v3", "mistral4", "glm4_moe_lite", "minicpm3"])
def test_a_walk_is_an_uncached_forward(kind, cache):
    assert {spec.kind for spec in Target(made(kind)).specs} == {"shared"}
    right = 2 * RIGHT if kind == "mistral4" else RIGHT  # whose expanded form here is as far: 1.2e-5
    assert walk_gap(made(kind), cache=cache) < right
    assert walk_gap(made(kind), cache=cache, width=1) < right
    assert walk_gap(made(kind), cache=cache, width=16) < right
    if kind == "minicpm3":  # transformers' grouped products of experts take no float64
        assert walk_gap(made(kind).double(), cache=cache) < RIGHT


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_rejected_rows_and_padding_may_be_nan(cache, poison):
    assert walk_gap(deepseek(), cache=cache, poison=poison) < RIGHT


@pytest.mark.parametrize("cache", CACHES)
def test_prompts_of_many_rows_are_expanded_on_static_buffers_and_blocks_never(cache, monkeypatch):
    asked, expanded = [], []
    expand = modeling_deepseek_v3.DeepseekV3Attention.expand_kv

    def noted(module, *given):
        expanded.append(given)
        return expand(module, *given)

    monkeypatch.setattr(latents, "pays_to_expand", lambda query, widths: not asked.append(query.shape[2]))
    monkeypatch.setattr(latents, "_expands", lambda kind: True)
    monkeypatch.setattr(modeling_deepseek_v3.DeepseekV3Attention, "expand_kv", noted)
    assert walk_gap(deepseek(), cache, poison=float("nan"), width=30, rounds=3) < RIGHT
    prompts = {16} if cache == "static" else set()  # the walk's chunks; its blocks have 30 rows
    assert set(asked) == prompts and len(expanded) >= len(asked)
    if cache == "static":
        assert walk_gap(made("glm_moe_dsa"), cache) < RIGHT


def test_fewer_products_from_170_rows_on():
    widths = Widths(512, 128, 64, 128)  # DeepSeek-V3's
    assert [pays_to_expand(torch.empty(1, 1, rows, 1), widths) for rows in (170, 171)] == [False, True]


def values_of_keys(weight, widths):
    heads = weight.view(-1, widths.nope + widths.value, widths.rank)
    return heads[:, : widths.nope], heads[:, : widths.value]


def without_rotation(query, up):
    plain = products_absorbed(query, up)
    return torch.cat([plain[..., : up.shape[2]], 0 * plain[..., up.shape[2] :]], dim=-1)


def without_query_scale(query, up):
    """Mistral-4's scale of queries by position, applied to the part without rotation alone."""
    whole = products_absorbed(query, up)
    size = up.shape[2]
    return torch.cat([whole[..., :size], whole[..., size:] / SCALES[-1]], dim=-1)


def of_wide_keys(module, inputs, attend, _=None):
    wide = sum(getattr(module, name) for name in ("kv_lora_rank", "qk_rope_head_dim"))
    return attended(module, inputs._replace(scale=wide**-0.5), attend)


products_absorbed, attended = latents.absorbed, latents.attend_latents
SCALES = [1.0]
FAULTS = {
    "W_v of W_k's rows": ("halves", values_of_keys),
    "k_rot left out of the score": ("absorbed", without_rotation),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_products_is_seen(name, monkeypatch):
    where, broken = FAULTS[name]
    monkeypatch.setattr(latents, "_expands", lambda kind: True)
    monkeypatch.setattr(latents, where, broken)
    assert walk_gap(deepseek()) > SEEN


def test_the_scale_of_an_expanded_head_is_kept(monkeypatch):
    monkeypatch.setattr(skeleton, "attend_latents", of_wide_keys)
    assert walk_gap(deepseek()) > SEEN


def test_the_scale_of_queries_by_position_is_of_whole_queries(monkeypatch):
    scale = mistral4.get_llama_4_attn_scale

    def noted(*given):
        SCALES.append(scale(*given))
        return SCALES[-1]

    monkeypatch.setattr(mistral4, "get_llama_4_attn_scale", noted)
    monkeypatch.setattr(latents, "absorbed", without_query_scale)
    assert walk_gap(made("mistral4")) > SEEN
    assert (
        max(float(torch.as_tensor(one).max()) for one in SCALES if not getattr(one, "is_meta", False)) > 1.5
    )


# --- what is no plain product ------------------------------------------------------------------------------


def adapted():
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(deepseek(), peft.LoraConfig(r=2, target_modules=["kv_b_proj"]))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator))
    return model.eval()


def hooked():
    model = deepseek()
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.register_forward_hook(lambda module, args, out: 2 * out)
    return model


def biased():
    model = deepseek()
    for layer in model.model.layers:
        old = layer.self_attn.kv_b_proj
        new = nn.Linear(old.in_features, old.out_features)
        new.weight = old.weight
        new.bias.data = torch.linspace(-2, 2, old.out_features)
        layer.self_attn.kv_b_proj = new
    return model


def replaced():
    model = deepseek()
    for layer in model.model.layers:
        own = layer.self_attn.kv_b_proj
        own.forward = lambda rows, own=own: 2 * nn.functional.linear(rows, own.weight)
    return model


def patched():
    model = deepseek()
    for layer in model.model.layers:
        kind = type(layer.self_attn)

        class Doubled(kind):
            def expand_kv(self, kv_nope, k_rot, kind=kind):
                key, value = kind.expand_kv(self, kv_nope, k_rot)
                return key, 2 * value

        layer.self_attn.__class__ = Doubled
    return model


EXPANDING = {
    "an adapter": adapted,
    "a hook": hooked,
    "a bias": biased,
    "a forward": replaced,
    "a class": patched,
}


@pytest.mark.parametrize("name", EXPANDING)
def test_what_is_no_plain_product_is_expanded(name):
    model = EXPANDING[name]()
    inner = model.get_base_model() if name == "an adapter" else model
    assert {spec.kind for spec in Target(inner).specs} == {"latent"}
    prompt = [11, 23, 5, 80, 41] * 3
    engine = td.compile(model, td.NGramProposer(4), runtime="eager", max_length=64, verify=False)
    own = own_text(inner, prompt, 12)
    assert own != own_text(deepseek(), prompt, 12)
    assert run(engine, [prompt], max_new_tokens=12, do_sample=False)[0] == [own]
    with refuses(ValueError, "cache='paged': holds no latent layers", "kv_b_proj", "choose 'static'"):
        td.compile(model, None, runtime="eager", cache="paged", max_length=64, verify=False)


def test_an_adapter_that_is_absorbed_loses_its_delta(monkeypatch):
    """The fault that `find_latents` prevents: the weight of PEFT's layer is that of its base."""
    assert walk_gap(adapted().get_base_model()) < RIGHT
    monkeypatch.setattr(latents, "_is_plain", lambda module: True)
    assert walk_gap(adapted().get_base_model()) > SEEN


def test_a_hook_that_is_added_later_is_seen():
    model, prompt = deepseek(), [11, 23, 5, 80, 41] * 3
    engine = td.compile(model, None, runtime="eager", max_length=64, verify=False)
    asked = {"max_new_tokens": 12, "do_sample": False}
    first = own_text(model, prompt, 12)
    assert run(engine, [prompt], **asked)[0] == [first]
    handle = model.model.layers[0].self_attn.kv_b_proj.register_forward_hook(
        lambda module, args, out: 3 * out
    )
    try:
        text = own_text(model, prompt, 12)
        assert text != first
        fresh = td.compile(model, None, runtime="eager", max_length=64, verify=False)
        assert run(fresh, [prompt], **asked)[0] == [text]
    finally:
        handle.remove()


def test_a_written_weight_is_read_anew():
    model, prompt = deepseek(), [11, 23, 5, 80, 41] * 3
    asked = {"max_new_tokens": 12, "do_sample": False}
    engine = td.compile(
        model, td.NGramProposer(4), runtime="eager", cache="paged", max_length=64, verify=False
    )
    first = run(engine, [prompt], **asked)[0]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.kv_b_proj.weight.mul_(-1.5)
    second = run(engine, [prompt], **asked)[0]
    assert first != second == [own_text(model, prompt, 12)]
