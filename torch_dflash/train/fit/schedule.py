"""`Schedule`: the sequences of each step, by its number alone, so that a resumed fit repeats them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from torch_dflash.train.features.sequences import (
    Sequences,
    epoch_batches,
    make_batch,
    seed_of,
    split_held_out,
)
from torch_dflash.train.fit.blocks import AnchorBatch
from torch_dflash.train.fit.objective import LossVocabulary, sample_vocabulary
from torch_dflash.train.fit.options import FitOptions


@dataclass(frozen=True)
class Schedule:
    """The steps of a fit.

    Args:
        taps: the drafter's. last: the target's last layer, if the KL loss needs it. processes: number that
            share a step; each takes every ``processes``-th micro-batch.
    """

    sequences: Sequences
    options: FitOptions
    taps: tuple[int, ...]
    last: int | None = None
    processes: int = 1

    def __post_init__(self):
        if len(self.sequences) <= self.options.held_out:
            raise ValueError(
                f"held_out={self.options.held_out}, but there are {len(self.sequences)} sequences; hold out "
                "fewer, or train on more."
            )
        if not self.steps_per_epoch:
            sizes = f"batch_size={self.options.batch_size} x accumulation={self.options.accumulation}"
            most = f"the {len(self.training)} training sequences"
            raise ValueError(f"{sizes} x {self.processes} processes is more than {most}; lower it.")

    @property
    def training(self) -> list[int]:
        """Numbers of the training sequences."""
        return self._parts[0]

    @property
    def held_out(self) -> list[int]:
        """Numbers of the sequences kept for validation."""
        return self._parts[1]

    @cached_property
    def _parts(self) -> tuple[list[int], list[int]]:
        return split_held_out(self.sequences, self.options.held_out, self.options.seed)

    @property
    def steps_per_epoch(self) -> int:
        """Whole steps in an epoch; batches of an incomplete step are left out."""
        batches = -(-(len(self.sequences) - self.options.held_out) // self.options.batch_size)
        return batches // (self.options.accumulation * self.processes)

    @property
    def steps(self) -> int:
        """Steps of the whole fit."""
        return self.options.steps or self.steps_per_epoch * self.options.epochs

    def step_batches(self, step: int, process: int = 0) -> list[AnchorBatch]:
        """The micro-batches of one step for one process, with their anchors."""
        seed = f"{self.options.seed}/{step // self.steps_per_epoch}"
        mine = self.step_sequences(step)[process :: self.processes]
        return [self._batch(indices, seed) for indices in mine]

    def step_sequences(self, step: int) -> list[list[int]]:
        """Numbers of the sequences in each micro-batch of one step."""
        epoch, place = divmod(step, self.steps_per_epoch)
        size = self.options.accumulation * self.processes
        return self._epoch(epoch)[place * size : (place + 1) * size]

    def held_out_batches(self) -> list[AnchorBatch]:
        """Validation batches; their anchors never change."""
        size, indices = self.options.batch_size, self.held_out
        indices = sorted(indices, key=lambda index: len(self.sequences.sequence(index).ids))
        return [self._batch(indices[at : at + size], "held out") for at in range(0, len(indices), size)]

    def vocabulary(
        self, step: int, weight: torch.Tensor, bias: torch.Tensor | None, always: torch.Tensor
    ) -> LossVocabulary:
        """The ids of this step's softmax (``options.sampled_vocabulary``)."""
        generator = torch.Generator().manual_seed(seed_of(f"vocabulary/{self.options.seed}/{step}"))
        return sample_vocabulary(weight, bias, always, self.options.sampled_vocabulary or 0, generator)

    def answer_ids(self) -> torch.Tensor:
        """Every id that occurs in an answer, sorted."""
        rows = (self.sequences.sequence(index) for index in range(len(self.sequences)))
        return torch.tensor(sorted({token for row in rows for token in row.ids[row.start :]}))

    def _batch(self, indices: list[int], seed: str) -> AnchorBatch:
        return make_batch(self.sequences, indices, self.taps, self.options.anchors, seed, self.last)

    @lru_cache(maxsize=4)  # noqa: B019 (keeps the last few fits' sequences, as a fit's process does)
    def _epoch(self, epoch: int) -> list[list[int]]:
        options = self.options
        return epoch_batches(self.sequences, self.training, options.batch_size, options.seed, epoch)

    def __hash__(self) -> int:
        return id(self)
