r"""The acceptance of a drafter for a target with recurrent layers, both trained here in some minutes.

    OMP_NUM_THREADS=1 python benchmarks/hybrid_acceptance.py --folder build/hybrid \
        --json docs/results/hybrid_acceptance.json

The target is a tiny Qwen3.5 (three gated delta rules to one attention) that learns to write like the embedded
target: `data/train/regenerated/maths`. Its drafter comes from ``torch-dflash train all``. The figures say
that training works over recurrent states, not how good a drafter of a published model would be. Each part
that is there already is kept.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from torch_dflash.cli import main as command
from torch_dflash.cli.loading import load_named
from torch_dflash.cli.outputs import write_results
from torch_dflash.train.answers.data import encode_conversation, read_answers

DATA = Path(__file__).parent.parent / "data"
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": 1024,
}
WORDS, LENGTH, BATCH = 2048, 256, 8


def main() -> None:
    """Make the target, its drafter and the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=10.0, help="of CPU time, for the target")
    parser.add_argument("--answers", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--limit", type=int, default=50, help="prompts that judge")
    parser.add_argument("--json", required=True)
    options = parser.parse_args()
    target, drafter = options.folder / "target", options.folder / "run/fit/drafter"
    if not (target / "told.json").exists():
        told = train_target(target, options.minutes)
        (target / "told.json").write_text(json.dumps(told))
    line = ["train", "all", "--target", target, "--out", options.folder / "run", "--online"]
    line += ["--prompts", DATA / "train/prompts/gsm8k_train.jsonl.gz"]
    line += ["--eval-prompts", DATA / "eval/gsm8k.jsonl"]
    line += [f"--regenerate=--runtime eager --max-new-tokens 96 --limit {options.answers} --batch-size 64"]
    fit = f"--mask-token-id {WORDS} --layers 2 --block-size 8 --taps 0,1,2 --learning-rate 2e-3 --held-out 16"
    line += [f"--fit={fit} --epochs {options.epochs} --batch-size 8 --anchors 32"]
    judge = f"--runtime eager --limit {options.limit} --max-new-tokens 96 --batch-size 10"
    line += [f"--evaluate={judge}"]
    run(line)
    shuffled = options.folder / "shuffled.json"
    line = ["train", "evaluate", "--target", target, "--drafter", drafter, "--json", shuffled, "--shuffled"]
    line += ["--prompts", DATA / "eval/gsm8k.jsonl", *shlex.split(judge)]
    run(line)
    own = json.loads((options.folder / "run/figures.json").read_text())["sets"]["gsm8k"]
    other = json.loads(shuffled.read_text())["sets"]["gsm8k"]
    told = json.loads((target / "told.json").read_text())
    print(own, other, told)
    write_results(options.json, {"target": told, "drafter": own, "shuffled": other})


def run(line: list[Any]) -> None:
    """A line of ``torch-dflash``; if it fails, so does this program."""
    if command([str(part) for part in line]):
        raise SystemExit(1)


def train_target(folder: Path, minutes: float) -> dict[str, Any]:
    """Train and save the target and its tokenizer; returns the figures of the training."""
    teacher = load_named("demo", "ngram").tokenizer
    answers = read_answers(sorted((DATA / "train/regenerated/maths").glob("*.gz")))
    talks = [
        [
            *one.messages,
            {"role": "assistant", "content": teacher.decode(one.response_ids, skip_special_tokens=True)},
        ]
        for one in answers
    ]
    tokenizer = teacher.train_new_from_iterator([talk[-1]["content"] for talk in talks], WORDS)
    held, batches = talks[:32], blocks(tokenizer, talks[32:])
    torch.manual_seed(0)
    # One row more than the tokenizer's ids: the drafter's mask, which no text holds.
    ids = {
        "vocab_size": WORDS + 1,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model = hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(**SHAPE | ids))
    steps = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    began, count = time.process_time(), 0
    while (spent := (time.process_time() - began) / 60) < minutes:
        steps.param_groups[0]["lr"] = 2e-3 * min(1.0, (count + 1) / 50, 1.02 - spent / minutes)
        rows = next(batches)
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        steps.step()
        steps.zero_grad()
        count += 1
        if count % 20 == 0:
            print(f"step {count}, {spent:.1f} min, loss {loss.item():.3f}", flush=True)
    model.eval()
    with torch.no_grad():
        rows = next(blocks(tokenizer, held, len(held)))
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss.item()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {
        "parameters": model.num_parameters(),
        "steps": count,
        "tokens": count * BATCH * LENGTH,
        "cpu_minutes": round((time.process_time() - began) / 60, 1),
        "held-out loss": round(loss, 3),
    }


def blocks(tokenizer: Any, talks: list, batch: int = BATCH) -> Iterator[torch.Tensor]:
    """Rows [batch, LENGTH] of conversations behind each other, for ever."""
    order, kept = random.Random(0), []
    while True:
        for talk in order.sample(talks, len(talks)):
            kept += encode_conversation(tokenizer, talk[:-1])
            kept += tokenizer(talk[-1]["content"] + tokenizer.eos_token, add_special_tokens=False).input_ids
            if len(kept) >= batch * LENGTH:
                yield torch.tensor(kept[: batch * LENGTH]).view(batch, LENGTH)
                kept = []


if __name__ == "__main__":
    main()
