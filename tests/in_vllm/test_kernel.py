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
from tpu_inference.kernels.ragged_paged_attention.v3 import kernel

from jax_bridge.vllm.pages import attend_block, write_rows

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


def test_pages_hold_rows_where_the_kernel_puts_them(by_kernel):
    pages = jnp.zeros_like(by_kernel[1])
    at = jnp.tile(jnp.arange(21), 2)
    page = TABLE[jnp.repeat(jnp.arange(2), 21), at // PAGE]
    ours = write_rows(pages, rows(1, 42, GROUPS), rows(2, 42, GROUPS), page, at % PAGE, DIM)
    np.testing.assert_array_equal(ours, by_kernel[1])


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
