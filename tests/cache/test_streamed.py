"""Attention in a loop over blocks of keys gives the plain form's text and reads the slots in use."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
import torch

import jax_bridge as jb
from jax_bridge.kernels import streamed
from jax_bridge.kernels.paged_attention import paged_attention_jax
from torch_dflash.cache.dense import StaticLayer
from torch_dflash.cache.latent import LatentLayer
from torch_dflash.cache.view import CacheView
from torch_dflash.ops.attention import AttentionInputs, dense_attention, visible
from torch_dflash.ops.block_attention import Past, block_attention
from torch_dflash.ops.paged_attention import Pages, paged_attention
from torch_dflash.ops.trees import read_tree
from torch_dflash.ops.windows import positions

BATCH, HEADS, GROUPS, ROWS, DIM, SLOTS = 3, 6, 2, 4, 8, 40
START = [0, 13, 36]  # an empty row, one in the middle, one that fills its buffer
RULES = {"causal": {}, "a window": {"window": 5}, "soft caps": {"softcap": 2.0}}
RULES |= {"sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -2.0])}}
RULES |= {"all": {"window": 7, "softcap": 3.0, "sinks": torch.linspace(-1, 1, HEADS)}}


def asked(seed: int = 0, start: list[int] = START, **rule) -> AttentionInputs:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(BATCH, HEADS, ROWS, DIM, generator=generator)
    key, value = torch.randn(2, BATCH, GROUPS, ROWS, DIM, generator=generator)
    at = torch.tensor(start, dtype=torch.int32)
    return AttentionInputs(query, key, value, at, DIM**-0.5, **rule)


def buffers(seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, BATCH, GROUPS, SLOTS, DIM, generator=generator)


def plain(inputs: AttentionInputs, key, value) -> torch.Tensor:
    at, slots = positions(inputs.start, ROWS), torch.arange(SLOTS)[None]
    return dense_attention(inputs, key, value, visible(at, slots, inputs.window, causal=True))


def in_blocks(inputs: AttentionInputs, key, value) -> torch.Tensor:
    return jb.to_torch(streamed.stream_dense(*jb.to_jax((inputs, key, value))))


@pytest.mark.parametrize("keys", [8, 16, 64])  # whole blocks, a last one that begins earlier, one alone
@pytest.mark.parametrize("rule", RULES)
def test_dense_buffers(rule, keys, monkeypatch):
    monkeypatch.setattr(streamed, "fitting_keys", lambda *_: keys)
    inputs, (key, value) = asked(**RULES[rule]), buffers()
    torch.testing.assert_close(in_blocks(inputs, key, value), plain(inputs, key, value), atol=2e-6, rtol=1e-5)


def test_a_half_precision_query_meets_wider_buffers():
    inputs, (key, value) = asked(), buffers()
    half = inputs._replace(query=inputs.query.bfloat16())
    exact = plain(inputs._replace(query=half.query.float()), key, value)
    out = in_blocks(half, key, value)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, exact.bfloat16(), atol=0, rtol=2**-7)


@pytest.mark.parametrize("kind", [StaticLayer, LatentLayer])
def test_what_a_wider_buffer_keeps_is_rounded_as_a_narrow_one_rounds(kind):
    """Otherwise the text would depend on the end of a program, where caches become narrow."""
    inputs, (key, value) = asked(), buffers()
    kept = []
    for dtype in (torch.float32, torch.bfloat16):
        layer = kind(key.to(dtype), value.to(dtype))
        view = CacheView((layer,), (None,), inputs.start, dtype=torch.bfloat16)
        view.update(inputs.key, inputs.value, 0)
        if kind is StaticLayer:
            view.attend(0, inputs._replace(query=inputs.query.to(dtype)))
        kept.append(view.states[0])
    at = START[1]
    for wide, narrow in zip(*(vars(layer).values() for layer in kept), strict=True):
        assert torch.equal(wide[1, :, at : at + ROWS], narrow[1, :, at : at + ROWS].float())


@pytest.mark.parametrize(
    ("start", "window", "unread"),
    [([0, 1, 2], None, slice(8, None)), ([34, 35, 36], 6, slice(24))],
    ids=["behind the longest row", "before the window"],
)
def test_slots_that_no_row_sees_are_not_read(start, window, unread, monkeypatch):
    monkeypatch.setattr(streamed, "fitting_keys", lambda *_: 8)
    inputs, (key, value) = asked(start=start, window=window), buffers()
    wanted = plain(inputs, key, value)
    value[:, :, unread] = torch.nan  # a NaN that is read passes even a weight of zero
    torch.testing.assert_close(in_blocks(inputs, key, value), wanted, atol=2e-6, rtol=1e-5)


def test_a_slot_that_is_taken_in_twice_shows(monkeypatch):
    monkeypatch.setattr(streamed, "fitting_keys", lambda *_: 16)
    inputs, (key, value) = asked(), buffers()
    honest = streamed.dense_block

    def greedy(*args):
        *held, slot, new = honest(*args)
        return *held, slot, new | True

    monkeypatch.setattr(streamed, "dense_block", greedy)
    assert not torch.allclose(in_blocks(inputs, key, value), plain(inputs, key, value), atol=1e-3)


@pytest.mark.parametrize("keys", [8, 16, 64])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 6])
def test_the_context_of_a_drafted_block(window, causal, keys, monkeypatch):
    """A ring's slots stand in any order, and some hold nothing."""
    monkeypatch.setattr(streamed, "fitting_keys", lambda *_: keys)
    inputs, (key, value) = asked(start=[0, 13, 60], window=window), buffers()
    slot = torch.arange(SLOTS, dtype=torch.int32)
    held = [torch.full_like(slot, -1), torch.where(slot < 13, slot, -1), (slot + 7) % SLOTS + 20]
    past = Past(key, value, torch.stack(held))
    got = jb.to_torch(streamed.stream_past(*jb.to_jax((inputs, past)), causal))
    torch.testing.assert_close(got, block_attention(inputs, past, causal), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("form", ["slots", "pages", "blocks of slots", "blocks of pages"])
def test_the_first_branch_of_a_tree_rounds_as_a_chain_does(form):
    """Another place among the keys would be another order of sums, and at a tie another text."""
    generator = torch.Generator().manual_seed(3)
    start = torch.tensor([301, 402], dtype=torch.int32)
    query = torch.randn(2, HEADS, ROWS, 64, generator=generator).bfloat16()
    key, value = torch.randn(2, 2, GROUPS, ROWS, 64, generator=generator).bfloat16()
    parent = torch.arange(-1, ROWS - 2).expand(2, -1)
    tree = read_tree(parent, torch.full((2,), ROWS - 1), ROWS)
    chain = AttentionInputs(query, key, value, start, 0.125)
    if "pages" in form:
        pool = torch.randn(65, GROUPS, 16, 128, generator=generator).bfloat16()
        pages = Pages(pool, torch.arange(1, 65, dtype=torch.int32).view(2, 32))
        attend = paged_attention if form == "pages" else partial(on_jax, paged_attention_jax)
        outs = [
            attend(one, Pages(pool.clone(), pages.table))[0] for one in (chain, chain._replace(tree=tree))
        ]
    else:
        held = torch.randn(2, 2, GROUPS, 512, 64, generator=generator).bfloat16()
        layer = StaticLayer(*held.clone())
        past = Past(layer.key, layer.value, layer.positions(start))
        if form == "slots":
            branch = block_attention(chain._replace(tree=tree), past, True)
            view = CacheView((layer,), (None,), start)
            outs = [view.attend(0, chain), branch]
        else:
            written = layer.write(key, value, start)
            branch = on_jax(partial(streamed.stream_past, causal=True), chain._replace(tree=tree), past)
            outs = [on_jax(streamed.stream_dense, chain, written.key, written.value), branch]
    assert torch.equal(*outs)


def on_jax(attend, inputs, *given):
    inputs, *given = jb.to_jax((inputs, *given))
    return jb.to_torch(attend(inputs._replace(scale=0.125), *given))


@pytest.mark.parametrize("heads", [1, 4, 20])
@pytest.mark.parametrize("width", [24, 96, 288])
def test_a_row_in_float32_has_the_sums_that_it_has_alone(heads, width):
    value = jax.random.normal(jax.random.key(0), (2, 1, 64, width))
    weight = jax.random.uniform(jax.random.key(1), (2, 1, heads, 32, 64))
    sums = jax.jit(streamed._gains)
    whole = sums(weight, value)
    wanted = jnp.einsum("bghrk,bgkd->bghrd", weight, value)
    torch.testing.assert_close(jb.to_torch(whole), jb.to_torch(wanted), rtol=1e-4, atol=1e-4)
    for rows in (1, 3, 16):
        assert (sums(weight[:, :, :, :rows], value) == whole[:, :, :, :rows]).all(), rows
