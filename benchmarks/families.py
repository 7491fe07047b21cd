"""Finds the causal LMs of transformers that decode to transformers' own text here, and those refused.

    OMP_NUM_THREADS=1 python benchmarks/families.py --json families.json
    python benchmarks/families.py --json families.json --markdown
    python benchmarks/families.py --classes

Every model type of transformers, and some variants, as a tiny random fp32 model of four layers. Its greedy
text (a prompt of 19 tokens alone, then ragged rows of 19, 11 and 4 in one left-padded batch, 24 new tokens)
is compared with ``target.generate`` row by row. Where they disagree, forwards of the target without a cache
decide. Each case is a separate process with a time limit. The JSON is written after each, and cases
in the JSON are not run again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

from family_configs import CASES, MULTIMODAL
from family_runs import report
from family_tables import tables, tested

from torch_dflash.cli.outputs import provenance

ROOT = Path(__file__).parents[1]
CLASSES = ROOT / "torch_dflash/assets/tested.txt"

RUNTIMES = ("eager", "xla")
CACHES = ("static", "paged")
# Outcomes of the model itself; every other outcome belongs to a runtime and a cache.
OF_THE_MODEL = ("not instantiable", "their generate fails")


def run_case(
    case: str, runtime: str, caches: list[str], proposers: list[str], limit: float
) -> dict[str, Any]:
    """The report of the case's process before its end, or before its time was over."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch_dflash.selftest.pairs"])  # torch and transformers are read once
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=report, args=(theirs, case, runtime, caches, proposers))
    process.start()
    theirs.close()
    found, end = {"runs": {}}, time.monotonic() + limit
    try:
        while ours.poll(end - time.monotonic()):
            one = ours.recv()
            if "cache" in one:
                found["runs"][f"{one.pop('runtime')} {one.pop('cache')}"] = one
            else:
                found |= one
        left = {"outcome": "time limit", "detail": f"{limit:.0f} s"}
    except EOFError:
        process.join()
        left = {"outcome": "crash", "detail": f"exit status {process.exitcode}"}
    process.kill()
    process.join()
    if found.get("outcome") not in OF_THE_MODEL:
        for cache in caches:
            found["runs"].setdefault(f"{runtime} {cache}", left)
    return found


def wanted(known: dict[str, Any], runtime: str, cache: str, again: bool) -> bool:
    """Whether this run is still to do; only cases that are equal eagerly are compiled."""
    name = f"{runtime} {cache}"
    if known.get("outcome") in OF_THE_MODEL or (name in known.get("runs", {}) and not again):
        return again and known.get("outcome") in OF_THE_MODEL and runtime == "eager"
    eager = known.get("runs", {}).get(f"eager {cache}", {})
    return runtime == "eager" or eager.get("outcome") in ("equal", "tie")


def choose_proposers(known: dict[str, Any], runtime: str, cache: str) -> list[str]:
    """All of them eagerly; one program is enough for XLA, with taps where the family has them."""
    if runtime == "eager":
        return ["ngram", "dflash", "plain"]
    return ["dflash" if "dflash" in known["runs"][f"eager {cache}"]["proposers"] else "ngram"]


def write(path: Path, results: dict[str, Any]) -> None:
    """Replace the file at once: a sweep may be stopped at any time."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    os.replace(part, path)


def sweep(asked: argparse.Namespace) -> dict[str, Any]:
    """Run the missing cases, one process at a time."""
    path = Path(asked.json)
    results = json.loads(path.read_text()) if path.exists() else {"families": {}}
    for runtime in asked.runtimes.split(","):
        for case in (
            asked.families.split(",") if asked.families else MULTIMODAL if asked.multimodal else CASES
        ):
            known = results["families"].setdefault(case, {"runs": {}})
            caches = [one for one in asked.caches.split(",") if wanted(known, runtime, one, asked.again)]
            if not caches:
                continue
            started, proposers = time.perf_counter(), choose_proposers(known, runtime, caches[0])
            found = run_case(case, runtime, caches, proposers, asked.limit)
            runs = known["runs"] | found["runs"] if found.get("outcome") not in OF_THE_MODEL else {}
            results["families"][case] = found | {"runs": runs}
            results["provenance"] = provenance()
            write(path, results)
            outcomes = {name: one["outcome"] for name, one in found["runs"].items()} or found["outcome"]
            print(f"{time.perf_counter() - started:6.1f} s  {case}: {outcomes}", flush=True)
    return results


def main() -> None:
    """Sweep, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--runtimes",
        default="eager,xla",
        help="some of eager,xla; xla tries what the JSON calls equal eagerly",
    )
    parser.add_argument("--caches", default="static,paged", help="some of static,paged")
    parser.add_argument("--families", default="", help="cases by name, with commas; unset: all of them")
    parser.add_argument("--multimodal", action="store_true", help="those that also read images or sound")
    parser.add_argument("--limit", type=float, default=300, help="seconds a case may take")
    parser.add_argument("--json", default="families.json", help="what was found; continued where it exists")
    parser.add_argument("--again", action="store_true", help="run what the JSON has, too")
    parser.add_argument("--markdown", action="store_true", help="run nothing, print the table of the JSON")
    parser.add_argument(
        "--classes", action="store_true", help=f"run nothing, write {CLASSES.name} from docs/results"
    )
    asked = parser.parse_args()
    if asked.markdown:
        print(tables(json.loads(Path(asked.json).read_text())["families"]))
    elif asked.classes:
        sweeps = (ROOT / "docs/results" / f"{name}.json" for name in ("families", "multimodal"))
        CLASSES.write_text(tested(*(json.loads(path.read_text()) for path in sweeps)))
    else:
        sweep(asked)


if __name__ == "__main__":
    main()
