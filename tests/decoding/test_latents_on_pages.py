"""A target of latent attention on pages: sampling, chats, saved states, written weights, and its memory."""

import pytest
import torch
import transformers as hf
from support.families import LATENT, MORE
from support.scripted import Scripted, own_text, run
from support.tiny import BASE, randomise
from support.tokenizers import GROWING, byte_tokenizer

import torch_dflash as td
from jax_bridge.aot.compile import abstract_pair
from jax_bridge.device_memory import bytes_of

NEW, PROMPTS = 14, [[11, 23, 5, 80, 41] * 3, [3, 90, 14], [60, 61, 12, 9, 33, 70, 71, 2] * 2]
PAGED = {"cache": "paged", "page_size": 16, "max_length": 64, "batch_size": 3}


@pytest.fixture(scope="module")
def target():
    return made()


def made(**fields):
    cls, config, extra = MORE["deepseek_v3"]
    return randomise(cls(config(**(BASE | extra | fields))), 3)


def compiled(model, drafter, runtime="eager", **options):
    return td.compile(model, drafter, runtime=runtime, **PAGED | {"verify": False} | options)


def said(proposer, texts):
    proposer.say([prompt + text for prompt, text in zip(PROMPTS, texts, strict=True)])
    return proposer


def test_sampled_text_is_that_of_plain_decoding(target):
    options = {"do_sample": True, "temperature": [0.0, 1.0, 4.0], "seed": 3, "max_new_tokens": NEW}
    wanted = run(compiled(target, None), PROMPTS, **options)[0]
    assert wanted[0] == own_text(target, PROMPTS[0], NEW)
    text, stats = run(compiled(target, said(Scripted(3, 96, 6), wanted)), PROMPTS, **options)
    assert text == wanted and stats.mean_acceptance_length > 4
    assert run(compiled(target, td.NGramProposer(4)), PROMPTS, **options)[0] == wanted


def test_a_saved_state_goes_on(target, tmp_path):
    ids = torch.tensor(PROMPTS[:1])
    own = own_text(target, PROMPTS[0], NEW)
    engine = compiled(target, td.NGramProposer(4), batch_size=1, rounds_per_chunk=1)
    state = engine.start(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    td.save_state(engine.advance(state), tmp_path / "state", engine)
    other = compiled(target, td.NGramProposer(4), batch_size=1, rounds_per_chunk=1)
    state = td.load_state(tmp_path / "state", other)
    while not state.done.all():
        state = other.advance(state)
    end = int(state.length[0]) + 1
    assert state.tokens[0, :end].tolist()[len(PROMPTS[0]) : len(PROMPTS[0]) + NEW] == own


def test_a_chat_reads_little_again():
    model, tokenizer = made(vocab_size=257, max_position_embeddings=1024), byte_tokenizer(GROWING)
    engine = compiled(model, td.NGramProposer(4), max_length=512, batch_size=1)
    chat = td.Chat(engine, tokenizer, do_sample=False, max_new_tokens=8, eos_token_id=None)
    messages, read = [], []
    for question in ("Is it warm?", "And there?", "And now?"):
        messages.append({"role": "user", "content": question})
        rendered = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = rendered["input_ids"][0].tolist()
        messages.append(chat(messages))
        text = tokenizer.decode(own_text(model, ids, 8), skip_special_tokens=True)
        assert messages[-1]["content"] == text
        read.append(chat.stats.prefilled)
    assert sum(read) < 1.5 * len(ids)


@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_a_written_weight_is_read_anew(runtime):
    model = made()
    engine = compiled(model, td.NGramProposer(4), runtime)
    asked = {"max_new_tokens": NEW, "do_sample": False}
    first = run(engine, PROMPTS, **asked)[0]
    assert first == [own_text(model, prompt, NEW) for prompt in PROMPTS]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.kv_b_proj.weight.mul_(-1.5)
    second = run(engine, PROMPTS, **asked)[0]
    assert first != second == [own_text(model, prompt, NEW) for prompt in PROMPTS]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.kv_b_proj.weight.data.mul_(-2)
    engine.refresh()
    assert run(engine, PROMPTS, **asked)[0] == [own_text(model, prompt, NEW) for prompt in PROMPTS]


@pytest.mark.parametrize("products", [{"quantize": "int8"}, {"compute": "bfloat16"}])
def test_products_in_another_type(target, products):
    """Blocks and steps round alike; halves come from the weight in its format."""
    texts = [
        run(compiled(target, drafter, "xla", **products), PROMPTS, max_new_tokens=NEW, do_sample=False)[0]
        for drafter in (None, td.NGramProposer(4))
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("cache", "lanes"), [("static", 576), ("paged", 640)])
def test_memory_counts_latents_alone(cache, lanes):
    """DeepSeek-V3's widths: 70 KB a token for 61 layers, 78 on pages, and nothing for values."""
    sizes = LATENT | {"num_hidden_layers": 2, "num_attention_heads": 128, "num_key_value_heads": 128}
    sizes |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    model = abstract_pair(hf.DeepseekV3Config(**BASE | sizes), None, capacity=4096, cache=cache)
    plan, found = model.pair.plan, bytes_of(model.state.cache)
    positions = plan.slots if cache == "static" else plan.pages * plan.page_size
    assert found == 2 * 2 * positions * lanes
    assert {spec.width for spec in model.pair.target.specs} == {576}
