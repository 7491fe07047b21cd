"""Measures `torch-dflash serve` on the bundled pair: tokens a second, first tokens, gaps, CPU seconds.

    python benchmarks/serve.py --json docs/results/serve_cpu.json
    python benchmarks/serve.py --clients 1 --tokens 128 --json docs/results/serve_one_cpu.json

Servers of one process, with a drafter, with a union of drafter and lookup, and plain, take the same prompts
in turns from clients of another process, which is this file again with --client. One client has servers of
one row, 4 and 16 clients have servers of 8. "map" is `engine.map` of the same prompts; "lean" an engine that
holds what a greedy request needs alone, and is timed in turns with the full one.
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
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import openai
import uvicorn

import torch_dflash as td
from torch_dflash.cli.outputs import write_results
from torch_dflash.cli.serve import PARTS

CLIENTS = {1: 1, 4: 8, 16: 8}
"""Clients, and the rows of their servers: on a CPU a row that is free costs its products all the same."""
WAYS = {1: ("plain", "drafter", "union"), 8: ("plain", "drafter")}
"""Ways to decode by rows: a union's pass has 8 nodes a row, more than two cores take at once for 8 rows."""
SETS = "gsm8k", "mbpp", "humaneval", "mt-bench"
MOST = 18
"""Prompts, of each set in turn."""
SHAPE = {"max_length": 512, "rounds_per_chunk": 4, "prefill_chunk_size": 32}
FULL = {
    "processors": tuple(name for names in PARTS.values() for name in names),
    "outputs": ("output_logprobs",),
    "top_logprobs": 5,
}
LEAN = {"processors": (), "filters": False}
GREEDY = {"do_sample": False, "eos_token_id": None}


def chats() -> list[list[dict[str, str]]]:
    """Questions of all sets."""
    lines = [(Path("data/eval") / f"{name}.jsonl").read_text().splitlines() for name in SETS]
    turns = [json.loads(line)["turns"][0] for together in zip(*lines, strict=False) for line in together]
    return [[{"role": "user", "content": turn}] for turn in turns[:MOST]]


async def ask(url: str, clients: int, requests: int, tokens: int) -> dict[str, Any]:
    """The figures of ``clients`` that send ``requests`` one after the other, as streams."""
    client, asked = openai.AsyncOpenAI(base_url=url, api_key="none", timeout=3600, max_retries=0), chats()
    waiting, first, gaps, texts = iter(range(requests)), [], [], {}

    async def one() -> None:
        for number in waiting:
            text, at = "", time.perf_counter()
            options: dict[str, Any] = {"stream": True, "max_tokens": tokens, "temperature": 0}
            options |= {"model": "demo", "messages": asked[number], "extra_body": {"ignore_eos": True}}
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


def summary(
    compiling: dict[str, Any], runs: dict[str, list[dict[str, Any]]], tokens: int, turns: int
) -> dict[str, Any]:
    """The medians so far, and whether drafts have changed a text."""
    texts = {tuple(name.split()): many[0]["texts"] for name, many in runs.items() if " " in name}
    same = all(found == texts["plain", *rest] for (_, *rest), found in texts.items())
    return {
        "shape": SHAPE | {"new_tokens": tokens, "repetitions": turns, "rows": CLIENTS},
        "compiling": compiling,
        "same_texts_drafted_and_plain": same,
        "runs": {name: middle(many) for name, many in runs.items()},
    }


def requests_of(clients: int) -> int:
    """The requests that so many clients send together."""
    return max(4, min(2 * clients, MOST))


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--client", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--clients", type=int, nargs="+", default=list(CLIENTS), choices=CLIENTS)
    asked = parser.parse_args()
    if asked.client:
        url, *numbers = asked.client
        print(json.dumps(asyncio.run(ask(url, *map(int, numbers)))))
        return
    jax.config.update("jax_enable_compilation_cache", False)  # programs of another run cost no time
    target, drafter, tokenizer = td.load_demo_pair()
    proposers: dict[str, tuple[Any, dict[str, Any]]] = {
        "plain": (None, {}),
        "drafter": (drafter, {"verify_width": 4}),
        "union": (td.Union(td.NGramProposer(), drafter, rows=8), {}),
    }
    rows = [tokenizer.apply_chat_template(one, add_generation_prompt=True) for one in chats()]
    prompts = [list(getattr(ids, "input_ids", ids)) for ids in rows]
    sizes = {CLIENTS[clients] for clients in asked.clients}
    made = [(way, size, FULL, f"{way} {size}") for size in sorted(sizes) for way in WAYS[size]]
    made += [("drafter", 8, LEAN, "lean")] if 8 in sizes else []
    engines: dict[str, Any] = {}
    compiling = {}
    for way, size, parts, name in made:
        proposer, width = proposers[way]
        engine = engines[name] = td.compile(target, proposer, batch_size=size, **SHAPE, **parts, **width)
        run = timed(lambda engine=engine: engine.warmup(progress=False, slots=True))
        compiling[name] = {"seconds": run["wall"], "cpu_seconds": run["cpu"]}
        print("compiling", name, compiling[name], flush=True)
        mapped(engine, prompts[: 2 * size], 8)
    runs: dict[str, list[dict[str, Any]]] = {}
    results: dict[str, Any] = {}
    with ExitStack() as open_servers:
        urls = {
            name: open_servers.enter_context(listening(td.asgi_app(engine, tokenizer, name="demo")))
            for name, engine in engines.items()
            if name != "lean"
        }
        for turn in range(asked.repetitions):
            for clients in asked.clients:
                size, requests = CLIENTS[clients], requests_of(clients)
                for way in WAYS[size][:: 1 if turn % 2 else -1]:
                    one = crowd(urls[f"{way} {size}"], clients, requests, asked.tokens)
                    runs.setdefault(f"{way} {clients}", []).append(one)
                    alike = mapped(engines[f"{way} {size}"], prompts[:requests], asked.tokens)
                    runs.setdefault(f"{way} map {clients}", []).append(alike)
            for key, name in {"full": "drafter 8", "lean": "lean"}.items() if 8 in sizes else ():
                runs.setdefault(key, []).append(mapped(engines[name], prompts[:8], asked.tokens))
            results = summary(compiling, runs, asked.tokens, turn + 1)
            if asked.json:  # after each turn: a run may be cut short
                write_results(asked.json, results)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
