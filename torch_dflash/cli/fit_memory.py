"""``torch-dflash fit-memory``: a pair's memory on each chip, and the smallest slice with room for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import click

from torch_dflash.cli import tpu
from torch_dflash.cli.command import COUNT, command, flag, option
from torch_dflash.progress import print_status

SOUGHT = ("batch", "context")
PARTS = {
    "target_weights": "target's weights",
    "drafter_weights": "drafter's weights",
    "cache": "target's cache",
    "drafter_state": "drafter's state",
    "rest": "rest of the state",
    "temporaries": "programs, while they run",
}
LARGER = (
    "Not even a few layers fit: a smaller --batch or --context, or a larger slice (--shapes-only says which)."
)
MEANING = """\
Of one chip. Weights in {weights}; every row has room for the whole context. Programs: the loop over rounds
and a prompt's largest chunk, compiled with {layers} of the target's layers; the one that needs more
counts."""

SHAPES = """\
Of one chip. Weights in {weights}; every row has room for the whole context. From shapes alone: what programs
need while they run, and what the compiler fills tiles up with, is left out."""

SLICES = """\
Slices: the smallest for one row of this context; programs are taken to need there what they need here."""


def _check(arguments: SimpleNamespace) -> None:
    tpu.check_json(arguments)


@command(
    "fit-memory",
    [
        *tpu.pair_options(),
        option("--topology", default="v5e:2x4", help="Generation and shape."),
        option("--mesh", type=COUNT, metavar="N",
               help="Chips of it that share each weight (all; 1 for a family that is not cut)."),
        option("--largest", type=click.Choice((*SOUGHT, "both", "none")), default="both",
               help="What is sought: the largest batch, the largest context."),
        flag("--no-confirm", "confirm", flag_value=False, default=True, help="Compile no whole pair."),
        flag("--shapes-only", "programs", flag_value=False, default=True,
             help="Compile nothing: programs' own memory is left out, and the answer comes at once."),
        *tpu.plan_options(without=("pool_pages",)),
        tpu.QUANTIZE,
    ],
    "Tell what a pair needs of each chip's memory, what fits, and which slice has room.",
    f"{tpu.NEEDS} Compiles a few layers, and the whole pair at the largest that fits: minutes for a large "
    "model.",
    check=_check,
)  # fmt: skip
def run(arguments: SimpleNamespace) -> int:
    """Compile and report; returns the exit status: 0, 1 if the pair does not fit, or 2."""
    results = _results(arguments)
    tpu.show(results, arguments.json, lambda: _table(results))
    return 0 if results["fits"] else 1


def _results(arguments: SimpleNamespace) -> dict[str, Any]:
    target, drafter = tpu.read_configs(arguments)
    plan = tpu.plan_of(arguments) | ({"quantize": arguments.quantize} if arguments.quantize else {})
    with tpu.offline(LARGER):
        from jax_bridge.aot.memory import fit_memory

        figures = fit_memory(
            target,
            drafter,
            topology=arguments.topology,
            chips=arguments.mesh,
            context=arguments.context,
            batch_size=arguments.batch,
            block_size=arguments.block,
            verify_width=arguments.verify,
            search={"both": SOUGHT, "none": ()}.get(arguments.largest, (arguments.largest,)),
            confirm=arguments.confirm,
            programs=arguments.programs,
            say=print_status,
            **plan,
        )
    return {"target": arguments.target, "drafter": arguments.drafter, "plan": plan, **figures}


def _table(found: dict[str, Any]) -> str:
    """The figures and their meaning, as text."""
    chips = "one chip" if found["chips"] == 1 else f"each of {found['chips']} chips"
    hbm, free = found["hbm_bytes"], found["hbm_bytes"] - found["needed_bytes"]
    plan = found["plan"]
    lines = [
        f"{found['target']} with {found['drafter']}, {chips} of {found['topology']}",
        f"batch {found['batch']}, context {found['context']}, cache {plan['cache']}, "
        f"filters {'yes' if plan['filters'] else 'no'}",
        "",
        *(f"{PARTS[name]:28}{size / 1e9:>9.3f} GB" for name, size in found["bytes"].items() if size),
        f"{'together':28}{found['needed_bytes'] / 1e9:>9.3f} GB of {hbm / 1e9:.3f}: "
        + (f"fits, {free / 1e9:.3f} GB are left" if free >= 0 else f"does not fit, by {-free / 1e9:.3f} GB"),
        "",
        *(_largest(found, what) for what in found["largest"]),
        *(_slice(generation, needs) for generation, needs in found["slices"].items()),
        "",
        (MEANING if found["layers_compiled"] else SHAPES).format(
            layers=found["layers_compiled"], weights=plan.get("quantize", "bfloat16")
        ),
        *([SLICES] if found["slices"] else ()),
    ]
    return "\n".join(lines)


def _largest(found: dict[str, Any], what: str) -> str:
    best, other = found["largest"][what], "context" if what == "batch" else "batch"
    beside = f"largest {what} at {other} {found[other]}: "
    if best is None:
        return beside + "none fits"
    return beside + f"{best['value']}" + ("" if best["confirmed"] else " (not compiled whole)")


def _slice(generation: str, needs: dict[str, Any] | None) -> str:
    if needs is None:
        return f"{generation}: on none of the slices that were tried"
    if "refused" in needs:
        return f"{generation}: not on one chip, and on several it is refused: {needs['refused']}"
    where = "one chip" if needs["chips"] == 1 else f"{needs['topology']}, {needs['chips']} chips"
    return (
        f"{generation}: {where} ({needs['needed_bytes'] / 1e9:.2f} of {needs['hbm_bytes'] / 1e9:.2f} GB each)"
    )
