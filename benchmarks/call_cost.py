"""Measures the host time of a call outside its programs: `generate` of one token, and a round of `advance`.

    OMP_NUM_THREADS=1 python benchmarks/call_cost.py --against CHECKOUT --json docs/results/call_cost.json

Two checkouts take turns, each in a process of its own: this one, and CHECKOUT (of 808e971, before models
were copied as they are). The model has 36 layers and as many modules and tensors as Qwen3-4B, but small ones.
Time in programs is measured to their end and taken off. The minimum of each process counts; the JSON has the
median of the processes' minima.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
ONE = """
import json, sys, time
import jax, torch
import torch_dflash as td
from transformers import Qwen3Config, Qwen3ForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
sizes |= {"num_hidden_layers": 36, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
model = Qwen3ForCausalLM(Qwen3Config(**sizes, eos_token_id=None, bos_token_id=None)).eval()
ids, options = torch.randint(0, 1000, (1, 8)), {"do_sample": False, "eos_token_id": None}
engine = td.compile(model, td.NGramProposer(width=4), max_length=256, rounds_per_chunk=1)
inside = 0.0

def timed(program):
    def run(*args):
        global inside
        begun = time.perf_counter()
        out = jax.block_until_ready(program(*args))
        inside += time.perf_counter() - begun
        return out
    return run

programs = engine.runtime._programs
get = programs.get
programs.get = lambda *args, **named: timed(get(*args, **named))

def cost(call, rounds):
    global inside
    found = []
    for _ in range(rounds):
        inside, begun = 0.0, time.perf_counter()
        call()
        found.append(time.perf_counter() - begun - inside)
    return min(found)

def one_token():
    engine.generate(ids, max_new_tokens=1, **options)


one_token()
state = engine.advance(engine.start(ids, max_new_tokens=200, **options))

def advance():
    global state
    state = engine.advance(state)

advance()
print(json.dumps({"generate": 1e3 * cost(one_token, 25), "advance": 1e3 * cost(advance, 25)}))
"""


def measure(checkout: Path) -> dict[str, float]:
    """Milliseconds of a call and of a chunk in a process of ``checkout``."""
    env = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(
        [sys.executable, "-c", ONE], env=env, capture_output=True, text=True, check=True, cwd=checkout
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Measure, and print or write the figures."""
    sys.path.insert(0, str(ROOT))
    from torch_dflash.cli.outputs import provenance

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, required=True, help="a checkout of the earlier commit")
    parser.add_argument("--turns", type=int, default=3, help="processes of each checkout")
    parser.add_argument("--json", type=Path, help="where the figures go")
    args = parser.parse_args()
    runs = {"before": [], "now": []}
    for _ in range(args.turns):
        for name, checkout in (("before", args.against), ("now", ROOT)):
            runs[name].append(measure(checkout))
            print(name, runs[name][-1], flush=True)
    found = {
        what: {name: median(one[what] for one in many) for name, many in runs.items()}
        for what in ("generate", "advance")
    }
    for one in found.values():
        one["share"] = one["now"] / one["before"]
    print(json.dumps(found, indent=1))
    if args.json:
        # The place of the other checkout concerns this machine alone.
        kept = provenance()
        kept["command"] = kept["command"].replace(str(args.against), "CHECKOUT")
        said = {"provenance": kept, "milliseconds": found, "processes": runs}
        args.json.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
