"""A round and its passes compiled for an absent TPU, each compared with its floor."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from jax_bridge.aot.compile import AbstractPair, CompiledStep, compile_step, find_topology, place_of
from jax_bridge.aot.floor import Chip, chip_of, floor_of
from jax_bridge.aot.hlo import Program, exchanges, forbidden, least_seconds
from jax_bridge.aot.shapes import floor_on_slice

PASSES = ("verify", "draft", "round")


class CompileError(RuntimeError):
    """The compiler refused the program; most often it does not fit the chip's HBM."""


@contextmanager
def compiling(what: str, topology: str) -> Iterator[None]:
    """Turns the compiler's refusal of ``what`` into a `CompileError`."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise CompileError(f"{what} for {topology}: {' '.join(str(error).split())[:400]}") from error


def check_topology(topology: str) -> None:
    """Refuse a topology that cannot be compiled for here, before anything is built.

    Raises:
        ModuleNotFoundError: libtpu is not installed. ValueError: no such topology, or no peaks for it.
    """
    chip_of(topology)
    find_topology(topology)


def report(
    model: AbstractPair,
    *,
    context: int,
    topology: str = "v5p:2x2x1",
    passes: tuple[str, ...] = PASSES,
    chips: int = 1,
    dump: str | None = None,
    status: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Compile ``passes`` for chips of ``topology``; the bytes that each moves, and their floors.

    Args:
        model: from `abstract_pair`, with capacity ``context`` for figures of a full cache.
        context: committed tokens per row that the floor counts.
        topology: see `jax_bridge.aot.compile.compile_step`.
        passes: some of `PASSES`; the figures of the others are None.
        chips: number of chips that share each weight; all figures are of one of them.
        dump: existing folder for the scheduled HLO, one ``PASS.hlo.txt`` each. A file that cannot be written
            is reported and skipped.
        status: called with a line before and after every compilation, which takes minutes for a large model.

    Returns:
        Bytes, milliseconds and counts by name. ``roofline_ms`` is the longer of the round's HBM time (at the
        counted bytes) and its FLOP time at the chip's peaks; ``bound`` names it: "memory" or "compute".
        Kernels without a FLOP count are taken to be the attention.

    Raises:
        ModuleNotFoundError, ValueError: as `jax_bridge.aot.compile.compile_step`. CompileError: refused.
    """
    chip = chip_of(topology)
    if chips == 1:
        floor = floor_of(model.pair, model.params, context)
    else:
        floor = floor_on_slice(model, place_of(model, topology, chips), context)
    steps: dict[str, CompiledStep] = {}
    for name in passes:
        status(f"compiling {name} for {topology} ...")
        with compiling(name, topology):
            steps[name] = step = compile_step(model, name, topology=topology, chips=chips)
        status(f"  {step.compile_seconds:.1f} s, {step.traffic_bytes / 1e9:.3f} GB a run")
        if dump is not None:
            _dump(Path(dump) / f"{name}.hlo.txt", step.hlo, status)
    attention = {"verify": floor.verify_attention_flops, "draft": floor.draft_attention_flops}
    attention["round"] = attention["verify"] + attention["draft"]
    figures: dict[str, Any] = {}
    for name in PASSES:
        step = steps.get(name)
        figures[f"{name}_hbm_bytes"] = step and step.traffic_bytes
        figures[f"{name}_floor_bytes"] = getattr(floor, name)
    main = next(name for name in ("round", *PASSES) if name in steps)
    return {
        "topology": topology,
        "chips": chips,
        "libtpu": libtpu_version(),
        **_summary(steps[main], attention[main], chip),
        **figures,
        "passes": {name: _summary(step, attention[name], chip) for name, step in steps.items()},
        "exchanges": {name: _exchanged(step, topology, chips) for name, step in steps.items()},
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _dump(file: Path, hlo: str, status: Callable[[str], None]) -> None:
    try:
        file.write_text(hlo)
    except OSError as error:  # such as a full disk: do not lose minutes of compiling
        status(f"  {file} could not be written ({error.strerror})")


def _summary(step: CompiledStep, attention: int, chip: Chip) -> dict[str, Any]:
    program = Program(step.hlo)
    lines = program.instructions()
    silent = any(
        'custom_call_target="tpu_custom_call"' in one.attributes and "cost_estimate" not in one.attributes
        for one in lines
    )
    flops = int(step.cost.get("flops", 0)) + (attention if silent else 0)
    moving, computing = step.traffic_bytes / chip.bandwidth, flops / chip.flops
    return {
        "compile_seconds": round(step.compile_seconds, 1),
        "hbm_per_chip_bytes": step.hbm_bytes,
        "argument_bytes": step.argument_bytes,
        "peak_temp_bytes": step.temp_bytes,
        "aliased_bytes": step.alias_bytes,
        "unaliased": step.unaliased,
        "collectives": program.collectives(),
        "forbidden": forbidden(step.hlo),
        "loops": sum(one.op == "while" for one in lines),
        "scatters": [one.type.partition("{")[0] for one in lines if one.op == "scatter"],
        "xla_bytes_accessed": int(step.cost.get("bytes accessed", 0)),
        "flops": flops,
        "roofline_ms": round(1e3 * max(moving, computing), 4),
        "bound": "memory" if moving >= computing else "compute",
    }


def _exchanged(step: CompiledStep, topology: str, chips: int) -> dict[str, Any]:
    found = exchanges(Program(step.hlo))
    least = least_seconds(found, chips, topology)
    return {
        "collectives": [one._asdict() for one in found],
        "least_ms": None if least is None else round(1e3 * least, 4),
    }


def libtpu_version() -> str | None:
    """The compiler's version; None: unknown."""
    try:
        return version("libtpu")
    except PackageNotFoundError:
        return None
