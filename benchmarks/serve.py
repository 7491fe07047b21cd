"""Measures `torch-dflash serve` on the bundled pair: tokens a second, first tokens, gaps, CPU seconds.

    python benchmarks/serve.py --json docs/results/serve_cpu.json

Two servers of one process, with the drafter and without, take the same prompts in turns from 1, 4 and 16
clients of another process, which is this file again with --client. "map" is `engine.map` of the same prompts;
"lean" is an engine that holds what a greedy request needs alone, and is timed in turns with the full one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import openai
import uvicorn

import torch_dflash as td
from torch_dflash.cli.outputs import write_results
from torch_dflash.cli.serve import PARTS

CLIENTS = 1, 4, 16
TOPICS = (
    "rainbows tides volcanoes magnets mirrors clocks bridges kites whales bees coffee bread salt paper glass "
    "rust yeast soap"
).split()
SHAPE = {"max_length": 256, "batch_size": 8, "rounds_per_chunk": 4, "prefill_chunk_size": 32}
FULL = {
    "processors": tuple(name for names in PARTS.values() for name in names),
    "outputs": ("output_logprobs",),
    "top_logprobs": 5,
}
LEAN = {"processors": (), "filters": False}
GREEDY = {"do_sample": False, "eos_token_id": None}


def chat(topic: str) -> list[dict[str, str]]:
    """A question."""
    return [{"role": "user", "content": f"Explain {topic} in a few sentences."}]


async def ask(url: str, clients: int, requests: int, tokens: int) -> dict[str, Any]:
    """The figures of ``clients`` that send ``requests`` one after the other, as streams."""
    client = openai.AsyncOpenAI(base_url=url, api_key="none", timeout=3600, max_retries=0)
    waiting, first, gaps, texts = iter(range(requests)), [], [], {}

    async def one() -> None:
        for number in waiting:
            text, at = "", time.perf_counter()
            options: dict[str, Any] = {"stream": True, "max_tokens": tokens, "temperature": 0}
            options |= {"model": "demo", "messages": chat(TOPICS[number]), "extra_body": {"ignore_eos": True}}
            async for event in await client.chat.completions.create(**options):
                if piece := event.choices[0].delta.content:
                    now = time.perf_counter()
                    (gaps if text else first).append(now - at)
                    at, text = now, text + piece
            texts[number] = text

    started = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(clients)))
    seconds = time.perf_counter() - started
    found = {"seconds": seconds, "tokens_a_second": requests * tokens / seconds}
    medians = {"first_token": statistics.median(first), "gap": statistics.median(gaps)}
    return found | medians | {"texts": [texts[number] for number in range(requests)]}


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """The address of a server of ``app`` in a thread."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started or app.state.server.closed:
            time.sleep(0.05)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join()


def timed(function: Any) -> dict[str, Any]:
    """The result of a function, with its seconds and this process's CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    return {"found": function(), "wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def crowd(url: str, clients: int, requests: int, tokens: int) -> dict[str, Any]:
    """The figures of `ask` in another process, and this one's CPU seconds meanwhile."""
    line = [sys.executable, __file__, "--client", url, *map(str, (clients, requests, tokens))]
    run = timed(lambda: subprocess.run(line, capture_output=True, text=True, check=True).stdout)
    return json.loads(run["found"]) | {"cpu_seconds": run["cpu"]}


def mapped(engine: Any, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """`engine.map` of the prompts."""
    run = timed(lambda: list(engine.map(prompts, max_new_tokens=tokens, **GREEDY)))
    rounds = sum(one.stats.rounds for one in run["found"])
    texts = [one.new_tokens[0] for one in run["found"]]
    return {"seconds": run["wall"], "cpu_seconds": run["cpu"], "rounds": rounds, "texts": texts}


def middle(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the figures of runs that said the same."""
    equal = all(one["texts"] == runs[0]["texts"] for one in runs)
    names = [name for name in runs[0] if name != "texts"]
    return {name: statistics.median(one[name] for one in runs) for name in names} | {"equal_texts": equal}


def summary(compiling: dict[str, Any], runs: dict[str, list[dict[str, Any]]], tokens: int) -> dict[str, Any]:
    """The medians so far, and whether drafts have changed a text."""
    texts = {name: many[0]["texts"] for name, many in runs.items()}
    drafted = {name: found for name, found in texts.items() if name.startswith("drafter ")}
    same = all(found == texts[name.replace("drafter", "plain")] for name, found in drafted.items())
    return {
        "shape": SHAPE | {"new_tokens": tokens, "repetitions": len(runs["lean"])},
        "compiling": compiling,
        "same_texts_drafted_and_plain": same,
        "runs": {name: middle(many) for name, many in runs.items()},
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--client", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--clients", type=int, nargs="+", default=list(CLIENTS))
    asked = parser.parse_args()
    if asked.client:
        url, *numbers = asked.client
        print(json.dumps(asyncio.run(ask(url, *map(int, numbers)))))
        return
    jax.config.update("jax_enable_compilation_cache", False)  # programs of another run cost no time
    target, drafter, tokenizer = td.load_demo_pair()
    engines: dict[str, Any] = {}
    compiling = {}
    for name, (proposer, parts) in {
        "drafter": (drafter, FULL),
        "plain": (None, FULL),
        "lean": (drafter, LEAN),
    }.items():
        width = {} if proposer is None else {"verify_width": 4}
        engine = engines[name] = td.compile(target, proposer, **SHAPE, **parts, **width)
        run = timed(lambda engine=engine: engine.warmup(progress=False, slots=True))
        compiling[name] = {"seconds": run["wall"], "cpu_seconds": run["cpu"]}
        print("compiling", name, compiling[name], flush=True)
    rows = [tokenizer.apply_chat_template(chat(topic), add_generation_prompt=True) for topic in TOPICS]
    prompts = [list(getattr(ids, "input_ids", ids)) for ids in rows]
    apps = {name: td.asgi_app(engines[name], tokenizer, name="demo") for name in ("drafter", "plain")}
    runs: dict[str, list[dict[str, Any]]] = {}
    results: dict[str, Any] = {}
    with listening(apps["drafter"]) as drafted, listening(apps["plain"]) as plain:
        for turn in range(asked.repetitions):
            ways = {"drafter": drafted, "plain": plain}
            for name in ways if turn % 2 else reversed(list(ways)):
                for clients in asked.clients:
                    requests = max(4, min(2 * clients, len(TOPICS)))
                    one = crowd(ways[name], clients, requests, asked.tokens)
                    runs.setdefault(f"{name} {clients}", []).append(one)
                    alike = mapped(engines[name], prompts[:requests], asked.tokens)
                    runs.setdefault(f"{name} map {requests}", []).append(alike)
            for name in ("drafter", "lean") if turn % 2 else ("lean", "drafter"):
                key = "full" if name == "drafter" else name
                runs.setdefault(key, []).append(mapped(engines[name], prompts[:8], asked.tokens))
            results = summary(compiling, runs, asked.tokens)
            if asked.json:  # after each turn: a run may be cut short
                write_results(asked.json, results)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
