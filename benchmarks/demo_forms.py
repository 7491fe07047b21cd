"""The speed of plain decoding, of the demo's drafter, and of unions with it, which answer in turn.

A form's figure is the median of its tokens a second (1 / TPOT) over plain decoding's in the same turn: a
machine that is busy at times slows both. ``--chat`` asks questions of conversations, to which no drafter
was fitted, and counts the CPU seconds of a call: other programs of the machine change those less.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import torch_dflash as td
from torch_dflash.cli.outputs import write_results
from torch_dflash.cli.text import encode
from torch_dflash.demo.pair import load_demo_draft_ids
from torch_dflash.demo.questions import QUESTIONS
from torch_dflash.proposers.narrow import with_draft_vocabulary
from torch_dflash.requests.row_values import default_stop_ids
from torch_dflash.train.answers.data import draw, read_prompts


def build(arguments: argparse.Namespace) -> tuple[dict[str, Any], Any, list[int]]:
    """Warm engines by form, plain decoding of the first type in front; the tokenizer; ids that end a text."""
    engines = {}
    for dtype in arguments.dtype:
        target, drafter, tokenizer = td.load_demo_pair(getattr(torch, dtype))
        narrow, lookup = with_draft_vocabulary(drafter, target, load_demo_draft_ids()), td.NGramProposer()
        forms = {"plain": None, "drafter": narrow}
        forms |= {f"union of {rows}": td.Union(lookup, narrow, rows=rows) for rows in arguments.rows}
        for form, drafts in forms.items():
            name = form if dtype == arguments.dtype[0] else f"{form}, {dtype}"
            engines[name] = td.compile(
                target,
                drafts,
                runtime=arguments.runtime,
                filters=False,
                verify_width=arguments.verify_width if drafts is not None else None,
                max_length=512,
                rounds_per_chunk=1,
                prefill_chunk_size=16,
            )
            engines[name].keeps_alive = target, drafts
            engines[name].warmup()
            print(name, "is compiled", flush=True)
    return engines, tokenizer, default_stop_ids(target, tokenizer)


def plain_of(form: str) -> str:
    """Plain decoding in the type of ``form``."""
    return ", ".join(["plain", *form.split(", ")[1:]])


def main() -> None:
    """Answer the demo's questions in each form, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runtime", default="xla")
    parser.add_argument(
        "--dtype", nargs="+", default=["bfloat16"], help="of several, ratios are to the first"
    )
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--draw", type=int, default=0, help="questions of data/eval besides the demo's")
    parser.add_argument("--chat", type=int, default=0, help="questions of mt-bench, in place of the others")
    parser.add_argument("--rows", type=int, nargs="+", default=[8])
    parser.add_argument("--verify-width", default="auto")
    parser.add_argument("--json", required=True)
    arguments = parser.parse_args()
    questions = [*QUESTIONS.items(), *draw(Path("data/eval"), arguments.draw)]
    if arguments.chat:
        prompts = read_prompts([Path("data/eval/mt-bench.jsonl")])
        questions = [("mt-bench", one.turns[0]) for one in random.Random(0).sample(prompts, arguments.chat)]
    engines, tokenizer, stops = build(arguments)
    asked = {
        f"{number} ({kind})": torch.tensor([encode(tokenizer, [{"role": "user", "content": question}])])
        for number, (kind, question) in enumerate(questions, 1)
    }
    options = {"max_new_tokens": arguments.max_new_tokens, "do_sample": False}
    options |= {"eos_token_id": stops, "return_dict_in_generate": True}
    speeds: dict[str, dict[str, list[float]]] = {kind: {} for kind in asked}
    for turn in range(arguments.repeats + 1):  # in the first turn engines learn the worth of drafts
        for kind, ids in asked.items():
            texts = {}
            for form, engine in random.sample([*engines.items()], len(engines)):
                spent = time.process_time()
                out: Any = engine.generate(ids, torch.ones_like(ids), **options)
                spent = (time.process_time() - spent) / len(out.new_tokens[0])
                texts[form] = out.new_tokens
                if turn:
                    each = spent if arguments.chat else out.stats.time_per_output_token
                    speeds[kind].setdefault(form, []).append(1 / each)
            same = sum(text == texts[plain_of(form)] for form, text in texts.items())
            print(f"{kind}: {same} of {len(texts)} texts are alike", flush=True)  # ties of bfloat16
        last = {kind: {form: round(own[-1], 1) for form, own in of.items()} for kind, of in speeds.items()}
        print("turn", turn, last, flush=True)
    first = next(iter(engines))
    ratios = {
        kind: {
            form: round(statistics.median(a / b for a, b in zip(own[form], own[first], strict=True)), 3)
            for form in engines
        }
        for kind, own in speeds.items()
    }
    medians = {form: statistics.median(own[form] for own in ratios.values()) for form in engines}
    write_results(arguments.json, vars(arguments) | {"over plain decoding": ratios, "median": medians})
    print(medians)


if __name__ == "__main__":
    main()
