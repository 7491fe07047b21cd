"""After warm-up nothing compiles, the host reads once a chunk, buffers are reused, drafts cost the same."""

import warnings
from contextlib import contextmanager

import jax
import numpy as np
import pytest
import torch
from jax._src.array import ArrayImpl
from support.scripted import own_text, run
from support.tiny import MASK, small_pair
from torch.utils.flop_counter import FlopCounterMode

import torch_dflash as td
from torch_dflash.proposers.dflash.proposer import DFlashProposer
from torch_dflash.rows import RowRequests

ROWS, CAPACITY, CHUNK = 3, 160, 3
compiled: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: compiled.append(event) if "backend_compile" in event else None
)


@pytest.fixture(scope="module")
def pair():
    return small_pair("gpt_oss", agree=6.0)


@pytest.fixture(scope="module")
def engine(pair):
    options = {"max_length": CAPACITY, "batch_size": ROWS, "rounds_per_chunk": CHUNK}
    return td.compile(*pair, runtime="xla", prefill_chunk_size=64, **options).warmup()


def random_prompts(*lengths):
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(0, MASK, (length,), generator=generator).tolist() for length in lengths]


REQUESTS = [
    *[((length,), {"max_new_tokens": 5}) for length in (1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 97, 128, 150)],
    *[((8, 70, 3), {"max_new_tokens": new}) for new in (1, 2, 7, 31, CAPACITY - 70)],
    ((20, 4), {"max_new_tokens": [3, 50]}),
    *[
        ((9, 9, 9), {"do_sample": True, "temperature": t, "max_new_tokens": 8})
        for t in (0.2, 1, [0, 0.5, 2.0])
    ],
    *[((9, 9, 9), {"do_sample": True, "seed": s, "max_new_tokens": 8}) for s in (0, -3, 2**63, [1, 2, 3])],
    ((12,), {"do_sample": True, "top_k": 4, "top_p": 0.7, "min_p": 0.1, "max_new_tokens": 8}),
    *[((9, 30), {"eos_token_id": stop, "max_new_tokens": 9}) for stop in (7, [1, 2, 3], [[5], [6] * 8], [])],
]


def test_nothing_compiles_after_warmup(engine):
    assert compiled, "the listener must have heard the warm-up"
    compiled.clear()
    for lengths, options in REQUESTS:
        _, stats = run(engine, random_prompts(*lengths), **options)
        assert stats.compilations == 0 and not compiled, (lengths, options, compiled)


def test_nothing_compiles_after_warmup_on_pages(pair):
    sizes = {"max_length": CAPACITY, "batch_size": ROWS, "rounds_per_chunk": CHUNK, "prefill_chunk_size": 64}
    small = td.compile(*pair, runtime="xla", cache="paged", page_size=16, pool_pages=14, **sizes).warmup()
    compiled.clear()
    for _ in range(2):
        _, stats = run(small, random_prompts(8, 70, 3), max_new_tokens=40)
        assert stats.compilations == 0 and not compiled


def test_a_compilation_is_noticed(pair):
    """The two counts above rise when a program compiles."""
    compiled.clear()
    cold = td.compile(pair[0], None, runtime="xla", max_length=48, batch_size=1, prefill_chunk_size=16)
    _, stats = run(cold, random_prompts(4), max_new_tokens=3)
    assert stats.compilations == len(compiled) >= 3
    _, stats = run(cold, random_prompts(9), max_new_tokens=7)
    assert stats.compilations == 0


def test_eager_never_compiles(pair):
    eager = td.compile(*pair, runtime="eager", max_length=48).warmup()
    compiled.clear()
    assert run(eager, random_prompts(4), max_new_tokens=3)[1].compilations == 0 and not compiled


@contextmanager
def host_reads(monkeypatch):
    """Counts transfers of device values to the host: ``device_get`` calls, and reads without a call."""
    counts, inside = {"device_get": 0, "other": 0}, []
    device_get, value, dlpack = jax.device_get, ArrayImpl._value, ArrayImpl.__dlpack__
    array = ArrayImpl.__array__

    def counted_get(tree):
        counts["device_get"] += 1
        inside.append(1)
        try:
            return device_get(tree)
        finally:
            inside.pop()

    def stray():
        counts["other"] += not inside

    def through_numpy(convert):  # it may take the buffer without asking the array
        return lambda x, *a, **k: (isinstance(x, jax.Array) and stray(), convert(x, *a, **k))[1]

    with monkeypatch.context() as patch:
        for convert in (np.array, np.asarray):
            patch.setattr(np, convert.__name__, through_numpy(convert))
        patch.setattr(jax, "device_get", counted_get)
        patch.setattr(ArrayImpl, "_value", property(lambda self: (stray(), value.fget(self))[1]))
        patch.setattr(ArrayImpl, "__array__", lambda self, *a, **k: (stray(), array(self, *a, **k))[1])
        patch.setattr(ArrayImpl, "__dlpack__", lambda self, **k: (stray(), dlpack(self, **k))[1])
        yield counts


def test_the_host_reads_once_a_chunk(engine, pair, monkeypatch):
    prompts = random_prompts(5, 40, 21)
    with host_reads(monkeypatch) as counts:
        texts, stats = run(engine, prompts, max_new_tokens=40, do_sample=False)
    assert texts == [own_text(pair[0], prompt, 40) for prompt in prompts]
    assert stats.rounds > 3 * CHUNK
    assert counts == {"device_get": stats.host_reads, "other": 0}
    assert stats.host_reads == 1 + -(-stats.rounds // CHUNK)  # after prefill, then after each chunk


def test_a_stray_read_is_noticed(monkeypatch):
    array = jax.numpy.arange(4)
    reads = [lambda: int(array[0]), lambda: bool(array[1]), array.tolist, array.__array__]
    reads += [lambda: np.array(array), lambda: torch.from_dlpack(array), lambda: str(array)]
    for number, read in enumerate(reads):
        with host_reads(monkeypatch) as counts:
            read()
        assert counts["other"] > 0 and counts["device_get"] == 0, number


def program(engine, name):
    """The one compiled program of a step (of the last bucket, for prefill)."""
    found = [made for key, made in engine.runtime._programs._compiled.items() if key[0] == name]
    assert found and (name == "prefill" or len(found) == 1)
    return found[-1]


def test_every_donated_buffer_is_reused(engine):
    params = engine.runtime.refresh(engine.tensors())
    state = engine.runtime.begin(params, RowRequests.idle(engine.plan))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    for name in ("rounds", "prefill"):
        memory = program(engine, name).memory_analysis()
        assert memory.alias_size_in_bytes >= size, name
        # Results that are not aliased are no state: nothing new comes out.
        assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 4096, name
    assert size > 10 * 4096


def test_buffers_stay_where_they_are(engine):
    seen = []
    advance = engine.runtime.advance

    def watched(params, state, turn):
        old = jax.block_until_ready(jax.tree.leaves(state))
        before = [leaf.unsafe_buffer_pointer() for leaf in old]
        state = advance(params, state, turn)
        new = jax.block_until_ready(jax.tree.leaves(state))
        seen.append((before, [leaf.unsafe_buffer_pointer() for leaf in new]))
        assert all(leaf.is_deleted() for leaf in old)
        return state

    engine.runtime.advance = watched
    try:
        run(engine, random_prompts(20, 6, 11), max_new_tokens=40, do_sample=False)
    finally:
        del engine.runtime.advance
    assert len(seen) > 3 and len(seen[0][0]) > 2 * (4 + 2)
    assert all(before == after for before, after in seen)
    assert len({tuple(before) for before, _ in seen}) == 1  # nor does reading progress copy them


def test_nothing_warns_of_unused_donations(pair):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain = td.compile(*pair, runtime="xla", max_length=40, batch_size=2, prefill_chunk_size=16).warmup()
        run(plain, random_prompts(3), max_new_tokens=4)
    assert [str(warning.message) for warning in caught] == []


def test_a_draft_costs_the_same_at_any_length(pair, monkeypatch):
    """The drafter sees each token once; a late draft costs as much as an early draft."""
    flops, lengths = [], []
    propose = DFlashProposer.propose

    def counted(self, pstate, anchor, length, embed, head, *asked):
        lengths.append(int(length[0]))
        with FlopCounterMode(display=False) as counter:
            out = propose(self, pstate, anchor, length, embed, head, *asked)
        flops.append(counter.get_total_flops())
        return out

    monkeypatch.setattr(DFlashProposer, "propose", counted)
    # Attention then multiplies every slot at any length, and nothing else may grow.
    monkeypatch.setattr("torch_dflash.ops.windows.WHOLE", CAPACITY * 2)
    eager = td.compile(*pair, runtime="eager", max_length=CAPACITY)
    run(eager, random_prompts(4), max_new_tokens=CAPACITY - 4)
    assert min(lengths) < 10 and max(lengths) > 140
    assert len(set(flops)) == 1 and flops[0] > 0
    run(eager, random_prompts(120), max_new_tokens=9)
    assert len(set(flops)) == 1


def test_one_program_serves_every_length(engine):
    before = program(engine, "rounds")
    for new in (4, 130):
        run(engine, random_prompts(3), max_new_tokens=new)
        assert program(engine, "rounds") is before
    names = [key[0] for key in engine.runtime._programs._compiled]
    assert sorted(names) == ["begin", "caches", "prefill", "prefill", "prefill", "read", "rounds"]
