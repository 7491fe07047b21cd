"""Compares the time of steps and of reading with transformers, for targets with recurrent layers, on a CPU.

    OMP_NUM_THREADS=1 python benchmarks/hybrid_steps.py --json docs/results/hybrid_steps.json

Random float32 models of four layers at published widths, every kind of layer among them. Timed in turns: a
prompt of 2,000 tokens with one new token, and 64 greedy tokens behind a short prompt, without a drafter; the
steps are those 64 tokens less a run of one token. ``ours`` and ``theirs`` are the process's seconds of CPU
time, the least of all: other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

import torch_dflash as td
from torch_dflash.cli.outputs import write_results

HYBRID = ["linear_attention"] * 3 + ["full_attention"]
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Qwen3.5-0.8B": (
        "Qwen3_5ForCausalLM",
        "Qwen3_5TextConfig",
        {"hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 2}
        | {"head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16, "layer_types": HYBRID},
    ),
    "LFM2-1.2B": (
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {"hidden_size": 2048, "intermediate_size": 8192, "block_auto_adjust_ff_dim": False}
        | {"num_attention_heads": 32, "num_key_value_heads": 8}
        | {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    ),
    "Granite-4.0-H-1B": (
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {"hidden_size": 1536, "shared_intermediate_size": 4096, "num_attention_heads": 12}
        | {"num_key_value_heads": 4, "num_local_experts": 0, "num_experts_per_tok": 0}
        | {"mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128, "layer_types": HYBRID},
    ),
}
"""Cases by the model that lends its widths."""
READ, NEW, SHORT = 2000, 64, 16


def build(case: str) -> Any:
    """The model of a case."""
    kind, config, fields = CASES[case]
    base = {"num_hidden_layers": 4, "vocab_size": 32768, "eos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(0)
    return getattr(hf, kind)(getattr(hf, config)(**base | {"bos_token_id": 1} | fields)).eval()


def seconds(run: Callable[[], Any]) -> float:
    """CPU seconds of one call, of all cores together."""
    started = time.process_time()
    run()
    return time.process_time() - started


def measure(case: str, runtime: str, turns: int) -> dict[str, dict[str, float]]:
    """Seconds of reading and of a step, ours and transformers'."""
    target = build(case)
    engine = td.compile(target, None, runtime=runtime, max_length=READ + NEW, filters=False).warmup()
    ids = torch.randint(3, 32000, (1, READ))

    def ours(prompt: Any, new: int) -> Any:
        return engine.generate(prompt, max_new_tokens=new, do_sample=False, eos_token_id=None)

    def theirs(prompt: Any, new: int) -> Any:
        mask = torch.ones_like(prompt)
        return target.generate(prompt, attention_mask=mask, max_new_tokens=new, do_sample=False)

    short = ids[:, :SHORT]
    found: dict[str, dict[str, list[float]]] = {}
    assert torch.equal(ours(short, NEW), theirs(short, NEW)), case
    for _ in range(turns):
        for name, decode in (("ours", ours), ("theirs", theirs)):
            parts = found.setdefault(name, {"prompt": [], "first": [], "whole": []})
            parts["prompt"].append(seconds(lambda decode=decode: decode(ids, 1)))
            parts["first"].append(seconds(lambda decode=decode: decode(short, 1)))
            parts["whole"].append(seconds(lambda decode=decode: decode(short, NEW)))
    return {
        name: {
            "prompt": min(parts["prompt"]),
            "step": (min(parts["whole"]) - min(parts["first"])) / (NEW - 1),
        }
        for name, parts in found.items()
    }


def main() -> None:
    """Print the seconds of every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help="some of them, with commas")
    parser.add_argument("--runtimes", default="eager,xla", help="some of eager,xla")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", default="", help="where to write them")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for case in asked.cases.split(","):
        for runtime in asked.runtimes.split(","):
            found = results.setdefault(case, {})[runtime] = measure(case, runtime, asked.turns)
            mine, other = found["ours"], found["theirs"]
            print(
                f"{case:18} {runtime:6} prompt {mine['prompt']:.2f} s ({other['prompt']:.2f}), "
                f"step {1e3 * mine['step']:.1f} ms ({1e3 * other['step']:.1f})",
                flush=True,
            )
    if asked.json:
        write_results(asked.json, {"seconds": results, "prompt_tokens": READ, "new_tokens": NEW})


if __name__ == "__main__":
    main()
