"""``torch-dflash demo``: a real model, one question, every way of decoding it side by side."""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import torch

import torch_dflash as td
from torch_dflash.cli.provenance import write_json
from torch_dflash.cli.trace import show, trace_rounds
from torch_dflash.demo_model import load_demo_target

QUESTION = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. "
    "How many clips did Natalia sell altogether in April and May?"
)
REPEATS = 3


def add_parser(commands) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser("demo", help="decode a question with and without drafting, and compare")
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--width", type=int, default=8, help="drafted block, the anchor included")
    parser.add_argument("--runtime", choices=("xla", "eager"), default="xla")
    parser.add_argument("--json", metavar="FILE", help="write the table with its provenance")
    parser.set_defaults(run=run)


def random_drafter(target, width: int) -> td.DFlashDraftModel:
    """A two-layer DFlash drafter for ``target`` with random weights: right shapes, no knowledge."""
    base = target.config
    torch.manual_seed(0)
    config = td.DFlashConfig(
        vocab_size=base.vocab_size,
        hidden_size=base.hidden_size,
        intermediate_size=base.intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=base.num_attention_heads,
        num_key_value_heads=base.num_key_value_heads,
        head_dim=base.hidden_size // base.num_attention_heads,
        max_position_embeddings=base.max_position_embeddings,
        num_target_layers=base.num_hidden_layers,
        block_size=width,
        mask_token_id=0,
    )
    return td.DFlashDraftModel(config).eval()


def run(arguments: argparse.Namespace) -> int:
    """Decode, compare, print. Exit status 1 if any text differs from plain decoding."""
    target, tokenizer = load_demo_target()
    messages = [{"role": "user", "content": arguments.question}]
    encoded: Any = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = encoded["input_ids"]
    drafters = {
        "plain decoding": None,
        f"n-gram lookup, W={arguments.width}": td.NGramProposer(arguments.width),
        f"DFlash, random weights, W={arguments.width}": random_drafter(target, arguments.width),
    }
    colour = sys.stdout.isatty()
    for name, drafter in list(drafters.items())[1:]:
        eager = td.compile(target, drafter, runtime="eager", max_length=ids.shape[1] + 24)
        print(f"\n{name}, first rounds:")
        print(show(trace_rounds(eager, ids, max_new_tokens=24)[:6], tokenizer, colour))

    print(f"\nCompiling {len(drafters)} programs for runtime={arguments.runtime!r} ...", flush=True)
    outputs = _measure(target, drafters, ids, arguments)
    plain = outputs["plain decoding"][0]
    print(f"\nQ: {arguments.question}")
    answer = str(tokenizer.decode(plain.sequences[0, ids.shape[1] :], skip_special_tokens=True))
    print(f"A: {answer.strip()}\n")
    rows = _report(outputs)
    print("\n" + _verify_cost(rows))
    if arguments.json:
        write_json(arguments.json, {"question": arguments.question, "rows": rows})
    return 0 if all(row["same_text"] for row in rows) else 1


def _measure(target, drafters: dict, ids, arguments) -> dict[str, list[Any]]:
    """Outputs by name: a discarded first run each, then ``REPEATS`` interleaved ones."""
    needed = ids.shape[1] + arguments.max_new_tokens
    engines = {
        name: td.compile(target, drafter, runtime=arguments.runtime, max_length=needed, filters=False)
        for name, drafter in drafters.items()
    }

    def decode(engine: td.Engine) -> Any:
        return engine.generate(
            ids,
            max_new_tokens=arguments.max_new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
        )

    for engine in engines.values():
        decode(engine)
    outputs: dict[str, list[Any]] = {name: [] for name in engines}
    for _ in range(REPEATS):
        for name, engine in engines.items():
            outputs[name].append(decode(engine))
    return outputs


def _report(outputs: dict[str, list[Any]]) -> list[dict]:
    """Print the table and return its rows."""
    first = outputs["plain decoding"][0].sequences
    rows = []
    print(f"{'':34}{'acceptance length':>18}{'tok/s':>8}{'vs plain':>10}{'ms/round':>10}  same text")
    for name, runs in outputs.items():
        stats = runs[0].stats
        tpot = statistics.median(run.stats.time_per_output_token or float("nan") for run in runs)
        row = {
            "method": name,
            "acceptance_length": stats.mean_acceptance_length,
            "tokens_per_second": 1 / tpot,
            "ms_per_round": tpot * (stats.new_tokens - 1) / max(stats.rounds, 1) * 1e3,
            "new_tokens": stats.new_tokens,
            "same_text": all(torch.equal(run.sequences, first) for run in runs),
        }
        rows.append(row)
        row["speedup"] = row["tokens_per_second"] / rows[0]["tokens_per_second"]
        print(
            f"{name:34}{row['acceptance_length']:>18.2f}{row['tokens_per_second']:>8.1f}"
            f"{row['speedup']:>9.2f}x{row['ms_per_round']:>10.1f}  {'yes' if row['same_text'] else 'NO'}"
        )
    return rows


def _verify_cost(rows: list[dict]) -> str:
    """What this device's verify costs: the n-gram round has no draft pass, so it is the verify alone."""
    plain, ngram, *_ = rows
    cost = ngram["ms_per_round"] / plain["ms_per_round"]
    return (
        f"A verify round costs {cost:.1f} plain steps on this device. A TPU or GPU at batch 1 reads\n"
        "the weights once for all rows and should stay near 1; a CPU does not: there, look at acceptance."
    )
