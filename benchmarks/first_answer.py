"""Measures the wait of a new process for its first answer, and for its second.

    python benchmarks/first_answer.py --json docs/results/first_answer_cpu.json

Each process imports the library, loads the demo pair and asks twice. The clock covers `td.generate` alone;
the first call's time includes importing JAX. A run is two processes: one finds the folder of compiled
programs empty, the next finds the programs of the first. `PYTHONPATH` chooses another version for comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch_dflash as td
from torch_dflash.cli.outputs import write_results

QUESTION = "What is the capital of France?"
NEW = 48


def ask() -> dict:
    """Seconds of the first and the second call of this process, and the programs that the first compiled."""
    target, drafter, tokenizer = td.load_demo_pair(progress=False)
    chat = [{"role": "user", "content": QUESTION}]
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    prompt: Any = tokenizer.apply_chat_template(chat, **options)
    seconds, stats = [], []
    for _ in range(2):
        started = time.perf_counter()
        out: Any = td.generate(
            target, drafter, **prompt, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True
        )
        seconds.append(time.perf_counter() - started)
        stats.append(out.stats.compilations)
    assert stats[1] == 0
    return {"first": seconds[0], "second": seconds[1], "compilations": stats[0]}


def in_a_process(folder: str) -> dict:
    """`ask` in a process of its own that keeps compiled programs in ``folder``."""
    done = subprocess.run(
        [sys.executable, __file__, "--ask"],
        env=os.environ | {"JAX_COMPILATION_CACHE_DIR": folder},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def summary(seconds: list[float]) -> dict:
    """The median and all values."""
    rounded = [round(value, 2) for value in seconds]
    return {"median": statistics.median(rounded), "seconds": rounded}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--ask", action="store_true", help=argparse.SUPPRESS)  # the inner process
    args = parser.parse_args()
    if args.ask:
        print(json.dumps(ask()))
        return
    empty, full = [], []
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as folder:
            empty.append(in_a_process(folder))
            full.append(in_a_process(folder))
    results = {
        "empty": summary([one["first"] for one in empty]),
        "full": summary([one["first"] for one in full]),
        "second": summary([one["second"] for one in empty + full]),
        "compilations": empty[0]["compilations"],
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }
    print(json.dumps(results, indent=1))
    if args.json:
        write_results(args.json, results)


if __name__ == "__main__":
    main()
