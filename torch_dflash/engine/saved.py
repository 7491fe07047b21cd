"""A `DecodeState` as a safetensors file: a generation survives its process and may change runtimes."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import zlib
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_dflash.engine.engine import Engine
from torch_dflash.engine.pages import check_table
from torch_dflash.plan import DecodePlan
from torch_dflash.rows import RowRequests, begin
from torch_dflash.state import DecodeState
from torch_dflash.storage.files import checksum_of, write_whole

FORMAT = "torch_dflash.DecodeState"
VERSION = 1


def save_state(state: DecodeState, path: str | os.PathLike[str], engine: Engine) -> None:
    """Write ``state`` of ``engine``, on whichever runtime, to the file ``path``: all of it or nothing.

    The state stays usable. Weights are not written: who loads the file brings the same models.

    Args:
        state: from ``engine.start`` or ``engine.advance``, between rounds, and not yet given to ``advance``.
        path: the file; its directory must exist.
        engine: any engine with the state's plan and proposer.

    Raises:
        OSError: the directory of ``path`` does not exist, or its disk is full; an old file stays as it was.
        ValueError: the state's shapes or dtypes are not those of this engine's plan and models, ``advance``
            has consumed it, its page table is impossible, or ``path`` is a directory.
        RuntimeError: another process of the mesh makes another call, or of another state.
    """
    file = engine.synchronize("save_state", state, lambda: _file_at(path))
    with engine.shared("save_state"):
        leaves, _ = pytree.tree_flatten_with_path(engine.runtime.fetch(state))
    tensors = {pytree.keystr(name): leaf.contiguous() for name, leaf in leaves if leaf is not None}
    check_leaves(tensors, expected_leaves(engine), "the state")
    check_pages(tensors, engine.plan, "the state")
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "plan": describe_plan(engine.plan),
        "proposer": describe_proposer(engine),
        "layers": describe_layers(engine),
    }
    metadata["checksum"] = _checksum(tensors, metadata)
    write_whole(file, lambda part: save_file(tensors, part, metadata))


def load_state(path: str | os.PathLike[str], engine: Engine) -> DecodeState:
    """The state in a file of `save_state`, on the runtime of ``engine``, which goes on with it.

    Weights are not compared: with others of the same shapes the generation goes on as theirs, over keys and
    values that the first ones computed.

    Args:
        path: the file.
        engine: of the same models, plan and proposer; its runtime and ``rounds_per_chunk`` may differ.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is damaged, is no state, is one of another plan or proposer (its name, width,
            taps and plain arguments) or of other shapes or dtypes, or its page table, counts or tokens are
            impossible; the message names the field, its value and the fix.
        RuntimeError: another process of the mesh has another file.
    """
    digest = lambda found: {"the state": found[1]}  # noqa: E731
    state, _ = engine.compare("load_state", lambda: _load(_file_at(path), engine), digest)
    with engine.shared("load_state"):
        return engine.place(state)


def _load(file: Path, engine: Engine) -> tuple[DecodeState, str]:
    """The state in a file, in torch's tensors, and its checksum."""
    tensors, metadata = _read(file)
    check_plan(metadata.get("plan"), engine.plan, file)
    if metadata.get("proposer") != describe_proposer(engine):
        raise ValueError(
            f"{file}: proposer is {metadata.get('proposer')}, this engine's is {describe_proposer(engine)}; "
            "compile with the drafter, and its arguments, that the state was made with."
        )
    check_layers(metadata.get("layers"), describe_layers(engine), file)
    template = abstract_state(engine)
    check_leaves(tensors, expected_leaves(engine), str(file))
    check_pages(tensors, engine.plan, str(file))
    check_values(tensors, engine.plan, engine.pair.target.vocab_size, str(file))
    state = pytree.tree_map_with_path(lambda name, _: tensors.get(pytree.keystr(name)), template)
    check_committed(state, str(file))
    return state, metadata["checksum"]


def describe_proposer(engine: Engine) -> str:
    """A proposer's name, width, taps and plain arguments: equal ones draft alike, weights apart.

    An argument is plain if it is kept under its own name and is a number or a string: ``max_ngram``, say.
    """
    proposer = engine.pair.proposer
    kept = {name: getattr(proposer, name, None) for name in inspect.signature(type(proposer)).parameters}
    plain = {name: value for name, value in kept.items() if isinstance(value, int | float | str)}
    settings = {"width": proposer.width, "taps": tuple(proposer.taps)} | plain
    shown = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    return f"{proposer.name}({shown})"


def describe_layers(engine: Engine) -> str:
    """The caches of the target's layers, as text: pages of whole tiles have one shape for several widths."""
    specs = map(dataclasses.asdict, engine.pair.target.specs)
    # Without fields that say nothing, which later releases may add.
    return "; ".join(str({name: one for name, one in spec.items() if one}) for spec in specs)


def check_layers(saved: str | None, own: str, file: Path) -> None:
    """Raise ``ValueError`` unless ``saved`` is ``own``, or absent as in files of older releases."""
    for theirs, mine in zip_longest((saved or own).split("; "), own.split("; ")):
        if theirs != mine:
            raise ValueError(
                f"{file}: a layer of the state's target is {theirs}, of this engine's {mine}; compile with "
                "the target that the state was made with."
            )


def abstract_state(engine: Engine) -> DecodeState:
    """The engine's empty state on the meta device: its structure, shapes and dtypes, without memory."""
    params = {name: _like(tensor) for name, tensor in engine.tensors().items()}
    return begin(engine.pair, params, RowRequests.idle(engine.plan, "meta"))


def _like(weight: Any) -> torch.Tensor:
    """A meta tensor of the shape and dtype of a tensor, or of an array that stands for one."""
    kind = getattr(torch, str(weight.dtype).removeprefix("torch."))
    return torch.empty(tuple(weight.shape), dtype=kind, device="meta")


def expected_leaves(engine: Engine) -> dict[str, torch.Tensor]:
    """Meta tensors by the names that a file gives them; a leaf that is None has none."""
    leaves, _ = pytree.tree_flatten_with_path(abstract_state(engine))
    return {pytree.keystr(name): leaf for name, leaf in leaves if leaf is not None}


def _file_at(path: str | os.PathLike[str]) -> Path:
    file = Path(path)
    if file.is_dir():
        raise ValueError(f"path={str(file)!r} is a directory; pass the file in it, such as {file / 'state'}.")
    return file


def _read(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    try:
        with safe_open(file, framework="pt") as content:
            metadata = content.metadata() or {}
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"{file} is damaged or no safetensors file ({error}); decode from the prompt again."
        ) from error
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{file}: format is {metadata.get('format')!r}, not {FORMAT!r}; pass a file of save_state."
        )
    if metadata.get("version") != str(VERSION):
        raise ValueError(
            f"{file}: version is {metadata.get('version')}, this release reads {VERSION}; "
            "load it with the release that wrote it."
        )
    found = _checksum(tensors, metadata)
    if metadata.get("checksum") != found:
        raise ValueError(
            f"{file}: checksum is {metadata.get('checksum')}, its content gives {found}: it was damaged "
            "after it was written; decode from the prompt again."
        )
    return tensors, metadata


def _checksum(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> str:
    header = "".join(metadata.get(name, "") for name in ("plan", "proposer", "layers"))
    return str(zlib.crc32(header.encode(), checksum_of(tensors)))


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
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
