"""Fitting a drafter with XLA: the loop, data, log and checkpoints of torch, the steps as JAX programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import torch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_bridge.arrays import to_jax, to_torch
from jax_bridge.programs.lower import Programs
from jax_bridge.state import register_states
from jax_bridge.train.step import AXIS, Arrays, lower_step, lower_validation, optimizer
from torch_dflash.train.features.sequences import Sequences
from torch_dflash.train.fit.blocks import AnchorBatch
from torch_dflash.train.fit.checkpoint import FitCheckpoint
from torch_dflash.train.fit.loop import Loop, open_fit, plan_fit
from torch_dflash.train.fit.objective import Losses, LossVocabulary
from torch_dflash.train.fit.options import FitOptions
from torch_dflash.train.fit.schedule import Schedule
from torch_dflash.train.fit.student import Student


def fit_xla(
    student: Student,
    sequences: Sequences,
    directory: Path,
    options: FitOptions,
    mesh: Mesh | None = None,
    until: int | None = None,
) -> None:
    """The fit of `torch_dflash.train.fit` with XLA. Files are the same, so either continues the other's.

    Trained weights are in ``student.drafter`` after it returns, and in the checkpoint if it is stopped.

    Args:
        mesh: devices that share each micro-batch, one axis named "data"; unset: all of JAX's devices.
        until: as of `Loop.run`.

    Raises:
        StageError: a loss that is not finite, a damaged file, a full disk; the message says what to do.
        ValueError: the data do not fit the drafter, or ``batch_size`` does not fit the mesh.
    """
    mesh = data_mesh() if mesh is None else mesh
    check_mesh(mesh, options.batch_size)
    schedule = plan_fit(student, sequences, options)
    with open_fit(directory, student, schedule):
        trainer = XlaTrainer(student, schedule, mesh)
        Loop(trainer, schedule, directory).run(until)
        trainer.write_back()


def data_mesh(devices: list[Any] | None = None) -> Mesh:
    """A mesh of ``devices`` (all of JAX's) with the one axis "data"."""
    return Mesh(np.array(devices or jax.devices()), (AXIS,))


def check_mesh(mesh: Mesh, batch_size: int) -> None:
    """Raise ``ValueError`` unless a micro-batch divides evenly over the mesh."""
    if mesh.axis_names != (AXIS,):
        raise ValueError(f"mesh={mesh.axis_names}: must have the one axis {AXIS!r}; see `data_mesh`.")
    if jax.process_count() > 1:
        raise ValueError(f"{jax.process_count()} JAX processes: train on the devices of one process.")
    if batch_size % mesh.size:
        raise ValueError(
            f"batch_size={batch_size} does not divide over {mesh.size} devices; choose a multiple of "
            f"{mesh.size}, or a mesh of fewer devices."
        )


class XlaTrainer:
    """Steps as XLA programs over a mesh, one per batch shape (`torch_dflash.train.fit.loop.Trainer`).

    Weights and moments are donated from step to step; embedding and head are arguments too.
    """

    def __init__(self, student: Student, schedule: Schedule, mesh: Mesh):
        register_states()
        self.process, self.main = 0, True
        self.student, self.schedule, self.options, self.mesh = student, schedule, schedule.options, mesh
        self.programs = Programs("highest")
        self.params: Arrays = self._put(dict(student.trained), copy=True)
        self.state: Any = self._put(optimizer(self.options, 0.0).init(self.params))
        self.frozen: Arrays = self._shared(_frozen(student))
        self._step = lower_step(student, self.options, mesh)
        self._validate = lower_validation(student, self.options, mesh)
        self._always = schedule.answer_ids() if self.options.sampled_vocabulary else None
        self._numbers = torch.arange(len(student.head_weight))[:, None]
        self._latest: Any = None

    def restore(self, checkpoint: FitCheckpoint) -> None:
        self.params = self._put(checkpoint.weights, copy=True)
        mu, nu = self._put(checkpoint.first, copy=True), self._put(checkpoint.second, copy=True)
        count = self._put(np.int32(checkpoint.step))
        self.state = optax.tree.set(self.state, mu=mu, nu=nu, count=count)

    def step(self, step: int, rate: float, batches: list[AnchorBatch]) -> Any:
        rows = self._put(self._stacked(batches), P(None, AXIS))
        vocabulary = self._put(self._vocabulary(step))
        args = (self.params, self.state, self.frozen, rows, vocabulary, self._put(np.float32(rate)))
        program = self.programs.get("step", self._step, args, donate=(0, 1))
        # One step waits while another runs; more would only hold batches in device memory.
        jax.block_until_ready(self._latest)
        self.params, self.state, *stepped = program(*args)
        self._latest = stepped
        return stepped

    def read(self, stepped: Any) -> tuple[Losses, float]:
        losses, norm = stepped
        return to_torch(losses), float(norm)

    def losses(self, batch: AnchorBatch) -> Losses:
        rows = _padded(batch, self.options.batch_size, batch.ids.shape[1])
        args = (self.params, self.frozen, self._put(rows, P(AXIS)))
        return to_torch(self.programs.get("losses", self._validate, args)(*args))

    def agreed(self, stop: bool) -> bool:
        return stop  # one process, whatever its devices

    def checkpoint(self, step: int, seconds: float) -> FitCheckpoint:
        moments = [optax.tree.get(self.state, name) for name in ("mu", "nu")]
        return FitCheckpoint(step, seconds, *to_torch((self.params, *moments)))

    def write_back(self) -> None:
        """Copy the trained weights into ``student.drafter``."""
        with torch.no_grad():
            for name, parameter in self.student.trained.items():
                parameter.copy_(to_torch(self.params[name]))

    def _put(self, tree: Any, spec: P = P(), copy: bool = False) -> Any:  # noqa: B008 - immutable
        """``tree`` on the mesh; ``copy``: in JAX's own memory, to be donated."""
        host = jax.devices("cpu")[0]
        return jax.device_put(to_jax(tree, copy=copy, device=host), NamedSharding(self.mesh, spec))

    def _shared(self, tensors: dict[str, torch.Tensor]) -> Arrays:
        """Arrays of the tensors; tensors in the same memory, such as tied weights, share one."""
        arrays = {_memory(tensor): tensor for tensor in tensors.values()}
        arrays = {memory: self._put(tensor) for memory, tensor in arrays.items()}
        return {name: arrays[_memory(tensor)] for name, tensor in tensors.items()}

    def _stacked(self, batches: list[AnchorBatch]) -> AnchorBatch:
        """The micro-batches as one [K, B, ...], padded to the widest: one scan, one program per width."""
        width = max(batch.ids.shape[1] for batch in batches)
        padded = [_padded(batch, self.options.batch_size, width) for batch in batches]
        return jax.tree.map(lambda *rows: torch.stack(rows), *padded)

    def _vocabulary(self, step: int) -> LossVocabulary | None:
        if self._always is None:
            return None
        # Indices of head rows: the rows are on the device already.
        return self.schedule.vocabulary(step, self._numbers, None, self._always)


def _padded(batch: AnchorBatch, rows: int, width: int) -> AnchorBatch:
    """The batch with empty rows and columns added: they have no anchor, so no loss."""

    def grown(value: Any, *shape: int, fill: int = 0) -> Any:
        if value is None or value.shape[: len(shape)] == shape:
            return value
        larger = value.new_full((*shape, *value.shape[len(shape) :]), fill)
        larger[tuple(map(slice, value.shape))] = value
        return larger

    return AnchorBatch(
        ids=grown(batch.ids, rows, width),
        length=grown(batch.length, rows),
        features=grown(batch.features, rows, width),
        anchors=grown(batch.anchors, rows, fill=-1),
        last=grown(batch.last, rows, width),
    )


def _frozen(student: Student) -> dict[str, torch.Tensor]:
    """All tensors that are not trained, by the student's names."""
    tensors = dict(student.named_parameters(remove_duplicate=False))
    tensors |= dict(student.named_buffers(remove_duplicate=False))
    trained = {f"drafter.{name}" for name in student.trained}
    return {name: tensor for name, tensor in tensors.items() if name not in trained}


def _memory(tensor: torch.Tensor) -> tuple:
    return tensor.data_ptr(), tensor.dtype, tensor.shape
