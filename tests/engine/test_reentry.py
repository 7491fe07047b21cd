"""User code that calls its engine is refused inside of a step, and served outside."""

import threading

import pytest
import torch
from support.scripted import own_text
from support.threads import in_threads, in_time
from support.tiny import make_target
from torch import nn

import torch_dflash as td

PROMPT, NEW = [5, 6, 7], 4
IDS = torch.tensor([PROMPT])
ASKED = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
SIZES = {"max_length": 32, "prefill_chunk_size": 16}


@pytest.fixture(scope="module")
def target():
    return make_target("llama")


class Calls:  # an engine whose user code calls ``call``
    def __init__(self, target, kind, runtime="eager"):
        self.call = lambda: None
        made = {"runtime": runtime} | SIZES
        if kind == "proposer":
            self.engine = td.compile(target, _proposer(self), **made)
        else:
            made["processors"] = (_processor(self, kind),)
            self.engine = td.compile(target, None, **made)

    def text(self):
        return in_time(lambda: self.engine.generate(IDS, **ASKED)[0, len(PROMPT) :].tolist())


def _processor(calls, kind):
    def bias(*given):
        calls.call()
        return given[-1]

    class Bias(nn.Module):
        def forward(self, ids, scores):
            return bias(ids, scores)

    if kind == "block":
        return td.BlockProcessor(bias)
    return td.HostProcessor(Bias() if kind == "module" else bias, pure=True)


def _proposer(calls):
    class Asks(td.Proposer):
        name, width = "asks", 4

        def __deepcopy__(self, memo):
            return Asks()

        def propose(self, pstate, anchor, length, embed, head):
            calls.call()
            return td.Draft(anchor[:, None].expand(-1, 3), length * 0 + 3), pstate

    return Asks()


KINDS = ("host", "module", "block", "proposer")
ENGINE = {
    "generate": lambda engine: engine.generate(IDS, **ASKED),
    "stream": lambda engine: engine.stream(IDS, **ASKED),
    "session": lambda engine: engine.session(),
    "start": lambda engine: engine.start(IDS, **ASKED),
    "warmup": lambda engine: engine.warmup(progress=False),
    "refresh": lambda engine: engine.refresh(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_user_code_inside_of_a_step_is_refused(target, kind):
    calls = Calls(target, kind)
    for door in ENGINE.values():
        calls.call = lambda door=door: door(calls.engine)
        with pytest.raises(RuntimeError, match="user code calls .* inside of a step of the same"):
            calls.text()
    calls.call = lambda: None
    assert calls.text() == own_text(target, PROMPT, NEW)


def test_user_code_that_is_traced_is_refused(target):
    calls, other = Calls(target, "block", "xla"), td.compile(target, None, **SIZES)
    for engine, words in ((calls.engine, "inside of a step of the same"), (other, "while JAX traces a step")):
        calls.call = lambda engine=engine: engine.generate(IDS, **ASKED)
        with pytest.raises(RuntimeError, match=f"user code .*{words}"):
            calls.text()


def test_a_criterion_that_asks_for_itself_is_refused(target):
    def stop(ids, scores):
        return say(stopping_criteria=[stop]) is None

    def say(**options):
        return td.generate(target, None, IDS, runtime="eager", **ASKED, **options)

    with pytest.raises(RuntimeError, match="user code .*inside of a step of the same engine"):
        say(stopping_criteria=[stop])
    other = lambda ids, scores: say() is None  # noqa: E731 - of another engine
    assert say(stopping_criteria=[other]).tolist() == say().tolist()


@pytest.mark.parametrize("pure", [True, False])
def test_a_processor_that_asks_for_itself_is_refused(target, pure):
    def bias(ids, scores):
        say(processors=asked)
        return scores

    def say(**options):
        return td.generate(target, None, IDS, runtime="eager", **ASKED, **options)

    asked = (td.HostProcessor(bias, pure),)
    with pytest.raises(RuntimeError, match="user code makes a call with itself"):
        say(processors=asked)
    own, asked = asked, (td.HostProcessor(lambda ids, scores: scores, pure),)
    assert say(processors=own + asked).tolist() == say().tolist()  # a call without itself


@pytest.mark.parametrize("kind", ["host", "proposer"])
def test_user_code_may_call_other_engines_and_the_model(target, kind):
    other = td.compile(target, None, runtime="eager", **SIZES)
    calls, own = Calls(target, kind), own_text(target, PROMPT, NEW)
    for call in (lambda: other.generate(IDS, **ASKED), lambda: own_text(target, PROMPT, 1)):
        calls.call = call
        assert calls.text() == own


def test_streamers_and_readers_may_call_their_engine(target):
    engine, own = td.compile(target, None, runtime="eager", **SIZES), own_text(target, PROMPT, NEW)
    heard = []

    class Streamer:
        def put(self, ids):
            heard.append(engine.generate(IDS, **ASKED)[0, len(PROMPT) :].tolist())

        end = lambda self: self.put(None)  # noqa: E731

    engine.generate(IDS, streamer=Streamer(), **ASKED)
    for _ in engine.stream(IDS, **ASKED):
        heard.append(engine.generate(IDS, **ASKED)[0, len(PROMPT) :].tolist())
    assert len(heard) > 4 and all(text == own for text in heard)


def test_a_call_of_another_thread_waits_its_turn(target):
    calls, own = Calls(target, "host"), own_text(target, PROMPT, NEW)
    inside, texts = threading.Event(), []

    def first():
        calls.call = lambda: (inside.set(), setattr(calls, "call", lambda: None), other.join(0.2))
        texts.append(calls.text())

    other = threading.Thread(target=lambda: (inside.wait(), texts.append(calls.text())))
    other.start()
    assert in_threads(first) == []
    other.join()
    assert texts == [own, own]
