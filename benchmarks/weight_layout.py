"""Compares the layouts of linear weights: [out, in], as torch keeps them, and [in, out].

    OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 python benchmarks/weight_layout.py --json figures.json

Times single products in both layouts, then whole decoding steps of the demo pair, where one engine's
linear weights are transposed and the other's are not. Runs alternate; ratios are medians over them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch

import torch_dflash as td
from torch_dflash.cli.outputs import write_results

# [in, out]: SmolLM2-135M's projections and head, then Qwen3-4B's feed-forward.
SIZES = [(576, 576), (576, 1536), (1536, 576), (576, 49152), (2560, 9728), (9728, 2560)]
ROWS = [1, 2, 4, 8, 16]
PROMPT = "Natalia sold clips to 48 of her friends in April, and then she sold half as many in May."


def alternate(runs: dict, repeats: int, times: int = 1) -> dict:
    """Seconds of each run's median, and the median of the ratios of neighbours (first over second).

    Each run does its work ``times`` times.
    """
    seconds = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            if repeat:  # the first compiles, or fills caches
                seconds[name].append((time.perf_counter() - started) / times)
    first, second = seconds.values()
    ratios = sorted(a / b for a, b in zip(first, second, strict=True))
    medians = {name: round(statistics.median(times), 7) for name, times in seconds.items()}
    quartiles = [round(ratios[len(ratios) * part // 4], 2) for part in (1, 3)]
    return medians | {"ratio": round(statistics.median(ratios), 2), "quartiles": quartiles}


def products(dtype, repeats: int) -> list[dict]:
    """``x [rows, in]`` times a weight in both layouts."""
    random, rows = np.random.default_rng(0), []
    for inner, outer in SIZES:
        weight = random.standard_normal((outer, inner), np.float32)
        out_in, in_out = jnp.asarray(weight, dtype), jnp.asarray(np.ascontiguousarray(weight.T), dtype)
        times = max(1, int(1e7 / weight.size))
        for count in ROWS:
            x = jnp.asarray(random.standard_normal((count, inner), np.float32), dtype)
            as_torch = jax.jit(lambda x, w: x @ w.T).lower(x, out_in).compile()
            transposed = jax.jit(lambda x, w: x @ w).lower(x, in_out).compile()

            def repeated(program, weight, x=x, times=times):
                for _ in range(times):
                    result = program(x, weight)
                result.block_until_ready()

            runs = {
                "out_in": lambda a=as_torch, w=out_in, run=repeated: run(a, w),
                "in_out": lambda a=transposed, w=in_out, run=repeated: run(a, w),
            }
            figures = alternate(runs, repeats, times)
            rows.append({"dtype": jnp.dtype(dtype).name, "in": inner, "out": outer, "rows": count} | figures)
            print(rows[-1], flush=True)
    return rows


def steps(repeats: int) -> list[dict]:
    """Rounds and prompts of the demo pair, drafted and plain."""
    target, drafter, tokenizer = td.load_demo_pair()
    ids, rows = tokenizer(PROMPT, return_tensors="pt").input_ids, []
    options = {"max_new_tokens": 220, "do_sample": False, "eos_token_id": None}
    for name, given in (("dflash", drafter), ("plain", None)):
        rounds, prompts = {}, {}
        for layout, pays in (("out_in", False), ("in_out", True)):
            with mock.patch("jax_bridge.weights.layout.lies_by_inputs", lambda shape, pays=pays: pays):
                engine = td.compile(target, given, max_length=256, rounds_per_chunk=1, filters=False)
                params = engine.runtime.refresh(engine.tensors())
                states = [engine.start(ids, **options)]

            def one_round(runtime=engine.runtime, params=params, states=states):
                states[0] = jax.block_until_ready(runtime.advance(params, states[0]))

            def prompt(engine=engine, params=params):
                with mock.patch.object(engine.runtime, "refresh", lambda tensors: params):
                    jax.block_until_ready(engine.start(ids, **options))

            rounds[layout], prompts[layout] = one_round, prompt
        width = 1 if given is None else given.config.block_size
        rows.append({"step": f"{name} round", "rows": width} | alternate(rounds, repeats))
        rows.append({"step": f"{name} prompt", "rows": ids.shape[1]} | alternate(prompts, repeats // 2))
        print(*rows[-2:], sep="\n", flush=True)
    return rows


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--repeats", type=int, default=24)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = {"steps": steps(asked.repeats)}
    found["products"] = products(jnp.float32, asked.repeats // 2) + products(jnp.bfloat16, 3)
    if asked.json:
        write_results(asked.json, found)


if __name__ == "__main__":
    main()
