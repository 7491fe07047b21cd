"""Requests that come and go while others decode say in a crowd what they say alone."""

import random
import threading
from concurrent.futures import CancelledError
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hybrids import make_hybrid
from support.refusals import refuses
from support.tiny import correlate, make_drafter, make_pair, make_target, small_pair
from support.tokenizers import byte_tokenizer
from torch.utils import _pytree as pytree

import jax_bridge as jb
import jax_bridge.ops  # noqa: F401 - registers the lowerings
import torch_dflash as td
from jax_bridge._torchax import call_torch
from torch_dflash.cache.paged import PagedLayer
from torch_dflash.cache.recurrent import RecurrentLayer
from torch_dflash.engine import slots as slots_module
from torch_dflash.engine.pages import PageAllocator
from torch_dflash.engine.scheduler import Scheduler
from torch_dflash.engine.slots import CHECK_SECONDS, Lane, QueueFull, Slots
from torch_dflash.plan import DecodePlan
from torch_dflash.proposers.dflash.proposer import DFlashProposer
from torch_dflash.rows import RowRequests, put, take
from torch_dflash.runtime import Rounds

RULES = "grammar", "repetition_penalty"
FIXED = {"max_length": 100, "batch_size": 4, "prefill_chunk_size": 16, "rounds_per_chunk": 3}
PAGED = {"cache": "paged", "page_size": 16, "pool_pages": 22}
TOKENIZER, VOCAB = byte_tokenizer(), 288
STOPS = [TOKENIZER.decode([token]) for token in (33, 75, 58)]
GRAMMAR = td.Grammar.regex("[a-h]{2,30}", TOKENIZER)


def spelling_pair(family, agree=6.0):
    """A pair whose target has every id of the tokenizer."""
    target = make_target(family, vocab_size=VOCAB)
    drafter = make_drafter(target)
    correlate(target, drafter, agree)
    return target, drafter


def small_hybrid():
    target = make_hybrid("qwen3_5", vocab_size=VOCAB)
    return target, make_drafter(target, num_hidden_layers=1, target_layer_ids=[0, 1])


def tree(pair):
    return pair[0], td.TreeProposer(pair[1], rows=8)


def union(pair):
    return pair[0], td.Union(td.NGramProposer(), pair[1])


KINDS = {
    "chain": lambda: spelling_pair("qwen3"),
    "windows": lambda: spelling_pair("gpt_oss"),
    "hybrid": small_hybrid,
    "tree": lambda: tree(spelling_pair("llama")),
    "union": lambda: union(spelling_pair("qwen3")),
    "lookup": lambda: (spelling_pair("llama")[0], td.NGramProposer()),
    "plain": lambda: (spelling_pair("llama")[0], None),
}


def drawn(count, seed, rules=True):
    """Prompts and options at random: lengths, seeds, sampling, penalties, stop strings and grammars."""
    draw, requests = random.Random(seed), []
    for _ in range(count):
        prompt = [draw.randrange(1, 90) for _ in range(draw.randrange(1, 40))]
        own = {"max_new_tokens": draw.randrange(1, 50), "seed": draw.randrange(1 << 40)}
        own |= {"eos_token_id": [draw.randrange(90)] if draw.random() < 0.3 else None}
        own |= {"do_sample": draw.random() < 0.5}
        own |= {"temperature": draw.choice([0.7, 3.0])} if own["do_sample"] else {}
        own |= {"top_k": draw.choice([0, 5])} if own["do_sample"] else {}
        own |= {"repetition_penalty": 1.4} if rules and draw.random() < 0.3 else {}
        own |= {"stop_strings": STOPS, "tokenizer": TOKENIZER} if draw.random() < 0.3 else {}
        own |= {"grammar": GRAMMAR, "eos_token_id": [0]} if rules and draw.random() < 0.2 else {}
        requests.append((prompt, own))
    return requests


def alone(engine, prompt, own):
    ids = torch.tensor([prompt])
    return engine.generate(ids, torch.ones_like(ids), **own)[0, len(prompt) :].tolist()


def crowd(engine, requests, seed=1, cancel=0.15):
    """Each request's tokens if it was not cancelled; arrivals and cancels come between steps at random."""
    draw, slots, handles, waiting = random.Random(seed), Slots(engine), [], list(requests)
    while waiting or not all(handle.done() for handle in handles):
        while waiting and draw.random() < 0.6:
            prompt, own = waiting.pop(0)
            handles.append(slots.submit(torch.tensor([prompt]), torch.ones(1, len(prompt)), **own))
        for handle in handles:
            if not handle.done() and draw.random() < cancel / 20:
                handle.cancel()
        slots.step()
    (lane,) = slots._lanes
    assert lane.idle and not slots.running and not slots.waiting and lane.busy == 0
    assert lane._scheduler.ended.all() and lane._state is None
    return [None if handle.cancelled() else handle.result().new_tokens[0] for handle in handles]


def differing(engine, requests, found):
    """Requests that said something else than alone, and how many were compared."""
    pairs = [(one, tokens) for one, tokens in zip(requests, found, strict=True) if tokens is not None]
    return [one for one, tokens in pairs if alone(engine, *one) != tokens], len(pairs)


CASES = [
    ("chain", "eager", {}),
    ("chain", "eager", PAGED | {"pool_pages": 14}),
    pytest.param("windows", "eager", {}, marks=pytest.mark.heavy),
    ("hybrid", "eager", PAGED),
    ("tree", "eager", {}),
    pytest.param("union", "eager", {}, marks=pytest.mark.heavy),
    pytest.param("lookup", "eager", PAGED, marks=pytest.mark.heavy),
    pytest.param("plain", "eager", {}, marks=pytest.mark.heavy),
    ("chain", "xla", PAGED),
    pytest.param("hybrid", "xla", {}, marks=pytest.mark.heavy),
    pytest.param("tree", "xla", PAGED, marks=pytest.mark.heavy),
    pytest.param("windows", "xla", {}, marks=pytest.mark.heavy),
]


@pytest.mark.parametrize(("kind", "runtime", "options"), CASES)
def test_a_request_says_in_a_crowd_what_it_says_alone(kind, runtime, options):
    rules = RULES if runtime == "eager" else ("repetition_penalty",)
    engine = td.compile(*KINDS[kind](), runtime=runtime, processors=rules, **FIXED, **options)
    requests = drawn(24, seed=len(kind))
    if runtime == "xla":
        requests = [one for one in requests if "grammar" not in one[1]]
    wrong, compared = differing(engine, requests, crowd(engine, requests))
    assert not wrong and compared > len(requests) // 2


@pytest.mark.heavy
@pytest.mark.parametrize(("kind", "options"), [("chain", {}), ("hybrid", PAGED), ("tree", PAGED)])
def test_three_hundred_requests(kind, options):
    options = options | {"outputs": ("output_logprobs",)}
    engine = td.compile(*KINDS[kind](), runtime="eager", processors=RULES, **FIXED, **options)
    requests = drawn(100, seed=7)
    found = crowd(engine, requests)
    wrong, compared = differing(engine, requests, found)
    assert not wrong and 60 < compared < 100


def filled(state, seed):
    """``state`` with other random values in every leaf."""
    generator = torch.Generator().manual_seed(seed)

    def other(leaf):
        bits = torch.randint(0, 2, leaf.shape, generator=generator)
        return bits.bool() if leaf.dtype == torch.bool else bits.to(leaf.dtype)

    return pytree.tree_map_only(torch.Tensor, other, state)


@pytest.mark.parametrize("cache", ["static", "paged"])
@pytest.mark.parametrize("kind", [*KINDS, "dflash2"])
def test_a_row_that_was_taken_out_and_put_back_is_the_same(kind, cache):
    pair = make_pair("qwen3", selector_rank=4) if kind == "dflash2" else KINDS[kind]()
    rules = "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids"
    engine = td.compile(*pair, runtime="eager", processors=rules, **FIXED, cache=cache)
    state = engine.runtime.begin(engine.tensors(), RowRequests.idle(engine.plan))
    one, other = filled(state, 1), filled(state, 2)
    for row in (torch.tensor(0), torch.tensor(3)):
        part = take(other, row)
        same = put(filled(state, 2), part, row)
        moved = put(filled(state, 1), part, row)
        leaves = [pytree.tree_leaves(each) for each in (other, same, one, moved, part)]
        for was, now, before, after, single in zip(*leaves, strict=True):
            if not isinstance(was, torch.Tensor):
                continue
            assert torch.equal(was, now)
            if len(single) == 1 and single.shape[1:] == was.shape[1:]:
                assert torch.equal(after[row], was[row])
                rest = [at for at in range(4) if at != row]
                assert torch.equal(after[rest], before[rest])


def test_an_aliased_leaf_is_written_in_one_place_alone(monkeypatch):
    """A new state has one tensor of zeros for several leaves."""
    engine = td.compile(*small_pair(), runtime="eager", **FIXED)
    requests = drawn(8, seed=3, rules=False)
    found = crowd(engine, requests, cancel=0)
    assert not differing(engine, requests, found)[0]
    monkeypatch.setattr("torch_dflash.eager._separate", lambda state: state)
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        found = crowd(engine, requests, cancel=0)
        assert not differing(engine, requests, found)[0]


def keep_rules(monkeypatch):
    reset = td.rows._reset
    kept = lambda pair, state, *given: replace(reset(pair, state, *given), rules=state.rules)  # noqa: E731
    monkeypatch.setattr(td.rows, "_reset", kept)


def keep_ring(monkeypatch):
    monkeypatch.setattr(DFlashProposer, "reset", lambda self, pstate, rows: pstate)


def free_twice(monkeypatch):
    release = PageAllocator.release

    def twice(self, row):
        self._free += self.table[row, : self._held(row)].tolist()
        release(self, row)

    monkeypatch.setattr(PageAllocator, "release", twice)


def old_table(monkeypatch):
    """Pages of a row that left stay in the device's table when the next one begins."""
    changes = Scheduler.changes

    def before_it_began(self, live, anew=False):
        before = self._table
        table, done = changes(self, live, anew)
        return (before if anew else table), done

    monkeypatch.setattr(Scheduler, "changes", before_it_began)


def old_stop(monkeypatch):
    """Stop rules of a row's first request go on for the next."""
    first, take_in = {}, slots_module.Slot.take_in

    def with_the_first(self, *given):
        rules = first.setdefault("rules", self.handle.row.stopping)
        object.__setattr__(self.handle.row, "stopping", rules)
        return take_in(self, *given)

    monkeypatch.setattr(slots_module.Slot, "take_in", with_the_first)


def old_news(monkeypatch):
    """A row's read is that of the row before."""
    row = td.runtime.HostRead.row
    monkeypatch.setattr(td.runtime.HostRead, "row", lambda self, number: row(self, max(number - 1, 0)))


def seeds_of_rows(monkeypatch):
    tensors = slots_module.row_requests

    def by_place(rows, plan):
        made = tensors(rows, plan)
        seed = made.sampling.seed
        seed += torch.arange(len(seed), dtype=seed.dtype) if len(rows) > 1 else 1
        return made

    monkeypatch.setattr(slots_module, "row_requests", by_place)


def first_piece_again(monkeypatch):
    pieces = slots_module.prompt_chunks

    def repeated(prompts, batch_size, *more):
        chunks = list(pieces(prompts, batch_size, *more))
        return [chunks[0], *chunks[:-1]] if batch_size == 1 else chunks

    monkeypatch.setattr(slots_module, "prompt_chunks", repeated)


def keep_state(monkeypatch):
    monkeypatch.setattr(RecurrentLayer, "reset", lambda self, rows: self)


BROKEN = [
    (keep_rules, "chain", {}),
    (keep_state, "hybrid", {}),
    (keep_ring, "chain", {}),
    (free_twice, "chain", PAGED | {"pool_pages": 14}),
    (old_table, "chain", PAGED),
    (old_stop, "chain", {}),
    (old_news, "chain", {}),
    (seeds_of_rows, "chain", {}),
    (first_piece_again, "chain", {}),
]


@pytest.mark.parametrize(("break_it", "kind", "options"), BROKEN, ids=[one[0].__name__ for one in BROKEN])
def test_what_is_broken_on_purpose_is_noticed(monkeypatch, break_it, kind, options):
    engine = td.compile(*KINDS[kind](), runtime="eager", processors=RULES, **FIXED, **options)
    requests = drawn(16, seed=5)
    wanted = [alone(engine, *one) for one in requests]
    with monkeypatch.context() as patch:
        break_it(patch)
        try:
            found = crowd(engine, requests, cancel=0)
        except Exception:
            return
    assert found != wanted


def test_a_chunk_ends_with_a_row_while_others_wait():
    """Rounds stop where a row ends that was live at the chunk's start; rows that rested do not count."""
    engine = td.compile(*small_pair(agree=6.0), runtime="eager", **(FIXED | {"rounds_per_chunk": 16}))
    advance, seen = engine.runtime.advance, []

    def noted(params, state, turn, wanted=None):
        before = state
        after = advance(params, state, turn, wanted)
        seen.append((wanted, before.done.tolist(), (after.rounds - before.rounds).max().item(), after.done))
        return after

    engine.runtime.advance = noted
    short, long = {"max_new_tokens": 3, "do_sample": False}, {"max_new_tokens": 60, "do_sample": False}
    options = [short, long, long, long, short, long] * 2
    outputs = list(engine.map([[5, 6, 7]] * len(options), options, eos_token_id=None))
    assert [len(one.new_tokens[0]) for one in outputs] == [one["max_new_tokens"] for one in options]
    for wanted, before, rounds, after in seen:
        if wanted is not None:
            assert not (np.array(before) & wanted).any()
            assert rounds < 16 or not (after.numpy() & wanted).any()
    assert any(wanted is not None for wanted, *_ in seen) and seen[-1][0] is None


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000))
def test_rows_and_pages_are_given_in_order_and_come_back(seed):
    """No page twice, none lost, all admitted in order, no deadlock; one log of draws, one schedule."""
    logs = [schedule(random.Random(seed)) for _ in range(2)]
    assert logs[0] == logs[1]


def schedule(draw):
    plan = DecodePlan(draw.randint(1, 5), 200, 8, 8, cache="paged", page_size=16)
    pool = draw.randint(plan.row_pages, plan.batch_size * plan.row_pages)
    plan = DecodePlan(plan.batch_size, 200, 8, 8, cache="paged", page_size=16, pool_pages=pool)
    scheduler, rows, log = Scheduler.idle(plan), {}, []
    coming = [(number, length := draw.randint(1, 150), draw.randint(length + 1, 200)) for number in range(25)]
    while coming or rows:
        for row in [row for row in rows if draw.random() < 0.05]:  # cancelled
            del rows[row]
            scheduler.ended[row] = True
        going, new = scheduler.going(), []
        free = [row for row in range(plan.batch_size) if row not in rows]
        while coming and free and draw.random() < 0.8:
            number, length, limit = coming[0]
            if not scheduler.seat(free[0], length, limit):
                assert rows, "a request finds no pages though no row has any"
                break
            rows[free[0]] = coming.pop(0)
            new.append(free.pop(0))
            log.append((number, new[-1]))
        table, done = scheduler.changes([*going, *new], anew=bool(new))
        assert going or new or not rows, "every row waits for every other"
        held = scheduler._allocator.table
        used = held[held > 0].tolist()
        assert len(used) == len(set(used)) and len(used) + len(scheduler._allocator._free) == plan.pages - 1
        assert (
            all(not held[row].any() for row in range(plan.batch_size) if row not in rows) or done is not None
        )
        length, over = scheduler.lengths.copy(), np.ones(plan.batch_size, bool)
        for row in [*going, *new]:
            number, start, limit = rows[row]
            length[row] = min(length[row] + draw.randint(1, plan.rounds_per_chunk * plan.gain), limit - 1)
            over[row] = length[row] + 1 >= limit
        scheduler.update(length, over)
        for row in [row for row in rows if scheduler.ended[row]]:
            del rows[row]
    scheduler.going()
    assert len(scheduler._allocator._free) == plan.pages - 1
    assert [number for number, _ in log] == list(range(25))
    return log


def test_more_rows_than_the_engine_decodes_together():
    engine = td.compile(*small_pair(agree=6.0), runtime="eager", **FIXED)
    requests = [one for one, _ in drawn(11, seed=2)]
    ids, mask = td.requests.prompts.pad_rows(requests)
    options = {"do_sample": True, "seed": 9, "eos_token_id": None, "max_new_tokens": [*range(5, 16)]}
    out = engine.generate(ids, mask, return_dict_in_generate=True, **options)
    wanted = []
    for at in range(11):
        own = options | {"seed": 9 + at, "max_new_tokens": 5 + at}
        wanted.append(alone(engine, requests[at], own))
    assert out.new_tokens == wanted and torch.equal(out.sequences[:, : ids.shape[1]], ids)
    assert out.stats.prefilled == sum(map(len, requests)) and out.stats.new_tokens == sum(range(5, 16))
    streamed = [[] for _ in requests]
    for gained in engine.stream(ids, mask, **options):
        for row, tokens in enumerate(gained):
            streamed[row] += tokens
    assert streamed == wanted
    options["max_new_tokens"] = 5
    mapped = engine.map(requests, **options)
    assert [one.new_tokens[0] for one in mapped] == [row[:5] for row in wanted]
    with refuses(ValueError, "input_ids has 11 rows", "batch_size=4"):
        engine.start(ids, mask, **options)


def test_map_takes_options_of_each_prompt_and_refuses_bad_ones():
    engine = td.compile(*small_pair(), runtime="eager", **FIXED)
    shared = {"do_sample": False, "max_new_tokens": 4}
    with refuses(ValueError, "prompts has 2 entries, options 1"):
        engine.map([[1], [2]], [{}], **shared)
    with refuses(TypeError, "prompts=Tensor (2, 3)", "tokenizer(texts).input_ids"):
        engine.map(torch.ones(2, 3, dtype=torch.long))
    with refuses(TypeError, "prompts=str"):
        engine.map("hello")
    with refuses(ValueError, "ahead=0"):
        engine.map([[1]], ahead=0)
    with refuses(TypeError, "max_tokens"):
        engine.map([[1]], max_tokens=3)
    outputs = engine.map([[1, 2], [3], [200], [4]], [{}, {"max_new_tokens": 2}, {}, {}], **shared)
    assert [len(next(outputs).new_tokens[0]) for _ in range(2)] == [4, 2]
    with refuses(ValueError, "prompt 2: input_ids of row 0 holds 200"):
        next(outputs)
    for wrong, shown in (("hello", "'hello'"), (5, "'5'"), (None, "'None'"), ([None], "'[None]'")):
        with refuses(TypeError, f"prompt 0: {shown}", "tokenizer(text).input_ids"):
            next(engine.map([wrong]))
    with refuses(TypeError, "prompt 0: input_ids has dtype torch.float32"):
        next(engine.map([[1.5]]))
    for wrong in (5, {"input_ids": [[1]]}):
        with refuses(TypeError, f"prompts={type(wrong).__name__}: pass unpadded lists"):
            engine.map(wrong)
    with refuses(ValueError, "prompt 0: row 0 of input_ids has an empty prompt"):
        next(engine.map([[]], **shared))
    with refuses(ValueError, "prompt 0: ", "max_length=100"):
        next(engine.map([[1]], max_new_tokens=100))


def test_seeds_of_map_are_counted_up_whatever_integer_they_are():
    engine = td.compile(*small_pair(), runtime="eager", **FIXED)
    options = {"do_sample": True, "temperature": 5.0, "max_new_tokens": 8, "eos_token_id": None}
    ids = torch.tensor([[5, 6, 7]] * 3)
    for seed in (5, np.int64(5), torch.tensor(5), 2**64 - 1, -1):
        wanted = engine.generate(ids, seed=seed, **options)[:, 3:].tolist()
        found = [one.new_tokens[0] for one in engine.map(ids.tolist(), seed=seed, **options)]
        assert found == wanted and found[0] != found[1]
    with refuses(ValueError, "prompts has more than 2 entries, options 2"):
        list(engine.map([[1]] * 3, ({} for _ in range(2)), max_new_tokens=2))
    with refuses(TypeError, "options: entry 0 is a str"):
        list(engine.map([[1]], ["seed"]))


def test_prompts_are_read_as_their_turn_comes():
    engine, read = td.compile(*small_pair(), runtime="eager", **FIXED), []

    def prompts():
        for number in range(1, 40):
            read.append(number)
            yield [number]

    outputs = engine.map(prompts(), do_sample=False, max_new_tokens=3, ahead=6)
    assert not read
    next(outputs)
    assert len(read) == 6
    outputs.close()
    one_by_one = engine.map(([n] for n in range(1, 9)), max_new_tokens=3, eos_token_id=None, ahead=1)
    assert [len(one.new_tokens[0]) for one in one_by_one] == [3] * 8


def test_the_models_are_looked_at_once_a_call(monkeypatch):
    engine, looks = td.compile(*small_pair(), runtime="eager", **FIXED), []
    follow = engine.follow
    monkeypatch.setattr(engine, "follow", lambda: looks.append(1) or follow())
    list(engine.map([[5]] * 20, max_new_tokens=2))
    assert len(looks) == 1
    slots, clock = Slots(engine), [100.0]
    monkeypatch.setattr(slots_module.time, "monotonic", lambda: clock[0])
    for _ in range(5):
        slots.submit(torch.ones(1, 1, dtype=torch.long), max_new_tokens=30)
        slots.step()
    assert len(looks) == 2
    clock[0] += CHECK_SECONDS + 0.1
    slots.submit(torch.ones(1, 1, dtype=torch.long), max_new_tokens=30)
    slots.submit(torch.ones(1, 1, dtype=torch.long), max_new_tokens=30, check=True)
    assert len(looks) == 4


def test_rows_under_way_end_with_the_weights_they_began_with():
    pair = small_pair()
    engine = td.compile(*pair, runtime="xla", **FIXED)
    one = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    before = alone(engine, [5, 6, 7], one)
    slots = Slots(engine)
    first = slots.submit(torch.tensor([[5, 6, 7]]), **one)
    slots.step()
    with torch.no_grad():
        head = pair[0].get_output_embeddings().weight
        head.copy_(head.flip(0))
    second = slots.submit(torch.tensor([[5, 6, 7]]), **one)
    assert first.result().new_tokens[0] == before
    assert second.result().new_tokens[0] == alone(engine, [5, 6, 7], one) != before


class Broken(Exception):
    pass


@pytest.mark.parametrize("where", ["stop", "grammar", "listener"])
def test_an_error_of_a_requests_own_code_ends_that_request_alone(monkeypatch, where):
    engine = td.compile(*KINDS["chain"](), runtime="eager", processors=RULES, **FIXED)
    requests = drawn(6, seed=4, rules=False)
    grammar = {"grammar": GRAMMAR, "eos_token_id": [0], "max_new_tokens": 8, "stop_strings": "zz"}
    requests[2] = [5, 6], grammar | {"tokenizer": TOKENIZER}
    slots = Slots(engine)
    handles = [slots.submit(torch.tensor([prompt]), **own) for prompt, own in requests]

    def fail(*given):
        raise Broken(where)

    if where == "listener":
        handles[2]._listen = fail
    elif where == "grammar":
        object.__setattr__(handles[2].row.grammar, "check", fail)
    else:
        object.__setattr__(handles[2].row, "stopping", (SimpleNamespace(ends=fail),))
    while slots.step():
        pass
    with pytest.raises(Broken, match=where):
        handles[2].result()
    others = [at for at in range(6) if at != 2]
    assert [handles[at].result().new_tokens[0] for at in others] == [
        alone(engine, *requests[at]) for at in others
    ]


def test_an_error_of_the_device_ends_the_rows_under_way_and_spares_those_that_wait(monkeypatch):
    engine = td.compile(*small_pair(), runtime="eager", **FIXED)
    requests = drawn(7, seed=6, rules=False)
    slots, advance = Slots(engine), engine.runtime.advance

    def once(*given):
        monkeypatch.setattr(engine.runtime, "advance", advance)
        raise Broken

    monkeypatch.setattr(engine.runtime, "advance", once)
    handles = [slots.submit(torch.tensor([prompt]), **own) for prompt, own in requests]
    for handle in handles[:4]:
        with pytest.raises(Broken):
            handle.result()
    found = [handle.result().new_tokens[0] for handle in handles[4:]]
    assert found == [alone(engine, *one) for one in requests[4:]]


def test_requests_of_many_threads_share_the_rows():
    engine = td.compile(*small_pair(agree=6.0), runtime="eager", **FIXED)
    requests, said = drawn(20, seed=8, rules=False), {}
    slots = engine.slots(queue=1000)

    def ask(at):
        prompt, own = requests[at]
        handle = slots.submit(torch.tensor([prompt]), **own)
        deltas = [token for delta in handle for token in delta.tokens]
        said[at] = handle.result(60).new_tokens[0]
        assert deltas == said[at]

    threads = [threading.Thread(target=ask, args=(at,)) for at in range(20)]
    [thread.start() for thread in threads]
    [thread.join(120) for thread in threads]
    assert [said[at] for at in range(20)] == [alone(engine, *one) for one in requests]
    assert not slots.running and not slots.waiting


def test_who_hears_of_an_end_may_submit_more():
    engine, found = td.compile(*small_pair(), runtime="eager", **FIXED), []
    slots, ids, done = engine.slots(), torch.ones(1, 3, dtype=torch.long), threading.Event()

    def again(handle):
        found.append(handle.result().new_tokens[0])
        if len(found) == 3:
            return done.set()
        slots.submit(ids, max_new_tokens=4, eos_token_id=None).add_done_callback(again)

    slots.submit(ids, max_new_tokens=4, eos_token_id=None).add_done_callback(again)
    assert done.wait(60) and found == [found[0]] * 3


def test_a_full_queue_and_what_no_row_can_hold(monkeypatch):
    engine = td.compile(*small_pair(), runtime="eager", **FIXED)
    with refuses(ValueError, "queue=0"):
        engine.slots(queue=0)
    with refuses(RuntimeError, "step: threads decode", "result() instead"):
        engine.slots().step()
    slots, ids = Slots(engine, queue=5), torch.ones(1, 3, dtype=torch.long)
    first = slots.submit(ids, max_new_tokens=50, eos_token_id=None)
    slots.step()
    with (
        torch.autocast("cpu", torch.bfloat16),
        refuses(ValueError, "submit under torch.autocast", "cast the"),
    ):
        engine.slots().submit(ids, max_new_tokens=5)
    waiting = [slots.submit(ids, max_new_tokens=50, eos_token_id=None) for _ in range(5)]
    with refuses(QueueFull, "5 requests wait, queue=5"):
        slots.submit(ids, max_new_tokens=50)
    with refuses(ValueError, "row 0: a prompt of 3 tokens", "max_length=100"):
        slots.submit(ids, max_new_tokens=98)
    with refuses(ValueError, "input_ids has 2 rows"):
        slots.submit(ids.expand(2, 3), max_new_tokens=3)
    with refuses(ValueError, "repetition_penalty"):
        slots.submit(ids, max_new_tokens=3, repetition_penalty=2.0)
    assert waiting[4].cancel() and slots.waiting == 4
    late = slots.submit(ids, max_new_tokens=2, eos_token_id=None)  # in the place of the one that was given up
    assert waiting[4].cancelled() and late.cancel() and first.cancel()
    slots.step()
    with pytest.raises(CancelledError):
        first.result()
    assert list(waiting[4]) == list(waiting[4]) == []
    assert len(waiting[0].result().new_tokens[0]) == 50 and not waiting[0].cancel()


def test_one_piece_of_a_long_prompt_is_read_beside_rounds():
    engine = td.compile(*small_pair(), runtime="eager", **FIXED)
    slots, fed, advanced = Slots(engine), [], []
    feed, advance = engine.runtime.feed, engine.runtime.advance
    engine.runtime.feed = lambda *given: fed.append((len(advanced), given[3].ids.shape[1])) or feed(*given)
    engine.runtime.advance = lambda *given: advanced.append(1) or advance(*given)
    one = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    slots.submit(torch.tensor([[5]]), **one)
    slots.step()
    fed.clear()
    late = [slots.submit(torch.ones(1, 50, dtype=torch.long), **one) for _ in range(2)]
    while slots.step():
        pass
    assert late[0].result().new_tokens == late[1].result().new_tokens
    chunks = [chunk for chunk, _ in fed]
    assert all(chunks.count(chunk) == 1 for chunk in set(chunks)) and {size for _, size in fed} == {16}


def test_the_loop_keeps_no_row_of_a_pool():
    """A pool of pages goes through whole: a row of it would be a page."""
    engine = td.compile(*small_pair(), runtime="eager", **FIXED, **PAGED)
    state = engine.runtime.begin(engine.tensors(), RowRequests.idle(engine.plan))
    part = take(state, torch.tensor(1))
    pools = [layer for layer in state.cache if isinstance(layer, PagedLayer)]
    assert pools and all(one.pool is other.pool for one, other in zip(state.cache, part.cache, strict=True))


def test_nothing_compiles_after_the_warmup_of_slots():
    engine = td.compile(*small_pair(agree=6.0), runtime="xla", **FIXED).warmup(progress=False, slots=True)
    before = engine.runtime.compilations
    requests = drawn(9, seed=12, rules=False)
    found = [one.new_tokens[0] for one in engine.map(*zip(*requests, strict=True))]
    assert engine.runtime.compilations == before
    assert found == [alone(engine, *one) for one in requests]


def test_a_lane_is_stepped_by_nobody_while_it_is_idle():
    engine = td.compile(*small_pair(), runtime="eager", **FIXED)
    slots = engine.slots()
    handle = slots.submit(torch.ones(1, 2, dtype=torch.long), max_new_tokens=3)
    assert handle.result(60).stats.new_tokens == 3
    (lane,) = slots._lanes
    thread = lane.thread
    if thread is not None:
        thread.join(60)
    assert isinstance(lane, Lane) and lane.thread is None and Rounds.of(engine.plan).rounds == 3


@pytest.mark.parametrize(("kind", "cache"), [("chain", "static"), ("chain", "paged"), ("hybrid", "static")])
def test_lowered_rows_are_taken_out_and_put_back_the_same(kind, cache):
    engine = td.compile(*KINDS[kind](), runtime="eager", processors=RULES[1:], **FIXED, cache=cache)
    state = filled(engine.runtime.begin(engine.tensors(), RowRequests.idle(engine.plan)), 2)
    wanted = [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, torch.Tensor)]

    def there_and_back(state, row):
        return put(state, take(state, row), row)

    step = jax.jit(partial(call_torch, there_and_back), donate_argnums=0)
    found = jb.state_to_torch(step(jb.state_to_jax(state), jax.numpy.int32(2)))
    leaves = [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor)]
    assert all(torch.equal(was, now) for was, now in zip(wanted, leaves, strict=True))
