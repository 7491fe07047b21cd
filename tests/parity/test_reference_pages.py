"""The paged cache of the XLA runtime equals a pure-JAX one: tokens, acceptance lengths, pages."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from support import authors
from support.reference import EXACT, PROMPTS, Pair
from support.scripted import pad
from support.states import look

import torch_dflash as td
from jax_bridge.reference import empty_pages, loop
from torch_dflash.requests.prompts import prompt_chunks
from torch_dflash.requests.request import row_requests

ROWS, PAGE, CHUNK = len(PROMPTS), 16, 16


class Run(NamedTuple):
    """Results of a run: text and acceptance lengths of each row, the layers' pools, rows' lengths."""

    texts: list[list[int]]
    accepted: list[list[int]]
    pools: list[np.ndarray]
    length: np.ndarray


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def pair(request, tmp_path_factory):
    overrides = {"llama": {}, "qwen3": authors.MIXED}[request.param]
    return Pair(tmp_path_factory.mktemp(request.param), request.param, overrides)


@pytest.fixture(scope="module")
def engine(pair):
    sizes = {"batch_size": ROWS, "max_length": 96, "rounds_per_chunk": 3, "prefill_chunk_size": CHUNK}
    pages = {"cache": "paged", "page_size": PAGE}
    return td.compile(pair.target, pair.drafter, runtime="xla", filters=False, **sizes, **pages)


@pytest.fixture(scope="module")
def table(engine) -> np.ndarray:
    """All pages but the first, out of order, with the pages of rows mixed."""
    plan = engine.plan
    numbers = np.random.default_rng(0).permutation(np.arange(1, plan.pages, dtype=np.int32))
    return numbers[: ROWS * plan.row_pages].reshape(ROWS, plan.row_pages)


def ours(engine, table: np.ndarray) -> Run:
    steps, done = engine.runtime, np.zeros(ROWS, bool)
    options = {"max_new_tokens": authors.NEW, "do_sample": False, "eos_token_id": None}
    request = engine.read(*pad(PROMPTS), options)
    params = steps.refresh(engine.tensors())
    state = steps.begin(params, row_requests(request.rows, engine.plan))
    state = steps.assign(state, table, done)
    for chunk in prompt_chunks([row.prompt for row in request.rows], ROWS, CHUNK, engine.plan.slots):
        state = steps.prefill(params, state, chunk)
    while not look(steps, state).done.all():
        state = steps.advance(params, state)
    assert np.array_equal(state.page_table, table)
    return seen(state, [layer.pool for layer in state.cache])


def reference(pair, engine, table: np.ndarray) -> Run:
    cache = empty_pages(pair.models.target, table, engine.plan.pages, PAGE, jnp.float32)
    state = loop.start(pair.models, pair.weights, PROMPTS, authors.NEW, cache=cache)
    while not state.done.all():
        state = pair.step(pair.weights, state)
    return seen(state, [layer.pool for layer in state.target])


def seen(state, pools) -> Run:
    fields = (state.tokens, state.length, state.accepted, state.rounds)
    tokens, length, accepted, rounds = map(np.asarray, fields)
    texts = [tokens[row, len(PROMPTS[row]) : length[row] + 1].tolist() for row in range(ROWS)]
    counts = [accepted[row, : rounds[row]].tolist() for row in range(ROWS)]
    return Run(texts, counts, list(map(np.asarray, pools)), length)


def gap(one: Run, other: Run, table: np.ndarray, rows=range(ROWS)) -> float:
    """Largest difference between K and V, padding included, of the positions written for good.

    Relative to the layer's largest K or V, 5 to 9 here: the rounding of a sum is proportional to it.
    """
    at = np.concatenate([np.arange(other.length[row]) for row in rows])
    page = np.concatenate([table[row, np.arange(other.length[row]) // PAGE] for row in rows])
    held = [
        (a[page, :, at % PAGE], b[page, :, at % PAGE]) for a, b in zip(one.pools, other.pools, strict=True)
    ]
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in held)


@pytest.fixture(scope="module")
def wanted(pair, engine, table) -> Run:
    return reference(pair, engine, table)


@pytest.fixture(scope="module")
def found(engine, table) -> Run:
    return ours(engine, table)


def test_every_token_acceptance_length_and_written_position(pair, wanted, found, table):
    assert (np.diff(table) < 0).any() and (np.diff(table) > 1).any()
    assert found.texts == wanted.texts and {len(text) for text in found.texts} == {authors.NEW}
    assert found.accepted == wanted.accepted
    assert {1, 2, 4, 5} <= {length for row in found.accepted for length in row}
    assert np.array_equal(found.length, wanted.length) and found.length.max() > 3 * PAGE
    for one, other in zip(found.pools, wanted.pools, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype == np.float32
    assert gap(found, wanted, table) < EXACT


def test_pages_say_what_static_arrays_say(pair, wanted, engine, table):
    dense = loop.decode(pair.models, pair.weights, PROMPTS, authors.NEW)
    cache = empty_pages(pair.models.target, table, engine.plan.pages, PAGE, jnp.float32)
    paged = loop.decode(pair.models, pair.weights, PROMPTS, authors.NEW, cache=cache)
    assert paged == dense == (wanted.texts, wanted.accepted)


def test_a_broken_table_is_noticed(pair, engine, table, wanted, found):
    swapped, shared = table.copy(), table.copy()
    swapped[0, [0, 1]] = table[0, [1, 0]]
    shared[1, 0] = table[0, 0]
    assert gap(found, wanted, table) < EXACT
    # In another order rows have the same text, but the pages hold other positions.
    other = ours(engine, swapped)
    assert other.texts == wanted.texts and gap(other, wanted, table) > 1e-3
    # One page for two rows: the later prompt overwrites the earlier one's positions.
    for broken in (ours(engine, shared), reference(pair, engine, shared)):
        assert broken.texts != wanted.texts and gap(broken, wanted, table) > 1e-3


def test_a_table_that_changes_under_a_generation_is_noticed(pair, engine, table, wanted):
    cache = empty_pages(pair.models.target, table, engine.plan.pages, PAGE, jnp.float32)
    state = loop.start(pair.models, pair.weights, PROMPTS, authors.NEW, cache=cache)
    # Two whole pages of a prompt might change places: keys keep their rotation. This one is still filled.
    swapped = jnp.asarray(table).at[0, jnp.array([1, 2])].set(table[0, [2, 1]])
    state = state._replace(target=tuple(layer._replace(table=swapped) for layer in state.target))
    while not state.done.all():
        state = pair.step(pair.weights, state)
    broken = seen(state, [layer.pool for layer in state.target])
    assert gap(broken, wanted, table, rows=[0]) > 1e-3 and gap(broken, wanted, table, rows=[1, 2]) < EXACT
