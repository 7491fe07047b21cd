"""Each row of a batch that replicas share has its own text alone, in its own place."""

import gc
import sys
import threading
import time
import weakref
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
from jax.sharding import Mesh
from support.refusals import refuses
from support.replicas import Case, run_cases
from support.slices import run_on_four
from support.threads import in_threads
from support.tiny import make_pair
from torch.testing import assert_close

import torch_dflash as td
from torch_dflash import progress
from torch_dflash.engine import slots as slots_module
from torch_dflash.engine.slots import Slots, Version
from torch_dflash.generation import prepare
from torch_dflash.plan import DecodePlan
from torch_dflash.requests.prompts import pad_rows
from torch_dflash.requests.request import Request, Row

NEW = 14
TWICE = Mesh(np.array(jax.devices()[:1] * 2), ("model",))
FIXED = {"max_length": 48, "batch_size": 2, "prefill_chunk_size": 16, "rounds_per_chunk": 2}
TOLD = {"outputs": ("output_logprobs", "output_scores"), "top_logprobs": 2}
GREEDY = {"do_sample": False, "eos_token_id": None, "max_new_tokens": NEW}
SAMPLED = GREEDY | {"do_sample": True, "temperature": 5.0, "top_k": 0, "seed": 11}


@pytest.fixture(scope="module")
def pair():
    return make_pair("qwen3", agree=6.0)


@pytest.fixture(scope="module")
def front(pair):
    return td.compile(*pair, mesh=TWICE, replicas=2, **FIXED)


def prompts(count):
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(1, 24, (count,), generator=generator).tolist()
    return [torch.randint(1, 90, (length,), generator=generator).tolist() for length in lengths]


def decode(engine, rows, **how):
    ids, mask = pad_rows(rows)
    return engine.generate(ids, mask, return_dict_in_generate=True, **how)


def alone(front, rows, **how):
    """A plain engine's text of each row by itself, with the row's own budget and seed."""
    said = []
    for at, row in enumerate(rows):
        own = {name: value[at] if isinstance(value, list) else value for name, value in how.items()}
        own |= {"seed": how["seed"] + at} if "seed" in how else {}
        said += decode(front.engines[0], [row], **own).new_tokens
    return said


def at_rest(front):
    """Waits until no replica has a thread; fails if a thread stays."""
    until = time.monotonic() + 60
    while any(thread.name.startswith("replica") for thread in threading.enumerate()):
        assert time.monotonic() < until, "a replica's thread goes on"
        time.sleep(0.01)
    assert [lane.busy for lane in front._shared._lanes] == [0, 0] and not front._shared.waiting


@pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("count", [1, 3, 7])
def test_rows_say_what_each_says_alone(front, how, count):
    """Rows of uneven lengths: fewer than replicas, up to the room of all, and more."""
    rows, how = prompts(count), how | {"max_new_tokens": [NEW - at for at in range(count)]}
    out, wanted = decode(front, rows, **how), alone(front, rows, **how)
    assert out.new_tokens == wanted
    ids, _ = pad_rows(rows)
    assert torch.equal(out.sequences[:, : ids.shape[1]], ids)
    assert sum(out.stats.widths.values()) >= sum(share.rounds for share in out.stats.replicas)
    shares = [(share.rows, share.rounds) for share in out.stats.replicas]
    assert sum(rows for rows, _ in shares) == count and out.stats.new_tokens == sum(how["max_new_tokens"])
    assert out.stats.prefilled == sum(map(len, rows))
    if count == 3:
        first, second, third = (len(lengths) for lengths in out.stats.acceptance_lengths)
        assert sorted(shares) == [(1, second), (2, max(first, third))]
    at_rest(front)


def test_what_a_call_draws_is_drawn_once(front):
    how = {name: value for name, value in SAMPLED.items() if name != "seed"}
    torch.manual_seed(3)
    said = decode(front, prompts(3), **how).new_tokens
    torch.manual_seed(3)
    ids, mask = pad_rows(prompts(3))
    seeds = [row.seed for row in front.read(ids, mask, how).rows]
    assert said == decode(front, prompts(3), **how, seed=seeds).new_tokens


@pytest.mark.parametrize("broken", ["order", "seeds"])
def test_a_wrong_order_and_seeds_of_a_replicas_own_are_noticed(front, monkeypatch, broken):
    rows = [[at + 1] * 6 for at in range(4)]  # of equal lengths: a row might stand in another's place
    wanted = alone(front, rows, **SAMPLED)
    assert decode(front, rows, **SAMPLED).new_tokens == wanted
    if broken == "order":
        enqueue = Slots.enqueue
        monkeypatch.setattr(Slots, "enqueue", lambda *given: enqueue(*given)[::-1])
    else:
        first, tensors = SAMPLED["seed"], slots_module.row_requests

        def counted_anew(rows, plan):
            return tensors([replace(row, seed=first + at) for at, row in enumerate(rows)], plan)

        monkeypatch.setattr(slots_module, "row_requests", counted_anew)
    assert decode(front, rows, **SAMPLED).new_tokens != wanted


@pytest.mark.heavy
def test_what_is_told_of_tokens_stands_in_its_row(pair):
    front, rows = td.compile(*pair, mesh=TWICE, replicas=2, **FIXED, **TOLD), prompts(5)
    asked = {"output_logprobs": True, "top_logprobs": 2, "output_scores": True}
    out = decode(front, rows, **SAMPLED, **asked)
    for at, row in enumerate(rows):
        own = decode(front.engines[0], [row], **(SAMPLED | {"seed": 11 + at}), **asked)
        assert torch.equal(out.top_ids[at : at + 1], own.top_ids)
        # Prompts are read in a program of one row, or of all: sums of another order.
        assert_close(out.logprobs[at : at + 1], own.logprobs)
        assert_close(torch.stack(out.scores)[:, at : at + 1], torch.stack(own.scores))


def test_a_stream_has_every_rows_tokens_in_their_order(front):
    rows = prompts(7)
    ids, mask = pad_rows(rows)
    said, reads = [[] for _ in rows], 0
    for gained in front.stream(ids, mask, **SAMPLED):
        reads += 1
        assert len(gained) == len(rows)
        for row, tokens in enumerate(gained):
            said[row] += tokens
    assert said == alone(front, rows, **SAMPLED) and reads > 4
    at_rest(front)


@pytest.mark.heavy
def test_pieces_of_a_stream_say_once_that_a_row_is_over(pair):
    ids, mask = pad_rows(prompts(3))
    options = {"mesh": TWICE, "replicas": 2, "output_logprobs": True, **GREEDY}
    over, logs = [0, 0, 0], [[], [], []]
    done = [False] * 3
    for pieces in td.stream(*pair, ids, mask, **options):
        for row, piece in enumerate(pieces):
            over[row] += piece.done and not done[row]
            assert piece.done or not done[row]
            done[row] = piece.done
            logs[row] += piece.logprobs
            assert len(piece.logprobs) == len(piece.tokens) == len(piece.drafted)
    assert over == [1, 1, 1] and all(len(row) == NEW for row in logs)


def test_a_stream_that_is_closed_frees_its_replicas(front):
    ids, mask = pad_rows(prompts(9))
    stream = front.stream(ids, mask, **GREEDY)
    next(stream)
    stream.close()
    at_rest(front)
    rows = prompts(3)
    assert decode(front, rows, **GREEDY).new_tokens == alone(front, rows, **GREEDY)
    never = front.stream(ids, mask, **GREEDY)
    del never
    at_rest(front)


class Broken(Exception):
    pass


@pytest.mark.parametrize("step", ["begin", "prefill", "advance", "read"])
def test_an_error_of_one_replica_ends_the_call_and_leaves_the_front_usable(front, monkeypatch, step):
    rows, runtime = prompts(9), front.engines[1].runtime

    def fail(*args, **more):
        raise Broken(step)

    with monkeypatch.context() as patch:
        for one in {"prefill": ("prefill", "feed")}.get(step, (step,)):
            patch.setattr(runtime, one, fail)
        with pytest.raises(Broken, match=step):
            decode(front, rows, **GREEDY)
        assert not front._shared.running  # at once: the call has waited for the others
        at_rest(front)
        ids, mask = pad_rows(rows)
        with pytest.raises(Broken, match=step):
            list(front.stream(ids, mask, **GREEDY))
        at_rest(front)
    assert decode(front, rows[:3], **GREEDY).new_tokens == alone(front, rows[:3], **GREEDY)


def test_a_call_does_not_wait_for_another_where_there_is_room(front, monkeypatch):
    """One replica holds up one call's rounds until another call is over."""
    over, runtime = threading.Event(), front.engines[front._shared._next().replica].runtime
    advance, said = runtime.advance, {}

    def held(*args):
        assert over.wait(60), "the second call waited for the first"
        return advance(*args)

    def second():
        time.sleep(0.1)
        said["second"] = decode(front, prompts(2)[1:], **GREEDY).new_tokens
        over.set()

    monkeypatch.setattr(runtime, "advance", held)
    errors = in_threads(lambda: said.update(first=decode(front, prompts(1), **GREEDY).new_tokens), second)
    assert not errors
    assert said["first"] == alone(front, prompts(1), **GREEDY)
    assert said["second"] == alone(front, prompts(2)[1:], **GREEDY)


def test_calls_of_many_threads_say_what_one_says(front):
    jobs = [(prompts(count), how) for count in (1, 2, 5) for how in (GREEDY, SAMPLED)]
    wanted, said = [alone(front, rows, **how) for rows, how in jobs], {}

    def speak(at):
        rows, how = jobs[at]
        said[at] = decode(front, rows, **how).new_tokens

    assert not in_threads(*[lambda at=at: speak(at) for at in range(len(jobs))])
    assert [said[at] for at in range(len(jobs))] == wanted
    at_rest(front)


def test_a_streamer_gets_the_one_row(front):
    got, ended, rows = [], [], prompts(1)
    put = lambda ids: got.append(ids.flatten().tolist())  # noqa: E731
    streamer = SimpleNamespace(put=put, end=lambda: ended.append(True))
    out = decode(front, rows, streamer=streamer, **GREEDY)
    assert got[0] == rows[0] and sum(got[1:], []) == out.new_tokens[0] and ended == [True]
    with refuses(ValueError, "streamer with 2 rows"):
        decode(front, prompts(2), streamer=streamer, **GREEDY)


@pytest.mark.heavy
def test_sessions_and_states_are_of_one_replica(front, tmp_path):
    rows = prompts(2)
    wanted = alone(front, rows, **GREEDY)
    gains = front.session().gains(rows[0], **GREEDY)
    assert [token for gain in gains for token in gain.tokens] == wanted[0]
    state = front.advance(front.start(*pad_rows(rows), **GREEDY))
    td.save_state(state, tmp_path / "state", front)
    for found in (state, td.load_state(tmp_path / "state", front)):
        while not bool(front.runtime.fetch(found.done).all()):
            found = front.advance(found)
        tokens = front.runtime.fetch(found.tokens)
        for at, row in enumerate(rows):
            assert tokens[at, len(row) : len(row) + NEW].tolist() == wanted[at]
    with refuses(ValueError, "3 rows", "batch_size=2"):
        front.start(*pad_rows(prompts(3)), **GREEDY)
    with refuses(ValueError, "is gone: engine.advance consumed this state"):
        front.advance(state)


@pytest.mark.heavy
def test_changed_weights_are_every_replicas(pair):
    target, drafter = make_pair("qwen3", agree=6.0)
    engine = td.compile(target, drafter, mesh=TWICE, replicas=2, **FIXED)
    rows = prompts(4)
    before = decode(engine, rows, **GREEDY).new_tokens
    with torch.no_grad():
        target.get_output_embeddings().weight.copy_(target.get_output_embeddings().weight.flip(0))
    after = decode(engine, rows, **GREEDY).new_tokens
    assert after == alone(engine, rows, **GREEDY) and all(a != b for a, b in zip(before, after, strict=True))


@pytest.mark.heavy
def test_a_front_is_freed_with_its_last_reference(pair):
    engine = td.compile(*pair, mesh=TWICE, replicas=2, **FIXED)
    decode(engine, prompts(3), **GREEDY)
    at_rest(engine)
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None


@pytest.mark.heavy
def test_nothing_compiles_after_warmup(pair):
    engine = td.compile(*pair, mesh=TWICE, replicas=2, **FIXED).warmup(progress=False)
    assert decode(engine, prompts(4), **GREEDY).stats.compilations == 0
    assert decode(engine, prompts(4), **SAMPLED).stats.compilations == 0


def test_warmup_without_a_terminal_says_that_other_replicas_compile(pair, monkeypatch, caplog):
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    line = "torch-dflash: compiling for the other replicas ..."
    fresh = td.compile(*pair, mesh=TWICE, replicas=2, **FIXED)
    fresh.warmup(progress=False)
    assert line not in caplog.messages
    fresh.warmup()
    assert caplog.messages.count(line) == 1


def test_what_replicas_cannot_be_is_refused(pair, front):
    with refuses(ValueError, "replicas=2 without a mesh", "mesh=2", '"auto"'):
        td.compile(*pair, replicas=2)
    with refuses(ValueError, "replicas=3 on 2 device(s)", "1 or 2"):
        td.compile(*pair, replicas=3, mesh=TWICE, **FIXED)
    for wrong in (0, 1.5, True, None, "2"):
        with refuses(ValueError, f"replicas={wrong!r}: must be an integer of at least 1"):
            td.compile(*pair, replicas=wrong, mesh=TWICE, **FIXED)
        with refuses(ValueError, f"replicas={wrong!r}"):
            td.generate(*pair, torch.ones(1, 3, dtype=torch.long), mesh=TWICE, replicas=wrong)
    with refuses(ValueError, "runtime='eager'", "runtime='xla'"):
        td.compile(*pair, replicas=2, mesh=TWICE, runtime="eager")
    with refuses(ValueError, "max_length=48"):
        decode(front, prompts(5), **(GREEDY | {"max_new_tokens": 60}))


def test_devices_are_counted_before_any_work(pair, monkeypatch):
    traced = lambda *_: pytest.fail("the target was traced first")  # noqa: E731
    monkeypatch.setattr("torch_dflash.engine.engine.Target", traced)
    with refuses(ValueError, "replicas=3 on 2 device(s)"):
        td.compile(*pair, replicas=3, mesh=TWICE, **FIXED)
    with refuses(ValueError, "mesh=99", "JAX has 1 device"):
        td.compile(*pair, mesh=99, **FIXED)


def test_generate_makes_replicas_as_large_as_their_share(pair):
    ids, mask = pad_rows(prompts(5))
    options = {"mesh": TWICE, "replicas": 2, **GREEDY}
    call = prepare("generate", *pair, ids, mask, options)
    assert call.options.batch_size == 4 and call.options.replicas == 2
    options = {"mesh": TWICE, "replicas": 2, **GREEDY}
    assert prepare("generate", *pair, ids[:2], mask[:2], options).options.batch_size == 1


def front_of(replicas, rows):
    """Slots whose replicas are never stepped."""
    plan = DecodePlan(capacity=16, batch_size=rows, block_size=4, verify_width=4)
    options = SimpleNamespace(prefill_chunk_size=16, replicas=replicas)
    return Slots(SimpleNamespace(plan=plan, options=options))


def queued(slots, rows):
    request = Request([Row(np.ones(1, np.int32), 1)], 0, torch.ones(1, 1))
    return slots.enqueue([request] * rows, Version(None, []))


def dealt(slots):
    return [list(lane.inbox) for lane in slots._lanes]


def test_rows_are_dealt_to_the_least_busy_in_the_order_of_arrival():
    slots = front_of(2, rows=3)
    first, second, third = queued(slots, 1), queued(slots, 3), queued(slots, 4)
    assert dealt(slots) == [[first[0], second[1], third[0]], [second[0], second[2], third[1]]]
    assert slots.waiting == 8 and list(slots._line) == third[2:]
    lane = slots._lanes[1]
    lane.inbox.popleft()
    third[2].cancel()  # given up while it waits: the next has its turn
    slots.freed(lane)
    assert list(lane.inbox) == [second[2], third[1], third[3]] and third[2].cancelled()


SHORT = Case("qwen3", "static", 2, 2, "sampled", "v1", rows=3, runtime="eager")
ONE_EACH = [
    Case("qwen3", "paged", 4, 4, "greedy", "v1", rows=6, compiled={"pool_pages": 2}),
    Case("llama", "static", 4, 4, "filters", "dflash2", rows=3),
    Case("gemma2", "static", 4, 4, "greedy", "plain", rows=7, capacity=2),
    Case("qwen3", "static", 4, 2, "sampled", "v1", capacity=2),
]
SLICES = [
    Case("gpt_oss", "static", 4, 2, "sampled", "v1", capacity=2),
    Case("qwen3_moe", "paged", 4, 2, "greedy", "dflash2", rows=7, capacity=2),
]


def same(case: Case) -> dict:
    (found,) = run_cases([case])
    assert found["replicas"] == [found["one"]] * 2, case
    assert found["threads"] == [found["one"][0]] * 3, case
    assert found["compiled"] == [0, 0]
    assert sum(found["shares"]) == case.rows and max(found["shares"]) < case.rows
    size = case.mesh // case.replicas
    places = [list(range(first, first + size)) for first in range(0, case.mesh, size)]
    assert found["weights"] == found["states"] == places
    assert bool(found["exchanged"]) == (size > 1)
    return found


@pytest.mark.heavy
def test_two_devices_share_rows():
    same(SHORT)


@pytest.mark.heavy
@pytest.mark.parametrize("case", ONE_EACH[:3], ids=lambda case: f"{case.family}-{case.cache}")
def test_devices_share_rows_of_any_family(case):
    """Families without slices decode too, on one device each. All replicas trace each step once."""
    found = same(case)
    assert found["traced"][1] == found["traced"][0] > 0


@pytest.mark.heavy
@pytest.mark.parametrize("case", [*SLICES, ONE_EACH[3]], ids=lambda case: f"{case.family}-{case.cache}")
def test_slices_share_rows(case):
    same(case)


@pytest.mark.heavy
def test_replicas_on_one_device_are_noticed():
    with pytest.raises(AssertionError):
        same(SHORT._replace(break_by="one device"))


LOADED = """
import torch, torch_dflash as td, jax, jax_bridge as jb
from support.slices import make_sliceable, prompts
target, drafter = make_sliceable("qwen3", "2x2", "v1")
target.save_pretrained("FOLDER")
options = {"max_length": 64, "prefill_chunk_size": 32, "rounds_per_chunk": 2, "filters": False}
asked = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
wanted = td.generate(target, drafter, *prompts(), runtime="eager", **asked)
for loaded_on, mesh, replicas in ((None, 2, 2), (2, 4, 2)):
    loaded = jb.load("FOLDER", mesh=loaded_on)
    front = td.compile(loaded, drafter, mesh=mesh, replicas=replicas, **options)
    assert torch.equal(front.generate(*prompts(), **asked), wanted), mesh
    first, second = (engine._params() for engine in front.engines)
    for name, leaf in loaded.arrays.items():
        assert first["target.model." + name] is leaf, name  # not copied
        copied = jax.tree.leaves(second["target.model." + name])
        devices = {one.id for part in copied for one in part.devices()}
        assert devices == set(range(mesh // 2, mesh)), (name, devices)
    again = front.engines[1]._params()
    assert all(again[name] is leaf for name, leaf in second.items())  # and once
try:
    td.compile(jb.load("FOLDER", mesh=4), drafter, mesh=4, replicas=2, **options)
except ValueError as error:
    assert "4 devices" in str(error) and "first replica" in str(error), error
    print("checked")
"""
STATES = """
import torch, torch_dflash as td
from support.slices import make_sliceable, prompts
target, drafter = make_sliceable("qwen3", "2x2", "v1")
fixed = {"max_length": 64, "batch_size": 3, "prefill_chunk_size": 32, "rounds_per_chunk": 2}
asked = {"max_new_tokens": 20, "do_sample": True, "seed": 3, "top_k": 0, "eos_token_id": None}
wanted = td.compile(target, drafter, **fixed).generate(*prompts(), **asked)
eager = td.compile(target, drafter, runtime="eager", **fixed)
front = td.compile(target, drafter, mesh=4, replicas=REPLICAS, **fixed)
def finish(engine, state):
    while not bool(torch.tensor(engine.runtime.fetch(state.done)).all()):
        state = engine.advance(state)
    return engine.runtime.fetch(state.tokens)
def check(tokens):
    for row, (ids, mask) in enumerate(zip(*prompts())):
        length = int(mask.sum()) + 20
        assert tokens[row, :length].tolist() == wanted[row, -length:].tolist(), row
where = []
for _ in range(2):
    state = front.start(*prompts(), **asked)
    where.append(state.tokens.devices())
    state = front.advance(state)
    assert state.tokens.devices() == where[-1]  # it goes on where it lies
    td.save_state(state, "FILE", front)
    check(finish(front, state))
assert not where[0] & where[1], where
check(finish(eager, td.load_state("FILE", eager)))
placed = [td.load_state("FILE", front) for _ in range(2)]
assert not placed[0].tokens.devices() & placed[1].tokens.devices()
check(finish(front, placed[1]))
check(finish(front.engines[0], front.engines[1].advance(placed[0])))  # from one replica to another
eager_state = eager.advance(eager.start(*prompts(), **asked))
td.save_state(eager_state, "FILE", eager)
check(finish(front, td.load_state("FILE", front)))
print("checked")
"""


@pytest.mark.heavy
def test_what_was_loaded_is_copied_to_the_other_replicas(tmp_path):
    assert run_on_four(["-c", LOADED.replace("FOLDER", str(tmp_path))]).strip().endswith("checked")


@pytest.mark.heavy
@pytest.mark.parametrize("replicas", [2, 4])
def test_a_state_goes_on_in_any_replica(tmp_path, replicas):
    code = STATES.replace("FILE", str(tmp_path / "state")).replace("REPLICAS", str(replicas))
    assert run_on_four(["-c", code]).strip().endswith("checked")


ARITHMETIC = """
import torch, torch_dflash as td
from support.slices import make_sliceable, prompts
target, drafter = make_sliceable("llama", "2x2", "v1")
target, drafter = target.DTYPE(), drafter.DTYPE()
options = {"max_length": 64, "batch_size": 2, "prefill_chunk_size": 32, "rounds_per_chunk": 2}
asked = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
front = td.compile(target, drafter, mesh=2, replicas=2, GIVEN, **options)
wanted = [engine.generate(*(part[:2] for part in prompts()), **asked) for engine in front.engines]
plain = td.compile(target, drafter, GIVEN, **options).generate(*(part[:2] for part in prompts()), **asked)
assert torch.equal(wanted[0], plain) and torch.equal(wanted[1], plain)
assert torch.equal(front.generate(*(part[:2] for part in prompts()), **asked), plain)
print("checked")
"""


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("dtype", "given"),
    [("float", "quantize='int8'"), ("bfloat16", "quantize='int8'"), ("float", "compute='bfloat16'")]
    + [("bfloat16", "compute='auto'")],
)
def test_every_arithmetic_is_the_one_of_the_first_device(dtype, given):
    code = ARITHMETIC.replace("DTYPE", dtype).replace("GIVEN", given)
    assert run_on_four(["-c", code]).strip().endswith("checked")


RULES = """
import torch, torch_dflash as td
from support.slices import prompts
from support.tiny import correlate, make_drafter, make_target
from support.tokenizers import byte_tokenizer
target = make_target("llama", vocab_size=288, max_position_embeddings=128, eos_token_id=0, pad_token_id=0)
drafter, tokenizer = make_drafter(target), byte_tokenizer()
correlate(target, drafter, 6.0)
def never(tokens, length, logits):
    return logits.index_fill(2, torch.tensor([7, 18, 200], device=logits.device), -torch.inf)
table = td.processors.GrammarTable(states=32, classes=32, vocab_size=288)
kinds = ("repetition_penalty", "suppress_tokens", "grammar", table, td.BlockProcessor(never))
fixed = {"max_length": 96, "prefill_chunk_size": 32, "rounds_per_chunk": 2, "processors": kinds}
eager = td.compile(target, drafter, runtime="eager", batch_size=3, **fixed)
front = td.compile(target, drafter, mesh=2, replicas=2, batch_size=2, **fixed)
numbers = td.Grammar.regex("([0-9]{1,3}|ab)(-([0-9]{1,3}|ab)){5,}", tokenizer)
date = td.Grammar.regex("[0-9]{4}-[0-9]{2}-[0-9]{2}", tokenizer, device=True)
asked = {"max_new_tokens": 24, "do_sample": True, "temperature": 3.0, "top_k": 0, "seed": 5}
ruled = asked | {"repetition_penalty": 1.2, "grammar": [numbers, date, None]}
none_left = asked | {"grammar": [None, None, numbers], "suppress_tokens": tokenizer.encode("0123456789a")}
assert torch.equal(front.generate(*prompts(), **ruled), eager.generate(*prompts(), **ruled))
for engine in (eager, front):
    try:
        engine.generate(*prompts(), **none_left)
    except ValueError as error:
        assert "row 2: token" in str(error), error
    else:
        raise AssertionError("a row outside of its grammar")
assert torch.equal(front.generate(*prompts(), **ruled), eager.generate(*prompts(), **ruled))
print("checked")
"""


@pytest.mark.heavy
def test_grammars_penalties_and_processors_are_each_rows_own_on_any_replica():
    assert run_on_four(["-c", RULES]).strip().endswith("checked")


LINES = """
import json, sys, io, contextlib, pathlib
from support.tiny import make_drafter, make_target
from support.tokenizers import TEMPLATE, byte_tokenizer
from torch_dflash.cli import main
folder = pathlib.Path("FOLDER")
target = make_target("qwen3", vocab_size=257, max_position_embeddings=128, eos_token_id=0, pad_token_id=0)
target.save_pretrained(folder / "target")
byte_tokenizer(TEMPLATE).save_pretrained(folder / "target")
make_drafter(target).save_pretrained(folder / "drafter")
lines = [{"prompt": "x" * (1 + 3 * at % 7)} for at in range(7)]
(folder / "lines").write_text("".join(json.dumps(line) + chr(10) for line in lines))
pair = ["--target", str(folder / "target"), "--drafter", str(folder / "drafter")]
said = []
for more in (["--runtime", "eager"], ["--mesh", "4", "--replicas", "4"]):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(
            ["generate", *pair, "--jsonl", "--file", str(folder / "lines"), "--batch-size", "1"]
            + ["--max-new-tokens", "9", "--temperature", "3", "--seed", "4", *more]
        ) == 0
    said.append([json.loads(line) for line in out.getvalue().splitlines()])
for line in [*said[0], *said[1]]:
    del line["seconds"]
assert said[0] == said[1] and len(said[0]) == 7, said
wrong = ["--jsonl", "--file", str(folder / "lines"), "--mesh", "4", "--replicas", "3"]
assert main(["generate", *pair, *wrong]) == 2
print("checked")
"""


@pytest.mark.heavy
def test_lines_are_shared_by_replicas(tmp_path):
    assert run_on_four(["-c", LINES.replace("FOLDER", str(tmp_path))]).strip().endswith("checked")
