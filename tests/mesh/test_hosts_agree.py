"""Agreement of processes, played by two threads: differing, late and silent processes."""

import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
from support.refusals import refuses
from transformers import GenerationConfig

import jax_bridge.hosts.hosts as hosts
import jax_bridge.hosts.watch as watch
from jax_bridge.hosts.hosts import Hosts, Lead, spanning
from jax_bridge.hosts.watch import OVER, Watch
from jax_bridge.mesh.shape import devices_of
from torch_dflash.engine.hosts import READ, packed, read_broadcast, read_compared, unpacked
from torch_dflash.requests.request import UNSET


class Shelf:  # in the place of `jax_bridge.hosts.store.Store`: one dictionary for all
    def __init__(self, process: int, kept: dict, change: threading.Condition):
        self.process, self.count, self._kept, self._change = process, 2, kept, change
        self.answers = True

    def put(self, key, value):
        if not self.answers:
            raise RuntimeError("UNAVAILABLE")
        with self._change:
            self._kept[key] = value
            self._change.notify_all()

    def put_bytes(self, key, value):
        self.put(key, value)
        return 1

    def wait(self, key, seconds):
        with self._change:
            if not self._change.wait_for(lambda: key in self._kept, min(seconds, 5)):
                raise RuntimeError("DEADLINE_EXCEEDED")
            return self._kept[key]

    def wait_bytes(self, key, pieces, seconds):
        return self.wait(key, seconds)

    def entries(self, folder):
        found = {key: key.rpartition("/") for key in [*self._kept]}
        return {int(name): self._kept[key] for key, (of, _, name) in found.items() if of == folder}

    def drop(self, key):
        for other in [one for one in self._kept if one == key or one.startswith(f"{key}/")]:
            del self._kept[other]

    def barrier(self, name, seconds):
        with self._change:
            if not self._change.wait_for(lambda: len(self.entries(name)) == 2, seconds):
                raise RuntimeError("DEADLINE_EXCEEDED")


@pytest.fixture
def shelves(monkeypatch):
    monkeypatch.setattr(watch, "LATE", 0.2)
    monkeypatch.setattr(watch, "BEAT", 0.01)
    monkeypatch.setattr(watch, "FAREWELL", 0)
    kept, change = {}, threading.Condition()
    return [Shelf(process, kept, change) for process in (0, 1)]


def both(shelves, call):
    def one(rank):
        shelf = shelves[rank]
        this = Hosts(shelf, seen := Watch(shelf))
        seen.until_all_answer = lambda: None  # no process gives signs of life here
        try:
            return call(rank, this)
        except (RuntimeError, TypeError, ValueError) as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, (0, 1)))


GIVEN = torch.ones(1, 1), None, {}


def readings(shelves, read, given=GIVEN, found=lambda found: {}):
    """Results of one `read_broadcast` in two threads; ``read`` has the rank before the request."""

    def call(rank, this):
        own = given(rank) if callable(given) else given
        return read_broadcast(this, "generate", {}, own, lambda *request: read(rank, *request), found)

    return both(shelves, call)


def test_what_process_0_is_given_counts(shelves):
    seeds, tokenizers = [], [object(), object()]

    def read(rank, ids, mask, options):
        seeds.append(options["seed"])
        return ids.tolist(), mask, options["tokenizer"], options["temperature"]

    def given(rank):
        options = {"tokenizer": tokenizers[rank], "temperature": [0.5 + rank]}
        return torch.full((1 + rank, 3), rank), None, options

    ours, theirs = readings(shelves, read, given)
    assert ours == ([[0, 0, 0]], None, tokenizers[0], [0.5])
    assert theirs == ([[0, 0, 0]], None, tokenizers[1], [0.5])
    assert seeds[0] == seeds[1]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (lambda rank: ("generate", {"the plan": f"{rank} rows"}), "the plan is 1 rows there, 0 rows in"),
        (lambda rank: (("generate", "warmup")[rank], {}), "the call is warmup there, generate in process 0"),
        (lambda rank: ("advance", {"more": "x"} if rank else {}), "more is x there, not said in process 0"),
    ],
)
def test_what_differs_is_named_in_both(shelves, what, words):
    for said in both(shelves, lambda rank, this: this.agree(*what(rank))):
        assert isinstance(said, RuntimeError) and "process 1 is not where process 0 is: " + words in str(said)


def test_what_one_process_refuses_is_known_to_the_other(shelves):
    def read(rank, *given):
        if rank:
            raise ValueError("top_k=-1")

    for said in readings(shelves, read, found=lambda found: {READ: "a request"}):
        assert "what it reads is ValueError: top_k=-1 there, a request in process 0" in str(said)


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_is_named_before_what_is_not_said_for_it(shelves, failing):
    def call(rank, this):
        def read():
            if rank == failing:
                raise OSError("no such folder")
            return "a checkpoint"

        return read_compared(
            this, "jb.load", read, lambda found: {"the mesh": "[0]", "the checkpoint": found}
        )

    said = both(shelves, call)
    there, here = ("OSError: no such folder", "no error")[:: 1 if failing else -1]
    assert f"what it reads is {there} there, {here} in process 0" in str(said[1 - failing])


@pytest.mark.parametrize(
    "prompts", [torch.ones(1, 3, device="meta"), np.array([["a"]]), torch.ones(1, 3) * 1j]
)
def test_prompts_that_cannot_be_sent_are_refused_in_both(shelves, prompts):
    for said in readings(shelves, lambda *given: given, (prompts, None, {})):
        assert "what it reads is not said there, " in str(said) and "in process 0" in str(said)


def test_what_one_cannot_unpack_is_known_to_the_other(shelves, monkeypatch):
    def unpack(sent, own):
        if own[2]["rank"]:
            raise TypeError("of another kind")
        return unpacked(sent, own)

    monkeypatch.setattr("torch_dflash.engine.hosts.unpacked", unpack)
    for said in readings(shelves, lambda *given: given, lambda rank: (None, None, {"rank": rank})):
        assert "what it reads is TypeError: of another kind there, no error in process 0" in str(said)


def test_what_both_refuse_is_each_ones_own_error(shelves):
    def read(*given):
        raise ValueError("top_k=-1")

    assert [str(said) for said in readings(shelves, read)] == ["top_k=-1"] * 2


def test_who_does_not_come_is_named_and_left(shelves):
    shelf = shelves[0]
    shelf._kept["beats/0"] = "1"
    seen = Watch(shelf)
    seen.until_all_answer = lambda: None
    this = Hosts(shelf, seen)
    with refuses(RuntimeError, "process 1 did not come to generate within 0.2 seconds"):
        this.agree("generate", {})
    assert "process 0 left generate: RuntimeError" in shelf._kept["told/1"]
    with refuses(RuntimeError, "process 0 left generate", "all processes have to be started anew"):
        this.agree("generate", {})


def interrupt(*given):
    raise KeyboardInterrupt


@pytest.mark.parametrize("step", ["put_bytes", "put", "barrier", "entries", "drop"])
def test_an_interrupt_while_others_are_waited_for_ends_all(shelves, monkeypatch, step):
    put = shelves[0].put
    monkeypatch.setattr(shelves[0], "barrier", lambda *given: None)
    of_calls = lambda key, *given: (interrupt if "calls" in key else put)(key, *given)  # noqa: E731
    monkeypatch.setattr(shelves[0], step, of_calls if step == "put" else interrupt)
    this = Hosts(shelves[0], Watch(shelves[0]))
    this._calls = 1
    with pytest.raises(KeyboardInterrupt):
        this.agree("generate", {})
    assert shelves[0]._kept["told/1"] == "process 0 left generate: KeyboardInterrupt"


def test_an_interrupt_while_it_is_asked_who_has_failed_ends_all(shelves, monkeypatch):
    monkeypatch.setattr(seen := Watch(shelves[0]), "until_all_answer", interrupt)
    with pytest.raises(KeyboardInterrupt), Hosts(shelves[0], seen).collective("generate"):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE")
    assert shelves[0]._kept["told/1"].startswith("process 0 left generate: JaxRuntimeError")


def test_what_was_not_told_is_told_as_python_ends(shelves, monkeypatch):
    """A second interrupt may have kept the first, or a call's error, from the other processes."""
    for error, told in ((None, "KeyboardInterrupt"), (ValueError("no"), "ValueError: no")):
        seen, put = Watch(shelves[0]), shelves[0].put
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(shelves[0], "put", interrupt)
            if error is None:
                with Hosts(shelves[0], seen).collective("generate"):
                    interrupt()
            seen.leave("generate", error)
        assert not any(key.startswith("told/") for key in shelves[0]._kept)
        if error is None:
            seen.leave("its program", KeyboardInterrupt())
        else:
            monkeypatch.setattr(watch.os, "_exit", interrupt)
            with pytest.raises(KeyboardInterrupt):
                seen._at_exit()
        assert shelves[0].put == put and shelves[0]._kept.pop("told/1") == f"process 0 left generate: {told}"


def test_another_thread_is_refused(shelves):
    this = Hosts(shelves[0], Watch(shelves[0]))
    with ThreadPoolExecutor(1) as pool, refuses(RuntimeError, "from the thread that made the first one"):
        pool.submit(this.agree, "generate", {}).result()


def test_a_stream_goes_as_far_as_process_0_goes(shelves):
    ended = []
    ours, theirs = (Lead(shelf, "streams/1", lambda: bool(ended)) for shelf in shelves)
    assert ours.go() and theirs.go() and ours.go() and theirs.go()
    assert "streams/1/0" in shelves[0]._kept and ours.go() and "streams/1/0" not in shelves[0]._kept
    assert not theirs.stop()
    assert ours.stop() and not theirs.go()
    ended.append("Python")
    assert theirs.stop()  # no process has to answer


def judged(shelves, monkeypatch, change, busy=True, silent=5, beats=500):
    """The end of process 1 while process 0 gives signs of life, except where ``change`` stops them."""
    monkeypatch.setattr(watch, "SILENT", silent)
    ends, over = [], threading.Event()

    def end(said):
        ends.append(said)
        over.set()
        seen._over.set()

    seen = Watch(shelves[1], end)
    threads = [threading.Thread(target=kind, daemon=True) for kind in (seen._live, seen._judge)]
    if busy:
        seen._busy.append("generate")
    for thread in threads:
        thread.start()
    for beat in range(beats):
        if over.wait(0.01):
            break
        change(beat)
    said = [*ends]  # a process that rests is busy again as its threads end
    seen._over.set()
    for thread in threads:
        thread.join()
    return said


def test_silence_is_noticed_and_life_is_not(shelves, monkeypatch):
    beat = lambda count: shelves[0].put("beats/0", f"{count} 0")  # noqa: E731
    started = time.monotonic()
    ends = judged(shelves, monkeypatch, lambda count: beat(min(count, 10)))
    assert ends[:1] == ["process 0 has not answered for 0 seconds"] and time.monotonic() - started < 5

    def unreachable(count):
        shelves[1].answers = count < 10
        beat(count)

    assert judged(shelves, monkeypatch, unreachable)[:1] == ["process 0 has not answered for 0 seconds"]


def test_a_watch_gives_signs_of_life_hears_what_is_said_and_judges(shelves, monkeypatch):
    monkeypatch.setattr(watch.atexit, "register", lambda call: None)
    kept, ends = shelves[0]._kept, queue.Queue()
    seen = Watch(shelves[1], ends.put)
    with seen.busy("generate"):
        seen.start()
        shelves[0].put("beats/0", OVER)
        assert ends.get(timeout=30) == "process 0 has ended, and this one is in generate"
    assert "beats/1" in kept
    shelves[0].put("beats/0", "1 0")
    Watch(shelves[0]).leave("generate", ValueError("of mine"))
    while (said := ends.get(timeout=30)) != "process 0 left generate: ValueError: of mine":
        assert said.startswith("process 0 has ended")
    seen._over.set()
    for thread in seen._threads:
        thread.join()


def test_a_process_that_lives_and_does_nothing_is_missed(shelves, monkeypatch):
    def change(count, done):
        shelves[0].put("beats/0", f"{count} {done}")

    words = "process 0 is alive, and did not take part in generate within 0.2 seconds"
    begin = Watch.step
    monkeypatch.setattr(Watch, "_live", lambda self, live=Watch._live: (begin(self), live(self)))
    assert judged(shelves, monkeypatch, lambda count: change(count, 0), silent=10**6)[:1] == [words]
    assert judged(shelves, monkeypatch, lambda count: change(count, 1), silent=10**6, beats=50) == []


def test_a_step_that_nobody_ends_is_given_up(shelves, monkeypatch):
    monkeypatch.setattr(watch, "STUCK", 0.2)
    words = "no process has got on with generate for 0.2 seconds; all are in it"
    change = lambda count: shelves[0].put("beats/0", f"{count} 0")  # noqa: E731
    assert judged(shelves, monkeypatch, change, silent=10**6)[:1] == [words]


def test_a_process_that_has_ended_is_missed_in_a_call_alone(shelves, monkeypatch):
    over = lambda count: shelves[0].put("beats/0", OVER)  # noqa: E731
    words = "process 0 has ended, and this one is in generate"
    assert judged(shelves, monkeypatch, over)[:1] == [words]
    assert judged(shelves, monkeypatch, over, busy=False, beats=50) == []
    monkeypatch.setattr(Watch, "_live", lambda self, live=Watch._live: _resting(self, live))
    assert judged(shelves, monkeypatch, over, beats=50) == []


class Fleeting(list):  # calls that end as soon as another thread has seen them
    def __bool__(self):
        found = len(self) > 0
        self.clear()
        return found


def test_a_call_that_ends_while_it_is_judged_does_not_end_the_watch(shelves, monkeypatch):
    monkeypatch.setattr(watch, "STUCK", 0.02)
    ends = []
    for beat, late in ((OVER, 0), ("1 0", 100)):
        seen = Watch(shelves[1], ends.append)
        seen._busy = Fleeting(["generate"])
        seen._end_for(0, beat, 0, late)
    assert ["process 0 has ended" in ends[0], "did not take part in generate" in ends[1]] == [True, True]
    over = iter([False, False, False, True])
    seen = Watch(shelves[1], ends.append)
    seen._busy, seen._over = Fleeting(["generate"]), SimpleNamespace(wait=lambda seconds: next(over))
    seen._judge()
    assert ends[2:] and all("got on with generate" in said for said in ends[2:])


def _resting(seen, live):
    """A process that rests inside of its call all the time."""
    with seen.paused("generate"):
        live(seen)


def test_process_0_ends_when_the_other_has_heard_why(shelves, monkeypatch):
    monkeypatch.setattr(watch, "FAREWELL", 5)
    order: list[str] = []
    monkeypatch.setattr(watch.os, "_exit", lambda status: order.append(f"ended {status}"))
    ends = threading.Thread(target=Watch(shelves[0])._exit, args=("of mine",))
    ends.start()
    assert shelves[1].wait("told/1", 5) == "of mine"
    time.sleep(0.3)
    order.append("heard")
    shelves[1].put("heard/1", "")
    ends.join()
    assert order == ["heard", "ended 1"]


@pytest.mark.parametrize(
    ("indices", "count", "words"),
    [
        ([0, 1], 2, ["devices of 2 processes, which have not joined", "jax.distributed.initialize()"]),
        ([0, 1], 3, ["processes [0, 1] of 3, and this is process 0", "devices of every process"]),
        ([1], 2, ["processes [1] of 2, and this is process 0"]),
    ],
)
def test_a_mesh_of_processes_that_are_not_all_here_is_refused(monkeypatch, indices, count, words):
    devices = [SimpleNamespace(process_index=index) for index in indices]
    monkeypatch.setattr(hosts, "parts_of", lambda mesh, replicas: [devices])
    monkeypatch.setattr(jax, "process_count", lambda: count)
    with refuses(ValueError, *words):
        spanning("auto")


def test_one_processs_devices_need_no_others():
    assert spanning(None) is None and spanning("auto") is None and devices_of(1) is None


def test_arguments_come_as_they_were():
    own = object()
    given = (
        torch.tensor([[1, 2], [3, 4]]),
        None,
        {
            "temperature": torch.tensor([0.1, 1.5]),
            "eos_token_id": UNSET,
            "sequence_bias": {(1, 2): -0.5, (3,): 2.0},
            "stop_strings": ["a", "ü"],
            "seed": 2**64 - 1,
            "tokenizer": own,
            "empty": torch.zeros(0, 3, dtype=torch.int32),
        },
    )
    other = (None, None, {"tokenizer": own, "temperature": 3})
    ids, mask, options = unpacked(packed(given), other)
    assert torch.equal(ids, given[0]) and ids.dtype == torch.int64 and mask is None
    assert torch.equal(options.pop("temperature"), given[2].pop("temperature"))
    empty = options.pop("empty")
    assert empty.shape == (0, 3) and empty.dtype == given[2].pop("empty").dtype
    assert options == given[2] and options["tokenizer"] is own
    config = GenerationConfig(max_new_tokens=7, top_p=0.3, bad_words_ids=[[1, 2]])
    assert unpacked(packed(config), None).to_dict() == config.to_dict()
