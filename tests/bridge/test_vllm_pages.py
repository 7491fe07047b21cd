"""Draft keys and values in vLLM's pages, without vLLM: what is written, and what a block sees of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support import tiny
from transformers import DynamicCache

from jax_bridge.vllm.pages import ROWS_AT_ONCE, attend_block, write_rows
from torch_dflash.integrations.vllm.drafter import PagedDrafter
from torch_dflash.ops.attention import KeyValue, grouped_attention, visible

GROUPS, HEADS, DIM, BLOCK = 2, 4, 16, 3
SHAPES = {"128 wide": (2 * GROUPS // 2, 2, 128), "64 wide": (GROUPS, 1, 128), "aligned": (3, 2, 128)}


def rows_of(generator, *shape):
    return generator.standard_normal(shape).astype(np.float32)


def paged(generator, lengths, size, shape, width):
    """Context rows of each sequence [G, L, D], and the same rows in pages in any order."""
    each = -(-max(lengths) // size) + 1
    table = generator.permutation(len(lengths) * each).reshape(len(lengths), each).astype(np.int32)
    pages = jnp.asarray(rows_of(generator, table.size, size, *shape))  # what others left there
    contexts = []
    for own, length in zip(table, lengths, strict=True):
        key, value = rows_of(generator, length, GROUPS, DIM), rows_of(generator, length, GROUPS, DIM)
        at = np.arange(length)
        pages = write_rows(pages, key, value, own[at // size], at % size, width)
        contexts.append((key.swapaxes(0, 1), value.swapaxes(0, 1)))
    return pages, table, contexts


@pytest.mark.parametrize("window, causal", [(None, False), (None, True), (5, False), (5, True), (700, False)])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_block_sees_its_own_pages_as_a_plain_cache(window, causal, sinks):
    generator = np.random.default_rng(0)
    lengths, size, width = [9, 0, ROWS_AT_ONCE + 300, 1], 4, 128
    pages, table, contexts = paged(generator, lengths, size, SHAPES["128 wide"], width)
    query = rows_of(generator, len(lengths), HEADS, BLOCK, DIM)
    key, value = (rows_of(generator, len(lengths), GROUPS, BLOCK, DIM) for _ in range(2))
    sink = rows_of(generator, HEADS) if sinks else None
    found = jax.jit(
        lambda *args: attend_block(*args, scale=0.3, width=width, window=window, causal=causal, sinks=sink)
    )(query, key, value, pages, table, np.array(lengths, np.int32))
    for row, (past_key, past_value) in enumerate(contexts):
        at = torch.arange(lengths[row], lengths[row] + BLOCK)[None]
        all_at = torch.arange(lengths[row] + BLOCK)[None]
        both = [
            torch.from_numpy(np.concatenate([past, own[row]], axis=1))[None]
            for past, own in ((past_key, key), (past_value, value))
        ]
        part = KeyValue(*both, visible(at, all_at, window, causal))
        wanted = grouped_attention(
            torch.from_numpy(query[row])[None], [part], 0.3, None if sink is None else torch.from_numpy(sink)
        )
        np.testing.assert_allclose(found[row], wanted[0], atol=2e-5, err_msg=f"row {row}")


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_a_row_gives_back_what_was_written(shape):
    generator, width = np.random.default_rng(1), 64 if shape == "64 wide" else 128
    pages, table, contexts = paged(generator, [6], 4, SHAPES[shape], width)
    query = np.zeros((1, HEADS, 1, DIM), np.float32)  # all rows weigh alike
    own = np.zeros((1, GROUPS, 1, DIM), np.float32)
    found = attend_block(query, own, own, pages, table, np.array([6]), scale=1.0, width=width)
    wanted = np.repeat(contexts[0][1].sum(1) / 7, HEADS // GROUPS, axis=0)
    np.testing.assert_allclose(found[0, 0], wanted, atol=1e-5)


def test_rows_without_a_page_are_dropped():
    pages = jnp.ones((2, 4, *SHAPES["128 wide"]))
    rows = jnp.full((2, GROUPS, DIM), 7.0)
    after = write_rows(pages, rows, rows, jnp.array([2, 1]), jnp.array([0, 3]), 128)
    assert bool((after[1, 3] == 7).any()) and bool((after.at[1, 3].set(1) == 1).all())


def test_the_layout_is_that_of_the_target_kernel():
    """tpu-inference's ``merge_kv``: heads in order, each key before its value."""
    key, value = np.ones((1, GROUPS, 128), np.float32), np.full((1, GROUPS, 128), 2, np.float32)
    pages = write_rows(jnp.zeros((1, 1, GROUPS * 2, 1, 128)), key, value, jnp.array([0]), jnp.array([0]), 128)
    assert pages[0, 0, :, 0, 0].tolist() == [1, 2, 1, 2]


@pytest.mark.parametrize("kind", ["plain", "windows", "dflash2", "dspark"])
@torch.no_grad()
def test_drafts_over_pages_are_those_of_a_growing_cache(kind):
    """Context rows come in two pieces, as in a chunked prefill; the growing cache gets them at once."""
    options = {
        "plain": {},
        "windows": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
        "dflash2": {"selector_rank": 8, "selector_top_k": 4, "conv_group_size": 8},
        "dspark": {"markov_rank": 4, "sample_from_anchor": True},
    }[kind]
    target, drafter = tiny.make_pair(agree=8.0, **options)
    module, count = PagedDrafter(drafter, 4), len(drafter.layers)
    ids, length, size, width = torch.randint(0, 90, (1, 11)), 10, 4, 128
    features = target(ids, output_hidden_states=True).hidden_states
    features = torch.cat([features[tap + 1] for tap in drafter.config.target_layer_ids], -1)[:, :length]
    pages, table = [jnp.zeros((4, size, 2, 2, width))] * count, np.array([[2, 0, 3]], np.int32)

    def write(layer, key, value):
        page, row = table[0][at // size], at.numpy() % size
        pages[layer] = write_rows(pages[layer], key.numpy(), value.numpy(), page, row, width)

    for at in torch.arange(length).split(7):
        module("remember", module("project", features[0, at]), at, write)

    def attend(attention, query, key, value, scale):
        own = (rows.numpy() for rows in (query, key, value))
        options = {"window": attention.window, "causal": attention.causal, "scale": scale, "width": width}
        out = attend_block(*own, pages[attention.index], table, np.array([length]), **options)
        return torch.from_numpy(np.array(out))

    anchor, embed, head = ids[:, -1], target.get_input_embeddings(), target.get_output_embeddings()
    found = module("draft", anchor, torch.tensor([length]), attend, embed, head)
    first = int(not drafter.config.sample_from_anchor)
    block = torch.cat([anchor[:, None], torch.full((1, 3 + first), drafter.config.mask_token_id)], 1)
    noise = drafter.embed(block, embed, torch.float32)
    at = torch.arange(length + block.shape[1])[None]
    hidden = drafter(noise, features, at, cache=DynamicCache()).last_hidden_state[:, first:]
    assert found.tolist() == drafter.choose(hidden, anchor, head).tolist()


@pytest.mark.parametrize("drafts", [0, 6])
def test_more_drafts_than_were_trained_are_refused(drafts):
    with pytest.raises(
        ValueError, match=f"num_speculative_tokens={drafts}: this drafter drafts 1 to 5 tokens"
    ):
        PagedDrafter(tiny.make_pair()[1], drafts)
