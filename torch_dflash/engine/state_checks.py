"""What a state that comes from a file must satisfy before anything is computed with it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch
from torch import Tensor

from torch_dflash.engine.page_allocator import check_table
from torch_dflash.plan import DecodePlan
from torch_dflash.state import DecodeState

# How often the host reads is the engine's own business; all else decides shapes, or what tokens come.
FREE = {"rounds_per_chunk"}
ARGUMENTS = {"capacity": "max_length"}  # plan fields that `torch_dflash.compile` names otherwise

OF_TREES = ("block_size", "depth", "verify_width")  # of a tree these follow from its proposer


def describe_plan(plan: DecodePlan) -> str:
    """``plan`` as JSON; its processors by their ``repr``, which for a dataclass has every field."""
    named = {option.name: getattr(plan, option.name) for option in dataclasses.fields(plan)}
    return json.dumps(named | {"processors": [repr(processor) for processor in plan.processors]})


def check_plan(text: str | None, plan: DecodePlan, file: Path) -> None:
    """Raise ``ValueError`` unless ``text`` is the JSON of ``plan``, `FREE` fields apart."""
    try:
        saved = json.loads(text or "")
    except (ValueError, RecursionError):
        saved = None
    if not isinstance(saved, dict):
        raise ValueError(
            f"{file}: plan is {_short(text)}, not a plan as JSON; save the state again with save_state."
        )
    own = json.loads(describe_plan(plan))
    of_trees = OF_TREES if saved.get("depth") is not None or plan.depth is not None else ()
    for name in sorted((saved.keys() | own.keys()) - FREE):
        if saved.get(name) != own.get(name):
            fix = f"{ARGUMENTS.get(name, name)}={_short(saved.get(name))}"
            if name in of_trees:
                fix = "the proposer, and its rows=, that the state was made with,"
            raise ValueError(
                f"{file}: the state has {name}={_short(saved.get(name))}, this engine {own.get(name)!r}; "
                f"compile with {fix} to go on with it."
            )


def check_leaves(tensors: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    """Raise ``ValueError`` unless ``tensors`` have the names, shapes and dtypes of ``expected``."""
    odd = sorted(tensors.keys() ^ expected.keys())
    if odd:
        there = "holds" if odd[0] in tensors else "lacks"
        raise ValueError(
            f"{what} {there} {odd[0]}, which this engine's state {'lacks' if there == 'holds' else 'holds'}; "
            "use an engine of the same target and drafter."
        )
    for name, tensor in tensors.items():
        want = expected[name]
        if tensor.shape != want.shape or tensor.dtype != want.dtype:
            raise ValueError(
                f"{what}: {name} is {tensor.dtype} {tuple(tensor.shape)}, this engine's is {want.dtype} "
                f"{tuple(want.shape)}; use an engine of the same target and drafter, in the same dtype."
            )


def check_pages(tensors: dict[str, Tensor], plan: DecodePlan, what: str) -> None:
    """Raise ``ValueError`` for a page table that no engine of ``plan`` makes."""
    if ".page_table" in tensors:
        check_table(tensors[".page_table"].numpy(force=True), plan.pages, what)


def check_values(tensors: dict[str, Tensor], plan: DecodePlan, vocab: int, what: str) -> None:
    """Raise ``ValueError`` for counts and tokens that decoding never leaves, and that would mislead it."""
    length, limit = tensors[".length"], tensors[".limit"]
    # The anchor stands at `length`, within the limit; a row that has read nothing yet has none.
    most = torch.where(length == 0, limit, limit - 1).clamp(min=0)
    ranges = {
        ".limit": (0, plan.capacity),
        ".length": (0, most),
        ".rounds": (0, plan.capacity),
        ".tokens": (0, vocab - 1),
        ".stop_ids": (-1, torch.iinfo(torch.int32).max),
    }
    for name, (low, high) in ranges.items():
        values = tensors[name]
        bad = (values < low) | (values > high)
        if bad.any():
            at = tuple(bad.nonzero()[0].tolist())
            top = high if isinstance(high, int) else int(high[at])
            _refuse(f"{what}: {name[1:]}{list(at)} is {int(values[at])}, it may be {low} to {top}")
    for row in (~tensors[".done"] & (length >= limit)).nonzero()[:1, 0].tolist():
        _refuse(f"{what}: done[{row}] is False, but length is {int(length[row])} and limit {int(limit[row])}")


def check_committed(state: DecodeState, what: str) -> None:
    """Raise ``ValueError`` if the proposer has not taken in what the target has: it would draft nonsense."""
    committed = getattr(state.proposer, "committed", None)
    if committed is not None and not torch.equal(committed, state.length):
        taken, length = committed.tolist(), state.length.tolist()
        _refuse(f"{what}: proposer has taken in {taken} tokens, but length is {length}")


def _refuse(problem: str) -> None:
    raise ValueError(f"{problem}; decode from the prompt again.")


def _short(value: object) -> str:
    said = repr(value)
    return said if len(said) <= 60 else f"{said[:57]}..."
