"""``torch-dflash demo``: the pair that comes with the library answers, plainly and with DFlash."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import torch_dflash as td
from torch_dflash.checks import check_arithmetic, context_of
from torch_dflash.cli.arguments import check_device, check_room, prompt_room
from torch_dflash.cli.demo_report import DRAFTED, NATIVE, PLAIN, TRANSFORMERS, Asked, Parts, as_json, report
from torch_dflash.cli.encode import encode
from torch_dflash.cli.errors import UserError, one_line, unwritten
from torch_dflash.cli.loading import place_of
from torch_dflash.cli.provenance import hardware, write_json
from torch_dflash.cli.timeline import Printer, draw_timeline
from torch_dflash.demo.contest import Method, Show, ours, transformers_own
from torch_dflash.demo.pair import demo_block_size, load_demo_draft_ids, load_demo_pair
from torch_dflash.demo.questions import QUESTIONS
from torch_dflash.demo.target import DemoModelError, load_demo_target
from torch_dflash.plan import MIN_BUCKET
from torch_dflash.progress import coloured, progress_bar
from torch_dflash.proposers.checkpoint.extras import ends_in_blocks
from torch_dflash.proposers.narrow import with_draft_vocabulary
from torch_dflash.requests.row_values import default_stop_ids
from torch_dflash.storage.files import StageError
from torch_dflash.train.answers.data import draw

KIND, PROMPTS = "maths", Path("data/eval")
ROOM, ROWS, FEW = 256, 8, 16


def run(arguments: SimpleNamespace) -> int:
    """Answer, compare, print. Exit status 1 where our text is another (no mere tie), 2 on wrong usage."""
    try:
        questions = _check_arguments(arguments)
        return _contest(arguments, questions)
    except DemoModelError as error:
        raise UserError(one_line(error)) from None
    except StageError as error:
        return unwritten("demo", error)


def _check_arguments(arguments: SimpleNamespace) -> list[tuple[str, str]]:
    """Refuse what needs no model to be refused; the questions, each with its kind."""
    check_device(arguments)
    rows, block = arguments.verify_width, demo_block_size()
    if rows not in (None, "auto") and (isinstance(rows, str) or not 2 <= rows <= block):
        raise UserError(f"--verify-width {rows}: must be an integer from 2 to {block}, or auto.")
    try:
        check_arithmetic("auto", arguments.quantize, arguments.runtime)
    except ValueError:
        raise UserError(
            f"--quantize {arguments.quantize}: --runtime {arguments.runtime} has no such products; "
            "leave one of the two out."
        ) from None
    if arguments.prompts is not None and not arguments.draw:
        raise UserError(f"--prompts {arguments.prompts}: nothing is drawn from it; give --draw too.")
    try:
        drawn = draw(arguments.prompts or PROMPTS, arguments.draw) if arguments.draw else []
    except StageError as error:
        raise UserError(f"--draw {arguments.draw}: {one_line(error)}") from None
    return _fixed(arguments) + drawn


def _fixed(arguments: SimpleNamespace) -> list[tuple[str, str]]:
    """The user's question, or those of the kind asked for."""
    kind, own = arguments.kind, arguments.question
    if own is None:
        return [(name, QUESTIONS[name]) for name in (QUESTIONS if kind == "all" else [kind or KIND])]
    if kind is not None:
        raise UserError(f"--kind {kind}: --question asks one of your own; leave one of the two out.")
    if not own.strip():
        raise UserError(f"--question {own!r}: it is empty; give at least one word.")
    try:
        own.encode()
    except UnicodeEncodeError:  # a byte that the shell gave as it was
        raise UserError(f"--question {own!a}: it is not UTF-8; check the terminal's encoding.") from None
    return [("yours", own)]


def _contest(arguments: SimpleNamespace, questions: list[tuple[str, str]]) -> int:
    parts, dtype, place = Parts(), getattr(torch, arguments.dtype), place_of(arguments.device)
    if place.type != "cpu" and place.index is not None:
        torch.accelerator.set_device_index(place.index)  # the one that figures name
    with parts.timed("load"):
        loaded: Any = load_demo_pair(dtype)
        target, drafter, tokenizer = loaded[0].to(place), loaded[1].to(place), loaded[2]
    room, asked = prompt_room(arguments.max_new_tokens, target), []
    for kind, question in questions:
        ids = encode(tokenizer, [{"role": "user", "content": question}])
        check_room(ids, room)
        asked.append(Asked(kind, question, torch.tensor([ids], device=place)))
    names = f"{type(target).__name__} and its drafter, {arguments.dtype}"
    form = names + (f", products in {arguments.quantize}" if arguments.quantize else "")
    print(f"{form}; runtime {arguments.runtime}; {hardware()}\n", flush=True)
    arguments.verify_width = arguments.verify_width or ("auto" if asked[1:] else drafter.config.block_size)
    methods = _methods(arguments, target, drafter, tokenizer, asked, parts)
    for turn in range(arguments.repeats):  # of all questions: an engine learns from what it has just drafted
        for number, one in enumerate(asked):
            if turn == 0:
                print(f"Q ({one.kind}): {one.question}\n", flush=True)
            with parts.timed("decode"):
                _ask(one, methods, tokenizer, arguments.max_new_tokens, show=number < len(QUESTIONS))
    for one in asked:
        one.note_ties(target)
    same = report(asked, arguments.dtype, parts)
    if arguments.json:
        options = {"dtype": arguments.dtype, "quantize": arguments.quantize, "runtime": arguments.runtime}
        options |= {
            "drafts": arguments.drafts,
            "verify_width": arguments.verify_width,
            "repeats": arguments.repeats,
        }
        options |= {"draft_vocabulary": len(load_demo_draft_ids()), "device": str(place)}
        write_json(arguments.json, options | {"threads": torch.get_num_threads()} | as_json(asked, parts))
    if arguments.png:
        firsts = {name: own[0].pieces[1:] for name, own in asked[0].answers.items() if name in DRAFTED}
        lengths = {name: list(map(len, pieces)) for name, pieces in firsts.items()}
        draw_timeline(arguments.png, lengths, drafter.config.block_size)
    return 0 if same else 1


def _capacity(needed: int, target: Any) -> int:
    """Room for ``needed`` tokens, the same for questions of like lengths: their programs are on disk then."""
    return min(-(-needed // ROOM) * ROOM, context_of(target))


def _methods(
    arguments: SimpleNamespace, target: Any, drafter: Any, tokenizer: Any, asked: list[Asked], parts: Parts
) -> dict[str, Method]:
    """What takes turns, warm: nothing compiles any more, and the costs of each width are known.

    A single question is a first look: transformers' `generate` in the pair's own type takes part alone, with
    a few tokens, for the drafter without lookup takes the time.
    """
    stops, new = default_stop_ids(target, tokenizer), arguments.max_new_tokens
    options: dict[str, Any] = {"runtime": arguments.runtime, "filters": False, "rounds_per_chunk": 1}
    longest = max(one.ids.shape[1] for one in asked)
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
    several, generate = len(asked) > 1, transformers_own(target, stops)
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
            method(asked[0].ids, min(new, tokens), lambda piece: None)
            bar.update()
    return methods


def _ask(one: Asked, methods: dict[str, Method], tokenizer: Any, new: int, show: bool) -> None:
    """Each method answers in turn; the first time, ours are shown as they come."""
    for name, method in methods.items():
        shown = show and name in list(methods)[:2] and not one.answers.get(name)
        colour = name in DRAFTED and coloured(sys.stdout)
        printer = Printer(tokenizer, colour)
        if shown:
            legend = " (green: drafted and accepted)" if colour else ""
            print(f"{name}{legend}:", flush=True)
        called = f"{one.kind}: {name}"
        with progress_bar(False if shown else None, total=new, desc=called, unit="token", leave=False) as bar:
            one.answers.setdefault(name, []).append(method(one.ids, new, printer if shown else _count(bar)))
        if shown:
            printer.end()
            print()


def _count(bar: Any) -> Show:
    def show(piece: list[int]) -> None:
        bar.update(len(piece))

    return show
