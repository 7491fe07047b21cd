"""A generation reuses the caches of the generation before; the text is that of clean memory."""

import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from support.authors import SECOND
from support.tiny import make_pair, ragged_prompts, small_pair

import torch_dflash as td
from jax_bridge.devices.spare import Spare, dense_layers
from torch_dflash.cache.dense import StaticLayer
from torch_dflash.cache.latent import LatentLayer
from torch_dflash.rows import RowRequests

WIDE = {"max_length": 64, "batch_size": 4, "rounds_per_chunk": 3, "filters": False}
WIDE |= {"outputs": ("output_logprobs",)}
ASKED = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
PAIRS = {"llama": ("llama", {}), "sinks and a window": ("gpt_oss", {}), "DFlash2": ("llama", SECOND)}
PAIRS["bfloat16"] = PAIRS["llama"]
SAMPLED = {"do_sample": True, "top_k": 0, "seed": 3}


@pytest.fixture(scope="module")
def pair():
    return small_pair("llama", agree=4.0)


@pytest.fixture(scope="module")
def engine(pair):
    return engine_of(pair)


@pytest.fixture(scope="module")
def fresh(engine):
    engine.runtime._spare.take()
    return ask(engine)


def engine_of(pair, **options) -> td.Engine:
    return td.compile(*pair, runtime="xla", **(WIDE | options))


def ask(engine, rows=3, **options):
    ids, mask = (tensor[:rows] for tensor in ragged_prompts())
    told = engine.generate(ids, mask, **(ASKED | {"output_logprobs": True} | options))
    return told.sequences.tolist(), [part.tolist() for part in told.logprobs]


def spoil(engine) -> None:
    """Fills the resting caches with the worst that a generation may leave: NaN keys, and huge values."""
    spare = engine.runtime._spare
    assert spare._layers
    worst = float(jnp.finfo(jnp.float32).max)
    bad = [(jnp.full_like(one.key, jnp.nan), jnp.full_like(one.value, worst)) for one in spare._layers]
    spare._layers = [StaticLayer(*layer) for layer in bad]


def with_cache(*layers) -> Any:
    return SimpleNamespace(cache=layers)


def noted(engine, monkeypatch) -> list[str]:
    names, run = [], engine.runtime._run

    def note(name, *args, **options):
        names.append(name)
        return run(name, *args, **options)

    monkeypatch.setattr(engine.runtime, "_run", note)
    return names


@pytest.mark.parametrize("name", PAIRS)
def test_what_lies_there_is_never_read(name, engine, monkeypatch):
    family, drafts = PAIRS[name]
    if name != "llama":
        target, drafter = make_pair(family, agree=4.0, **drafts)
        dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
        engine = engine_of((target.to(dtype), drafter.to(dtype)))
    asked = {}, {"rows": 1}, SAMPLED
    clean = []
    for options in asked:
        engine.runtime._spare.take()
        clean.append(ask(engine, **options))
    names = noted(engine, monkeypatch)
    for text, options in zip(clean, asked, strict=True):
        spoil(engine)
        assert ask(engine, **options) == text
    assert names.count("begin") == 3 and "caches" not in names


def test_a_stream_that_is_left_leaves_its_caches(engine, fresh, monkeypatch):
    ask(engine)
    ids, mask = ragged_prompts()
    options = {name: value for name, value in ASKED.items() if name != "return_dict_in_generate"}
    stream = engine.stream(ids[:3], mask[:3], **options)
    next(stream), next(stream)
    assert not engine.runtime._spare._layers
    stream.close()
    spoil(engine)
    names = noted(engine, monkeypatch)
    assert ask(engine) == fresh and "caches" not in names


def test_what_is_handed_out_begins_with_zeros(engine):
    ask(engine)
    spoil(engine)
    ids, mask = ragged_prompts()
    state = engine.start(ids[:3], mask[:3], max_new_tokens=20, do_sample=False)
    assert not engine.runtime._spare._layers  # otherwise there would be two caches
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(dense_layers(state)))
    last = dense_layers(state)[0].key[0, :, -8:]
    assert not last.any()


def test_a_proposer_begins_with_what_it_made(engine, monkeypatch):
    ask(engine)
    spoil(engine)
    seen, begin = [], engine.runtime.begin

    def note(*args, **options):
        state = begin(*args, **options)
        seen.extend(leaf for layer in state.proposer.layers for leaf in (layer.key.any(), layer.value.any()))
        assert bool(jnp.isnan(dense_layers(state)[0].key).all())
        return state

    monkeypatch.setattr(engine.runtime, "begin", note)
    ask(engine)
    assert seen and not any(seen)


def test_a_session_keeps_its_own(pair):
    engine = engine_of(pair, batch_size=1, outputs=())
    session, prompt = engine.session(), ragged_prompts()[0][0].tolist()
    said = [token for gain in session.gains(prompt, max_new_tokens=8) for token in gain.tokens]
    assert not engine.runtime._spare._layers
    again = [token for gain in session.gains([*prompt, *said, 5], max_new_tokens=8) for token in gain.tokens]
    fresh = engine.generate(torch.tensor([[*prompt, *said, 5]]), max_new_tokens=8, do_sample=False)
    assert again == fresh[0, len(prompt) + len(said) + 1 :].tolist()


def test_an_error_leaves_nothing_behind(engine, fresh, monkeypatch):
    ask(engine)
    with monkeypatch.context() as patch:
        patch.setattr(engine.runtime, "read", lambda *_: (_ for _ in ()).throw(RuntimeError("broken")))
        with pytest.raises(RuntimeError, match="broken"):
            ask(engine)
    assert not engine.runtime._spare._layers
    assert ask(engine) == fresh


def test_a_consumed_state_leaves_nothing(engine):
    ask(engine)
    (first, *rest) = engine.runtime._spare.take()
    first.key.delete()
    engine.runtime._spare.rest(with_cache(first, *rest))
    assert not engine.runtime._spare._layers


def test_a_stream_that_ends_while_caches_are_given_waits_for_nobody(engine, fresh):
    """Python may collect garbage in the thread that holds the lock."""
    ask(engine)
    layers = engine.runtime._spare.take()
    resting = threading.Thread(target=engine.runtime._spare.rest, args=(with_cache(*layers),), daemon=True)
    with Spare._lock:
        resting.start()
        resting.join(20)
        assert not resting.is_alive() and not engine.runtime._spare._layers
    assert ask(engine) == fresh


def test_one_rests_in_a_process_until_another_begins(pair, engine, fresh):
    other = engine_of((pair[0], None))
    ask(engine)
    held = weakref.ref(engine.runtime._spare._layers[0].key)
    state = other.runtime.begin(other.runtime.refresh(other.tensors()), RowRequests.idle(other.plan))
    gc.collect()
    assert held() is None and not engine.runtime._spare._layers
    ask(engine)
    held = weakref.ref(engine.runtime._spare._layers[0].key)
    other.runtime.retire(state)
    gc.collect()
    assert held() is None and other.runtime._spare._layers
    held = weakref.ref(other.runtime._spare._layers[0].key)
    del other, state
    gc.collect()
    assert held() is None
    assert ask(engine) == fresh


def test_caches_of_another_type_are_not_taken(engine, fresh, monkeypatch):
    ask(engine)
    spare = engine.runtime._spare
    spare._layers = [jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), layer) for layer in spare._layers]
    names = noted(engine, monkeypatch)
    assert ask(engine) == fresh and "caches" in names


def test_latent_layers_begin_anew():
    """Latent layers compute from all that they have cached, before a mask."""
    rows = jnp.zeros((1, 1, 4, 2))
    latent, dense = LatentLayer(rows, rows), StaticLayer(rows, rows)
    assert dense_layers(with_cache(latent, dense)) == [dense]


def test_no_later_call_compiles(pair):
    engine = engine_of(pair)
    engine.warmup()
    compiled = engine.runtime.compilations
    for _ in range(2):
        ask(engine)
    engine.runtime._spare.take()
    ask(engine)
    assert engine.runtime.compilations == compiled


def test_fresh_and_stale_caches_are_bound_to_the_device_alike(engine):
    """A cache that is not bound compiles into another program, which the disk does not have."""
    rows, params = RowRequests.idle(engine.plan), engine.runtime.refresh(engine.tensors())
    ask(engine)
    stale = engine.runtime.begin(params, rows, stale=True)
    fresh = engine.runtime.begin(params, rows)
    assert all(leaf.committed for state in (stale, fresh) for leaf in jax.tree.leaves(state))
