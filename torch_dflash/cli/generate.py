"""``torch-dflash generate``: decode prompts with any pair, as text or as JSON lines."""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from torch_dflash.cli.arguments import check_room, read_input, read_schema
from torch_dflash.cli.encode import StdoutStreamer
from torch_dflash.cli.errors import UserError, one_line
from torch_dflash.cli.job import Job
from torch_dflash.cli.jsonl import read_items, run_lines
from torch_dflash.engine.outputs import DecodeStats, GenerateOutput
from torch_dflash.grammars.grammar import Grammar
from torch_dflash.grammars.matcher import NoTokenLeft
from torch_dflash.progress import print_status

DEFAULT_BATCH = 8


def run(arguments: SimpleNamespace) -> int:
    """Decode what was asked for; returns the exit status."""
    data = read_input(arguments)
    schema = read_schema(arguments)
    job = Job.load(arguments, output_logprobs=arguments.logprobs, top_logprobs=arguments.top_logprobs)
    job = replace(job, options=job.options | _grammar(arguments, schema, job.loaded.tokenizer))
    try:
        return _lines(job, data) if arguments.jsonl else _one(job, data)
    except NoTokenLeft as error:
        raise UserError(one_line(error)) from None


def _grammar(arguments: SimpleNamespace, schema: str | None, tokenizer: Any) -> dict[str, Any]:
    """The option that --json-schema or --regex stands for."""
    if schema is None and arguments.regex is None:
        return {}
    try:
        if schema is not None:
            return {"grammar": Grammar.json_schema(schema, tokenizer)}
        return {"grammar": Grammar.regex(arguments.regex, tokenizer)}
    except (ImportError, TypeError, ValueError) as error:
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
    engine = job.engine(len(ids), 1, job.streamed_rounds)
    row = torch.tensor([ids])
    started = time.perf_counter()
    if job.arguments.runtime == "xla":  # compile just what this prompt needs, outside the measured times
        few = {"max_new_tokens": min(2, job.arguments.max_new_tokens), "eos_token_id": [], "grammar": None}
        engine.generate(row, torch.ones_like(row), seed=0, **(job.options | few))
    compiling = time.perf_counter() - started
    options = job.options | {"seed": job.arguments.seed, "streamer": StdoutStreamer(job.loaded.tokenizer)}
    output = engine.generate(row, torch.ones_like(row), return_dict_in_generate=True, **options)
    assert isinstance(output, GenerateOutput)
    _report(job, [output], compiling)
    return 0


def _lines(job: Job, data: bytes) -> int:
    """Many prompts, one JSON line each. Exit status 1 if any line was bad."""
    items = read_items(data, job.encode, job.room, job.arguments)
    if not items:
        raise UserError("--jsonl: the input has no lines; give one JSON object per line.")
    good = [item.ids for item in items if item.error is None]
    replicas = job.arguments.replicas
    size = min(job.arguments.batch_size or DEFAULT_BATCH, -(-len(good) // replicas))
    started, engine = time.perf_counter(), None
    if good:
        engine = job.engine(max(map(len, good)), size, None, replicas).warmup()
    compiling = time.perf_counter() - started
    tokenizer = job.loaded.tokenizer
    decode = lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))  # noqa: E731
    common = {"batch_size": size * replicas, "seed": job.arguments.seed, "options": job.options}
    outputs = run_lines(engine, items, decode=decode, **common)
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
        *(0, 0, 0.0, None, 0, 0, 0),
    )
    tpot = (seconds - sum(firsts)) / tokens if tokens else float("nan")
    print_status(
        f"acceptance length {whole.mean_acceptance_length:.2f} | TTFT {statistics.mean(firsts) * 1e3:.1f} ms"
        f" | TPOT {tpot * 1e3:.2f} ms | {new / seconds:.1f} tokens/s | "
        f"{new} tokens in {seconds:.2f} s, {job.arguments.runtime}"
        + (f", after {compiling:.1f} s of compiling" if job.arguments.runtime == "xla" else "")
    )
