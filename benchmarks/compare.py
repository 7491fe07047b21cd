"""Drafters of every method for one target, from nothing, at one training budget.

``fit``: each sees the same cached features of the same sequences in the same order, with the same anchors,
the same ids in the loss and the same frozen head. The budget is answer tokens seen; FLOPs are derived.
Two learning rates of each are tried for a tenth of the budget, and the one with the better acceptance on
held-out answers goes on. Checkpoints are judged at the same tokens, and the best is exported. Run again, the
program resumes. Below `CONVERGED` tokens the JSON holds curves, and no ranking.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.utils.flop_counter import FlopCounterMode

from torch_dflash.cli.loading import load_named
from torch_dflash.cli.outputs import write_results
from torch_dflash.cli.train.stage import target_name
from torch_dflash.storage.files import StageError, write_atomically
from torch_dflash.train.answers.provenance import read_data
from torch_dflash.train.export import export_drafter
from torch_dflash.train.features.sequences import CachedSequences, check_taps
from torch_dflash.train.fit.architecture import new_drafter
from torch_dflash.train.fit.blocks import AnchorBatch
from torch_dflash.train.fit.log import read_log
from torch_dflash.train.fit.objective import LossVocabulary
from torch_dflash.train.fit.options import DrafterShape, FitOptions, Objective
from torch_dflash.train.fit.schedule import Schedule
from torch_dflash.train.fit.student import Student, weightless
from torch_dflash.train.options import Layers
from torch_dflash.train.stages import MANIFEST

CONVERGED = 9_000_000
METHODS = ("eagle3", "medusa", "dflash", "dflash2")
PASSES = ("eagle3",)
"""Methods that read their weights and the head once for each draft; the others do once a round."""
EQUAL = ("sequences", "data_checksum", "target_weights", "feature_dtype", "processes")
EQUAL += tuple(
    one.name for cls in (FitOptions, Objective) for one in fields(cls) if one.name != "learning_rate"
)
"""Settings that all fits have in common."""
LEFT_OUT = ("learning_rate", "epochs", "evaluate_minutes", "checkpoint_minutes")
"""Options that the JSON says elsewhere, or that change no figure."""


@dataclass(frozen=True)
class Budget:
    """The steps of every fit.

    Attributes:
        steps: the fewest whose answers hold the tokens that are asked for. marks: the steps after which a
            checkpoint is judged, the first at a tenth. seen: answer tokens up to each mark.
    """

    steps: int
    marks: tuple[int, ...]
    seen: tuple[int, ...]


def budget_of(sequences: Any, options: FitOptions, tokens: int, judged: int) -> Budget:
    """The steps for ``tokens`` answer tokens, judged at ``judged`` marks."""
    total, after = 0, []
    for rows in _steps(Schedule(sequences, options, ())):
        total += sum(len(sequences.sequence(row).ids) - sequences.sequence(row).start for row in rows)
        after.append(total)
        if total >= tokens:
            break
    steps = len(after)
    marks = sorted({max(1, round(steps * share / judged)) for share in range(1, judged + 1)} | {tenth(steps)})
    marks = [mark for mark in marks if mark >= tenth(steps)]
    return Budget(steps, tuple(marks), tuple(after[mark - 1] for mark in marks))


def tenth(steps: int) -> int:
    """The step up to which learning rates are tried."""
    return max(1, round(steps / 10))


def _steps(schedule: Schedule) -> Iterator[list[int]]:
    for step in count():
        yield [row for rows in schedule.step_sequences(step) for row in rows]


def shapes_of(arguments: argparse.Namespace) -> dict[str, DrafterShape]:
    """The drafters to fit, by name; ``dflash-N`` is a block of N rows."""
    wide = {"mask_token_id": arguments.mask_token_id, "layers": arguments.layers}
    wide |= {"intermediate_size": arguments.intermediate_size}
    of_head = {"dflash": wide, "dflash2": wide | {"selector_rank": arguments.selector_rank}}
    of_head["eagle3"] = {"intermediate_size": arguments.eagle3_intermediate_size}
    common: dict[str, Any] = {"init_seed": arguments.seed}
    found = {}
    for name in arguments.methods:
        taps = {} if name == "medusa" else {"taps": arguments.taps}
        given = common | taps | of_head.get(name, {})
        found[name] = DrafterShape(head=name, block_size=arguments.width, **given)
    for size in arguments.block_size:
        if size != arguments.width or "dflash" not in found:
            found[f"dflash-{size}"] = DrafterShape(
                head="dflash", block_size=size, taps=arguments.taps, **common, **wide
            )
    return found


class Fits:
    """The fits of one budget on one target's features."""

    def __init__(self, arguments: argparse.Namespace, target: Any, sequences: Any):
        self.target, self.sequences, self.out = target, sequences, arguments.out
        self.name, self.data = target_name(arguments.target), read_data([arguments.features])
        self.runtime, self.rates = arguments.runtime, arguments.rates
        self.objective = Objective(weighting="dpace", rows_per_chunk=arguments.rows_per_chunk)
        self.options = FitOptions(
            batch_size=arguments.batch_size,
            anchors=arguments.anchors,
            mixed_precision=arguments.mixed_precision,
            sampled_vocabulary=arguments.sampled_vocabulary,
            held_out=arguments.held_out,
            seed=arguments.seed,
            evaluate_minutes=float("inf"),  # at the marks alone
            checkpoint_minutes=arguments.checkpoint_minutes,
        )
        self.budget = budget_of(sequences, self.options, arguments.tokens, arguments.judged)
        self.options = replace(self.options, steps=self.budget.steps)

    def student(self, shape: DrafterShape) -> Student:
        """A drafter from nothing, to be trained."""
        drafter = new_drafter(self.target, shape).float()
        half = torch.bfloat16 if self.options.mixed_precision == "bf16" else None
        return Student(drafter, self.target, self.objective, head_dtype=half)

    def check(self, shapes: dict[str, DrafterShape]) -> None:
        """Raise ``ValueError`` for a drafter that cannot be built, or whose taps the features lack."""
        for shape in shapes.values():
            check_taps(self.sequences, tuple(new_drafter(self.target, shape).config.target_layer_ids))

    def row(self, name: str, shape: DrafterShape) -> dict[str, Any]:
        """One drafter's figures, after its fits."""
        first, tried = self.budget.marks[0], {}
        for rate in self.rates:
            self.train(name, shape, rate, first)
            tried[rate] = self.curve(name, rate)[first]
        rate = max(self.rates, key=lambda rate: (tried[rate]["acceptance_length"], -tried[rate]["loss"]))
        for mark in self.budget.marks:
            self.train(name, shape, rate, mark)
        judged = {f"{rate:g}": shortened(found) for rate, found in tried.items()}
        return self.figures(name, shape, rate) | {"rates_tried": judged}

    def train(self, name: str, shape: DrafterShape, rate: float, mark: int) -> None:
        """Go on with a fit up to ``mark``, and keep its weights there if they are the best so far."""
        home = self.home(name, rate)
        if (taken := steps_taken(home)) < mark:
            options = replace(self.options, learning_rate=rate)
            if self.runtime == "xla":
                from jax_bridge.train.trainer import fit_xla as fit
            else:
                from torch_dflash.train.fit.torch_trainer import fit
            fit(self.student(shape), self.sequences, home, options, until=mark)
            taken = mark
        if taken == mark and self.best(name, rate, mark)[0] == mark:
            last = home / "checkpoints" / f"step-{mark:08}.safetensors"
            write_atomically(home / "best.safetensors", lambda part: shutil.copyfile(last, part))

    def home(self, name: str, rate: float) -> Path:
        """The directory of a fit."""
        return self.out / name / f"rate-{rate:g}"

    def curve(self, name: str, rate: float) -> dict[int, dict[str, Any]]:
        """The held-out figures at the marks that a fit has passed."""
        lines = [line for line in read_log(self.home(name, rate) / "log.jsonl") if line["kind"] == "held_out"]
        return {line["step"]: line for line in lines if line["step"] in self.budget.marks}

    def best(self, name: str, rate: float, until: int) -> tuple[int, dict[str, Any]]:
        """The mark with the highest acceptance up to ``until``, and its figures."""
        passed = {mark: line for mark, line in self.curve(name, rate).items() if mark <= until}
        return max(passed.items(), key=lambda item: (item[1]["acceptance_length"], -item[0]))

    def figures(self, name: str, shape: DrafterShape, rate: float) -> dict[str, Any]:
        """A finished fit in the JSON; exports its best checkpoint."""
        student, curve, home = self.student(shape), self.curve(name, rate), self.home(name, rate)
        step, best = self.best(name, rate, self.budget.steps)
        flops = flops_of(student, self.sequences, replace(self.options, learning_rate=rate))
        with safe_open(home / "best.safetensors", "pt") as file:
            weights = {key: file.get_tensor(key) for key in file.keys() if key.startswith("weights/")}  # noqa: SIM118
        named = dict(student.drafter.named_parameters())
        with torch.no_grad():
            for key, weight in weights.items():
                named[key.removeprefix("weights/")].copy_(weight)
        said = {"name": self.name, "data": self.data}
        export_drafter(student.drafter, self.out / name / "drafter", self.target, home, **said)
        seen = dict(zip(self.budget.marks, self.budget.seen, strict=True))
        return {
            "shape": {key: value for key, value in asdict(shape).items() if value is not None},
            "taps": list(student.drafter.config.target_layer_ids),
            "drafts": student.width - 1,
            "weights": sum(weight.numel() for weight in named.values()),
            "draft_bytes": draft_bytes(student, passes=student.width - 1 if name in PASSES else 1),
            "learning_rate": rate,
            "minutes": round(max(line["seconds"] for line in curve.values()) / 60, 2),
            "training_flops": flops,
            "checkpoints_judged": len(curve),
            "best": {"tokens": seen[step], "step": step, **shortened(best), "accuracy": best["accuracy"]},
            "curve": [{"tokens": seen[mark], **shortened(line)} for mark, line in sorted(curve.items())],
        }


def shortened(line: dict[str, Any]) -> dict[str, float]:
    """The held-out figures of a checkpoint."""
    return {key: round(line[key], 4) for key in ("acceptance_length", "loss")}


def steps_taken(home: Path) -> int:
    """The step of a fit's last checkpoint."""
    files = sorted((home / "checkpoints").glob("step-*.safetensors"))
    return int(files[-1].stem.removeprefix("step-")) if files else 0


def draft_bytes(student: Student, passes: int) -> int:
    """Bytes of the weights in bfloat16 that drafts of a round read: the head too, tables of ids not.

    ``passes``: over all weights but the projection of features, ``fc``, which is read once.
    """
    read = {
        name: weight.numel() for name, weight in student.drafter.named_parameters() if "codebook" not in name
    }
    once = sum(size for name, size in read.items() if name.startswith("fc."))
    return 2 * (once + passes * (sum(read.values()) - once + student.head_weight.numel()))


def flops_of(student: Student, sequences: Any, options: FitOptions) -> int:
    """FLOPs of all steps' products, forward and backward, by the shapes of their batches."""
    schedule, counted = Schedule(sequences, options, ()), Counter()
    for rows in islice(_steps(schedule), schedule.steps):
        counted[len(rows), -(-max(len(sequences.sequence(row).ids) for row in rows) // 64) * 64] += 1
    ghost = weightless(student, trained=True)
    ids = len(schedule.answer_ids()) + (options.sampled_vocabulary or 0)
    return sum(times * _flops(ghost, options, rows, width, ids) for (rows, width), times in counted.items())


def _flops(ghost: Any, options: FitOptions, rows: int, width: int, ids: int) -> int:
    def made(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    (known, hidden), taps = ghost.head_weight.shape, len(ghost.drafter.config.target_layer_ids)
    vocabulary, kind = None, ghost.head_weight.dtype
    if options.sampled_vocabulary is not None:
        shift = made(ids, dtype=torch.float32)
        vocabulary = LossVocabulary(made(ids, hidden, dtype=kind), None, shift, made(known), made(ids))
    features = made(rows, width, taps * hidden, dtype=torch.float32)
    batch = AnchorBatch(made(rows, width), made(rows), features, made(rows, options.anchors))
    with FlopCounterMode(display=False) as counter, torch.enable_grad():
        ghost(batch, vocabulary).loss.backward()
    return counter.get_total_flops()


def check_equal(homes: dict[str, Path]) -> None:
    """Raise ``StageError`` if two fits differ in more than the drafter and its learning rate.

    Compares what the fits themselves recorded: their settings, and the last steps of their logs.
    """
    facts = {}
    for name, home in homes.items():
        settings = json.loads((home / MANIFEST).read_text())
        last = max(line["step"] for line in read_log(home / "log.jsonl"))
        facts[name] = {key: ({"freeze": False} | settings)[key] for key in EQUAL} | {"last step": last}
    (first, known), *others = facts.items()
    for name, found in others:
        for key, value in known.items():
            if value != found[key]:
                unlike = f"{first} has {key}={value!r}, {name} {key}={found[key]!r}"
                raise StageError(f"{unlike}: their budgets are not equal; fit both anew.")


def results_of(fits: Fits, rows: dict[str, dict[str, Any]], tokens: int) -> dict[str, Any]:
    """The JSON's content; a ranking only if the fits have seen enough, and all are there."""
    converged, options = tokens >= CONVERGED, asdict(fits.options) | asdict(fits.objective)
    title = f"held-out acceptance after {fits.budget.seen[-1]:,} answer tokens seen"
    found: dict[str, Any] = {
        "title": title if converged else f"not converged: {title}",
        "converged": converged,
        "tokens": {"asked": tokens, "seen": fits.budget.seen[-1]},
        "steps": fits.budget.steps,
        "sequences": len(fits.sequences),
        "options": {name: value for name, value in options.items() if name not in LEFT_OUT},
        "fits": rows,
    }
    if converged:
        lengths = {name: row["best"]["acceptance_length"] for name, row in rows.items()}
        found["ranking"] = sorted(lengths, key=lambda name: -lengths[name])
    return found


def fit(arguments: argparse.Namespace) -> None:
    """Fit every drafter, and write the JSON after each."""
    loaded, shapes = load_named(arguments.target, "none", dtype=arguments.target_dtype), shapes_of(arguments)
    fits = Fits(arguments, loaded.target, CachedSequences([arguments.features]))
    fits.check(shapes)
    rows: dict[str, dict[str, Any]] = {}
    homes: dict[str, Path] = {}
    for name, shape in shapes.items():
        rows[name] = fits.row(name, shape)
        homes[name] = fits.home(name, rows[name]["learning_rate"])
        check_equal(homes)
        write_results(arguments.json, results_of(fits, rows, arguments.tokens))
        print(name, rows[name]["best"], flush=True)


def parser() -> argparse.ArgumentParser:
    """The program's options."""
    made = argparse.ArgumentParser(description=__doc__)
    one = made.add_subparsers(required=True).add_parser("fit", description=__doc__)
    one.set_defaults(run=fit)
    one.add_argument("--target", default="demo")
    one.add_argument("--target-dtype", default="auto")
    one.add_argument("--features", type=Path, required=True, help="with the taps of all drafters")
    one.add_argument("--tokens", type=lambda text: int(float(text)), required=True, help="the budget")
    one.add_argument("--methods", nargs="*", default=list(METHODS), choices=METHODS)
    one.add_argument("--width", type=int, default=8, help="rows of a draft, the anchor included")
    sizes = {"type": lambda text: [int(size) for size in text.split(",")], "metavar": "N,N..."}
    one.add_argument("--block-size", default=[], **sizes, help="further DFlash drafters by their blocks")
    one.add_argument("--rates", nargs="+", type=float, default=[1e-3, 2e-3], help="learning rates to try")
    one.add_argument("--judged", type=int, default=20, help="checkpoints of each fit that are judged")
    one.add_argument("--taps", type=Layers, default=Layers("1,14,27"), help="of all but Medusa")
    one.add_argument("--mask-token-id", type=int, default=16)
    one.add_argument("--layers", type=int, default=2, help="of DFlash drafters")
    one.add_argument("--intermediate-size", type=int, help="of DFlash drafters")
    one.add_argument("--eagle3-intermediate-size", type=int)
    one.add_argument("--selector-rank", type=int, default=64, help="of DFlash2")
    one.add_argument("--batch-size", type=int, default=8)
    one.add_argument("--anchors", type=int, default=64)
    one.add_argument("--sampled-vocabulary", type=int)
    one.add_argument("--rows-per-chunk", type=int, default=1024)
    one.add_argument("--mixed-precision", default="bf16", choices=["no", "bf16"])
    one.add_argument("--held-out", type=int, default=64)
    one.add_argument("--checkpoint-minutes", type=float, default=5.0)
    one.add_argument("--runtime", default="eager", choices=["eager", "xla"])
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--json", default="docs/results/compare/fit.json")
    return made


def main() -> None:
    """Run what is asked."""
    arguments = parser().parse_args()
    Path(arguments.json).parent.mkdir(parents=True, exist_ok=True)
    arguments.run(arguments)


if __name__ == "__main__":
    main()
