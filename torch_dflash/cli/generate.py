"""``torch-dflash generate``: decode prompts with any pair, as text or as JSON lines."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch

import torch_dflash as td
from torch_dflash.checks import CACHES
from torch_dflash.cli.arguments import (
    PENALTIES,
    call_options,
    check_options,
    check_room,
    prompt_room,
    read_input,
    rows_or_auto,
    template_options,
)
from torch_dflash.cli.encode import StdoutStreamer, encode
from torch_dflash.cli.errors import UserError, fail, one_line
from torch_dflash.cli.jsonl import read_items, run_lines
from torch_dflash.cli.loading import DRAFTERS, DTYPES, TARGETS, Loaded, load_pair
from torch_dflash.engine.options import LARGEST_CHUNK
from torch_dflash.engine.outputs import GenerateOutput
from torch_dflash.engine.prompts import bucket
from torch_dflash.engine.read import read_request
from torch_dflash.engine.rules import of_the_model
from torch_dflash.engine.special_ids import stop_ids
from torch_dflash.engine.stats import DecodeStats

STREAMED_ROUNDS = 4  # rounds between two pieces of streamed text: a read each, but text flows
DEFAULT_BATCH = 8


def add_parser(commands) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "generate",
        help="decode prompts with a target and a drafter",
        description="Decode one prompt to streamed text, or JSON lines to JSON lines. Text goes to stdout, "
        "statistics and errors to stderr. Exit status: 0 done, 1 some lines failed, 2 wrong usage.",
    )
    add = parser.add_argument
    names = f"directory, hub id or {', '.join(TARGETS)}"
    add("--target", required=True, metavar="T", help=f"the model whose text comes out: {names}")
    names = f"directory, hub id or {', '.join(DRAFTERS)}"
    add("--drafter", required=True, metavar="D", help=f"what drafts for it: {names}")
    add("stdin", nargs="?", choices=["-"], metavar="-", help="read the prompt (or the JSON lines) from stdin")
    add("--prompt", metavar="TEXT")
    add("--file", metavar="PATH", help="the whole file is one prompt; with --jsonl, one prompt per line")
    add(
        "--jsonl",
        action="store_true",
        help='input lines {"prompt": ...}, {"turns": [...]} (the first is used) or {"messages": [...]}; '
        "one result line each, in order",
    )
    add("--system", metavar="TEXT", help="system message of the chat template")
    add("--raw", action="store_true", help="send the text as it is, without the chat template")
    add("--chat-template-kwargs", metavar="JSON", help="e.g. '{\"enable_thinking\": false}'")
    add("--max-new-tokens", type=int, default=256, metavar="N")
    add("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    add("--top-k", type=int, default=0, help="0 (default): off")
    add("--top-p", type=float, default=1.0)
    add("--min-p", type=float, default=0.0)
    for name in PENALTIES:
        kind = int if name.endswith("size") else float
        add(f"--{name.replace('_', '-')}", type=kind, metavar="N", help="unset: what the model asks for")
    add("--stop", action="append", metavar="TEXT", help="end with this text; may be given more than once")
    add("--seed", type=int, default=0, help="line n of --jsonl draws from seed + n - 1")
    add("--ignore-eos", action="store_true", help="never stop before --max-new-tokens")
    add("--dtype", choices=DTYPES, default="auto")
    add("--runtime", choices=("xla", "eager"), default="xla")
    add("--cache", choices=CACHES, default="static", help="of the target (default static)")
    add("--no-verify", dest="verify", action="store_false", help="decode a class that is not tested, unseen")
    add("--device", help="torch device of --runtime eager, such as cuda")
    add("--block-size", type=int, metavar="W", help="drafted block, the anchor included")
    add("--verify-width", type=rows_or_auto, metavar="M", help="how much of the block is verified, or auto")
    add(
        "--batch-size",
        type=int,
        metavar="B",
        help=f"lines decoded together with --jsonl (default {DEFAULT_BATCH})",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Decode what was asked for; returns the exit status."""
    try:
        check_options(arguments)
        data = read_input(arguments)
        loaded = load_pair(
            arguments.target,
            arguments.drafter,
            dtype=arguments.dtype,
            device=arguments.device,
            block_size=arguments.block_size,
        )
        room = prompt_room(arguments.max_new_tokens, loaded.target)
        job = Job(arguments, loaded, call_options(arguments, loaded), room)
        return _lines(job, data) if arguments.jsonl else _one(job, data)
    except UserError as error:
        return fail("generate", error)
    except BrokenPipeError:  # the reader has seen enough; the interpreter must not flush into it again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


@dataclass(frozen=True)
class Job:
    """What to decode with: the pair, every call's ``options``, and the ``room`` for a prompt in tokens."""

    arguments: argparse.Namespace
    loaded: Loaded
    options: dict[str, Any]
    room: int

    def encode(self, messages: list[dict]) -> list[int]:
        """Prompt ids of ``messages``, --system before them."""
        if self.arguments.system is not None:
            messages = [{"role": "system", "content": self.arguments.system}, *messages]
        template = template_options(self.arguments)
        return encode(self.loaded.tokenizer, messages, raw=self.arguments.raw, template_options=template)

    def own_processors(self) -> tuple:
        """What the model's own config asks for."""
        target = self.loaded.target
        slots = max(8, *map(len, stop_ids(self.options["eos_token_id"], 1)))
        return of_the_model(target.generation_config, slots, target.get_input_embeddings().weight.shape[0])

    def engine(self, longest: list[int], batch_size: int, rounds_per_chunk: int | None) -> td.Engine:
        """An engine for prompts up to ``longest``; what does not fit is a `UserError`."""
        asked, row = self.arguments, torch.tensor([longest])
        try:
            request = read_request(self.loaded.target, row, None, self.options | {"seed": asked.seed})
            return td.compile(
                self.loaded.target,
                self.loaded.drafter,
                runtime=asked.runtime,
                max_length=len(longest) + asked.max_new_tokens,
                batch_size=batch_size,
                # A proposer that was made here has its width already.
                block_size=None if asked.drafter == "ngram" else asked.block_size,
                verify_width=asked.verify_width,
                rounds_per_chunk=rounds_per_chunk,
                stop_slots=max(8, *map(len, request.stop_ids)),
                filters=request.filters,
                # Of other lines, too: a shorter one may need what the longest does not.
                processors=(*request.processors, *self.own_processors()),
                cache=asked.cache,
                verify=asked.verify,
                prefill_chunk_size=min(LARGEST_CHUNK, bucket(len(longest))),
            )
        except (TypeError, ValueError) as error:
            raise UserError(one_line(error)) from None


def _one(job: Job, data: bytes) -> int:
    """One prompt, its text streamed."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"the prompt is not UTF-8 ({error}); convert it.") from None
    text = text if job.arguments.prompt is not None else text.removesuffix("\n")  # which editors add
    ids = job.encode([{"role": "user", "content": text}])
    check_room(ids, job.room)
    engine = job.engine(ids, 1, STREAMED_ROUNDS if job.arguments.runtime == "xla" else None)
    row = torch.tensor([ids])
    started = time.perf_counter()
    if job.arguments.runtime == "xla":  # compile just what this prompt needs, outside the measured times
        few = {"max_new_tokens": min(2, job.arguments.max_new_tokens), "eos_token_id": []}
        engine.generate(row, torch.ones_like(row), seed=0, **(job.options | few))
    compiling = time.perf_counter() - started
    output = engine.generate(
        row,
        torch.ones_like(row),
        seed=job.arguments.seed,
        streamer=StdoutStreamer(job.loaded.tokenizer),
        return_dict_in_generate=True,
        **job.options,
    )
    assert isinstance(output, GenerateOutput)
    _report(job, [output], compiling)
    return 0


def _lines(job: Job, data: bytes) -> int:
    """Many prompts, one JSON line each. Exit status 1 if any line was bad."""
    items = read_items(data, job.encode, job.room)
    if not items:
        raise UserError("--jsonl: the input has no lines; give one JSON object per line.")
    good = [item.ids for item in items if item.error is None]
    size = min(job.arguments.batch_size or DEFAULT_BATCH, len(good))
    started, engine = time.perf_counter(), None
    if good:
        engine = job.engine(max(good, key=len), size, None).warmup()
    compiling = time.perf_counter() - started
    tokenizer = job.loaded.tokenizer
    outputs = run_lines(
        engine,
        items,
        batch_size=size,
        seed=job.arguments.seed,
        options=job.options,
        decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
    )
    if outputs:
        _report(job, outputs, compiling)
    bad = [item.error for item in items if item.error is not None]
    if bad:
        print(f"torch-dflash generate: {len(bad)} of {len(items)} lines failed; {bad[0]}", file=sys.stderr)
    return 1 if bad else 0


def _report(job: Job, outputs: list[GenerateOutput], compiling: float) -> None:
    """One line on stderr. Times leave compilation out; tokens/s counts prefill."""
    every = [output.stats for output in outputs if output.stats is not None]
    new = sum(stats.new_tokens for stats in every)
    seconds = tokens = 0.0
    firsts = []
    for stats in every:
        firsts.append(stats.time_to_first_token)
        steps = max(map(sum, stats.acceptance_lengths))  # after the longest row's first token
        seconds += stats.time_to_first_token + steps * (stats.time_per_output_token or 0.0)
        tokens += steps
    whole = DecodeStats(
        [row for stats in every for row in stats.acceptance_lengths],
        [cut for stats in every for cut in stats.capped],
        *(0, 0, 0.0, None, 0, 0),
    )
    tpot = (seconds - sum(firsts)) / tokens if tokens else float("nan")
    print(
        f"acceptance length {whole.mean_acceptance_length:.2f} | TTFT {statistics.mean(firsts) * 1e3:.1f} ms"
        f" | TPOT {tpot * 1e3:.2f} ms | {new / seconds:.1f} tokens/s | "
        f"{new} tokens in {seconds:.2f} s, {job.arguments.runtime}"
        + (f", after {compiling:.1f} s of compiling" if job.arguments.runtime == "xla" else ""),
        file=sys.stderr,
    )
