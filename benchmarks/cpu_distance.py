"""Measures the distance of the bundled target in bfloat16 and int8 from itself in float32, on a CPU.

    python benchmarks/cpu_distance.py --answers 32 --json docs/results/cpu_distance.json

The target answers prompts of the evaluation sets, which no drafter has learned from, greedily in float32.
Each answer is read behind its prompt in one pass, in every arithmetic. Two figures come of the answers'
tokens: the share whose likeliest token is that of float32, and the perplexity, which is low because
the answers are the target's own.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

import torch_dflash as td
from jax_bridge.arrays import to_jax
from jax_bridge.programs.lower import lower, tracing
from torch_dflash.cli.outputs import write_results
from torch_dflash.cli.text import encode
from torch_dflash.demo.target import load_demo_target
from torch_dflash.rows import RowRequests
from torch_dflash.train.answers.data import draw

PROMPTS = Path(__file__).parents[1] / "data" / "eval"
ROOM, NEW = 512, 128
ARITHMETIC: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "float32, products in bfloat16": (torch.float32, {"compute": "bfloat16"}),
    "float32, products in int8": (torch.float32, {"quantize": "int8"}),
    "bfloat16": (torch.bfloat16, {}),
    "bfloat16, products in int8": (torch.bfloat16, {"quantize": "int8"}),
}


class Text(NamedTuple):
    """Ids of a prompt and its answer, which begins at ``start``."""

    ids: list[int]
    start: int


class Seen(NamedTuple):
    """The likeliest id and the own log-probability at each token of the answers."""

    likeliest: np.ndarray
    log_probability: np.ndarray


def answer(target: Any, tokenizer: Any, count: int, seed: int) -> list[Text]:
    """``count`` prompts that fit the room, with the target's answers."""
    engine = td.compile(target, None, max_length=ROOM, filters=False)
    asked = (encode(tokenizer, [{"role": "user", "content": text}]) for _, text in draw(PROMPTS, count, seed))
    prompts = [ids for ids in asked if len(ids) <= ROOM - NEW]
    texts = (engine.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False) for ids in prompts)
    return [Text(text[0].tolist(), len(ids)) for ids, text in zip(prompts, texts, strict=True)]


def look(target: Any, texts: list[Text], **options: Any) -> Seen:
    """Reads the texts with the target as an engine with these options computes."""
    engine = td.compile(target, None, max_length=ROOM, filters=False, **options)
    runtime: Any = engine.runtime
    params = runtime.refresh(engine.tensors())

    def read(params: Any, state: Any, ids: Any) -> Any:
        def step(pair: Any, state: Any, ids: Any) -> Any:
            return pair.target(ids, state.length, state.cache).logits.float().log_softmax(dim=-1)

        return engine.pair.run(step, params, state, ids)

    def told() -> Iterator[Seen]:
        program = jax.jit(lower(read))
        for text in texts:
            ids = torch.tensor([text.ids + [0] * (ROOM - len(text.ids))], dtype=torch.int32)
            state = runtime.begin(params, RowRequests.idle(engine.plan))
            found = np.asarray(program(params, state, to_jax(ids)))[0, text.start - 1 : len(text.ids) - 1]
            said = np.asarray(text.ids[text.start :])
            yield Seen(found.argmax(axis=1), found[np.arange(len(said)), said])

    with tracing("highest"):
        return Seen(*map(np.concatenate, zip(*told(), strict=True)))


def main() -> None:
    """Look at the answers in every arithmetic; print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=64, help="how many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    targets = {dtype: load_demo_target(dtype, progress=False) for dtype in (torch.float32, torch.bfloat16)}
    texts = answer(*targets[torch.float32], asked.answers, asked.seed)
    rows, exact = [], None
    for name, (dtype, options) in ARITHMETIC.items():
        seen = look(targets[dtype][0], texts, **options)
        exact = exact or seen
        agreement = float((seen.likeliest == exact.likeliest).mean())
        perplexity = math.exp(-float(seen.log_probability.mean()))
        rows.append({"arithmetic": name, "agreement": agreement, "perplexity": perplexity})
        print(f"{name:32} agreement {agreement:.4f}  perplexity {perplexity:.4f}", flush=True)
    if asked.json:
        of = {"answers": len(texts), "seed": asked.seed, "tokens": len(exact.likeliest)}
        write_results(asked.json, of | {"rows": rows})


if __name__ == "__main__":
    main()
