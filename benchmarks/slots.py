"""Compares closed batches with slots on the bundled pair: rounds, speeds, host time of a chunk.

    python benchmarks/slots.py --json docs/results/slots_cpu.json

Both decode the same 32 requests on 8 rows in one process, in turns; every text is compared. "closed" is
`generate` of 8 rows at a time, in the order of the requests; "slots" is `map`.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
import time
from typing import Any

import torch

import torch_dflash as td
from torch_dflash.cli.outputs import write_results
from torch_dflash.engine.call import map_prompts
from torch_dflash.engine.slots import Lane, Slots
from torch_dflash.requests.prompts import pad_rows, prompt_chunks
from torch_dflash.requests.request import row_requests

ROWS, REQUESTS = 8, 32
TOPICS = (
    "rainbows tides volcanoes magnets mirrors clocks bridges kites whales bees coffee bread salt paper "
    "glass rust yeast soap batteries engines radios satellites comets deserts glaciers rivers forests "
    "vaccines dreams music chess money"
).split()
MIXES = {"short": (6, 83, 27), "long": (12, 190, 100), "even": (64, 64, 64)}
"""The fewest, the most and the mean of new tokens."""


def lengths(mix: str) -> list[int]:
    """New tokens of each request: of 100 draws the one whose schedule saves as much as the median one."""
    draws = sorted((drawn_lengths(mix, seed) for seed in range(100)), key=saved)
    return draws[len(draws) // 2]


def saved(counts: list[int]) -> float:
    """Rounds of rows that take the next request as they end, over closed batches'; a token a round."""
    rows = [0] * ROWS
    for count in counts:
        heapq.heappush(rows, heapq.heappop(rows) + count)
    return max(rows) / sum(max(counts[at : at + ROWS]) for at in range(0, REQUESTS, ROWS))


def drawn_lengths(mix: str, seed: int) -> list[int]:
    """A skewed draw of new tokens for each request, scaled to the mix's mean."""
    fewest, most, mean = MIXES[mix]
    draw = random.Random(seed)
    drawn = [min(most, fewest + draw.expovariate(1 / max(mean - fewest, 1))) for _ in range(REQUESTS)]
    for _ in range(20):  # cut draws lower the mean
        scale = (mean - fewest) / max(statistics.mean(drawn) - fewest, 1e-9)
        drawn = [min(most, fewest + (one - fewest) * scale) for one in drawn]
    return [round(one) for one in drawn]


class Timed:
    """Runs both ways and keeps rounds, seconds and texts."""

    def __init__(self, engine: Any, prompts: list[list[int]], counts: list[int]):
        self.engine, self.prompts, self.counts = engine, prompts, counts
        self.options = {"do_sample": False, "eos_token_id": None}

    def closed(self) -> tuple[int, list[list[int]]]:
        rounds, texts = 0, []
        for at in range(0, REQUESTS, ROWS):
            ids, mask = pad_rows(self.prompts[at : at + ROWS])
            out = self.engine.generate(
                ids,
                mask,
                max_new_tokens=self.counts[at : at + ROWS],
                return_dict_in_generate=True,
                **self.options,
            )
            rounds += out.stats.rounds
            texts += out.new_tokens
        return rounds, texts

    def slots(self) -> tuple[int, list[list[int]]]:
        slots, options = Slots(self.engine), [{"max_new_tokens": count} for count in self.counts]
        found = list(map_prompts(self.engine, slots, self.prompts, options, dict(self.options), None))
        (lane,) = slots._lanes
        return lane.rounds, [one.new_tokens[0] for one in found]

    def run(self, name: str) -> dict[str, Any]:
        wall, cpu = time.perf_counter(), time.process_time()
        rounds, texts = getattr(self, name)()
        return {
            "rounds": rounds,
            "seconds": time.perf_counter() - wall,
            "cpu_seconds": time.process_time() - cpu,
            "texts": texts,
        }


def compare(engine: Any, prompts: list[list[int]], mix: str, repetitions: int) -> dict[str, Any]:
    """Medians of both ways, and their ratios: closed over slots for speeds, slots over closed for rounds."""
    timed = Timed(engine, prompts, lengths(mix))
    runs: dict[str, list[dict[str, Any]]] = {"closed": [], "slots": []}
    for turn in range(repetitions):
        for name in runs if turn % 2 else reversed(list(runs)):
            runs[name].append(timed.run(name))
    texts = [one["texts"] for many in runs.values() for one in many]
    found = {
        name: {
            key: statistics.median(one[key] for one in many) for key in ("rounds", "seconds", "cpu_seconds")
        }
        for name, many in runs.items()
    }
    closed, slots = found["closed"], found["slots"]
    equal = sum(all(text[at] == texts[0][at] for text in texts) for at in range(REQUESTS))
    return found | {
        "new_tokens": sum(timed.counts),
        "equal_texts": equal,
        "rounds_ratio": slots["rounds"] / closed["rounds"],
        "speedup": closed["seconds"] / slots["seconds"],
        "cpu_speedup": closed["cpu_seconds"] / slots["cpu_seconds"],
    }


def prompt_cost(engine: Any, prompts: list[list[int]]) -> dict[str, float]:
    """Seconds to read one prompt beside seven rows: in a program of one row, and in the batch's."""
    runtime, plan, params = engine.runtime, engine.plan, engine.version().params[0]
    ids, mask = pad_rows(prompts[:1])
    rows = engine.read(ids, mask, {"max_new_tokens": 2, "do_sample": False}).rows
    lane = Lane(0, Slots(engine))
    (alone,) = prompt_chunks([rows[0].prompt], 1, 512, plan.slots)
    due = [rows[0].prompt] + [rows[0].prompt[:0]] * (ROWS - 1)
    (batch,) = prompt_chunks(due, ROWS, 512, plan.slots)
    state = runtime.begin(params, row_requests(rows * ROWS, plan))
    zeros = torch.zeros(ROWS, dtype=torch.int32).numpy()
    seconds: dict[str, list[float]] = {"row": [], "batch": []}
    for _ in range(7):
        for name in seconds:
            state = runtime.admit(params, state, 0, row_requests(rows, lane._single))
            runtime.read(state, zeros, zeros)
            started = time.perf_counter()
            if name == "row":
                state = runtime.feed(params, state, 0, alone)
            else:
                state = runtime.prefill(params, state, batch)
            runtime.read(state, zeros, zeros)
            seconds[name].append(time.perf_counter() - started)
    found = {name: statistics.median(many[1:]) for name, many in seconds.items()}
    return found | {"ratio": found["row"] / found["batch"]}


def host_time(pair: tuple[Any, Any], rows: int = 16) -> float:
    """Milliseconds of this thread's CPU a chunk that are ours: the runtime's methods are left out."""
    engine = td.compile(*pair, max_length=256, batch_size=rows, rounds_per_chunk=2, verify_width=4)
    inside, spent = 0.0, []

    def outside(method: Any) -> Any:
        def run(*args: Any) -> Any:
            nonlocal inside
            started = time.thread_time()
            out = method(*args)
            inside += time.thread_time() - started
            return out

        return run

    for name in ("admit", "feed", "prefill", "assign", "advance", "read"):
        setattr(engine.runtime, name, outside(getattr(engine.runtime, name)))
    slots = Slots(engine)
    for at in range(2 * rows):
        slots.submit(torch.full((1, 20), at + 5), max_new_tokens=20 + at, do_sample=False, eos_token_id=None)
    while True:
        inside, started = 0.0, time.thread_time()
        more = slots.step()
        spent.append(1e3 * (time.thread_time() - started - inside))
        if not more:
            return statistics.median(spent[2:])


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", required=True)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--mixes", nargs="+", default=list(MIXES), choices=list(MIXES))
    arguments = parser.parse_args()
    target, drafter, tokenizer = td.load_demo_pair()
    chats = [[{"role": "user", "content": f"Explain {topic} in a few sentences."}] for topic in TOPICS]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in chats]
    prompts = [list(getattr(ids, "input_ids", ids)) for ids in prompts]
    schedules = {mix: saved(lengths(mix)) for mix in MIXES}
    found: dict[str, Any] = {
        "rounds_ratio_by_schedule": schedules,
        "prompt_tokens": [len(ids) for ids in prompts],
        "rows": ROWS,
        "mixes": {},
    }
    for method, proposer in {"plain": None, "dflash": drafter}.items():
        width = {} if proposer is None else {"verify_width": 4}
        engine = td.compile(target, proposer, max_length=320, batch_size=ROWS, **width)
        engine.warmup(progress=False, slots=True)
        for mix in arguments.mixes:
            found["mixes"][f"{method} {mix}"] = one = compare(engine, prompts, mix, arguments.repetitions)
            print(method, mix, one, flush=True)
        found[f"prompt of one row, {method}"] = prompt_cost(engine, prompts)
        print(found[f"prompt of one row, {method}"], flush=True)
    found["host_milliseconds_a_chunk"] = host_time((target, drafter))
    print(found["host_milliseconds_a_chunk"])
    write_results(arguments.json, found)


if __name__ == "__main__":
    main()
