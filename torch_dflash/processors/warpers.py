"""Filters of sampling that come after top-k, top-p and min-p; greedy rows do not see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process

from torch_dflash.processors.interface import Forgetful, Text, column
from torch_dflash.processors.options import Option, Twin

FIRST = ("temperature", "top_k", "top_p", "min_p")
"""Options of sampling that a round applies before these."""


class _Warper(Forgetful):
    """One number of each row."""

    scaled, reads_text = True, False

    def values(self, requested: Sequence[Any], starts: Sequence[int]) -> Tensor:
        return column(requested, self.options[0].off)


def _option(name: str, kind: type, read: str, after: tuple[str, ...] = FIRST) -> Option:
    twin = Twin(kind, lambda item, call: getattr(item, read), after=after)
    share = lambda v: 0 <= v < 1  # noqa: E731
    return Option(
        name, 0.0, share, "a number in [0, 1); 0.0 for all tokens", per_row=True, samples=True, twin=twin
    )


@dataclass(frozen=True)
class TypicalP(_Warper):
    """``typical_p`` (arXiv 2202.00666): the ids nearest to the expected information, up to this mass."""

    options = (
        replace(
            _option("typical_p", logits_process.TypicalLogitsWarper, "mass"),
            off=1.0,
            holds=lambda v: 0 < v <= 1,
            must="a number in (0, 1]; 1.0 for all tokens",
        ),
    )

    def __call__(self, memory: Tensor, text: Text, logits: Tensor) -> Tensor:
        log, share, entropy = _information(logits)
        distance, order = torch.sort((-log - entropy).abs(), dim=-1)
        mass = torch.cumsum(share.gather(2, order), dim=-1)
        wanted = memory[:, None, None]
        last = (mass < wanted).sum(dim=-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
        within = (-log - entropy).abs() <= distance.gather(2, last)
        return torch.where(within | (wanted >= 1), logits, -torch.inf)


@dataclass(frozen=True)
class EpsilonCutoff(_Warper):
    """``epsilon_cutoff`` (arXiv 2210.15191): no id below this probability, the likeliest apart."""

    options = (
        _option("epsilon_cutoff", logits_process.EpsilonLogitsWarper, "epsilon", (*FIRST, "typical_p")),
    )

    def __call__(self, memory: Tensor, text: Text, logits: Tensor) -> Tensor:
        return _cut(logits, memory[:, None, None])


@dataclass(frozen=True)
class EtaCutoff(_Warper):
    """``eta_cutoff`` (arXiv 2210.15191): the same, but lower where the target is uncertain."""

    options = (
        _option(
            "eta_cutoff",
            logits_process.EtaLogitsWarper,
            "epsilon",
            (*FIRST, "typical_p", "epsilon_cutoff"),
        ),
    )

    def __call__(self, memory: Tensor, text: Text, logits: Tensor) -> Tensor:
        entropy = _information(logits)[2]
        epsilon = memory[:, None, None]
        return _cut(logits, torch.minimum(epsilon, torch.sqrt(epsilon) * torch.exp(-entropy)))


def _information(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(Logarithms of the ids' probabilities, the probabilities, entropies of rows [B, M, 1])."""
    log = torch.log_softmax(logits, dim=-1)
    share = torch.exp(log)
    return log, share, -torch.where(share > 0, log * share, 0.0).sum(dim=-1, keepdim=True)


def _cut(logits: Tensor, least: Tensor) -> Tensor:
    unlikely = torch.softmax(logits, dim=-1) < least
    return torch.where(unlikely & (logits < logits.amax(dim=-1, keepdim=True)), -torch.inf, logits)
