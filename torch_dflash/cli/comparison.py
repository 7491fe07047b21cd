"""The demo's comparison: every method answers the questions; a table, a sentence and JSON of the figures."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import torch_dflash as td
from torch_dflash.checks import context_of
from torch_dflash.cli.arguments import check_prompt_length, longest_prompt
from torch_dflash.cli.loading import place_of
from torch_dflash.cli.outputs import LOAD, hardware, write_results
from torch_dflash.cli.text import Printer, encode
from torch_dflash.demo.contest import Method, TimedAnswer, ours, transformers_own
from torch_dflash.demo.pair import load_demo_draft_ids, load_demo_pair
from torch_dflash.demo.questions import QUESTIONS
from torch_dflash.demo.target import load_demo_target
from torch_dflash.plan import MIN_BUCKET
from torch_dflash.progress import coloured, progress_bar
from torch_dflash.proposers.checkpoint.extras import ends_in_blocks
from torch_dflash.proposers.narrow import with_draft_vocabulary
from torch_dflash.requests.row_values import default_stop_ids
from torch_dflash.storage.files import write_atomically

PLAIN, UNION, DFLASH = "plain decoding", "DFlash + lookup", "DFlash"
DRAFTED = UNION, DFLASH
TRANSFORMERS, NATIVE = "transformers' generate, {}", "transformers' DFlash, {}"
LENGTH_STEP, ROWS, FEW = 256, 8, 16


@dataclass
class Question:
    """A question, its ids [1, T], and by method the answers to it; ``ties``: ours that part at a tie."""

    kind: str
    question: str
    ids: torch.Tensor
    answers: dict[str, list[TimedAnswer]] = field(default_factory=dict)
    ties: list[TimedAnswer] = field(default_factory=list)

    def times(self, name: str) -> list[float]:
        """Seconds per output token of each answer. One token alone comes with the prompt's pass."""
        return [answer.time_per_output_token for answer in self.answers[name] if len(answer.pieces) > 1]

    def seconds(self, name: str) -> float:
        """The median of `times`."""
        return statistics.median(self.times(name))

    def same(self, name: str) -> bool:
        """Whether each answer of a method is that of its own kind of plain decoding, or parts at a tie."""
        native, generate = (kind.partition(",")[0] for kind in (NATIVE, TRANSFORMERS))
        plain = PLAIN if name in DRAFTED else name.replace(native, generate)
        wanted = self.answers[plain][0].tokens
        return all(answer.tokens == wanted or answer in self.ties for answer in self.answers[name])

    @torch.no_grad()
    def note_ties(self, target: Any) -> None:
        """Find our answers that part from plain decoding where ``target`` gives both tokens the same logit.

        The same up to the last bit of the weights' type: the order of sums decides between such tokens.
        """
        plain = self.answers[PLAIN][0].tokens
        for answer in (one for name in DRAFTED for one in self.answers.get(name, [])):
            pairs = list(zip(plain, answer.tokens, strict=False))
            at = next((number for number, (one, other) in enumerate(pairs) if one != other), None)
            if at is None:
                continue
            prefix = torch.tensor([plain[:at]], dtype=self.ids.dtype, device=self.ids.device)
            logits = target(torch.cat([self.ids, prefix], dim=1)).logits[0, -1].float()
            one, other = logits[list(pairs[at])]
            if abs(one - other) <= torch.finfo(target.dtype).eps * abs(one):
                self.ties.append(answer)


class Parts:
    """Seconds that each part of a run took."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds of the ``with`` block to the part ``name``."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


def compare_methods(arguments: SimpleNamespace, questions: list[tuple[str, str]]) -> int:
    """Ask all ``questions`` (kind, text), print and write the figures; returns the exit status."""
    parts, dtype, place = Parts(), getattr(torch, arguments.dtype), place_of(arguments.device)
    if place.type != "cpu" and place.index is not None:
        torch.accelerator.set_device_index(place.index)  # the one that figures name
    with parts.timed("load"):
        loaded: Any = load_demo_pair(dtype)
        target, drafter, tokenizer = loaded[0].to(place), loaded[1].to(place), loaded[2]
    longest, items = longest_prompt(arguments.max_new_tokens, target), []
    for kind, question in questions:
        ids = encode(tokenizer, [{"role": "user", "content": question}])
        check_prompt_length(ids, longest)
        items.append(Question(kind, question, torch.tensor([ids], device=place)))
    pair = f"{type(target).__name__} and its drafter, {arguments.dtype}"
    pair += f", products in {arguments.quantize}" if arguments.quantize else ""
    print(f"{pair}; runtime {arguments.runtime}; {hardware()}\n", flush=True)
    arguments.verify_width = arguments.verify_width or ("auto" if items[1:] else drafter.config.block_size)
    methods = _methods(arguments, target, drafter, tokenizer, items, parts)
    for turn in range(arguments.repeats):  # of all questions: an engine learns from what it has just drafted
        for number, one in enumerate(items):
            if turn == 0:
                print(f"Q ({one.kind}): {one.question}\n", flush=True)
            with parts.timed("decode"):
                ask(one, methods, tokenizer, arguments.max_new_tokens, show=number < len(QUESTIONS))
    for one in items:
        one.note_ties(target)
    same = report(items, arguments.dtype, parts)
    if arguments.json:
        names = ("dtype", "quantize", "runtime", "drafts", "verify_width", "repeats")
        options: dict[str, Any] = {name: getattr(arguments, name) for name in names}
        options |= {"draft_vocabulary": len(load_demo_draft_ids()), "device": str(place)}
        options |= {"threads": torch.get_num_threads()}
        write_results(arguments.json, options | figures_of(items, parts))
    if arguments.png:
        firsts = {name: own[0].pieces[1:] for name, own in items[0].answers.items() if name in DRAFTED}
        lengths = {name: list(map(len, pieces)) for name, pieces in firsts.items()}
        draw_timeline(arguments.png, lengths, drafter.config.block_size)
    return 0 if same else 1


def _capacity(needed: int, target: Any) -> int:
    # The same for questions of like lengths, so that their programs are found on disk.
    return min(-(-needed // LENGTH_STEP) * LENGTH_STEP, context_of(target))


def _methods(
    arguments: SimpleNamespace, target: Any, drafter: Any, tokenizer: Any, items: list[Question], parts: Parts
) -> dict[str, Method]:
    """The methods by name, warm: nothing compiles any more, and the cost of each width is known.

    For one question, transformers' `generate` takes part in the pair's own type alone, with `FEW` tokens.
    """
    stops, new = default_stop_ids(target, tokenizer), arguments.max_new_tokens
    options: dict[str, Any] = {"runtime": arguments.runtime, "filters": False, "rounds_per_chunk": 1}
    longest = max(one.ids.shape[1] for one in items)
    options |= {"max_length": _capacity(longest + new, target), "prefill_chunk_size": MIN_BUCKET}
    options |= {"quantize": arguments.quantize}
    narrow = with_draft_vocabulary(drafter, target, load_demo_draft_ids())  # transformers' loop knows none
    drafts: dict[str, Any] = {DRAFTED[1]: narrow}
    if arguments.drafts == "union":
        drafts = {DRAFTED[0]: td.Union(td.NGramProposer(), narrow, rows=ROWS)} | drafts
    engines = {PLAIN: td.compile(target, None, **options)}
    options["verify_width"] = arguments.verify_width
    engines |= {name: td.compile(target, one, **options) for name, one in drafts.items()}
    with parts.timed("compile"):
        for engine in engines.values():
            engine.warmup()
    methods = {name: ours(engine, stops) for name, engine in engines.items()}
    several, generate = len(items) > 1, transformers_own(target, stops)
    few: Method = lambda ids, most, show: generate(ids, min(most, FEW), show)  # noqa: E731
    methods[TRANSFORMERS.format(arguments.dtype)] = generate if several else few
    if several and arguments.dtype != "float32":
        with parts.timed("load"):
            exact: Any = load_demo_target(torch.float32, progress=False)[0]
            exact = exact.to(target.device)
        methods[TRANSFORMERS.format("float32")] = transformers_own(exact, stops)
    if several and ends_in_blocks():
        native = {"assistant_model": drafter, "speculation_type": "dflash"}
        methods[NATIVE.format(arguments.dtype)] = transformers_own(target, stops, **native)
    bar = progress_bar(None, total=len(methods), unit="method", leave=False)
    with parts.timed("warm up"), bar:
        for name, method in methods.items():
            bar.set_description(f"warm up: {name}")
            tokens = 16 if arguments.verify_width == "auto" and name in DRAFTED else 3
            method(items[0].ids, min(new, tokens), lambda piece: None)
            bar.update()
    return methods


def ask(one: Question, methods: dict[str, Method], tokenizer: Any, new: int, show: bool) -> None:
    """Let each method answer; stream the first answers of plain decoding and of our first drafter."""
    for name, method in methods.items():
        shown = show and name in list(methods)[:2] and not one.answers.get(name)
        colour = name in DRAFTED and coloured(sys.stdout)
        printer = Printer(tokenizer, colour)
        if shown:
            legend = " (green: drafted and accepted)" if colour else ""
            print(f"{name}{legend}:", flush=True)
        called = f"{one.kind}: {name}"
        with progress_bar(False if shown else None, total=new, desc=called, unit="token", leave=False) as bar:
            count: Any = lambda piece, bar=bar: bar.update(len(piece))  # noqa: E731
            one.answers.setdefault(name, []).append(method(one.ids, new, printer if shown else count))
        if shown:
            printer.end()
            print()


def report(items: list[Question], dtype: str, parts: Parts) -> bool:
    """Print the table and the sentence; returns whether our texts are those of plain decoding."""
    rows = _rows(items)
    drafted = [row for row in rows if row["method"] in DRAFTED]
    print(_sentence(rows, drafted[0], " (median)" if len(items) > 1 else "") + "\n")
    print(f"{'':34}{'tokens a pass':>14}{'tok/s':>8}{'vs plain':>10}{'(quartiles)':>14}  same text")
    for row in rows:
        spread = "({:.2f}..{:.2f})".format(*row["quartiles"]) if row["quartiles"] and len(items) > 1 else ""
        length, speed = _number(row["acceptance_length"], 14), _number(row["tokens_per_second"], 8, 1)
        print(
            f"{row['method']:34}{length}{speed}"
            f"{_number(row['speedup'], 9)}{'x' if row['speedup'] else ' '}{spread:>14}"
            f"  {'NO' if not row['same_text'] else 'tie' if row['ties'] else 'yes'}"
        )
    if LOAD is not None and LOAD > (cores := os.cpu_count() or 1):
        print(f"\nThe machine was busy before (load {LOAD:.1f}, {cores} cores): these speeds may say little.")
    print("\ntime: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.seconds.items()))
    for row in drafted:
        if row["ties"]:
            count = f"{row['ties']} of {len(items)} texts of {row['method']}"
            print(f"\n{count} part from plain decoding's where two tokens have the same logit in {dtype}.")
    return all(row["same_text"] for row in drafted)


def _sentence(rows: list[dict[str, Any]], ours: dict[str, Any], median: str) -> str:
    same = "same text up to a tie" if ours["ties"] else "same text"
    text = same if ours["same_text"] else "OTHER TEXT"
    if ours["speedup"] is None:
        return (
            f"{ours['method']}: {text}; answers of one token come with the prompt's pass: there is no speed."
        )
    sentence = (
        f"{ours['method']}: {ours['speedup']:.2f} times as fast as plain decoding{median}, {text}, "
        f"{_number(ours['acceptance_length'], 1, 1)} tokens per target pass"
    )
    others = [row for row in rows if "generate" in row["method"] and row["speedup"] is not None]
    if not others:
        return sentence + "."
    best = max(others, key=lambda row: row["speedup"])
    return f"{sentence};\n{ours['speedup'] / best['speedup']:.2f} times as fast as {best['method']}."


def _number(value: float | None, width: int, digits: int = 2) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"


def figures_of(items: list[Question], parts: Parts) -> dict[str, Any]:
    """The figures of all questions together and of each question, for JSON."""
    return {
        "seconds": parts.seconds,
        "rows": _rows(items),
        "questions": [
            {
                "kind": one.kind,
                "question": one.question,
                "rows": _rows([one]),
                "token_seconds": {name: one.times(name) for name in one.answers},
            }
            for one in items
        ],
    }


def _rows(items: list[Question]) -> list[dict[str, Any]]:
    """One row per method: tokens a pass (of first answers), tokens a second, the median speed-up.

    None where all answers have one token, which comes with the prompt's pass.
    """
    rows = []
    for name in items[0].answers:
        answers = [one.answers[name][0] for one in items]
        timed = [one for one in items if one.times(name) and one.times(PLAIN)]
        ratios = sorted(one.seconds(PLAIN) / one.seconds(name) for one in timed)
        quartiles = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        later = [len(piece) for answer in answers for piece in answer.pieces[1:]]
        counts = [sum(map(len, one.answers[name][0].pieces[1:])) for one in timed]
        spent = sum(one.seconds(name) * count for one, count in zip(timed, counts, strict=True))
        rows.append(
            {
                "method": name,
                "acceptance_length": sum(later) / len(later) if later else None,
                "tokens_per_second": sum(counts) / spent if spent else None,
                "new_tokens": sum(len(answer.tokens) for answer in answers),
                "speedup": statistics.median(ratios) if ratios else None,
                "quartiles": [quartiles[0], quartiles[2]] if ratios else None,
                "same_text": all(one.same(name) for one in items),
                "ties": sum(any(answer in one.ties for answer in one.answers[name]) for one in items),
            }
        )
    return rows


def draw_timeline(path: Path, timelines: dict[str, list[int]], width: int) -> None:
    """Draw the acceptance length of every round, one row of bars per method with its mean, as a PNG.

    Raises:
        ModuleNotFoundError: matplotlib is missing (extra ``demo``).
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.2 * len(timelines)), layout="constrained")
    rows = figure.subplots(len(timelines), 1, squeeze=False, sharex=True)[:, 0]
    for axes, (name, lengths) in zip(rows, timelines.items(), strict=True):
        axes.bar(range(1, len(lengths) + 1), lengths, width=0.9, color="tab:green")
        axes.set(ylim=(0, width + 0.5), ylabel="tokens", title=f"{name}: no round")
        if lengths:
            mean = sum(lengths) / len(lengths)
            axes.axhline(mean, color="black", linewidth=1, linestyle="--")
            axes.set_title(f"{name}: mean acceptance length {mean:.2f}")
    rows[-1].set_xlabel("round")
    write_atomically(path.resolve(), lambda part: figure.savefig(part, format="png", dpi=120))
