"""Log-probabilities, logits and scores of the picked tokens, as the plan's ``outputs`` name them.

Log-probabilities have an entry for each token of a row. Whole rows of logits are kept for as many tokens as
the host reads at once, from its first unknown token on; the host keeps them after the read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from torch_dflash.ops.windows import read_rows, write_rows
from torch_dflash.plan import DecodePlan

Record = dict[str, Tensor]
WHOLE = {"scores": "output_scores", "logits": "output_logits"}
"""Entries of a whole vocabulary for each token, with their options."""


def start_record(plan: DecodePlan, vocab_size: int, device: Any) -> Record:
    """An empty record with the entries that the plan asks for.

    ``logprobs`` [B, S]; ``top_logprobs``, ``top_ids`` [B, S, K]; ``scores``, ``logits`` [B, R, V]: R tokens,
    the most of a row between two reads, from position ``start`` [B] on.
    """
    size, record = plan.batch_size, {}

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(size, *shape, dtype=dtype, device=device)

    if "output_logprobs" in plan.outputs:
        record["logprobs"] = empty(plan.slots)
    if plan.top_logprobs:
        record["top_logprobs"] = empty(plan.slots, plan.top_logprobs)
        record["top_ids"] = empty(plan.slots, plan.top_logprobs, dtype=torch.int32)
    for name, option in WHOLE.items():
        if option in plan.outputs:
            record |= {name: empty(plan.most_gained, vocab_size), "start": empty(dtype=torch.int32)}
    return record


def note_picks(
    record: Record,
    picks: Int[Tensor, "B M"],
    logits: Float[Tensor, "B M V"],
    scores: Float[Tensor, "B M V"] | None,
    at: Int[Tensor, " B"],
    count: Int[Tensor, " B"] | None = None,
) -> Record:
    """The record with the target's ``picks`` for positions from ``at`` [B] on.

    ``logits`` are the target's own, ``scores`` those after processors and filters. Entries past a row's
    committed tokens are stale, like the tokens. ``count``: as in `write_rows`.
    """
    found: Record = {}
    if "logprobs" in record:
        log = torch.log_softmax(logits.to(torch.float32), dim=-1)
        found["logprobs"] = log.gather(2, picks[..., None].long())[..., 0]
        if "top_logprobs" in record:
            found["top_logprobs"], found["top_ids"] = log.topk(record["top_logprobs"].shape[2], dim=-1)
    noted = {name: write_rows(record[name], rows, at, dim=1, count=count) for name, rows in found.items()}
    for name, rows in {"scores": scores, "logits": logits}.items():
        if name in record and rows is not None:
            # A row that the host has ended runs on until the device knows; these entries are never read.
            place = (at - record["start"]).clamp(0, record[name].shape[1] - rows.shape[1])
            noted[name] = write_rows(record[name], rows, place, dim=1, count=count)
    return record | noted


def read_record(record: Record, plan: DecodePlan, known: Int[Tensor, " B"]) -> Record:
    """The entries of the most tokens of a chunk, from position ``known`` [B] on."""
    found: Record = {}
    for name, buffer in record.items():
        if name in WHOLE:
            found[name] = buffer.clone()
        elif name != "start":
            each = buffer[0, 0].numel()
            flat = read_rows(buffer.flatten(1), known * each, plan.most_gained * each)
            found[name] = flat.view(len(buffer), plan.most_gained, *buffer.shape[2:])
    return found


class HostRecord:
    """The record on the host: one entry for each new token of each row.

    Args:
        first: [B], the position of each row's first new token.
    """

    def __init__(self, first: np.ndarray):
        self._first = first.copy()
        self._rows: dict[str, list[list[np.ndarray]]] = {}

    @classmethod
    def joined(cls, parts: Sequence[tuple[HostRecord, Sequence[int]]]) -> HostRecord:
        """Join (record, its rows in the joined record) of several batches."""
        whole = cls(np.zeros(sum(len(rows) for _, rows in parts), np.int32))
        for part, rows in parts:
            whole._first[list(rows)] = part._first[: len(rows)]
            for name, entries in part._rows.items():
                kept = whole._rows.setdefault(name, [[] for _ in whole._first])
                for row, own in zip(rows, entries, strict=False):
                    kept[row] = own
        return whole

    def add(self, found: dict[str, np.ndarray], row: int, since: int, end: int) -> None:
        """Add a read's entries of a row's tokens from position ``since`` on."""
        for name, rows in found.items():
            kept = self._rows.setdefault(name, [[] for _ in self._first])[row]
            del kept[since - int(self._first[row]) :]
            kept.extend(rows[row, : end - since].copy())  # a view would keep the whole read alive

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def of(self, name: str, row: int, since: int, end: int) -> list[np.ndarray]:
        """The entries of a row's tokens from position ``since`` to before ``end``."""
        first = int(self._first[row])
        return self._rows[name][row][since - first : end - first]

    def logprobs(self, row: int, since: int, end: int) -> list[float] | None:
        """Log-probabilities of the tokens from ``since`` to before ``end``; None: not kept."""
        kept = "logprobs" in self._rows
        return [float(one) for one in self.of("logprobs", row, since, end)] if kept else None

    def top(self, row: int, since: int, end: int) -> list[list[tuple[int, float]]] | None:
        """The likeliest ids and their log-probabilities for each of these tokens; None: not kept."""
        if "top_ids" not in self._rows:
            return None
        both = (self.of(name, row, since, end) for name in ("top_ids", "top_logprobs"))
        return [list(zip(ids.tolist(), logs.tolist(), strict=True)) for ids, logs in zip(*both, strict=True)]
