"""Int8 weights off the CPU, of the bundled pair: the target's perplexity and choices, the draft's acceptance.

    torch-dflash bench --target demo --methods plain --prompts data/eval/*.jsonl --texts build/own.json
    python benchmarks/int8_quality.py --texts build/own.json --json docs/results/int8_quality.json

Linear weights get the values of the form, codes times a scale for each output row, so that the figures are of
the form on any device. The target is judged on the answers that it gives as it is, and on the questions. The
drafter is replayed by ``torch-dflash bench`` on the same answers.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import jax_bridge as jb
import torch_dflash as td
from jax_bridge.weights.codes import Scaled
from torch_dflash.cli.outputs import write_results

ASSET = "torch_dflash/assets/smollm2-135m-instruct-dflash"


def in_int8(model: Any) -> Any:
    """A copy of ``model`` whose linear weights have the values of the form."""
    found = copy.deepcopy(model)
    for part in found.modules():
        if isinstance(part, nn.Linear):
            values = jb.to_torch(Scaled.of(part.weight.detach(), None).entries())
            part.weight.data = values.to(part.weight.dtype)
    return found


@torch.inference_mode()
def judged(models: dict[str, Any], answers: list[tuple[list[int], list[int]]]) -> dict[str, Any]:
    """Perplexities of questions and answers by both models, and how often they choose the same token."""
    sums = {f"{name} {part}": 0.0 for name in models for part in ("question", "answer")}
    counts = {"question": 0, "answer": 0, "alike": 0}
    for prompt, answer in answers:
        ids = torch.tensor([prompt + answer])
        logits = {name: model(ids).logits[0, :-1].float() for name, model in models.items()}
        parts = {"question": slice(0, len(prompt) - 1), "answer": slice(len(prompt) - 1, None)}
        for part, where in parts.items():
            counts[part] += len(ids[0, 1:][where])
            for name, found in logits.items():
                loss = nn.functional.cross_entropy(found[where], ids[0, 1:][where], reduction="sum")
                sums[f"{name} {part}"] += loss.item()
        own, other = (found[parts["answer"]].argmax(dim=1) for found in logits.values())
        counts["alike"] += int((own == other).sum())
    perplexity = {
        key: float(torch.tensor(total / counts[key.split()[1]]).exp()) for key, total in sums.items()
    }
    return {"perplexity": perplexity, "same_choice": counts["alike"] / counts["answer"], "tokens": counts}


def main() -> None:
    """Judge and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("build/int8"))
    parser.add_argument("--json", required=True)
    asked = parser.parse_args()
    texts = json.loads(asked.texts.read_text())
    target, drafter, _ = td.load_demo_pair(dtype=getattr(torch, texts["options"]["dtype"]))
    models = {"as_it_is": target, "int8": in_int8(target)}
    found = {name: judged(models, one["answers"]) for name, one in texts["sets"].items()}
    folder = asked.out / "drafter"
    in_int8(drafter).save_pretrained(folder)
    options = texts["options"]
    counted = asked.out / "counts.json"
    words = ["bench", "--target", "demo", "--methods", f"dflash={ASSET},dflash:8={folder}"]
    words += ["--prompts", *(f"data/eval/{name}.jsonl" for name in texts["sets"]), "--decoded", "0"]
    words += ["--texts", str(asked.texts), "--json", str(counted), "--dtype", options["dtype"]]
    for name in ("limit", "max_new_tokens", "max_prompt_tokens", "batch_size", "runtime"):
        words += [] if options[name] is None else [f"--{name.replace('_', '-')}", str(options[name])]
    subprocess.run([sys.executable, "-m", "torch_dflash", *words], check=True)
    counts = json.loads(counted.read_text())["counts"]
    acceptance = {
        name: {
            form: one["methods"][name]["tokens_per_round"]
            for form, name in {"as_it_is": "dflash", "int8": "dflash:8"}.items()
        }
        for name, one in counts.items()
    }
    write_results(asked.json, {"options": options, "target": found, "drafter": acceptance})


if __name__ == "__main__":
    main()
