"""Threads, failures, abandoned streams, changed weights, freed engines: the life of a long process."""

import copy
import gc
import threading
import weakref
from functools import partial
from types import SimpleNamespace

import jax
import pytest
import torch
from support.scripted import own_text, pad, run
from support.threads import in_threads
from support.tiny import MASK, make_pair, ragged_prompts
from transformers import PreTrainedModel

import torch_dflash as td
from torch_dflash.engine import registry as engine_cache

NEW = 16
FIXED = {"max_length": 48, "batch_size": 2, "prefill_chunk_size": 16}


@pytest.fixture(scope="module", params=["eager", "xla"])
def runtime(request):
    return request.param


@pytest.fixture(scope="module")
def pair():
    return make_pair("qwen3", agree=6.0)


@pytest.fixture(scope="module")
def engine(pair, runtime):
    return td.compile(*pair, runtime=runtime, rounds_per_chunk=3, **FIXED)


def prompts(count, longest=24):
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(0, MASK, (length,), generator=generator).tolist() for length in lengths]


def test_four_threads_say_what_one_says(engine, pair):
    """The first calls also race for compilation: the engine is not warm."""
    work = [[prompts(8)[i : i + 2] for i in range(0, 8, 2)][(t + i) % 4] for t in range(4) for i in range(3)]
    options = [{"do_sample": False}, {"do_sample": True, "temperature": 20.0, "top_k": 0, "seed": 4}]
    jobs = [(rows, options[(i // 3 + i) % 2]) for i, rows in enumerate(work)]
    said, gate = {}, threading.Barrier(4)

    def speak(thread):
        gate.wait()
        for i in range(3 * thread, 3 * thread + 3):
            rows, how = jobs[i]
            said[i] = run(engine, rows, max_new_tokens=NEW, **how)[0]

    errors = in_threads(*[partial(speak, thread) for thread in range(4)])
    assert not errors and len(said) == len(jobs) == 12
    for i, (rows, how) in enumerate(jobs):
        alone = run(engine, rows, max_new_tokens=NEW, **how)[0]
        assert said[i] == alone
        if not how["do_sample"]:
            assert alone == [own_text(pair[0], row, NEW) for row in rows]
    assert len({str(texts) for texts in said.values()}) > 4


class Broken(Exception):
    pass


@pytest.mark.parametrize("step", ["read", "advance", "prefill", "begin", "refresh"])
def test_an_exception_in_a_call_leaves_the_engine_usable(engine, pair, monkeypatch, step):
    rows = prompts(2)
    right = [own_text(pair[0], row, NEW) for row in rows]
    whole, calls = getattr(engine.runtime, step), []

    def fails_late(*args):
        calls.append(1)
        out = whole(*args)  # a consumed state stays consumed
        if len(calls) == {"read": 3, "advance": 2}.get(step, 1):
            raise Broken
        return out

    with monkeypatch.context() as patch:
        patch.setattr(engine.runtime, step, fails_late)
        with pytest.raises(Broken):
            run(engine, rows, max_new_tokens=NEW)
    assert run(engine, rows, max_new_tokens=NEW)[0] == right


@pytest.mark.parametrize("modes", [(True, False), (False, True)])
def test_a_stream_goes_on_outside_the_inference_mode_it_began_in(pair, engine, modes):
    rows = prompts(2)
    right = [own_text(pair[0], row, NEW) for row in rows]
    with torch.inference_mode(modes[0]):
        stream = engine.stream(*pad(rows), max_new_tokens=NEW, eos_token_id=None)
        pieces = [next(stream)]
    with torch.inference_mode(modes[1]):
        pieces += list(stream)
    assert [sum((piece[row] for piece in pieces), []) for row in range(2)] == right


def test_an_abandoned_stream_leaves_the_engine_usable(engine, pair):
    rows = prompts(2)
    right = [own_text(pair[0], row, NEW) for row in rows]
    options = {"max_new_tokens": NEW, "eos_token_id": None}
    abandoned, kept = engine.stream(*pad(rows), **options), engine.stream(*pad(rows), **options)
    pieces = [next(kept), next(abandoned), next(kept), next(abandoned)][::2]
    abandoned.close()
    assert run(engine, rows, max_new_tokens=NEW)[0] == right
    pieces += list(kept)  # another call's end did not touch this state
    assert [sum((piece[row] for piece in pieces), []) for row in range(2)] == right
    assert len(pieces) > 2
    forgotten = engine.stream(*pad(rows), **options)
    next(forgotten)
    del forgotten
    gc.collect()
    assert run(engine, rows, max_new_tokens=NEW)[0] == right


def test_a_streamer_that_fails_leaves_the_engine_usable(engine, pair):
    def put(ids):
        if ids.ndim == 1:
            raise Broken

    ended = lambda: pytest.fail("a call that failed has no end")  # noqa: E731
    rows = prompts(1)
    with pytest.raises(Broken):
        run(engine, rows, max_new_tokens=NEW, streamer=SimpleNamespace(put=put, end=ended))
    assert run(engine, rows, max_new_tokens=NEW)[0] == [own_text(pair[0], rows[0], NEW)]


def test_a_change_of_weights_is_seen_without_compiling(engine, pair):
    target, drafter = pair
    rows = prompts(2)
    before, _ = run(engine, rows, max_new_tokens=NEW)
    saved = copy.deepcopy(target.state_dict()), copy.deepcopy(drafter.state_dict())
    try:
        with torch.no_grad():
            target.model.layers[1].mlp.down_proj.weight.mul_(-1.5)
            target.model.norm.weight.mul_(-1.0)
        after, stats = run(engine, rows, max_new_tokens=NEW)
        assert stats.compilations == 0 and after != before
        assert after == [own_text(target, row, NEW) for row in rows]
        with torch.no_grad():
            drafter.norm.weight.zero_()  # drafts token 0 only
        same, worse = run(engine, rows, max_new_tokens=NEW)
        assert same == after and worse.compilations == 0
        assert worse.acceptance_lengths != stats.acceptance_lengths
    finally:
        target.load_state_dict(saved[0]), drafter.load_state_dict(saved[1])
    again, stats = run(engine, rows, max_new_tokens=NEW)
    assert again == before and stats.compilations == 0


def live_arrays() -> int:
    """Counts JAX arrays without torchax's random key, uint32, and each engine's flags of rows, bool."""
    return sum(array.dtype not in ("uint32", "bool") for array in jax.live_arrays())


# An n-gram proposer is known by value: its engine serves the next equal one, and ends with the target alone.
@pytest.mark.parametrize(
    "drafter_kind, goes", [("dflash", "target"), ("dflash", "drafter"), ("ngram", "target")]
)
def test_a_cached_engine_is_freed_with_either_model(runtime, goes, drafter_kind):
    gc.collect()
    arrays = live_arrays()
    target, drafter = make_pair("llama")
    if drafter_kind == "ngram":
        drafter = td.NGramProposer(width=4)
    ids = torch.tensor([[4, 5, 6]])
    td.generate(target, drafter, ids, max_new_tokens=3, runtime=runtime)
    assert (live_arrays() > arrays) == (runtime == "xla")
    by_drafter = engine_cache._engines[target]
    ((made,),) = [entries.values() for entries in by_drafter.values()]
    watched = [weakref.ref(made), weakref.ref(made.runtime), weakref.ref(made.pair)]
    models = {"target": weakref.ref(target), "drafter": weakref.ref(drafter)}
    del made, by_drafter
    if goes == "target":
        del target
    else:
        del drafter
    gc.collect()
    assert models[goes]() is None
    assert [watch() for watch in watched] == [None] * 3
    assert live_arrays() <= arrays  # the device's copies of the weights went too
    assert models["drafter" if goes == "target" else "target"]() is not None


def test_a_compiled_engine_keeps_its_models():
    made = td.compile(*make_pair("llama"), runtime="eager", **FIXED)
    watched = weakref.ref(made.keeps_alive[0]), weakref.ref(made.keeps_alive[1])
    gc.collect()
    assert run(made, prompts(1), max_new_tokens=3)[1].new_tokens == 3
    made.keeps_alive = None
    gc.collect()
    assert watched[0]() is None and watched[1]() is None
    with pytest.raises(RuntimeError, match="target was deleted"):
        run(made, prompts(1), max_new_tokens=3)


def snapshot(model):
    """All state that a user could find changed."""
    modules = dict(model.named_modules())
    return {
        "config": model.config.to_dict(),
        "generation": model.generation_config.to_dict() if model.can_generate() else None,
        "attention": model.config._attn_implementation,
        "experts": getattr(model.config, "_experts_implementation", None),
        "hooks": {
            name: [dict(vars(module)[kind]) for kind in vars(module) if kind.endswith("_hooks")]
            for name, module in modules.items()
        },
        "training": {name: module.training for name, module in modules.items()},
        "forwards": {name: "forward" in vars(module) for name, module in modules.items()},
        "tensors": {name: (id(t), t.data_ptr(), t._version) for name, t in model.named_parameters()},
        "values": {name: t.sum().item() for name, t in model.state_dict().items()},
        "gradients": [(p.requires_grad, p.grad) for p in model.parameters()],
        "modules": {name: id(module) for name, module in modules.items()},
    }


def test_the_users_models_stay_untouched(runtime):
    target, drafter = make_pair("gpt_oss")
    target.train()
    ids, mask = ragged_prompts(2, longest=9)
    before = snapshot(target), snapshot(drafter)
    td.generate(target, drafter, ids, mask, max_new_tokens=5, runtime=runtime)
    assert (snapshot(target), snapshot(drafter)) == before
    loss = target(input_ids=ids, labels=ids).loss
    loss.backward()  # still a model to train
    assert target.get_input_embeddings().weight.grad.abs().sum() > 0
    target.eval()
    text = own_text(target, ids[0].tolist(), 5)
    out = td.generate(target, drafter, ids[:1], mask[:1], max_new_tokens=5, runtime="eager")
    assert out[0, 9:].tolist() == text


def test_a_second_call_reuses_the_engine(pair, runtime):
    ids = torch.tensor([[1, 2, 3, 4]])
    options = {"max_new_tokens": 6, "runtime": runtime, "return_dict_in_generate": True}
    first = td.generate(*pair, ids, **options)
    assert (first.stats.compilations > 0) == (runtime == "xla")
    engines = dict(engine_cache._engines[pair[0]][pair[1]])
    longer = torch.tensor([[9, 2, 3, 4, 7, 7, 1]])
    second = td.generate(*pair, longer, **(options | {"max_new_tokens": 11, "eos_token_id": [5, 6]}))
    assert second.stats.compilations == 0
    assert dict(engine_cache._engines[pair[0]][pair[1]]) == engines


def test_torchs_seed_rules_where_none_is_given(engine, pair, runtime):
    ids = torch.tensor([[1, 2, 3, 4]])
    options = {"do_sample": True, "temperature": 20.0, "top_k": 0, "max_new_tokens": NEW}
    options |= {"eos_token_id": None}

    def front(**more):
        return td.generate(*pair, ids, runtime=runtime, **options, **more).tolist()

    def reusable(**more):
        return engine.generate(ids, **options, **more).tolist()

    for call in (front, reusable):
        torch.manual_seed(7)
        first, second = call(), call()
        left = torch.rand(3).tolist()
        torch.manual_seed(7)
        assert [call(), call()] == [first, second] and first != second
        assert torch.rand(3).tolist() == left
        torch.manual_seed(7)
        torch.randint(0, 2**31 - 1, (1,))  # a call draws one number, and a given seed none
        assert call(seed=3) == call(seed=3)
        assert call() == second
    torch.manual_seed(7)
    assert front() == first  # both doors draw alike


def test_engines_of_one_model_share_its_weights_on_the_device():
    """Every length and batch size has an engine; the engines share one copy of the weights."""
    target, drafter = make_pair("qwen3", seed=4)
    ids, _ = ragged_prompts(1)
    gc.collect()
    before = live_arrays()
    short = td.compile(target, drafter, max_length=64)
    text = short.generate(ids, max_new_tokens=4, do_sample=False)
    arrays = live_arrays()
    long = td.compile(target, drafter, max_length=128)
    assert torch.equal(long.generate(ids, max_new_tokens=4, do_sample=False), text)
    assert live_arrays() == arrays
    with torch.no_grad():
        target.model.norm.weight.mul_(-1)
    for engine in (short, long):
        assert not torch.equal(engine.generate(ids, max_new_tokens=4, do_sample=False), text)
    assert live_arrays() == arrays
    del short, long, engine
    gc.collect()
    assert live_arrays() - before < (arrays - before) / 4


def test_new_weights_at_an_old_address_are_seen():
    """A successor may get a freed weight's memory: same address, version, shape and dtype."""
    target = make_pair("llama", seed=5)[0]
    engine = td.compile(target, None, max_length=32)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    memory = torch.empty_like(target.lm_head.weight).detach().numpy()
    for seed in range(3):
        target.lm_head.weight = None
        memory[:] = torch.randn(memory.shape, generator=torch.Generator().manual_seed(seed)).numpy()
        target.lm_head.weight = torch.nn.Parameter(torch.from_numpy(memory))
        wanted = target.generate(ids, max_new_tokens=6, do_sample=False)
        assert torch.equal(engine.generate(ids, max_new_tokens=6, do_sample=False), wanted)


IDS = torch.tensor([[5, 6, 7]])
WORDS = {
    "cuda:0": "Pass runtime='eager' to decode on the GPU.",
    "xla:0": "keep the target on the CPU (target.to('cpu')), or load it with jax_bridge.load",
}


def heard(caplog):
    """The announcements, without those of another test's engine."""
    return [line for line in caplog.messages if "compiling" not in line]


@pytest.mark.parametrize("place", WORDS)
def test_the_line_names_the_device_and_the_way_out(place, monkeypatch, caplog):
    pair = make_pair("llama")
    monkeypatch.setattr(PreTrainedModel, "device", property(lambda model: torch.device(place)))
    td.compile(*pair, runtime="eager", max_length=64, verify=False)
    assert not heard(caplog)
    td.compile(*pair, max_length=64, verify=False)  # a twin would be made there
    td.compile(*pair, max_length=128, verify=False)
    (line,) = heard(caplog)
    assert f"the target is on {place}; runtime='xla' copies its weights to JAX's default device" in line
    assert WORDS[place] in line


def test_nothing_is_said_of_the_cpu(caplog):
    td.compile(*make_pair("llama"), max_length=64)
    assert not heard(caplog)
