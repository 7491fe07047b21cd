"""Unknown targets are refused by name; windows in a mask are read."""

import re
from functools import partial, wraps

import pytest
import torch
import transformers as hf
from support.tiny import BASE, make_drafter, randomise
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, and_masks, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import torch_dflash as td
from torch_dflash.targets.masks import read_window

SMALL = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 32}
HALF = {"use_sliding_window": True, "sliding_window": 6, "num_experts": 4}
HALF |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
BOTH_WAYS = {"sliding_window": 6, "use_bidirectional_attention": True}
CHUNKS = {"attention_chunk_size": 6, "num_local_experts": 2, "head_dim": 8}
# Class, config, further fields, and a word of the message for refused targets.
IN_THE_MASK = {
    "phimoe": ("PhimoeForCausalLM", "PhimoeConfig", {"sliding_window": 6, "num_local_experts": 4}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", HALF),
}
WRONG = {
    "doge": ("DogeForCausalLM", "DogeConfig", {}, "mask"),
    "diffllama": ("DiffLlamaForCausalLM", "DiffLlamaConfig", {}, "attends more than once"),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", BOTH_WAYS, "is_causal=False"),
    "llama4": ("Llama4ForCausalLM", "Llama4TextConfig", CHUNKS, "mask of layer 0"),
    "bert": ("BertLMHeadModel", "BertConfig", {"is_decoder": False}, "is_causal=False"),
    "moshi": ("MoshiForCausalLM", "MoshiConfig", {"sliding_window": 6, "ffn_dim": 48}, "=6|passes no mask"),
    "bart": ("BartForCausalLM", "BartConfig", SMALL, "position_ids"),
    "mbart": ("MBartForCausalLM", "MBartConfig", SMALL, "position_ids"),
    "pegasus": ("PegasusForCausalLM", "PegasusConfig", SMALL, "position_ids"),
    "marian": ("MarianForCausalLM", "MarianConfig", SMALL, "position_ids"),
    "blenderbot": ("BlenderbotSmallForCausalLM", "BlenderbotSmallConfig", SMALL, "position_ids"),
    "falcon": ("FalconForCausalLM", "FalconConfig", {}, "attend to them by other means"),
    "gpt_neox_japanese": ("GPTNeoXJapaneseForCausalLM", "GPTNeoXJapaneseConfig", {}, "other means"),
}
OTHER_LAYOUTS = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {}),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", {}),
    "bert": ("BertLMHeadModel", "BertConfig", {"is_decoder": True}),
}


def build(cls, config, extra):
    torch.manual_seed(0)
    return randomise(getattr(hf, cls)(getattr(hf, config)(**(BASE | extra))), 0)


def prompt(length=11):
    return torch.randint(0, 96, (1, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", IN_THE_MASK)
@pytest.mark.parametrize("cache", ["static", "paged"])
def test_windows_that_live_in_the_mask_are_honoured(family, cache):
    target, ids = build(*IN_THE_MASK[family]), prompt()
    wanted = target.generate(ids, max_new_tokens=24, do_sample=False)
    for drafter in (make_drafter(target), td.NGramProposer(5), None):
        options = {"max_new_tokens": 24, "do_sample": False, "runtime": "eager", "cache": cache}
        assert torch.equal(td.generate(target, drafter, ids, **options), wanted)


@pytest.mark.parametrize("family", WRONG)
@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_targets_that_are_not_understood_are_refused_by_name(family, runtime):
    cls, config, extra, word = WRONG[family]
    target = build(cls, config, extra)
    with pytest.raises(ValueError, match=f"target={cls}") as refusal:
        td.compile(target, None, runtime=runtime, max_length=64)
    assert re.search(word, str(refusal.value))


@pytest.mark.parametrize("family", OTHER_LAYOUTS)
def test_every_proposer_serves_decoders_of_other_layouts(family):
    target, ids = build(*OTHER_LAYOUTS[family]), prompt()
    wanted = target.generate(ids, max_new_tokens=24, do_sample=False)
    for drafter in (make_drafter(target), td.NGramProposer(5), None):
        got = td.generate(target, drafter, ids, max_new_tokens=24, do_sample=False, runtime="eager")
        assert torch.equal(got, wanted)


def test_attention_that_says_it_is_not_causal_is_refused():
    """sdpa follows the flag without a mask, and eager attention never follows it."""
    target = build("GemmaForCausalLM", "GemmaConfig", {"head_dim": 8, "use_bidirectional_attention": True})
    with pytest.raises(ValueError, match="target=GemmaForCausalLM: layer 0 says is_causal=False"):
        td.compile(target, None, runtime="eager", max_length=64)


def test_a_soft_cap_that_the_targets_own_attention_drops_is_refused():
    extra = {"sliding_window": 6, "head_dim": 8, "query_pre_attn_scalar": 8}
    target = build("Gemma2ForCausalLM", "Gemma2Config", extra)
    target.config._attn_implementation = "sdpa"  # the default, and in silence, in older releases
    with pytest.raises(ValueError, match="softcap.*attn_implementation='eager'"):
        td.compile(target, None, runtime="eager", max_length=64)


def sharper(module, query, key, value, mask, scaling=None, **more):
    return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling * 3, **more)


Sharper = type("Sharper", (), {"__call__": staticmethod(sharper)})


def windowed(*args, mask_function, **more):
    near = and_masks(mask_function, lambda batch, head, query, key: key > query - 4)
    return sdpa_mask(*args, mask_function=near, **more)


@pytest.mark.parametrize("name", ["mine", "sdpa"])
@pytest.mark.parametrize(
    ("registry", "function"),
    [
        (ALL_ATTENTION_FUNCTIONS, sharper),
        (ALL_ATTENTION_FUNCTIONS, partial(sharper, dropout=0.0)),
        (ALL_ATTENTION_FUNCTIONS, Sharper()),
        (ALL_MASK_ATTENTION_FUNCTIONS, windowed),
    ],
)
def test_the_users_own_attention_is_refused(monkeypatch, name, registry, function):
    target = build("LlamaForCausalLM", "LlamaConfig", {})
    td.compile(target, None, runtime="eager", max_length=64)
    monkeypatch.setitem(registry._global_mapping, name, function)
    target.config._attn_implementation = name
    with pytest.raises(ValueError, match=f"attn_implementation='{name}'.*not transformers' own"):
        td.compile(target, None, runtime="eager", max_length=64)


def test_a_window_of_one_is_refused():
    target = build("MistralForCausalLM", "MistralConfig", {"sliding_window": 1})
    with pytest.raises(ValueError, match="sliding_window=1"):
        td.compile(target, None, runtime="eager", max_length=64)


def rule(visible):
    return lambda batch, head, query, key: visible(query, key)


@pytest.mark.parametrize(
    ("visible", "window"),
    [
        (lambda q, k: k <= q, None),
        (lambda q, k: (k <= q) & (k > q - 1), 1),
        (lambda q, k: (k <= q) & (k > q - 6), 6),
        (lambda q, k: (k <= q) & (k > q - 4096), 4096),
        (lambda q, k: (k <= q) & (k > q - 1_000_000), None),  # as wide as the context
    ],
)
def test_windows_are_read_from_masks(visible, window):
    assert read_window(rule(visible), 100_000) == window


def test_a_context_without_end_is_no_window():
    assert read_window(rule(lambda q, k: k <= q), 2**31 - 1) is None


@pytest.mark.parametrize(
    "visible",
    [
        lambda q, k: k >= 0,  # bidirectional
        lambda q, k: k < q,  # a row that does not see itself
        lambda q, k: k <= q + 1,
        lambda q, k: (k <= q) & (k // 64 == q // 64),  # chunks
        lambda q, k: (k <= q) & ((k > q - 6) | (k < 4)),  # sinks that are tokens
        lambda q, k: (k <= q) & (k % 2 == q % 2),
        lambda q, k: (k <= q) & (k > q - 6 - q // 1000),  # a window that grows
        lambda q, k: (k < q - 6) | (k == q),
        lambda q, k: k > q,
    ],
)
def test_other_masks_are_refused(visible):
    with pytest.raises(ValueError, match="position"):
        read_window(rule(visible), 100_000)


def flipped(module, hidden, index, weights, *args, **more):
    return batched_mm_experts_forward(module, hidden, index, weights.flip(-1) * 2, *args, **more)


@pytest.mark.parametrize("name", ["mine", "batched_mm"])
def test_the_users_own_experts_are_refused(monkeypatch, name):
    extra = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    target = build("Qwen3MoeForCausalLM", "Qwen3MoeConfig", extra)
    engine = td.compile(target, None, runtime="eager", max_length=64)
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, name, flipped)
    target.set_experts_implementation(name)
    anew = partial(td.compile, target, None, runtime="eager", max_length=64)
    for call in (partial(engine.generate, prompt(), max_new_tokens=3), anew):
        with pytest.raises(ValueError, match=f"experts_implementation='{name}'.*not transformers' own"):
            call()
    target.set_experts_implementation("grouped_mm")
    engine.generate(prompt(), max_new_tokens=3)


@pytest.mark.parametrize("name", ["scaled_dot_product_attention", "softmax"])
def test_attention_swapped_in_torch_itself_is_refused(monkeypatch, name):
    target = build("LlamaForCausalLM", "LlamaConfig", {})
    whole = getattr(torch.nn.functional, name)

    def mine(rows, *args, **more):
        return whole(rows * 3, *args, **more)

    engine = td.compile(target, None, runtime="eager", max_length=64)
    monkeypatch.setattr(torch.nn.functional, name, wraps(whole)(mine))
    with pytest.raises(ValueError, match=f"torch.nn.functional.{name} is .*put torch's own back"):
        engine.generate(prompt(), max_new_tokens=3)
