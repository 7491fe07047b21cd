"""Stage 3, fit: train a drafter on torch devices with accelerate; resumable, and the same after a resume."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils import _pytree as pytree
from tqdm import tqdm

from torch_dflash.train.blocks import Batch
from torch_dflash.train.checkpoint import Checkpoint, load_latest, save_checkpoint
from torch_dflash.train.files import StageError, open_stage
from torch_dflash.train.log import TrainLog, draw_log
from torch_dflash.train.objective import Losses, Vocabulary
from torch_dflash.train.options import FitOptions
from torch_dflash.train.schedule import Schedule
from torch_dflash.train.sequences import Sequences, check_taps
from torch_dflash.train.student import Student


def fit(student: Student, sequences: Sequences, directory: Path, options: FitOptions) -> None:
    """Train ``student.drafter`` in place; go on from the last checkpoint under ``directory`` if there is one.

    Leaves ``checkpoints/``, ``log.jsonl`` and ``training.png``. Ctrl-C or SIGTERM ends it after the step at
    hand, with a checkpoint.

    Raises:
        StageError: a loss that is not finite, a damaged file, a full disk; the message says what to do.
        ValueError: the data do not fit the drafter.
    """
    config: Any = student.drafter.config
    taps = tuple(config.target_layer_ids)
    last = student.last_layer if student.objective.kl else None
    check_taps(sequences, taps if last is None else (*taps, last))
    accelerator = Accelerator(mixed_precision=options.mixed_precision)
    schedule = Schedule(sequences, options, taps, last, accelerator.num_processes)
    settings = asdict(options) | asdict(student.objective) | {"width": student.width, "taps": taps}
    if accelerator.is_main_process:
        open_stage(directory, {"stage": "fit", "sequences": len(sequences), **settings})
    _Fit(student, schedule, directory, accelerator).run()


class _Fit:
    """One run of `fit`: what its steps share."""

    def __init__(self, student: Student, schedule: Schedule, directory: Path, accelerator: Accelerator):
        self.options, self.schedule = schedule.options, schedule
        self.directory, self.accelerator = directory, accelerator
        self.drafter = student.drafter
        self.trained = dict(student.drafter.named_parameters())
        self.optimizer = torch.optim.AdamW(
            self.trained.values(), lr=self.options.learning_rate, weight_decay=self.options.weight_decay
        )
        self.done, self.seconds = self._resume()
        self.bare: Any = student.to(accelerator.device)
        prepared: Any = accelerator.prepare(self.bare, self.optimizer)
        self.student, self.optimizer = prepared
        self.always = schedule.answer_ids() if self.options.sampled_vocabulary else None

    def _resume(self) -> tuple[int, float]:
        checkpoint = load_latest(self.directory / "checkpoints")
        if checkpoint is None:
            return 0, 0.0
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(checkpoint.weights[name])
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(float(checkpoint.step)),
                    "exp_avg": checkpoint.first[name].to(parameter.device),
                    "exp_avg_sq": checkpoint.second[name].to(parameter.device),
                }
        return checkpoint.step, checkpoint.seconds

    def run(self) -> None:
        steps, main = self.schedule.steps, self.accelerator.is_main_process
        log = TrainLog(self.directory, self.done) if main else None
        started = time.monotonic() - self.seconds
        saved = evaluated = time.monotonic()
        with stop_requested() as stopping, self._batches() as batches, self._bar(steps) as bar:
            while self.done < steps and not stopping:
                found = self._step(next(batches))
                self.done += 1
                self.seconds = time.monotonic() - started
                bar.update()
                last = self.done == steps or bool(stopping)
                if self.done % self.options.log_steps == 0 or last:
                    self._report(log, bar, "train", found)
                if last or time.monotonic() - evaluated > 60 * self.options.evaluate_minutes:
                    self._report(log, bar, "held_out", self._validate())
                    evaluated = time.monotonic()
                if last or time.monotonic() - saved > 60 * self.options.checkpoint_minutes:
                    self._save()
                    saved = time.monotonic()
        if self.done < steps:
            raise StageError(
                f"stopped after step {self.done} of {steps}; run the same command again to go on from here."
            )

    def _step(self, batches: list[Batch]) -> dict[str, float]:
        """One optimizer step over all micro-batches of all processes."""
        accelerator, options = self.accelerator, self.options
        rate = options.rate(self.done, self.schedule.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        vocabulary = self._vocabulary()
        # The denominator is known before the forward, so any cut into micro-batches gives the same step.
        blocks = torch.tensor(sum(int((batch.anchors >= 0).sum()) for batch in batches), dtype=torch.float32)
        blocks = accelerator.reduce(blocks.to(accelerator.device), "sum").clamp(min=1)
        sums = []
        for number, batch in enumerate(batches):
            held = accelerator.no_sync(self.student) if number + 1 < len(batches) else nullcontext()
            with held:
                with accelerator.autocast():
                    losses = self.student(_moved(batch, accelerator.device), vocabulary)
                # DDP averages gradients over the processes; the loss is a sum over them.
                accelerator.backward(losses.loss * accelerator.num_processes / blocks)
            sums.append(losses)
        norm: Any = accelerator.clip_grad_norm_(list(self.trained.values()), options.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self._measured(sums) | {"rate": rate, "gradient_norm": float(norm)}

    def _validate(self) -> dict[str, float]:
        """The held-out losses over the whole vocabulary, on every process alike."""
        sums = []
        with torch.no_grad(), self.accelerator.autocast():
            for batch in self.schedule.held_out_batches():
                sums.append(self.bare(_moved(batch, self.accelerator.device)))
        return measures(reduce(add, sums))

    def _measured(self, sums: list[Losses]) -> dict[str, float]:
        total = reduce(add, sums)
        return measures(pytree.tree_map(lambda value: self.accelerator.reduce(value, "sum"), total))

    def _vocabulary(self) -> Vocabulary | None:
        if self.always is None:
            return None
        return self.schedule.vocabulary(self.done, self.bare.head_weight, self.bare.head_bias, self.always)

    def _report(self, log: TrainLog | None, bar: tqdm, kind: str, found: dict[str, Any]) -> None:
        if not math.isfinite(found["loss"]):
            kept = load_latest(self.directory / "checkpoints")
            raise StageError(
                f"the {kind} loss is {found['loss']} at step {self.done}: the fit has diverged. The "
                f"checkpoint of step {kept.step if kept else 0} is kept. Lower learning_rate="
                f"{self.options.learning_rate:g} or clip={self.options.clip:g} in a new directory, or look "
                "for damaged features."
            )
        if log is not None:
            log.write(kind=kind, step=self.done, seconds=round(self.seconds, 1), **found)
            bar.set_postfix(kind=kind, loss=found["loss"], acceptance=found["acceptance_length"])

    def _save(self) -> None:
        if not self.accelerator.is_main_process:
            return
        state = self.optimizer.state
        checkpoint = Checkpoint(
            step=self.done,
            seconds=self.seconds,
            weights=dict(self.trained),
            first={name: state[value]["exp_avg"] for name, value in self.trained.items()},
            second={name: state[value]["exp_avg_sq"] for name, value in self.trained.items()},
        )
        save_checkpoint(self.directory / "checkpoints", checkpoint)
        draw_log(self.directory)

    @contextmanager
    def _batches(self) -> Iterator[Iterator[list[Batch]]]:
        """The steps' batches, each made in a thread while the step before it runs."""
        make, process = self.schedule.step_batches, self.accelerator.process_index
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
        hidden = not self.accelerator.is_main_process
        return tqdm(total=steps, initial=self.done, desc="fit", unit="step", disable=hidden)


def add(one: Losses, other: Losses) -> Losses:
    """Sums of two batches together."""
    return pytree.tree_map(torch.add, one, other)


def measures(losses: Losses) -> dict[str, Any]:
    """Sums as figures: the mean loss of a block, per-position cross-entropy, accuracy, acceptance length."""
    losses = pytree.tree_map(torch.Tensor.detach, losses)
    blocks, known = losses.blocks.clamp(min=1), losses.known.clamp(min=1)
    return {
        "loss": float(losses.loss / blocks),
        "acceptance_length": float(1 + losses.prefix.sum() / blocks),
        "accuracy": [round(value, 4) for value in (losses.hits / known).tolist()],
        "cross_entropy": [round(value, 4) for value in (losses.ce / known).tolist()],
        "blocks": int(losses.blocks),
    }


def _moved(batch: Batch, device: torch.device) -> Batch:
    return pytree.tree_map(lambda value: value.to(device, non_blocking=True), batch)


@contextmanager
def stop_requested() -> Iterator[list[int]]:
    """A list that fills when the process is asked to stop (Ctrl-C, SIGTERM); a second request kills it."""
    asked: list[int] = []
    before = {}

    def note(number, _frame):
        asked.append(number)
        signal.signal(number, before[number])

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, note)
    except ValueError:  # not the main thread: the caller's thread keeps the signals
        pass
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
