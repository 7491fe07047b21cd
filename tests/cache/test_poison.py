"""A value of one row that is not finite reaches the rows that see it, and changes no bit of others."""

import itertools
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.experts import FLAGS, Experts, routed
from support.scripted import Scripted, own_text, run
from support.tiny import MASK, VOCAB, make_drafter, make_target, randomise
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import torch_dflash as td
from jax_bridge._torchax import call_torch
from jax_bridge.kernels import paged_attention as paged_kernel
from jax_bridge.kernels.block_attention import pallas_block_attention
from jax_bridge.kernels.pallas_paged import pallas_paged_attention
from jax_bridge.programs.lower import tracing
from torch_dflash.cache.allocate import allocate
from torch_dflash.cache.latent import LatentLayer
from torch_dflash.cache.ring import allocate_ring
from torch_dflash.cache.spec import LayerSpec
from torch_dflash.cache.view import CacheView
from torch_dflash.ops.attention import AttentionInputs, KeyValue, finite_values, grouped_attention
from torch_dflash.ops.block_attention import Past, block_attention
from torch_dflash.plan import DecodePlan
from torch_dflash.proposers.dflash.model import DFlashDraftModel
from torch_dflash.proposers.dflash.proposer import DFlashProposer
from torch_dflash.targets.experts import static_experts

BAD, FINE = [torch.nan, torch.inf, -torch.inf], [0.5]
BATCH, HEADS, GROUPS, WIDTH = 2, 4, 2, 6
PLAN = DecodePlan(batch_size=BATCH, capacity=48, block_size=WIDTH, verify_width=WIDTH)
PAGED = DecodePlan(
    batch_size=BATCH, capacity=48, block_size=WIDTH, verify_width=WIDTH, cache="paged", page_size=16
)
KINDS = {"all": {}, "a window": {"window": 3}, "only itself": {"window": 1}}
KINDS |= {"a window, sinks, soft cap": {"window": 5, "softcap": 4.0, "sinks": True}}
TABLE = torch.arange(1, 1 + BATCH * PAGED.row_pages, dtype=torch.int32).view(BATCH, -1).flip(1)


def rows_of(count: int, seed: int, dim: int, bad=(), poisons=FINE):
    """Random query, key, value; ``bad`` rows have ``poisons`` in turn.

    In sequence 0 in the value of one K/V head, in sequence 1 in all keys and values.
    """
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(BATCH, heads, count, dim, generator=generator) for heads in (HEADS, GROUPS, GROUPS)
    )
    for row, poison in zip(bad, itertools.cycle(poisons)):
        value[0, 1, row, row % dim] = poison
        value[1, :, row], key[1, :, row] = poison, poison
    return query, key, value


def attend(kind: str, layer, start, table, query, key, value, sinks):
    """Runs a target's layer on the rows: (output [B, M, Q, Dv], the layer afterwards)."""
    options = KINDS[kind]
    view = CacheView((layer,), (options.get("window"),), start, table)
    if isinstance(layer, LatentLayer):  # its model computes keys and values anew from the cache
        key, value = view.update(key, value, 0)
    window, softcap = options.get("window"), options.get("softcap")
    sinks = sinks if "sinks" in options else None
    inputs = AttentionInputs(query, key, value, start, query.shape[3] ** -0.5, window, sinks, softcap)
    return view.attend(0, inputs), view.states[0]


@cache
def lowered(form: str, kind: str):
    """`attend` compiled by XLA, once for each ``form``: a test changes the code below."""
    return jax.jit(partial(call_torch, partial(attend, kind)))


def at(position: int) -> torch.Tensor:
    return torch.full((BATCH,), position, dtype=torch.int32)


def interpreted(*args, **options):
    return pallas_paged_attention(*args, **options, interpret=True)


def empty(form: str, dim: int = 16):
    spec = LayerSpec("latent" if form == "latent" else "attention", GROUPS, dim, dim, None)
    return allocate(spec, PAGED if form in ("paged", *PAGES) else PLAN, torch.float32, "cpu")


PAGES = ["jnp", "pallas"]
FORMS = ["static", "latent", "paged", "lowered static", *PAGES]


def step(form: str, kind: str, layer, rows, start: int):
    """`attend` by a form; both sequences stand at ``start``."""
    tensors = at(start), TABLE, *rows, 0.1 * torch.arange(4.0)
    if form not in ("lowered static", *PAGES):
        return attend(kind, layer, *tensors)
    arrays = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), (layer, *tensors))
    with tracing("highest"):
        return lowered(form, kind)(*arrays)


def play(form: str, kind: str, poisons, dim: int = 16, kept: int = 0):
    """A prompt, a block whose rows from 2 on are bad, and a round that kept the first ``2 + kept`` of them.

    The second block is shorter, so bad rows stay behind it. Returns both outputs [B, M, Q, Dv].
    """
    layer = empty(form, dim)
    for start in (0, 6, 9):
        _, layer = step(form, kind, layer, rows_of(WIDTH, start, dim), start)
    first, layer = step(form, kind, layer, rows_of(WIDTH, 1, dim, range(2, WIDTH), poisons), 15)
    second, _ = step(form, kind, layer, rows_of(2, 2, dim), 15 + 2 + kept)
    return np.asarray(first), np.asarray(second)


@pytest.fixture
def kernels(request, monkeypatch):
    """Reads two pages at a time, with the kernel in the place of the CPU's form."""
    monkeypatch.setattr(paged_kernel, "BLOCK_KEYS", 32)
    if request.getfixturevalue("form") == "pallas":
        monkeypatch.setattr(paged_kernel, "jnp_paged_attention", interpreted)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["all", "a window, sinks, soft cap"])
def test_a_rejected_row_changes_no_other(form, kind, kernels):
    wanted, after = play(form, kind, FINE)
    assert np.isfinite(wanted).all() and np.isfinite(after).all()
    block, second = play(form, kind, BAD)
    assert np.array_equal(block[:, :2], wanted[:, :2])
    assert not np.isfinite(block[1, 2:]).any()
    # In sequence 0 one K/V head, and its query heads alone, saw a bad value.
    assert np.array_equal(block[0, :, :2], wanted[0, :, :2])
    assert not np.isfinite(block[0, 2:, 2:]).any()
    assert np.array_equal(second, after)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["a window", "only itself"])
def test_a_bad_row_that_was_kept_is_seen_as_far_as_a_window_reaches(form, kind, kernels):
    wanted, got = (play(form, kind, poisons, kept=2)[1] for poisons in (FINE, BAD))
    # Rows 2 and 3 of the block were kept; the two rows after them may see row 3.
    if kind == "only itself":
        assert np.array_equal(got, wanted)
    else:
        assert not np.isfinite(got[1]).any() and not np.isfinite(got[0, :, 2:]).any()
        assert np.array_equal(got[0, :, :2], wanted[0, :, :2])


@pytest.mark.parametrize("form", ["static", "pallas"])
def test_heads_of_whole_registers(form, kernels):
    wanted, after = play(form, "all", FINE, dim=128)
    block, second = play(form, "all", BAD, dim=128)
    assert np.array_equal(block[:, :2], wanted[:, :2]) and np.array_equal(second, after)
    assert not np.isfinite(block[1, 2:]).any()


@pytest.mark.parametrize("form", PAGES)
def test_pages_keep_an_infinite_key_as_it_is(form, kernels):
    """The kernel moves rows within a tile and computes nothing with them."""
    query, key, value = rows_of(WIDTH, 1, 16)
    key[0, 0, 1, 3], key[0, 0, 2, 3], key[0, 1, 4, 5] = torch.inf, -torch.inf, torch.nan
    wanted = step("paged", "all", empty("paged"), (query, key, value), 5)[1].pool.numpy()
    pool = np.asarray(step(form, "all", empty(form), (query, key, value), 5)[1].pool)
    assert np.array_equal(pool[1:], wanted[1:], equal_nan=True)
    assert [f(pool).sum() for f in (np.isposinf, np.isneginf, np.isnan)] == [1, 1, 1]


def test_finite_values_are_given_back_as_they_are():
    _, *rows = rows_of(4, 3, 8)
    assert all(map(torch.equal, finite_values(*rows), rows))


# --- a drafter's block and its context ---------------------------------------------------------------------


def torch_block(query, key, value, start, past, scale, window, causal):
    inputs = AttentionInputs(query, key, value, start, scale, window)
    return block_attention(inputs, past, causal).numpy()


def pallas_block(query, key, value, start, past, **rule):
    query, key, value, start, *past = (jnp.asarray(one.numpy()) for one in (query, key, value, start, *past))
    out = pallas_block_attention(query, key, value, start, Past(*past), **rule, block_keys=16, interpret=True)
    return np.asarray(out)


@pytest.mark.parametrize("form", [torch_block, pallas_block])
@pytest.mark.parametrize("ring", [False, True])
def test_a_drafters_context_forgets_rejected_rows(form, ring):
    """Rows written past ``count`` never enter, and masked rows change nothing."""

    def block(poisons):
        if ring:
            layer = allocate_ring(GROUPS, 16, BATCH, 9, WIDTH, torch.float32, "cpu")
        else:
            layer = allocate(LayerSpec("attention", GROUPS, 16, 16, None), PLAN, torch.float32, "cpu")
        for start, count in ((0, 6), (6, 6), (12, 2), (14, 1)):
            _, *rows = rows_of(WIDTH, start, 16, range(count, WIDTH), poisons)
            layer = layer.write(*finite_values(*rows), at(start), at(count))
        assert all(torch.isfinite(part).all() for part in (layer.key, layer.value))
        length = at(15)
        query, *own = rows_of(WIDTH, 40, 16, range(3, WIDTH), poisons)
        past = Past(layer.key, layer.value, layer.positions(length))
        rule = {"scale": 0.25, "window": 9, "causal": True}
        return form(query, *finite_values(*own), length, past, **rule)

    wanted, got = block(FINE), block(BAD)
    assert np.array_equal(got[:, :3], wanted[:, :3]) and not np.isfinite(got[1, 3:]).any()


def test_blocks_of_a_training_pass_are_blind_to_each_others():
    blocks, width = 3, 4
    inside = torch.ones(width, width, dtype=torch.bool).tril()[None, None].repeat(1, 1, blocks, 1)
    out = []
    for poisons in (FINE, BAD):
        query, *rows = rows_of(blocks * width, 5, 16, [6], poisons)
        part = KeyValue(*finite_values(*rows), inside, blocks)
        out.append(grouped_attention(query, [part], 0.25).numpy())
    blind = [row for row in range(blocks * width) if row not in (6, 7)]
    assert np.array_equal(out[0][:, blind], out[1][:, blind]) and np.isnan(out[1][1, [6, 7]]).all()


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("count", [3, 24])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_experts_keep_rows_apart(flags, count, poison):
    torch.manual_seed(1)
    experts = Experts(*flags)
    rows, index, weights = routed(count)
    wanted = static_experts(experts, rows, index, weights)
    rows[1], weights[1] = poison, torch.nan
    got = static_experts(experts, rows, index, weights)
    assert torch.isnan(got[1]).any()
    others = [row for row in range(count) if row != 1]
    assert torch.equal(got[others], wanted[others])


# --- whole targets -----------------------------------------------------------------------------------------

TOKEN, NEW = 7, 14
"""A token that is in no text here."""
SIZES = {"max_length": 64, "prefill_chunk_size": 16, "batch_size": 3}
CACHES = {"static": {}, "paged": {"cache": "paged", "page_size": 16, "pool_pages": 6}}
PROMPTS = [[11, 23, 5, 80, 41] * 3, [3, 90, 14], [60, 61, 12, 9, 33, 70, 71, 2] * 2]


def latent_target():
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16}
    sizes |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16}
    sizes |= {"q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    sizes |= {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    sizes |= {"first_k_dense_replace": 1, "bos_token_id": None, "eos_token_id": None}
    sizes |= {"max_position_embeddings": 256}
    config = DeepseekV3Config(**sizes)
    return randomise(DeepseekV3ForCausalLM(config), 3)


@cache
def target(family: str, dtype=torch.float32):
    """A target whose embedding of `TOKEN` overflows, and its own texts, in which `TOKEN` never stands."""
    model = latent_target() if family == "latent" else make_target(family, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight[TOKEN] = 0
        model.get_input_embeddings().weight[TOKEN] = torch.inf
    model = model.to(dtype)
    texts = [own_text(model, prompt, NEW) for prompt in PROMPTS]
    assert not any(TOKEN in row for row in (*texts, *PROMPTS))
    return model, texts


def script(texts):
    """Row 0: `TOKEN` in every draft. Row 1: right, but for every fourth token. Row 2: right for a while."""
    wrong = [[TOKEN] * NEW, [TOKEN if at % 4 == 3 else token for at, token in enumerate(texts[1])]]
    wrong += [[*texts[2][:7], *[TOKEN] * (NEW - 7)]]
    return [prompt + draft for prompt, draft in zip(PROMPTS, wrong, strict=True)]


COMBINATIONS = [
    *[(family, "eager", kind) for family in ("qwen3", "qwen2", "gpt_oss") for kind in CACHES],
    *[("latent", "eager", kind) for kind in CACHES],
    *[("qwen3", "xla", kind) for kind in CACHES],
]


@pytest.mark.parametrize(("family", "runtime", "kind"), COMBINATIONS)
def test_a_rejected_draft_does_not_change_the_text(family, runtime, kind):
    model, texts = target(family)
    drafter = Scripted(3, 96, WIDTH)
    drafter.say(script(texts))
    engine = td.compile(model, drafter, runtime=runtime, **SIZES, **CACHES[kind])
    got, stats = run(engine, PROMPTS, max_new_tokens=NEW)
    assert got == texts
    assert max(stats.acceptance_lengths[1]) > 2  # the bad rows stood among good ones


def test_in_half_precision():
    model, texts = target("qwen3", torch.float16)
    drafter = Scripted(3, 96, WIDTH)
    drafter.say(script(texts))
    got, _ = run(td.compile(model, drafter, runtime="eager", **SIZES), PROMPTS, max_new_tokens=NEW)
    plain, _ = run(td.compile(model, None, runtime="eager", **SIZES), PROMPTS, max_new_tokens=NEW)
    assert got == plain


@pytest.mark.parametrize("kind", CACHES)
def test_a_drafter_goes_on_after_a_bad_row(kind, monkeypatch):
    """The target's features of a rejected row never enter the drafter's context."""
    model, _ = target("qwen3")
    drafter, propose = make_drafter(model), DFlashProposer.propose

    def misled_by(token):
        def mislead(self, *args):
            draft, state = propose(self, *args)
            draft.tokens[:, 1] = token
            return draft, state

        monkeypatch.setattr(DFlashProposer, "propose", mislead)
        hooked = []
        engine = td.compile(model, drafter, runtime="eager", **SIZES, **CACHES[kind])
        monkeypatch.setattr(
            DFlashDraftModel, "logits", lambda *args: hooked.append(logits(*args)) or hooked[-1]
        )
        texts, stats = run(engine, PROMPTS, max_new_tokens=NEW)
        monkeypatch.setattr(DFlashDraftModel, "logits", logits)
        return texts, stats.acceptance_lengths, torch.stack(hooked)

    logits = DFlashDraftModel.logits
    texts = target("qwen3")[1]
    harmless = next(token for token in range(MASK) if token not in sum(texts, []))
    (text, lengths, drafted), other = misled_by(TOKEN), misled_by(harmless)
    assert text == other[0] == texts and lengths == other[1]
    assert torch.equal(drafted, other[2]) and torch.isfinite(drafted).all()
