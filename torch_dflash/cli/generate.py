"""``torch-dflash generate``: decodes prompts with any pair, as text or as JSON lines."""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from torch_dflash.cli.arguments import check_call_options, check_prompt_length, decoding
from torch_dflash.cli.command import COUNT, FILE, command, flag, option
from torch_dflash.cli.errors import UserError, refusing
from torch_dflash.progress import print_status
from torch_dflash.runtime_kinds import RUNTIMES
from torch_dflash.storage.json_text import parse_json

if TYPE_CHECKING:
    from torch_dflash.cli.job import Job
    from torch_dflash.engine.outputs import GenerateOutput

DEFAULT_BATCH = 8


def _dash(word: str) -> str:
    if word != "-":
        raise click.UsageError(f"{word!r} has no option before it; a prompt is --prompt TEXT.")
    return word


def _check(arguments: SimpleNamespace) -> None:
    if arguments.batch_size is not None and not arguments.jsonl:
        raise UserError(
            f"--batch-size {arguments.batch_size} with one prompt: it is for --jsonl; leave it out."
        )
    if arguments.replicas != 1 and not arguments.jsonl:
        raise UserError(
            f"--replicas {arguments.replicas} with one prompt: they share lines of --jsonl; leave it out."
        )
    if (arguments.logprobs or arguments.top_logprobs is not None) and not arguments.jsonl:
        raise UserError("--logprobs, --top-logprobs: they stand in JSON lines; pass --jsonl.")
    if arguments.prompt is not None and arguments.jsonl:
        raise UserError("--jsonl with --prompt: JSON lines come from --file PATH or -; leave --jsonl out.")
    check_call_options(arguments)


@command(
    "generate",
    [
        *decoding(),
        click.Argument(["stdin"], required=False, type=_dash, metavar="[-]"),
        option("--prompt", metavar="TEXT"),
        option("--file", type=FILE, metavar="PATH",
               help="The whole file is one prompt; with --jsonl, one prompt per line."),
        flag("--jsonl", help='Input lines {"prompt": ...}, {"turns": [...]} (the first is used) or '
             '{"messages": [...]}; one result line each, in order.'),
        flag("--raw", help="Send the text as it is, without the chat template."),
        flag("--logprobs", help="With --jsonl: each new id and its log-probability."),
        option("--top-logprobs", type=int, metavar="K",
               help="With --jsonl: also those of the K likeliest ids."),
        option("--json-schema", type=FILE, metavar="FILE",
               help="Answer with JSON that fits the schema in this file."),
        option("--regex", metavar="R",
               help="Answer with text that this regular expression matches as a whole."),
        option("--batch-size", type=COUNT, metavar="B",
               help="Lines decoded beside each other with --jsonl (8), by each replica."),
        option("--replicas", type=int, default=1, metavar="N",
               help="With --jsonl: copies of the pair, each on its part of --mesh, that share the lines."),
    ],
    "Decode prompts with a target and a drafter.",
    "Decodes one prompt to streamed text, or JSON lines to JSON lines; - reads them from stdin. Text "
    "goes to stdout, statistics and errors to stderr. Exit status: 0 done, 1 some lines failed, 2 wrong "
    "usage.",
    check=_check,
)  # fmt: skip
def run(arguments: SimpleNamespace) -> int:
    """Decode the prompts; returns the exit status."""
    data, schema = _read_input(arguments), _read_schema(arguments)
    from torch_dflash.cli.job import Job
    from torch_dflash.grammars.matcher import NoTokenLeft

    job = Job.load(arguments, output_logprobs=arguments.logprobs, top_logprobs=arguments.top_logprobs)
    job = replace(job, options=job.options | _grammar(arguments, schema, job.loaded.tokenizer))
    with refusing(NoTokenLeft):
        return _lines(job, data) if arguments.jsonl else _one(job, data)


def _read_input(arguments: SimpleNamespace) -> bytes:
    """The bytes of --prompt, --file or stdin, of which there must be exactly one."""
    given = {"--prompt": arguments.prompt, "--file": arguments.file, "-": arguments.stdin}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) != 1:
        what = " and ".join(given) + ": two inputs" if given else "no input"
        raise UserError(f"{what}; give exactly one of --prompt TEXT, --file PATH and -.")
    if arguments.prompt is not None:
        return arguments.prompt.encode("utf-8", "surrogateescape")
    if arguments.stdin or arguments.file == "-":
        return sys.stdin.buffer.read()
    return _read_file("--file", arguments.file)


def _read_schema(arguments: SimpleNamespace) -> str | None:
    """The text of --json-schema, which is JSON; None: unset."""
    if arguments.json_schema is None:
        return None
    if arguments.regex is not None:
        raise UserError("--json-schema and --regex both say what an answer may be; give one of them.")
    try:
        text = _read_file("--json-schema", arguments.json_schema).decode("utf-8-sig")
        parse_json(text)
        return text
    except ValueError as error:
        raise UserError(f"--json-schema {arguments.json_schema}: no JSON ({error}); mend the file.") from None


def _read_file(option: str, name: str) -> bytes:
    try:
        return Path(name).expanduser().read_bytes()
    except OSError as error:
        raise UserError(f"{option} {name}: {error.strerror}; give a file that can be read.") from None


def _grammar(arguments: SimpleNamespace, schema: str | None, tokenizer: Any) -> dict[str, Any]:
    """The option of a call for --json-schema or --regex."""
    from torch_dflash.grammars.grammar import Grammar

    with refusing(ImportError, TypeError, ValueError):
        if schema is not None:
            return {"grammar": Grammar.json_schema(schema, tokenizer)}
        return {} if arguments.regex is None else {"grammar": Grammar.regex(arguments.regex, tokenizer)}


def _one(job: Job, data: bytes) -> int:
    """Decode one prompt and stream its text."""
    import torch

    from torch_dflash.cli.text import StdoutStreamer

    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"the prompt is not UTF-8 ({error}); convert it.") from None
    text = text if job.arguments.prompt is not None else text.removesuffix("\n")  # which editors add
    ids = job.encode([{"role": "user", "content": text}])
    check_prompt_length(ids, job.longest_prompt)
    engine = job.engine(len(ids), 1, job.streamed_rounds)
    row = torch.tensor([ids])
    started = time.perf_counter()
    if RUNTIMES[job.arguments.runtime].compiles:  # just what this prompt needs, outside the measured times
        few = {"max_new_tokens": min(2, job.arguments.max_new_tokens), "eos_token_id": [], "grammar": None}
        engine.generate(row, torch.ones_like(row), seed=0, **(job.options | few))
    compiling = time.perf_counter() - started
    options = job.options | {"seed": job.arguments.seed, "streamer": StdoutStreamer(job.loaded.tokenizer)}
    output: Any = engine.generate(row, torch.ones_like(row), return_dict_in_generate=True, **options)
    _report(job, [output], compiling)
    return 0


def _lines(job: Job, data: bytes) -> int:
    """Decode one prompt per line, to one JSON line each. Exit status 1 if any line was bad."""
    from torch_dflash.cli.jsonl import read_items, run_lines

    items = read_items(data, job.encode, job.longest_prompt, job.arguments)
    if not items:
        raise UserError("--jsonl: the input has no lines; give one JSON object per line.")
    good = [item.ids for item in items if item.error is None]
    replicas = job.arguments.replicas
    size = min(job.arguments.batch_size or DEFAULT_BATCH, -(-len(good) // replicas))
    started, engine = time.perf_counter(), None
    if good:
        engine = job.engine(max(map(len, good)), size, None, replicas)
        engine.warmup(slots=len(good) > size or replicas > 1)
    compiling, begun = time.perf_counter() - started, time.perf_counter()
    outputs = run_lines(engine, items, job)
    if outputs:
        _report(job, outputs, compiling, time.perf_counter() - begun)
    bad = [item.error for item in items if item.error is not None]
    if bad:
        print(f"torch-dflash generate: {len(bad)} of {len(items)} lines failed; {bad[0]}", file=sys.stderr)
    return 1 if bad else 0


def _report(job: Job, outputs: list[GenerateOutput], compiling: float, seconds: float | None = None) -> None:
    """Print statistics in one line on stderr. Times leave compilation out; tokens/s counts prefill."""
    every = [output.stats for output in outputs]
    new = sum(stats.new_tokens for stats in every)
    firsts = [stats.time_to_first_token for stats in every]
    steps = [max(map(sum, stats.acceptance_lengths)) for stats in every]  # of the longest row
    times = [stats.time_per_output_token or 0.0 for stats in every]
    later = sum(count * each for count, each in zip(steps, times, strict=True))
    seconds = sum(firsts) + later if seconds is None else seconds
    tpot = later / sum(steps) if any(steps) else float("nan")
    rounds = [length for stats in every for length in stats.whole_rounds]
    mean = sum(rounds) / len(rounds) if rounds else float("nan")
    print_status(
        f"acceptance length {mean:.2f} | TTFT {statistics.mean(firsts) * 1e3:.1f} ms"
        f" | TPOT {tpot * 1e3:.2f} ms | {new / seconds:.1f} tokens/s | "
        f"{new} tokens in {seconds:.2f} s, {job.arguments.runtime}"
        + (f", after {compiling:.1f} s of compiling" if RUNTIMES[job.arguments.runtime].compiles else "")
    )
