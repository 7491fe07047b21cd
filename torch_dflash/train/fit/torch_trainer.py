"""Stage 3, fit: trains a drafter on torch devices with accelerate; a resumed fit takes the same steps."""

from __future__ import annotations

from contextlib import nullcontext
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState
from torch.utils import _pytree as pytree

from torch_dflash.train.features.sequences import Sequences
from torch_dflash.train.fit.blocks import AnchorBatch
from torch_dflash.train.fit.checkpoint import FitCheckpoint
from torch_dflash.train.fit.loop import Loop, add, open_fit, plan_fit
from torch_dflash.train.fit.objective import Losses, LossVocabulary
from torch_dflash.train.fit.options import FitOptions
from torch_dflash.train.fit.schedule import Schedule
from torch_dflash.train.fit.student import Student


def fit(
    student: Student, sequences: Sequences, directory: Path, options: FitOptions, until: int | None = None
) -> None:
    """Train ``student.drafter`` in place, from the last checkpoint under ``directory`` if there is one.

    Writes ``checkpoints/``, ``log.jsonl`` and ``training.png``. Ctrl-C or SIGTERM ends the fit after the
    current step, with a checkpoint.

    Raises:
        StageError: a loss that is not finite, a damaged file, a full disk; the message gives the fix.
        ValueError: the data do not fit the drafter.
    """
    # accelerate keeps the precision of a process's first fit and refuses another.
    AcceleratorState._reset_state()
    # Embedding and head are equal buffers in all processes: no broadcast in every forward.
    kwargs = DistributedDataParallelKwargs(broadcast_buffers=False)
    accelerator = Accelerator(mixed_precision=options.mixed_precision, kwargs_handlers=[kwargs])
    schedule = plan_fit(student, sequences, options, accelerator.num_processes)
    with open_fit(directory, student, schedule) if accelerator.is_main_process else nullcontext():
        Loop(TorchTrainer(student, schedule, accelerator), schedule, directory).run(until)


class TorchTrainer:
    """Steps on torch devices, one or several processes (`torch_dflash.train.fit.loop.Trainer`)."""

    def __init__(self, student: Student, schedule: Schedule, accelerator: Accelerator):
        self.options, self.schedule = schedule.options, schedule
        self.accelerator: Any = accelerator
        self.process: int = accelerator.process_index
        self.main: bool = accelerator.is_main_process
        self.trained = student.trained
        self.optimizer = torch.optim.AdamW(
            self.trained.values(), lr=self.options.learning_rate, weight_decay=self.options.weight_decay
        )
        self.bare: Any = student.to(accelerator.device)
        prepared: Any = accelerator.prepare(self.bare, self.optimizer)
        self.student, self.optimizer = prepared
        self.always = schedule.answer_ids() if self.options.sampled_vocabulary else None

    def restore(self, checkpoint: FitCheckpoint) -> None:
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(checkpoint.weights[name])
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(float(checkpoint.step)),
                    "exp_avg": checkpoint.first[name].to(parameter.device),
                    "exp_avg_sq": checkpoint.second[name].to(parameter.device),
                }

    def step(self, step: int, rate: float, batches: list[AnchorBatch]) -> Any:
        accelerator = self.accelerator
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        vocabulary = self._vocabulary(step)
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
            sums.append(pytree.tree_map(torch.Tensor.detach, losses))
        norm: Any = accelerator.clip_grad_norm_(list(self.trained.values()), self.options.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return reduce(add, sums), norm

    def read(self, stepped: Any) -> tuple[Losses, float]:
        losses, norm = stepped
        return pytree.tree_map(lambda value: self.accelerator.reduce(value, "sum"), losses), float(norm)

    def losses(self, batch: AnchorBatch) -> Losses:
        with torch.no_grad(), self.accelerator.autocast():
            return self.bare(_moved(batch, self.accelerator.device))

    def agreed(self, stop: bool) -> bool:
        if self.accelerator.num_processes == 1:
            return stop
        requests = torch.tensor(float(stop), device=self.accelerator.device)
        return bool(self.accelerator.reduce(requests, "sum") > 0)

    def checkpoint(self, step: int, seconds: float) -> FitCheckpoint:
        state = self.optimizer.state
        return FitCheckpoint(
            step=step,
            seconds=seconds,
            weights=dict(self.trained),
            first={name: state[value]["exp_avg"] for name, value in self.trained.items()},
            second={name: state[value]["exp_avg_sq"] for name, value in self.trained.items()},
        )

    def _vocabulary(self, step: int) -> LossVocabulary | None:
        if self.always is None:
            return None
        return self.schedule.vocabulary(step, self.bare.head_weight, self.bare.head_bias, self.always)


def _moved(batch: AnchorBatch, device: torch.device) -> AnchorBatch:
    return pytree.tree_map(lambda value: value.to(device, non_blocking=True), batch)
