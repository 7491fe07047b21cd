"""Runs a scenario in each of two processes: ``python -m support.host_scenarios RANK PORT NAME ...``."""

import sys
import time
from typing import Any

import jax
import torch

import jax_bridge as jb
import torch_dflash as td
from support.hosts import PATIENT, SILENT
from support.slices import make_sliceable, prompts

FIXED = {"max_length": 96, "batch_size": 3, "prefill_chunk_size": 32}
ASKED = {"max_new_tokens": 30, "eos_token_id": None}


def say(*words: Any) -> None:
    print(*words, flush=True)


def other_prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """The input of process 1 in the place of `prompts`: no process reads it."""
    return torch.ones(2, 4, dtype=torch.long), torch.ones(2, 4, dtype=torch.long)


def plain_target(layers: int = 1) -> Any:
    return make_sliceable("llama", "2x2", "plain")[0]


def equal(rank: int, family: str, cache: str, drafter: str, seed: str) -> None:
    """Both give one device's text for process 0's prompts, with the seed that process 0 has or draws."""
    pair = make_sliceable(family, "2x2", drafter)
    engine = td.compile(*pair, mesh="auto", cache=cache, **FIXED)
    alone = td.compile(*pair, runtime="eager", cache=cache, **FIXED)
    given = other_prompts() if rank else prompts()
    picks = {"do_sample": True, "temperature": 0.9, "top_k": 0}
    for asked in ({}, picks):
        own = asked | ({"seed": 5 + rank} if seed == "given" else {})
        for torch_seed in (11, 12):
            torch.manual_seed(torch_seed + 7 * rank)
            found = engine.generate(*given, **ASKED, **own)
            torch.manual_seed(torch_seed)
            wanted = alone.generate(*prompts(), **ASKED, **asked | ({"seed": 5} if seed == "given" else {}))
            assert torch.equal(found, wanted), (rank, asked, found.tolist(), wanted.tolist())
    say("checked")


def doors(rank: int, folder: str) -> None:
    """Every other door: checkpoints, td.generate, streams, states, refusals."""
    from torch_dflash.storage.weight_files import Stored

    read, part, whole = [0], Stored.read_part, Stored.read

    def count(tensor):
        read[0] += tensor.nbytes
        return tensor

    Stored.read_part = lambda self, index: count(part(self, index))
    Stored.read = lambda self: count(whole(self))
    loaded = jb.load(folder, mesh="auto")
    say("read", read[0])
    _, drafter = make_sliceable("qwen3_moe", "2x2", "v1")
    given = other_prompts() if rank else prompts()
    alone = td.compile(make_sliceable("qwen3_moe", "2x2", "v1")[0], drafter, runtime="eager", **FIXED)
    wanted = alone.generate(*prompts(), **ASKED)
    found = td.generate(loaded, drafter, *given, **ASKED, prefill_chunk_size=32)
    assert torch.equal(found, wanted), (found, wanted)
    engine = td.compile(loaded, drafter, rounds_per_chunk=2, **FIXED)
    for left in (2, None):  # a stream that both leave, and a whole one
        gained: list[list[int]] = [[], [], []]
        for chunk, rows in enumerate(engine.stream(*given, **ASKED)):
            gained = [one + more for one, more in zip(gained, rows, strict=True)]
            if chunk == left:
                break
        for row, tokens in zip(wanted, gained, strict=True):
            new = row[-30:].tolist()
            assert tokens == new[: len(tokens)] and (left or tokens == new), (left, tokens, new)
    state = engine.advance(engine.start(*given, **ASKED))
    file = f"{folder}/state{rank}"
    td.save_state(state, file, engine)
    state = td.load_state(file, engine)
    while not bool(engine.runtime.fetch(state.done).all()):
        state = engine.advance(state)
    tokens = engine.runtime.fetch(state.tokens)
    for row, (new, mask) in enumerate(zip(wanted, prompts()[1], strict=True)):
        length = int(mask.sum())
        assert tokens[row, length : length + 30].tolist() == new[-30:].tolist(), row
    refusals(rank, engine, given)
    assert torch.equal(engine.generate(*given, **ASKED), wanted)  # no refusal has done harm
    say("checked")


def refusals(rank: int, engine: Any, given: Any) -> None:
    ids, mask = given
    for words, call in (
        ("max_time", lambda: engine.generate(ids, mask, **ASKED, max_time=3.0)),
        ("a session with a mesh of several processes", lambda: engine.session()),
        ("max_length=96", lambda: engine.generate(ids, mask, max_new_tokens=500 if rank == 0 else 5)),
        ("verify_width='auto'", lambda: td.compile(*small(), mesh="auto", verify_width="auto", **FIXED)),
    ):
        try:
            call()
        except ValueError as error:
            assert words in str(error), (words, error)
        else:
            raise AssertionError(words)


def small() -> tuple[Any, Any]:
    return make_sliceable("qwen3", "2x2", "v1")


class Slow:  # a streamer that prints at each chunk; ``then`` runs at the second
    def __init__(self, then: Any = None):
        self.then, self.chunks = then, 0

    def put(self, tokens: Any) -> None:
        self.chunks += 1
        say("chunk", self.chunks)
        if self.chunks == 3 and self.then is not None:
            self.then()
        time.sleep(0.3)

    def end(self) -> None:
        say("all of it")


def long_call(then: Any = None) -> None:
    engine = td.compile(plain_target(), None, mesh="auto", max_length=512, rounds_per_chunk=1)
    engine.generate(prompts()[0][:1], streamer=Slow(then), max_new_tokens=450, eos_token_id=None)


def lasting(rank: int) -> None:
    long_call()


def raising(rank: int, who: str) -> None:
    def fail():
        raise ValueError("a streamer of mine")

    long_call(fail if rank == int(who) else None)


def leaving(rank: int, how: str) -> None:
    """One process ends, and the other makes another call."""
    engine = td.compile(plain_target(), None, mesh="auto", max_length=64)
    engine.synchronize("warmup")
    if rank and how == "by an error":
        raise ZeroDivisionError("of mine")
    if not rank:
        engine.generate(prompts()[0][:1], max_new_tokens=5)


def streams(rank: int) -> None:
    engine = td.compile(plain_target(), None, mesh="auto", max_length=256, rounds_per_chunk=1)
    for chunk, _ in enumerate(engine.stream(prompts()[0][:1], max_new_tokens=200, eos_token_id=None)):
        if rank and chunk == 3:
            break
    say("left")
    time.sleep(60)


held: list[Any] = []
"""A stream that somebody keeps: it ends with Python."""


def keeping(rank: int) -> None:
    """Both read a little of a stream and end, one of them later."""
    engine = td.compile(plain_target(), None, mesh="auto", max_length=128, rounds_per_chunk=1)
    held.append(engine.stream(prompts()[0][:1], max_new_tokens=80, eos_token_id=None))
    say(next(held[0]), next(held[0]))
    time.sleep(4 * rank)
    say("checked")


def differing(rank: int, what: str) -> None:
    """The processes make different calls; both get an error, and continue."""
    target = plain_target()
    if what == "weights" and rank:
        with torch.no_grad():
            target.model.layers[1].mlp.up_proj.weight *= 1.5
    length = 128 if what == "plan" and rank else 64
    engine = td.compile(target, None, mesh="auto", max_length=length)
    try:
        engine.generate(prompts()[0][:1], max_new_tokens=5, eos_token_id=None)
    except RuntimeError as error:
        say(error)
    else:
        raise AssertionError("nothing was said")


def drifting(rank: int) -> None:
    import torch_dflash.engine.hosts as together
    from torch_dflash.runtime import Progress

    together.CHECK_EVERY = 4
    add = Progress.add

    def wrong(self, found):
        add(self, found)
        if rank and self.rounds[0] == 2:
            self.tokens[0, 3] += 1

    Progress.add = wrong
    long_call()


def main() -> None:
    import jax_bridge.hosts.watch as watch

    rank, port, name, *arguments = sys.argv[1:]
    torch.set_num_threads(1)
    watch.SILENT = SILENT
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"localhost:{port}", num_processes=2, process_id=int(rank), heartbeat_timeout_seconds=PATIENT
    )
    globals()[name](int(rank), *arguments)


if __name__ == "__main__":
    main()
