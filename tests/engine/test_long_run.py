"""The last of two thousand rounds cost as much as the first ones, and nothing is left behind."""

import os
import statistics
import time
from pathlib import Path

import jax
import pytest
import torch
from support.tiny import make_drafter, make_target

import torch_dflash as td

ROUNDS, CHUNK = 2000, 50


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["static", "paged"])
def test_time_and_memory_of_a_round_do_not_grow(cache):
    target = make_target("llama", max_position_embeddings=8192)
    sliding = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5}
    drafter = make_drafter(target, max_position_embeddings=8192, **sliding)
    capacity = 480  # a round's attention follows its context: many short texts, not one long one
    options = {"max_length": capacity, "rounds_per_chunk": CHUNK, "filters": False}
    engine = td.compile(target, drafter, cache=cache, **options).warmup()
    times, arrays, memory, rounds = [], [], [], 0
    while rounds < ROUNDS:
        prompt, new = torch.ones(1, 8, dtype=torch.long), capacity - 8
        state = engine.start(prompt, max_new_tokens=new, do_sample=False, eos_token_id=None)
        jax.block_until_ready(state)
        ended = False
        while not ended and rounds < ROUNDS:
            before = int(state.rounds[0])
            started = time.perf_counter()
            state = jax.block_until_ready(engine.advance(state))
            gone = int(state.rounds[0]) - before
            if gone == CHUNK:
                times.append(time.perf_counter() - started)
            rounds += gone
            ended = bool(state.done[0])
            arrays.append(sum(array.nbytes for array in jax.live_arrays()))
            memory.append(resident())
    # The fastest of several: other programs only ever slow a chunk down.
    half = len(times) // 2
    first, last = min(times[:half]), min(times[half:])
    assert last < 1.5 * first, (first, last, statistics.median(times))
    assert arrays[-1] == arrays[1]
    assert memory[-1] - memory[len(memory) // 4] < 4 << 20
