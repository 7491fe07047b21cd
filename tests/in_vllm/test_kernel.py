"""A TPU's attention kernel in Pallas' interpreter has the layout of our pages and our attention.

Elsewhere in these tests plain JAX stands in its place (`site/cpu_for_vllm.py`), which is compared, too. In
float32, for `interpreted` wants types of one width.
"""

import cpu_for_vllm
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted import on_cpu
from tpu_inference.kernels.ragged_paged_attention.v3 import kernel, kernel_hd64

from jax_bridge.vllm.pages import as_rows, attend_block, attend_in_turn, write_rows

HEADS, GROUPS, DIM, PAGE, COUNT, BLOCK = 4, 2, 128, 16, 8, 6
LENGTHS = [21, 9]  # rows of context of two requests
TABLE = jnp.array([[5, 2, 7], [1, 4, 3]])
SCALE = DIM**-0.5
# Rows of queries and keys that the kernel fetches and computes at once; the default asks a TPU.
SIZES = {"d_block_sizes": (1, 16, 1, 16), "m_block_sizes": (8, 16, 8, 16), "vmem_limit_bytes": 1 << 27}


def rows(seed, count, heads):
    return jax.random.normal(jax.random.key(seed), (count, heads, DIM))


def attention(function, pages, query, key, value, before, **options):
    """``function`` on each request's new rows behind the ``before`` rows that its pages hold."""
    count = len(query) // len(before)
    sizes = SIZES if function is kernel.ragged_paged_attention else {}
    with on_cpu():
        return function(
            jnp.copy(query), jnp.copy(key), jnp.copy(value), jnp.copy(pages),
            jnp.array(before) + count, TABLE.reshape(-1), jnp.arange(len(before) + 1) * count,
            jnp.array([0, 0, len(before)]), sm_scale=SCALE, **options, **sizes,
        )  # fmt: skip


def filled(function):
    """Pages with each request's context, written by ``function``, and the context's keys and values."""
    pages = jnp.zeros(kernel.get_kv_cache_shape(COUNT, PAGE, GROUPS, DIM, jnp.float32))
    key, value, query = rows(1, 42, GROUPS), rows(2, 42, GROUPS), rows(3, 42, HEADS)
    return attention(function, pages, query, key, value, [0, 0])


@pytest.fixture(scope="module")
def by_kernel():
    """(attention [42, heads, DIM], pages) of two prompts of 21 rows, by the kernel."""
    return filled(kernel.ragged_paged_attention)


@pytest.mark.parametrize("parts", [[21], [16, 5], [1, 2, 14, 4]])
def test_pages_hold_rows_where_the_kernel_puts_them(by_kernel, parts):
    """Two prompts at once, written whole or in parts that begin and end within a page."""
    pages, done = {3: jnp.zeros_like(by_kernel[1])}, 0
    key, value = (rows(seed, 42, GROUPS).reshape(2, 21, GROUPS, DIM) for seed in (1, 2))
    for count in parts:
        own = (one[:, done : done + count].reshape(2 * count, GROUPS, DIM) for one in (key, value))
        new = [(3, 1, as_rows(*own, pages[3], DIM))]
        begun, written = jnp.array([0, count]), jnp.array([count, count])
        pages = write_rows(pages, new, {1: TABLE}, begun, jnp.array([done, done]), written)
        done += count
    np.testing.assert_array_equal(pages[3], by_kernel[1])


def test_what_stands_in_for_the_kernel_is_equal(by_kernel):
    out, pages = filled(cpu_for_vllm.ragged_paged_attention)
    np.testing.assert_array_equal(pages, by_kernel[1])
    np.testing.assert_allclose(out, by_kernel[0], atol=1e-5)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_block_attends_as_in_the_kernel(by_kernel, length):
    """The kernel writes the block's rows first and attends without causality; we attend without writing."""
    query, key, value = rows(4, 2 * BLOCK, HEADS), rows(5, 2 * BLOCK, GROUPS), rows(6, 2 * BLOCK, GROUPS)
    before = [length, 21 - length // 2]
    theirs, _ = attention(
        kernel.ragged_paged_attention, by_kernel[1], query, key, value, before, use_causal_mask=False
    )
    query, key, value = (one.reshape(2, BLOCK, -1, DIM).swapaxes(1, 2) for one in (query, key, value))
    ours = attend_block(query, key, value, by_kernel[1], TABLE, jnp.array(before), scale=SCALE, width=DIM)
    np.testing.assert_allclose(ours, theirs.reshape(ours.shape), atol=1e-5)


def test_requests_in_turn_attend_as_all_at_once(by_kernel):
    given = [rows(seed, 2 * BLOCK, heads).reshape(2, BLOCK, -1, DIM).swapaxes(1, 2)
             for seed, heads in ((4, HEADS), (5, GROUPS), (6, GROUPS))]  # fmt: skip
    given += [by_kernel[1], TABLE, jnp.array([21, 3])]
    found = [function(*given, scale=SCALE, width=DIM) for function in (attend_block, attend_in_turn)]
    np.testing.assert_allclose(*found, atol=1e-6)


@pytest.mark.parametrize("sink", [None, jnp.array([0.5, -1.0, 2.0, 0.0])])
def test_what_stands_in_for_the_kernel_of_heads_of_64_is_equal(sink):
    """Prompts of 21 and 9 rows, then three more rows of each; our rows lie where that kernel puts them."""
    query, key, value = (
        rows(seed, 36, heads)[..., :64] for seed, heads in ((1, HEADS), (2, GROUPS), (3, GROUPS))
    )
    sizes = {"num_kv_pages_per_block": 1, "num_queries_per_block": 8, "vmem_limit_bytes": 1 << 27}
    found = []
    for function, more in (
        (kernel_hd64.ragged_paged_attention_hd64, sizes),
        (cpu_for_vllm.ragged_paged_attention, {}),
    ):
        pages, outs = jnp.zeros(kernel_hd64.get_kv_cache_shape(COUNT, PAGE, GROUPS, 64, jnp.float32)), []
        for part, starts, lengths in (
            (slice(0, 30), [0, 21, 30], [21, 9]),
            (slice(30, 36), [0, 3, 6], [24, 12]),
        ):
            with on_cpu():
                out, pages = function(
                    jnp.copy(query[part]), jnp.copy(key[part]), jnp.copy(value[part]), jnp.copy(pages),
                    jnp.array(lengths), TABLE.reshape(-1), jnp.array(starts), jnp.array([0, 0, 2]), sink,
                    sm_scale=0.125, **more,
                )  # fmt: skip
            outs.append(out)
        found.append((*outs, pages))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    ours = {0: jnp.zeros_like(found[0][-1])}
    new = [(0, 0, as_rows(key[:30], value[:30], ours[0], 64))]
    given = jnp.array([0, 21]), jnp.array([0, 0]), jnp.array([21, 9])
    ours = write_rows(ours, new, {0: TABLE}, *given)
    new = [(0, 0, as_rows(key[30:], value[30:], ours[0], 64))]
    given = jnp.array([0, 3]), jnp.array([21, 9]), jnp.array([3, 3])
    np.testing.assert_array_equal(write_rows(ours, new, {0: TABLE}, *given)[0], found[0][-1])
