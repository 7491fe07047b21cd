"""`Loop`: a fit's loop for every kind of device: resume, validate, checkpoint, log, stop."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from functools import reduce
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils import _pytree as pytree
from tqdm import tqdm

from torch_dflash.progress import progress_bar
from torch_dflash.storage.files import StageError, Stopped
from torch_dflash.train.features.extract import data_checksum
from torch_dflash.train.features.sequences import Sequences, check_mask, check_source, check_taps
from torch_dflash.train.fit.blocks import AnchorBatch
from torch_dflash.train.fit.checkpoint import FitCheckpoint, load_latest, save_checkpoint
from torch_dflash.train.fit.heads import head_of
from torch_dflash.train.fit.log import TrainLog, check_drawing, draw_log
from torch_dflash.train.fit.objective import Losses
from torch_dflash.train.fit.options import FitOptions
from torch_dflash.train.fit.schedule import Schedule
from torch_dflash.train.fit.student import Student, check_gradients
from torch_dflash.train.stages import open_stage


@runtime_checkable
class Trainer(Protocol):
    """Takes the steps, on torch devices (`torch_trainer.py`) or XLA (`jax_bridge.train`).

    Attributes:
        process: number of this process among those sharing a step. main: whether it writes the files.
    """

    process: int
    main: bool

    def restore(self, checkpoint: FitCheckpoint) -> None:
        """Resume from ``checkpoint``."""
        ...

    def step(self, step: int, rate: float, batches: list[AnchorBatch]) -> Any:
        """Start the optimizer step ``step``, 0-based; returns the argument of `read`."""
        ...

    def read(self, stepped: Any) -> tuple[Losses, float]:
        """Losses of a step over all processes, and the norm of its gradient before clipping."""
        ...

    def losses(self, batch: AnchorBatch) -> Losses:
        """Losses of a held-out batch over the whole vocabulary."""
        ...

    def agreed(self, stop: bool) -> bool:
        """Whether any process wants to stop; all stop after the same step."""
        ...

    def checkpoint(self, step: int, seconds: float) -> FitCheckpoint:
        """Weights and moments after ``step`` steps; called in the main process only."""
        ...


def plan_fit(student: Student, sequences: Sequences, options: FitOptions, processes: int = 1) -> Schedule:
    """The steps of a fit of ``student``.

    Raises:
        ValueError: the data do not fit the drafter or the options, or no loss reaches a weight.
    """
    config: Any = student.drafter.config
    check_source(sequences, student.target)
    taps = tuple(config.target_layer_ids)
    last = student.last_layer if student.objective.distils else None
    check_taps(sequences, taps if last is None else (*taps, last))
    if (mask := getattr(config, "mask_token_id", None)) is not None:
        check_mask(sequences, mask)
    check_gradients(student)
    return Schedule(sequences, options, taps, last, processes)


def open_fit(directory: Path, student: Student, schedule: Schedule) -> AbstractContextManager[None]:
    """Open ``directory`` for this fit, which resumes only with the same settings.

    The runtime is no setting: a fit may continue on another.
    """
    config, kind = student.drafter.config, student.kind
    data = schedule.sequences
    settings = {
        "stage": "fit",
        "sequences": len(data),
        "feature_dtype": str(data.dtype).removeprefix("torch."),
    }
    settings |= asdict(schedule.options) | asdict(student.objective)
    if not settings["freeze"]:
        del settings["freeze"]  # folders of earlier releases do not say it
    settings |= {"target": student.target.name, "width": student.width, "taps": schedule.taps}
    settings |= {name: getattr(config, name) for name in kind.shape} | {"processes": schedule.processes}
    settings |= {"head": head_of(config)} | {name: getattr(config, name, None) for name in kind.sizes}
    settings |= {"target_weights": student.target.weights, "start_weights": student.start_weights}
    settings["data_checksum"] = data_checksum(map(data.sequence, range(len(data))))
    return open_stage(directory, settings, "checkpoints/step-*")


class Loop:
    """One run of a fit in ``directory``, from its last checkpoint if there is one."""

    def __init__(self, trainer: Trainer, schedule: Schedule, directory: Path):
        self.trainer, self.schedule, self.directory = trainer, schedule, directory
        self.options = schedule.options
        check_drawing()
        checkpoint = load_latest(directory / "checkpoints")
        if checkpoint is not None:
            trainer.restore(checkpoint)
        self.done, self.seconds = (checkpoint.step, checkpoint.seconds) if checkpoint else (0, 0.0)

    def run(self, until: int | None = None) -> None:
        """Take the remaining steps. Ctrl-C or SIGTERM ends the run after the current step, with a checkpoint.

        Args:
            until: the last step of this run, with a validation and a checkpoint; a later run goes on.

        Raises:
            StageError: a stop (`Stopped`), or a loss that is not finite.
        """
        steps = self.schedule.steps
        end = steps if until is None else min(until, steps)
        log = TrainLog(self.directory, self.done) if self.trainer.main else None
        started = time.monotonic() - self.seconds
        saved = evaluated = time.monotonic()
        with stop_requested() as stopping, self._batches() as batches, self._bar(steps) as bar:
            last = self.done >= end
            while not last:  # a stop during validation takes effect after the next step, which is saved
                rate = self.options.rate(self.done, steps)
                stepped = self.trainer.step(self.done, rate, next(batches))
                self.done += 1
                self.seconds = time.monotonic() - started
                bar.update()
                last = self.done == end or self.trainer.agreed(bool(stopping))
                if self.done % self.options.log_steps == 0 or last:
                    losses, norm = self.trainer.read(stepped)
                    found = measures(losses) | {"rate": rate, "gradient_norm": norm}
                    self._report(log, bar, "train", found)
                if last or time.monotonic() - evaluated > 60 * self.options.evaluate_minutes:
                    self._report(log, bar, "held_out", self._validate())
                    evaluated = time.monotonic()
                if last or time.monotonic() - saved > 60 * self.options.checkpoint_minutes:
                    self._save()
                    saved = time.monotonic()
        if self.done < end:
            raise Stopped(f"stopped after step {self.done} of {steps}; run the same command again to go on.")

    def _validate(self) -> dict[str, Any]:
        """The held-out losses over the whole vocabulary, computed on every process."""
        return measures(reduce(add, map(self.trainer.losses, self.schedule.held_out_batches())))

    def _report(self, log: TrainLog | None, bar: tqdm, kind: str, found: dict[str, Any]) -> None:
        bad = [name for name in ("loss", "gradient_norm") if not math.isfinite(found.get(name, 0.0))]
        if bad:
            kept = load_latest(self.directory / "checkpoints")
            raise StageError(
                f"the {kind} {bad[0]} is {found[bad[0]]} at step {self.done}: the fit has diverged. The "
                f"checkpoint of step {kept.step if kept else 0} is kept. Lower learning_rate="
                f"{self.options.learning_rate:g} or clip={self.options.clip:g} in a new directory, or look "
                "for damaged features."
            )
        if log is not None:
            log.write(kind=kind, step=self.done, seconds=round(self.seconds, 1), **found)
            bar.set_postfix(kind=kind, loss=found["loss"], acceptance=found["acceptance_length"])

    def _save(self) -> None:
        if self.trainer.main:
            checkpoint = self.trainer.checkpoint(self.done, self.seconds)
            save_checkpoint(self.directory / "checkpoints", checkpoint)
            draw_log(self.directory)

    @contextmanager
    def _batches(self) -> Iterator[Iterator[list[AnchorBatch]]]:
        """The steps' batches; a thread makes each during the step before."""
        make, process = self.schedule.step_batches, self.trainer.process
        with ThreadPoolExecutor(1) as pool:

            def batches():
                ahead = pool.submit(make, self.done, process)
                for step in range(self.done + 1, self.schedule.steps + 1):
                    ready = ahead.result()
                    if step < self.schedule.steps:
                        ahead = pool.submit(make, step, process)
                    yield ready

            yield batches()

    def _bar(self, steps: int) -> tqdm:
        return progress_bar(self.trainer.main, total=steps, initial=self.done, desc="fit", unit="step")


def add(one: Losses, other: Losses) -> Losses:
    """The sums of two batches."""
    return pytree.tree_map(torch.add, one, other)


def measures(losses: Losses) -> dict[str, Any]:
    """Mean loss of a block, per-position cross-entropy and accuracy, and acceptance length.

    With a candidate selector also its recall: how often the true token is a candidate.
    """
    blocks, known = losses.blocks.clamp(min=1), losses.known.clamp(min=1)
    return {
        "loss": float(losses.loss / blocks),
        "acceptance_length": float(1 + losses.prefix.sum() / blocks),
        "accuracy": _rounded(losses.hits / known),
        "cross_entropy": _rounded(losses.ce / known),
        "blocks": int(losses.blocks),
    } | ({} if losses.listed is None else {"recall": _rounded(losses.listed / known)})


def _rounded(values: torch.Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]


@contextmanager
def stop_requested() -> Iterator[list[int]]:
    """A list that fills on a request to stop (Ctrl-C, SIGTERM); a second request kills the process."""
    signals: list[int] = []
    before = {}

    def note(number, _frame):
        signals.append(number)
        signal.signal(number, before[number])

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, note)
    except ValueError:  # not the main thread, which handles the signals
        pass
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
