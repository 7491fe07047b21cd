"""Runs ``torch-dflash bench``: plain texts once, then counts and walls of every method on them."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torch_dflash.bench.counts import Count, GivenText, decode, parting, replay
from torch_dflash.bench.methods import Method
from torch_dflash.bench.options import BenchOptions
from torch_dflash.bench.walls import time_methods, wall_row
from torch_dflash.checks import context_of
from torch_dflash.demo.contest import ours, transformers_own
from torch_dflash.engine.engine import Engine
from torch_dflash.progress import progress_bar
from torch_dflash.requests.options import EngineOptions
from torch_dflash.requests.prompts import bucket
from torch_dflash.requests.row_values import default_stop_ids
from torch_dflash.storage.files import StageError
from torch_dflash.train.answers.conversations import check_turns, converse
from torch_dflash.train.answers.data import Prompt

PLAIN = Method("plain")
Answers = list[tuple[list[int], list[int]]]
"""Prompt and answer of each question, as ids."""


@dataclass(frozen=True)
class Bench:
    """A target, its tokenizer, and the methods to compare; ``template``: variables of the chat template."""

    target: Any
    tokenizer: Any
    methods: list[Method]
    options: BenchOptions
    template: dict[str, Any] | None = None

    @property
    def stops(self) -> list[int]:
        """The ids that end an answer."""
        return default_stop_ids(self.target, self.tokenizer)

    @property
    def longest(self) -> int:
        """The most tokens of a prompt."""
        room = context_of(self.target) - self.options.max_new_tokens
        return min(room, self.options.max_prompt_tokens or room)

    def texts(self, name: str, prompts: list[Prompt]) -> dict[str, Any]:
        """Plain greedy answers to a set's first prompts, all turns; longer questions are left out.

        Returns:
            ``answers``, pairs of ids; ``left_out``, the questions not asked; ``checksum``, of the answers.
        """
        prompts = prompts[: self.options.limit]
        check_turns(self.tokenizer, prompts)
        answers: Answers = []
        turns = sum(len(prompt.turns) for prompt in prompts)
        engines: dict[int, Engine] = {}

        def answer(rows: list[list[int]]) -> list[list[int]]:
            room = bucket(max(map(len, rows)))
            if room not in engines:
                engines[room] = self._engine(PLAIN, room)
            return decode(engines[room], rows, self.options.max_new_tokens, self.stops)[1]

        sizes = {"batch_size": self.options.batch_size, "longest": self.longest, "template": self.template}
        with progress_bar(True, total=turns, desc=f"{name}: plain", unit="turn") as bar:
            for batch in converse(self.tokenizer, prompts, answer, **sizes):
                answers += [(item.ids, item.response) for item in batch]
                bar.update(len(batch))
        return {"answers": answers, "left_out": turns - len(answers), "checksum": checksum(answers)}

    def count(self, name: str, method: Method, answers: Answers) -> dict[str, Any]:
        """The figures of one method on a set's answers: how they were had, and `Count.row`.

        Raises:
            StageError: decoded rounds are not those of the replay, where the text is the same; or
                transformers' own call does not take the drafter.
        """
        few = answers[: self.options.decoded]
        if method.plain:
            rounds = [[1] * (len(text) - 1) for _, text in answers]
            return {"by": "its texts"} | Count(rounds, [False] * len(rounds)).row()
        if method.theirs is not None:
            return {"by": "decoded"} | self._theirs(name, method, few).row()
        if not method.weights:
            return {"by": "decoded"} | self._decoded(method, answers).row()
        count = self._replayed(method, answers)
        decoded = self._decoded(method, few) if few else Count()
        checked = 0
        for own, other, same in zip(decoded.rounds, count.rounds, decoded.same, strict=False):
            checked += same
            if same and own != other:
                found = f"decoded rounds {own}, replayed {other}"
                raise StageError(f"{name}, {method.name}: {found}; report this.")
        figures = {"by": "replayed", "decoded": len(few), "equal_to_replay": checked}
        return figures | count.row() | {"parted": decoded.parted, "ties": decoded.ties}

    def walls(self, name: str, answers: Answers) -> dict[str, Any]:
        """Each method's times on a set's first answers, in turn."""
        some = [prompt for prompt, _ in answers[: self.options.walls]]
        if not some:
            return {}
        room = bucket(max(map(len, some)))
        timed = {
            method.name: transformers_own(self.target, self.stops, **method.theirs)
            if method.theirs is not None
            else ours(self._engine(method, room, batch_size=1, rounds_per_chunk=1).warmup(), self.stops)
            for method in self.methods
        }
        for answer in timed.values():
            answer(torch.tensor([some[0]]), min(8, self.options.max_new_tokens), lambda piece: None)
        new = self.options.max_new_tokens
        times = time_methods(timed, some, new, self.options.repeats)
        return {method: wall_row(times, self.methods[0].name, method) for method in timed}

    def _replayed(self, method: Method, answers: Answers) -> Count:
        prompts, texts = [prompt for prompt, _ in answers], [text for _, text in answers]
        room = bucket(max(map(len, prompts)))
        rule = GivenText(self._capacity(room))
        return replay(self._engine(method, room, rule), prompts, texts, self.stops)

    def _decoded(self, method: Method, answers: Answers) -> Count:
        prompts = [prompt for prompt, _ in answers]
        engine = self._engine(method, bucket(max(map(len, prompts))))
        count, texts = decode(engine, prompts, self.options.max_new_tokens, self.stops)
        self._compare(count, answers, texts)
        return count

    def _theirs(self, name: str, method: Method, answers: Answers) -> Count:
        answer, texts, count = transformers_own(self.target, self.stops, **method.theirs or {}), [], Count()
        for prompt, _ in answers:
            try:
                found = answer(torch.tensor([prompt]), self.options.max_new_tokens, lambda piece: None)
            except (AttributeError, TypeError, ValueError) as error:
                raise StageError(
                    f"{name}, {method.name}: transformers' generate does not take it ({error}); leave it out."
                ) from error
            rounds = list(map(len, found.pieces[1:]))
            count.add([rounds], [found.tokens[-1] not in self.stops])
            texts.append(found.tokens)
        self._compare(count, answers, texts)
        return count

    def _compare(self, count: Count, answers: Answers, texts: list[list[int]]) -> None:
        for (prompt, plain), text in zip(answers, texts, strict=True):
            found = parting(self.target, prompt, plain, text)
            count.same.append(found is None)
            count.parted += found is not None
            count.ties += found == "tie"

    def _engine(self, method: Method, room: int, *rules: Any, **more: Any) -> Engine:
        options = {"batch_size": self.options.batch_size, "processors": rules, "filters": False}
        options |= {"verify_width": method.verify_width} | more
        size = {"runtime": self.options.runtime, "max_length": self._capacity(room)}
        return Engine(self.target, method.drafter, EngineOptions(**size, **options))

    def _capacity(self, room: int) -> int:
        return min(room + self.options.max_new_tokens, context_of(self.target))


def run(
    bench: Bench,
    sets: dict[str, list[Prompt]],
    texts: dict[str, Any],
    results: dict[str, Any],
    keep: Callable[[], None],
    provenance: Callable[[], dict],
) -> None:
    """Fill ``texts`` and ``results`` with what they lack; ``keep`` is called after each part of a set.

    Raises:
        StageError: what they hold is of other prompts or texts, or no question fits.
    """
    counts, walls = results.setdefault("counts", {}), results.setdefault("walls", {})
    if bench.longest < 1:
        new = bench.options.max_new_tokens
        raise StageError(f"max_new_tokens={new}: leaves no room for a prompt in {context_of(bench.target)}.")
    for name, prompts in sets.items():
        asked = prompts_checksum(bench, prompts)
        if texts.get(name, {}).get("prompts_checksum", asked) != asked:
            raise StageError(
                f"{name}: the texts that are kept are of other prompts; name another --texts file."
            )
        if name not in texts:
            texts[name] = bench.texts(name, prompts) | {"prompts_checksum": asked}
            keep()
        answers: Answers = texts[name]["answers"]
        of_texts = {key: texts[name][key] for key in ("left_out", "checksum")}
        own = counts.setdefault(name, of_texts | {"methods": {}})
        if not answers:
            continue
        if own["checksum"] != of_texts["checksum"]:
            raise StageError(
                f"{name}: the figures that are kept are of other texts; name another --json file."
            )
        for method in bench.methods:
            kept = own["methods"].get(method.name)
            if kept is None:
                own["methods"][method.name] = bench.count(name, method, answers) | _of_drafter(method)
                own["provenance"] = provenance()
                keep()
            elif kept.get("drafter", 0) != method.checksum:
                raise StageError(
                    f"{name}, {method.name}: the figures that are kept are of another drafter; name another "
                    "--json file."
                )
        if bench.options.walls and _lacks_walls(bench, name, walls.get(name, {})):
            asked_walls = {"answers": bench.options.walls}
            found = {"methods": bench.walls(name, answers), "provenance": provenance()}
            walls[name] = asked_walls | found
            keep()
    if not any(own["methods"] for own in counts.values()):
        room = f"{bench.longest} tokens long, the room that max_new_tokens and max_prompt_tokens leave"
        raise StageError(f"no question of {', '.join(sets)} is at most {room}; lower or raise them.")


def _lacks_walls(bench: Bench, name: str, kept: dict[str, Any]) -> bool:
    """Whether methods are to be timed on a set; they take turns, so that a further one is timed with all.

    Raises:
        StageError: times of methods that are not named would be lost.
    """
    known, named = kept.get("methods", {}).keys(), {one.name for one in bench.methods}
    if named <= known and kept["answers"] == bench.options.walls:
        return False
    if lost := sorted(known - named):
        raise StageError(
            f"{name}: times of {', '.join(lost)} are kept, and methods are timed in turn; name them "
            "in --methods, too, or another --json file."
        )
    return True


def _of_drafter(method: Method) -> dict[str, int]:
    return {"drafter": method.checksum} if method.checksum else {}


def prompts_checksum(bench: Bench, prompts: list[Prompt]) -> int:
    """Checksum of the questions that are asked, in their order."""
    return zlib.crc32(repr([prompt.turns for prompt in prompts[: bench.options.limit]]).encode())


def checksum(answers: Answers) -> int:
    """Checksum of prompts and answers."""
    return zlib.crc32(repr([[*prompt, -1, *answer] for prompt, answer in answers]).encode())
