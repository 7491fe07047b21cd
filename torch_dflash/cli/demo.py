"""``torch-dflash demo``: the pair that comes with the library answers a question, beside the baselines."""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

import torch_dflash as td
from torch_dflash.cli.arguments import check_room, prompt_room, rows_or_auto
from torch_dflash.cli.encode import encode
from torch_dflash.cli.errors import UserError, fail
from torch_dflash.cli.provenance import write_json
from torch_dflash.cli.timeline import draw_timeline, stream_answer
from torch_dflash.cli.writable import check_outputs
from torch_dflash.demo.pair import load_demo_pair
from torch_dflash.demo.target import DemoModelError

QUESTION = (
    "A baker bakes 36 rolls in the morning and half as many in the afternoon. She sells each roll for 2 "
    "dollars. How much money does she make if she sells all of them?"
)
PLAIN = "plain decoding"
REPEATS = 3


def add_parser(commands) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser("demo", help="ask the pair that comes with the library a question")
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument(
        "--verify-width", type=rows_or_auto, help="rows verified, the anchor included, or auto (default: all)"
    )
    parser.add_argument("--runtime", choices=("xla", "eager"), default="xla")
    parser.add_argument("--json", metavar="FILE", help="write the table with its provenance")
    parser.add_argument("--png", metavar="FILE", type=Path, help="draw the acceptance length of every round")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Answer, compare, print. Exit status 1 if any text differs from plain decoding, 2 on wrong usage."""
    try:
        _check_arguments(arguments)
        return _answer(arguments, *load_demo_pair())
    except (UserError, DemoModelError) as error:
        return fail("demo", error)
    except KeyboardInterrupt:
        return 130


def _check_arguments(arguments: argparse.Namespace) -> None:
    """Refuse what needs no model to be refused."""
    if arguments.max_new_tokens < 1:
        raise UserError(f"--max-new-tokens {arguments.max_new_tokens}: must be an integer of at least 1.")
    rows = arguments.verify_width
    if rows not in (None, "auto") and (isinstance(rows, str) or rows < 2):
        raise UserError(f"--verify-width {rows}: the anchor and a draft need at least 2; or give auto.")
    check_outputs(json=arguments.json, png=arguments.png)


def _answer(arguments: argparse.Namespace, target: Any, drafter: Any, tokenizer: Any) -> int:
    block = drafter.config.block_size
    width = arguments.verify_width if isinstance(arguments.verify_width, int) else block
    if width > block:
        raise UserError(f"--verify-width {width}: the drafter's blocks have {block} rows; lower it.")
    room = prompt_room(arguments.max_new_tokens, target)
    prompt = encode(tokenizer, [{"role": "user", "content": arguments.question}])
    check_room(prompt, room)
    ids = torch.tensor([prompt])
    drafters = {PLAIN: None, f"n-gram lookup, W={width}": td.NGramProposer(width), "DFlash": drafter}
    options: dict[str, Any] = {"runtime": arguments.runtime, "filters": False}
    options["max_length"] = ids.shape[1] + arguments.max_new_tokens
    shown = {"verify_width": arguments.verify_width}

    print(f"Q: {arguments.question}\n\nCompiling for runtime={arguments.runtime!r} ...", flush=True)
    live = td.compile(target, drafter, rounds_per_chunk=1, **shown, **options)
    call: dict[str, Any] = {"max_new_tokens": arguments.max_new_tokens, "do_sample": False}
    live.generate(ids, max_new_tokens=2, do_sample=False)  # compiles what this question needs
    print("A: ", end="", flush=True)
    stream_answer(live, tokenizer, ids, sys.stdout.isatty(), **call)
    if sys.stdout.isatty():
        print("(green: drafted and accepted; the rest: the target's own, one token a round)")

    engines = {
        name: td.compile(target, drafts, **(shown if drafts is drafter else {}), **options)
        for name, drafts in drafters.items()
    }
    outputs = _measure(engines, ids, call)
    rows = _report(outputs)
    print("\n" + _verify_cost(rows))
    if arguments.json:
        write_json(arguments.json, {"question": arguments.question, "rows": rows})
    if arguments.png:
        rounds = {name: runs[0].stats.acceptance_lengths[0] for name, runs in outputs.items()}
        draw_timeline(arguments.png, {name: rounds[name] for name in rounds if name != PLAIN}, width)
    return 0 if all(row["same_text"] for row in rows) else 1


def _measure(engines: dict[str, td.Engine], ids, call: dict[str, Any]) -> dict[str, list[Any]]:
    """Outputs by name: a discarded first run each, then ``REPEATS`` interleaved ones."""
    for engine in engines.values():
        engine.generate(ids, **call)
    outputs: dict[str, list[Any]] = {name: [] for name in engines}
    for _ in range(REPEATS):
        for name, engine in engines.items():
            outputs[name].append(engine.generate(ids, return_dict_in_generate=True, **call))
    return outputs


def _report(outputs: dict[str, list[Any]]) -> list[dict]:
    """Print the table and return its rows."""
    first = outputs[PLAIN][0].sequences
    rows = []
    print(f"\n{'':22}{'acceptance length':>18}{'tok/s':>8}{'vs plain':>10}{'ms/round':>10}  same text")
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
            f"{name:22}{row['acceptance_length']:>18.2f}{row['tokens_per_second']:>8.1f}"
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
