"""Latent attention on a CPU: absorbed against expanded, a step and a prompt, and errors in bfloat16.

    python benchmarks/latents_cpu.py --json docs/results/latents_cpu.json

A model with DeepSeek-V3's ratios at small widths and dense MLPs decodes plainly on static buffers. A hook
that does nothing on ``kv_b_proj`` keeps the expanded form. Both take turns. The errors are those of the
logits behind a prompt, against the same weights in float64.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from typing import Any

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import torch_dflash as td
from torch_dflash.cli.outputs import write_results

SIZES = {"hidden_size": 512, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 192}
SIZES |= {"kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
SIZES |= {"num_hidden_layers": 4, "first_k_dense_replace": 4, "intermediate_size": 1024, "vocab_size": 512}
POSITIONS, STEPS, TURNS, SEEDS = 2000, 32, 5, 20
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None}


def made(seed: int) -> Any:
    """A random model."""
    torch.manual_seed(seed)
    config = DeepseekV3Config(**SIZES, max_position_embeddings=4096, initializer_range=0.05)
    return DeepseekV3ForCausalLM(config).eval()


def both(model: Any) -> dict[str, Any]:
    """The model, and its copy that expands."""
    expanded = copy.deepcopy(model)
    for name, part in expanded.named_modules():
        if name.endswith("kv_b_proj"):
            part.register_forward_pre_hook(lambda *_: None)
    return {"absorbed": model, "expanded": expanded}


def times(runtime: str) -> dict[str, Any]:
    """Medians of a step and of a prompt of `POSITIONS` tokens."""
    ids = torch.randint(1, SIZES["vocab_size"], (1, POSITIONS), generator=torch.Generator().manual_seed(0))
    shape = {"max_length": POSITIONS + STEPS + 8, "cache": "static", "runtime": runtime, "filters": False}
    shape |= {"verify": False}  # the hook would be tried
    engines = {name: td.compile(model, None, **shape) for name, model in both(made(0)).items()}
    found: dict[str, dict[str, list[float]]] = {name: {"prompt": [], "step": []} for name in engines}
    texts = {}
    for turn in range(TURNS + 1):
        for name in engines if turn % 2 else reversed([*engines]):
            taken = []
            for count in (1, 1 + STEPS):
                begun = time.perf_counter()
                texts[name] = engines[name].generate(ids, max_new_tokens=count, **GREEDY)
                taken.append(time.perf_counter() - begun)
            if turn:  # the first compiles
                found[name]["prompt"].append(taken[0])
                found[name]["step"].append((taken[1] - taken[0]) / STEPS)
    medians = {
        name: {part: statistics.median(seconds) for part, seconds in parts.items()}
        for name, parts in found.items()
    }
    ratios = {part: medians["expanded"][part] / medians["absorbed"][part] for part in ("prompt", "step")}
    return medians | {"expanded_of_absorbed": ratios, "same_text": torch.equal(*texts.values())}


def errors() -> dict[str, Any]:
    """Mean errors of logits in bfloat16, of `SEEDS` models."""
    rows: dict[str, list[float]] = {"absorbed": [], "expanded": []}
    for seed in range(SEEDS):
        ids = torch.randint(1, SIZES["vocab_size"], (1, 64), generator=torch.Generator().manual_seed(seed))
        model = made(seed).to(torch.bfloat16)
        with torch.no_grad():
            right = copy.deepcopy(model).double()(ids).logits[0, -1]
        for name, one in both(model).items():
            told: Any = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 1}
            told |= {"runtime": "eager", "cache": "static", "verify": False}
            got = td.generate(one, None, ids, **told, **GREEDY).logits[0][0]
            rows[name].append(float((got.double() - right).abs().mean()))
    means = {name: statistics.mean(found) for name, found in rows.items()}
    return means | {"absorbed_of_expanded": means["absorbed"] / means["expanded"]}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", required=True)
    asked = parser.parse_args()
    shape = {"sizes": SIZES, "positions": POSITIONS, "steps": STEPS, "turns": TURNS, "seeds": SEEDS}
    results = {"shape": shape, "bfloat16_error": errors()}
    results |= {runtime: times(runtime) for runtime in ("xla", "eager")}
    write_results(asked.json, results)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
