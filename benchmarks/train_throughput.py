"""Training steps per second of this library, of SpecForge and of speculators, and this CPU's own peak.

Run on an idle machine, one thread::

    OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 python benchmarks/train_throughput.py --json figures.json

The peers take part where they can be imported (``PYTHONPATH``); without them ours is timed alone. A step is
forward with loss, backward, clipping and AdamW, from given hidden states of the target. All contenders start
from the same weights, draft from the same anchors of the same sequences and take turns, so that a machine
that slows down slows all of them. The clock is the process's CPU time over its threads, which other programs
disturb less; times on the wall are in the JSON, too. Before anything is timed, losses and gradients are
compared.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import math
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from train_step_ours import SIZES, Contender, Setting, Size, make_setting, ours, product
from train_step_peers import agreement, find_peers, specforge, speculators

from torch_dflash.cli.outputs import write_results


def clock() -> float:
    """CPU seconds of this process per thread."""
    return time.process_time() / torch.get_num_threads()


def peak(dtype: str, size: int = 2048, repeats: int = 5) -> float:
    """Floating-point operations per second of one large matrix product: the best of several."""
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    left, right = torch.randn(size, size).to(kind), torch.randn(size, size).to(kind)
    torch.mm(left, right)
    best = math.inf
    for _ in range(repeats):
        start = clock()
        torch.mm(left, right)
        best = min(best, clock() - start)
    return product(size, size, size) / best


def line_up(setting: Setting, dtype: str, peers: dict[str, Any]) -> list[Contender]:
    """All that can run here, ours first."""
    found = [
        ours(setting, dtype, 1024, sampled=False),
        ours(setting, dtype, 256, sampled=False),
        ours(setting, dtype, 1024, sampled=True),
    ]
    if "version" in peers["specforge"]:
        found.append(specforge(setting, dtype))
        if dtype == "bf16":
            found.append(specforge(setting, dtype, own=True))
    if "version" in peers["speculators"]:
        found.append(speculators(setting, dtype))
    return found


def time_step(runner: Contender) -> dict[str, float | None]:
    """One step: its time, and the rise of the resident memory above what lay there before."""
    before = _reset_peak()
    start, wall = clock(), time.perf_counter()
    runner.run()
    runner.update()
    seconds, wall = clock() - start, time.perf_counter() - wall
    top = _status("VmHWM")
    rise = None if before is None or top is None else (top - before) / 2**20
    return {"ms": seconds * 1e3, "wall_ms": wall * 1e3, "mib": rise}


def measure(setting: Setting, dtype: str, peers: dict[str, Any], repeats: int) -> dict[str, Any]:
    """All contenders of one size and type, in turns."""
    runners = line_up(setting, dtype, peers)
    agreed = agreement(runners, dtype)
    peaks, steps = [], {runner.name: [] for runner in runners}
    for turn in range(repeats):
        peaks.append(peak(dtype))
        for runner in runners if turn % 2 == 0 else runners[::-1]:
            steps[runner.name].append(time_step(runner))
    best, blocks = max(peaks), setting.size.blocks
    rows = []
    for runner in runners:
        taken = steps[runner.name]
        rises = [step["mib"] for step in taken if step["mib"] is not None]
        seconds = statistics.median(step["ms"] for step in taken) / 1e3
        rows.append(
            {
                "name": runner.name,
                "blocks_per_second": blocks / seconds,
                "ms": seconds * 1e3,
                "all_ms": [step["ms"] for step in taken],
                "wall_ms": [step["wall_ms"] for step in taken],
                "gflop": runner.flops / 1e9,
                "gflops": runner.flops / seconds / 1e9,
                "share_of_peak": runner.flops / seconds / best,
                "peak_mib": max(rises) if rises else None,
                **agreed[runner.name],
            }
        )
    ceiling = blocks * best / runners[0].flops
    return {"dtype": dtype, "peak_gflops": best / 1e9, "blocks_per_second_at_peak": ceiling, "rows": rows}


def _status(field: str) -> int | None:
    path = Path("/proc/self/status")
    found = re.search(rf"^{field}:\s+(\d+) kB", path.read_text(), re.MULTILINE) if path.exists() else None
    return int(found[1]) * 1024 if found else None


def _reset_peak() -> int | None:
    """Give freed memory back and forget the peak; resident bytes then, or None where Linux does not say."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (AttributeError, OSError):
        return None
    return _status("VmRSS")


def show(size: Size, result: dict[str, Any]) -> None:
    """One table."""
    print(
        f"\n{size.name}, {result['dtype']}: {size.blocks} blocks of {size.width}, hidden {size.hidden}, "
        f"{size.layers} layers, {size.vocabulary} ids; peak {result['peak_gflops']:.0f} GFLOP/s, at which "
        f"ours (all ids) would make {result['blocks_per_second_at_peak']:.0f} blocks/s"
    )
    heads = ("", "blocks/s", "ms/step", "GFLOP", "GFLOP/s", "of peak", "memory", "loss", "grad diff")
    print(f"{heads[0]:36}" + "".join(f"{head:>10}" for head in heads[1:]))
    for row in result["rows"]:
        memory = "?" if row["peak_mib"] is None else f"{row['peak_mib']:.0f} MiB"
        print(
            f"{row['name']:36}{row['blocks_per_second']:10.1f}{row['ms']:10.0f}{row['gflop']:10.0f}"
            f"{row['gflops']:10.1f}{row['share_of_peak']:10.0%}{memory:>10}{row['loss']:10.4f}"
            f"{row['gradient_difference']:10.1e}"
        )
    sys.stdout.flush()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [size.name for size in SIZES]
    parser.add_argument("--sizes", nargs="+", choices=names, default=names)
    parser.add_argument("--dtypes", nargs="+", choices=("fp32", "bf16"), default=("fp32", "bf16"))
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each; the median counts")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", help="write all figures to this file")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    peers = find_peers()
    for name, peer in peers.items():
        if "missing" in peer:
            print(f"{name}: not importable ({peer['missing']}); ours is timed without it")
        else:
            extra = f", with {', '.join(peer['replaced'])} replaced" if peer["replaced"] else ""
            print(f"{name} {peer['version']}{extra}")
    results = []
    for size in (size for size in SIZES if size.name in asked.sizes):
        setting = make_setting(size)
        for dtype in asked.dtypes:
            result = measure(setting, dtype, peers, asked.repeats)
            show(size, result)
            results.append({"size": {**vars(size), "blocks": size.blocks}, **result})
            if asked.json:  # after every table: an interrupted run keeps what it has
                written = {"threads": asked.threads, "repeats": asked.repeats, "peers": peers}
                write_results(asked.json, {**written, "results": results})


if __name__ == "__main__":
    main()
