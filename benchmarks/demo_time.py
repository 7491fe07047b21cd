"""Measures the time of `make demo` behind its installation, the first time and later.

    python benchmarks/demo_time.py --json docs/results/demo_time_cpu.json

The first run finds an empty cache folder: it fetches and converts the model and compiles every program. Later
ones find all files. Seconds are those of the whole process, and of its parts. On a machine with other work
CPU seconds are more exact; those of pip stand under "rest".
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch_dflash.cli.outputs import write_results

PARTS = "import", "load", "compile", "warm up", "decode"


def timed_demo() -> dict[str, dict[str, float]]:
    """Run the demo in this process: seconds and CPU seconds of each part."""
    from torch_dflash.cli import comparison

    parts = {"import": {"seconds": time.time() - _born(), "cpu": time.process_time()}}

    class Parts(comparison.Parts):
        @contextmanager
        def timed(self, name: str) -> Iterator[None]:
            started, cpu = time.perf_counter(), time.process_time()
            with super().timed(name):
                yield
            part = parts.setdefault(name, {"seconds": 0.0, "cpu": 0.0})
            part["seconds"] += time.perf_counter() - started
            part["cpu"] += time.process_time() - cpu

    comparison.Parts = Parts
    from torch_dflash.cli import main

    if main(["demo"]):
        raise SystemExit("the demo failed")
    return parts


def _born() -> float:
    """The start of this process, in seconds since the epoch."""
    fields = open("/proc/self/stat").read().rpartition(")")[2].split()
    boot = next(int(line.split()[1]) for line in open("/proc/stat") if line.startswith("btime"))
    return boot + int(fields[19]) / os.sysconf("SC_CLK_TCK")


def in_a_process(folder: str) -> dict:
    """`timed_demo` in a process of its own whose caches lie in ``folder``."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, __file__, "--run", f"{folder}/parts.json"],
        env=os.environ | {"XDG_CACHE_HOME": folder},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    with open(f"{folder}/parts.json") as file:
        parts = json.load(file)
    parts["rest"] = {
        "seconds": seconds - sum(part["seconds"] for part in parts.values()),
        "cpu": cpu - sum(part["cpu"] for part in parts.values()),
    }
    return {"seconds": seconds, "cpu": cpu, "parts": parts}


def rounded(found: dict) -> dict:
    """To a tenth of a second."""
    return {name: rounded(one) if isinstance(one, dict) else round(one, 1) for name, one in found.items()}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="later runs")
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--run", help=argparse.SUPPRESS)  # the inner process
    args = parser.parse_args()
    if args.run:
        found = timed_demo()
        with open(args.run, "w") as file:
            json.dump(found, file)
        return
    with tempfile.TemporaryDirectory() as folder:
        first = rounded(in_a_process(folder))
        later = [rounded(in_a_process(folder)) for _ in range(args.repeats)]
    results = {
        "first": first,
        "later": statistics.median_low([one["seconds"] for one in later]),
        "runs": later,
        "cores": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }
    print(json.dumps(results, indent=1))
    if args.json:
        write_results(args.json, results)


if __name__ == "__main__":
    main()
