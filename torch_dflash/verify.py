"""Does block decoding compute what the target computes? Asked of its logits, before any text is made."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from torch_dflash.checks import check_cache, check_counts, context_of
from torch_dflash.decode import Pair
from torch_dflash.proposers.plain import PlainProposer
from torch_dflash.skeleton import collect_tensors
from torch_dflash.state import DecodePlan
from torch_dflash.target import Target
from torch_dflash.tested import is_tested
from torch_dflash.twin import WINDOW, build_twin

BLOCK = 4
KEPT = (2, BLOCK, 1, 3)
"""Rows of each block that count: as in decoding, the next block is written over the others."""
LONGEST_CHUNK = 512
ROUNDING = 2e-4
"""Differences that rounding explains in float32, as a share of the logits' spread."""
NOISE = 8
"""Differences between shapes that are rounding, in multiples of the model's own between two lengths."""
MOST = {torch.float32: 5e-3, torch.float64: 5e-3}
"""The same, as a share of the spread, at most: a model that is not causal differs from itself by more."""
MOST_IN_HALF = 0.25


@dataclass(frozen=True)
class Agreement:
    """How far block decoding's logits are from those of the target's own forward without a cache.

    Attributes:
        difference: largest difference of two logits.
        position: where it is: position of the row in its sequence.
        spread: standard deviation of the target's logits over the vocabulary.
        noise: largest difference between the target's own forwards of two lengths, where they overlap.
        compared: rows of logits that were compared.
        dtype: of the logits.
    """

    difference: float
    position: int
    spread: float
    noise: float
    compared: int
    dtype: torch.dtype

    @property
    def holds(self) -> bool:
        """Whether rounding explains the difference."""
        most = MOST.get(self.dtype, MOST_IN_HALF) * self.spread
        return self.difference <= max(min(NOISE * self.noise, most), ROUNDING * self.spread)

    def __str__(self) -> str:
        return (
            f"logits differ by {self.difference:.3g} at position {self.position} (they spread over "
            f"{self.spread:.3g}; the target's own forwards of two lengths differ by {self.noise:.3g})"
        )


def check(target: PreTrainedModel, length: int | None = None, cache: str = "static") -> Agreement:
    """Hold block decoding's cached passes against the target's own forward, with its real weights.

    Two random prompts of different lengths are read in chunks, then blocks are verified behind them, whose
    rows are partly rejected. Runs eagerly, where the target is; takes one forward of ``length`` tokens.

    Args:
        target: a transformers causal LM.
        length: tokens; unset: past the edge of its widest sliding window, at least 64.
        cache: "static" or "paged".

    Raises:
        ValueError: the logits part by more than rounding explains, or the target cannot be decoded at all.
    """
    check_counts(least=24, length=length)
    check_cache(cache)
    skeleton = Target(target)
    windows = [spec.window or 0 for spec in skeleton.specs]
    agreement = compare(
        target, skeleton, length or min(context_of(target), max(64, max(windows) + 32)), cache
    )
    if not agreement.holds:
        raise ValueError(
            f"target={type(target).__name__}: block decoding is not what it computes: {agreement}."
        )
    return agreement


_known: dict[tuple, str | None] = {}


def verify_class(target: PreTrainedModel, cache: str) -> None:
    """Refuse a target of a class that is not tested here and whose tiny random twin decodes otherwise.

    Remembered per class and config.

    Raises:
        ValueError: the twin's logits part from its own forward's, or there can be no twin.
    """
    if is_tested(type(target)):
        return
    key = type(target), cache, target.config.to_json_string(use_diff=False)
    if key not in _known:
        _known[key] = _fault_of_twin(target, cache)
    if _known[key] is not None:
        raise ValueError(f"target={type(target).__name__}: {_known[key]}")


def _fault_of_twin(target: PreTrainedModel, cache: str) -> str | None:
    try:
        twin = build_twin(target)
        agreement = compare(twin, Target(twin), 4 * WINDOW + 4, cache)
    except Exception as error:  # a class that is not known may do anything
        reason = str(error).partition("\n")[0]
        return (
            "this class is not among those tested, and no tiny twin of it could be tried "
            f"({type(error).__name__}: {reason}). torch_dflash.check(target) tries the target itself; "
            "verify=False decodes without."
        )
    if agreement.holds:
        return None
    return (
        f"this class is not among those tested, and a tiny random twin of it is decoded otherwise: "
        f"{agreement}. Block decoding does not know what it does; use its own generate."
    )


def compare(model: Any, skeleton: Target, length: int, cache: str) -> Agreement:
    """`Agreement` on two random rows of about ``length`` tokens; ``skeleton`` is the model's."""
    device, generator = model.device, torch.Generator("cpu").manual_seed(0)
    ids = torch.randint(1, skeleton.vocab_size, (2, length), generator=generator, device="cpu")
    ids = ids.int().to(device)
    reach = sum(KEPT[:-1]) + BLOCK
    read = torch.tensor([length - reach, length - reach - 3], dtype=torch.int32, device=device)
    with torch.inference_mode(False), torch.no_grad(), device:
        own = [_own_logits(model, ids[row : row + 1], int(read.min()) - 1) for row in range(2)]
        short = _own_logits(model, ids[:1, :-3], int(read.min()) - 1)
        ours = _cached_logits(model, skeleton, ids, read, cache)
    first, worst, position = int(read.min()) - 1, 0.0, -1
    for row, at, logits in ours:
        theirs = own[row][at - first : at - first + len(logits)].float()
        gaps = (logits.float() - theirs).abs().amax(dim=1).nan_to_num(nan=torch.inf)
        if float(gaps.max()) > worst or position < 0:
            worst, position = float(gaps.max()), at + int(gaps.argmax())
    noise = float((short - own[0][: len(short)]).float().abs().max())
    compared = sum(len(logits) for _, _, logits in ours)
    return Agreement(worst, position, float(own[0].float().std()), noise, compared, own[0].dtype)


def _own_logits(model: Any, ids: Tensor, first: int) -> Tensor:
    """The model's own logits [R, V] from position ``first`` on, without a cache."""
    keep = ids.shape[1] - first
    accepts = "logits_to_keep" in inspect.signature(type(model).forward).parameters
    more = {"logits_to_keep": keep} if accepts else {}
    return model(input_ids=ids.long(), use_cache=False, **more).logits[0, -keep:]


def _cached_logits(
    model: Any, skeleton: Target, ids: Tensor, read: Tensor, cache: str
) -> list[tuple[int, int, Tensor]]:
    """(row, first position, logits [R, V]) of the last prompt token and of each block's rows."""
    plan = DecodePlan(2, ids.shape[1], BLOCK, BLOCK, cache=cache, page_size=16)
    pair = Pair(skeleton, PlainProposer(), plan)
    params = collect_tensors(skeleton.model, model, "target.model.")
    pages = None
    if cache == "paged":
        pages = 1 + torch.arange(2 * plan.row_pages, dtype=torch.int32, device=ids.device).view(2, -1)
    layers = pair.run(lambda pair: pair.target.start(plan), params)
    start, found = torch.zeros_like(read), []

    def forward(width: int, count: Tensor | None) -> Tensor:
        nonlocal layers
        at = start[:, None] + torch.arange(width, device=ids.device)
        rows = ids.gather(1, at.clamp(max=ids.shape[1] - 1).long())
        out = pair.run(lambda pair: pair.target(rows, start, layers, (), pages, count), params)
        layers = out.cache
        return out.logits

    while bool((start < read).any()):
        count = (read - start).clamp(max=LONGEST_CHUNK)
        logits = forward(int(count.max()), count)
        ended = [row for row in range(2) if int(start[row] + count[row]) == int(read[row]) and count[row]]
        found += [(row, int(read[row]) - 1, logits[row, -1:]) for row in ended]
        start = start + count
    for kept in KEPT:
        logits = forward(BLOCK, None)
        found += [(row, int(start[row]), logits[row]) for row in range(2)]
        start = start + kept
    return found
