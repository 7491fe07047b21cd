"""``torch-dflash aot``: the cost of a decoding round on a TPU, from the compiler alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import click

from torch_dflash.checks import positions_of
from torch_dflash.cli import tpu
from torch_dflash.cli.command import COUNT, command, flag, option
from torch_dflash.cli.errors import UserError
from torch_dflash.cli.outputs import make_folder
from torch_dflash.progress import print_status

PASSES = ("verify", "draft", "round")
CONTEXTS, BATCHES = (1024, 4096, 32768), (1, 8, 64)
OF_TREE = "Of a tree of the drafter's block: the round that verifies it, and no pass alone."
SMALLER = "If it does not fit: fewer --layers, a smaller --batch or --context, or another --topology."
MEANING = """\
GB: what one run moves through HBM, recounted from the scheduled program (no VMEM; an estimate, not a
measurement). Floor: weights once and the K/V of the context once; a round's floor is the sum of both passes',
for each reads the head. Roofline: the longer of HBM time and FLOP time at the chip's published peaks."""
DERIVED = """\
Derived, not compiled or measured: weights, K/V of the context and each row's own bytes, and two FLOPs per
weight and row, at the chips' published peaks. A pass of few rows is bound by memory: more rows come at the
same time. Experts are multiplied for all rows; in brackets: FLOPs of those that rows are routed to. Products
of codes in groups of 32 inputs fill a part of the chip's multipliers, and take 4 (v6e: 8) times longer."""


def _check(arguments: SimpleNamespace) -> None:
    if arguments.acceptance and not arguments.kflat:
        raise UserError("--acceptance: is for --kflat; add it, or leave this out.")
    if arguments.rows and arguments.kflat:
        raise UserError(
            f"--rows {arguments.rows}: --kflat counts every number of rows; leave one of them out."
        )
    tpu.check_json(arguments)


@command(
    "aot",
    [
        *tpu.pair_options(),
        option("--topology", default="v5p:2x2x1", help="Generation and shape; one chip of it is used."),
        option("--mesh", type=COUNT, default=1, metavar="N", help="Chips of it that share each weight."),
        option("--layers", type=COUNT, metavar="N", help="Keep N of the target's layers."),
        option("--passes", many=True, type=click.Choice(PASSES), default=PASSES, help="What is compiled."),
        *tpu.plan_options(),
        option("--rows", type=click.IntRange(2, 64), metavar="R", help=OF_TREE),
        tpu.QUANTIZE,
        option("--dump-hlo", metavar="DIR", help="Write each scheduled program there, as text."),
        flag("--kflat", help="Compile nothing: bytes and FLOPs of 1 to 1,024 verified rows, from shapes."),
        option("--acceptance", many=True, type=click.FloatRange(0, 1), metavar="P",
               help="For --kflat: how often drafts 1 to d are all accepted, for d = 1, 2, ..."),
    ],
    "Compile a round for a TPU that is not there; bytes against their floor.",
    f"{tpu.NEEDS} Compiling takes minutes for a large model.",
    check=_check,
)  # fmt: skip
def run(arguments: SimpleNamespace) -> int:
    """Compile and report; returns the exit status."""
    if arguments.kflat:
        return _kflat(arguments)
    results = _results(arguments)
    tpu.show(results, arguments.json, lambda: _table(results, arguments))
    return 0


def _results(arguments: SimpleNamespace) -> dict[str, Any]:
    target, drafter = tpu.read_configs(arguments)
    plan = tpu.plan_of(arguments)
    with tpu.offline(SMALLER):
        from jax_bridge.aot.compile import abstract_pair
        from jax_bridge.aot.report import check_topology, report

        check_topology(arguments.topology)
        if arguments.dump_hlo is not None:
            make_folder("dump-hlo", arguments.dump_hlo)
        widths = {"block_size": arguments.block, "verify_width": arguments.verify, "rows": arguments.rows}
        sizes = {"capacity": arguments.context, "batch_size": arguments.batch, "quantize": arguments.quantize}
        model = abstract_pair(target, drafter, **sizes, **widths, **plan)
        figures = report(
            model,
            context=arguments.context,
            topology=arguments.topology,
            passes=tuple(arguments.passes) if arguments.rows is None else ("round",),
            chips=arguments.mesh,
            dump=arguments.dump_hlo,
            status=print_status,
        )
    fixed = model.pair.plan
    found = _named(arguments, target, fixed) | {"verify": fixed.verify_width, "rows": arguments.rows}
    found |= {"quantize": arguments.quantize} if arguments.quantize else {}
    return found | {"context": arguments.context, "batch": fixed.batch_size, "plan": plan} | figures


def _named(arguments: SimpleNamespace, target: Any, plan: Any) -> dict[str, Any]:
    found = {"target": arguments.target, "drafter": arguments.drafter}
    return found | {"layers": target.get_text_config().num_hidden_layers, "block": plan.block_size}


def _table(results: dict[str, Any], arguments: SimpleNamespace) -> str:
    """The figures and their meaning, as text."""
    shape = {name: results[name] for name in ("layers", "block", "verify", "rows", "context", "batch")}
    shape = {name: size for name, size in shape.items() if size is not None}
    chips = "one chip" if arguments.mesh == 1 else f"one of {arguments.mesh} chips that share each weight"
    lines = [
        f"{results['target']} with {results['drafter']}, {chips} of {results['topology']}",
        ", ".join(f"{name} {value}" for name, value in shape.items()) + f", cache {arguments.cache}",
        "",
        f"{'pass':8}{'GB':>9}{'floor GB':>10}{'ratio':>8}{'TFLOP':>8}{'roofline ms':>13}{'bound':>9}"
        f"{'temp MB':>9}{'compiled in':>13}",
    ]
    for name, found in results["passes"].items():
        moved, floor = results[f"{name}_hbm_bytes"], results[f"{name}_floor_bytes"]
        ratio = f"{moved / floor:>8.3f}" if floor else f"{'-':>8}"
        lines.append(
            f"{name:8}{moved / 1e9:>9.3f}{floor / 1e9:>10.3f}{ratio}{found['flops'] / 1e12:>8.3f}"
            f"{found['roofline_ms']:>13.3f}{found['bound']:>9}{found['peak_temp_bytes'] / 1e6:>9.1f}"
            f"{found['compile_seconds']:>11.1f} s"
        )
    collectives = ", ".join(f"{count} {kind}" for kind, count in results["collectives"].items()) or "none"
    lost = results["unaliased"]
    reuse = f"{results['aliased_bytes'] / 1e6:.1f} MB of the state updated in place"
    lines += [
        "",
        f"HBM per chip: {results['hbm_per_chip_bytes'] / 1e9:.3f} GB; {reuse}"
        + (f", but not {', '.join(lost)}" if lost else ", all of it"),
        f"collectives: {collectives}; forbidden: {', '.join(results['forbidden']) or 'none'}",
        "",
        *(_exchanged(results) if arguments.mesh > 1 else []),
        MEANING,
    ]
    return "\n".join(lines)


def _exchanged(results: dict[str, Any]) -> list[str]:
    """The exchanges between chips in each pass, as lines."""
    lines = []
    for name, found in results["exchanges"].items():
        least = found["least_ms"]
        took = "" if least is None else f", at least {least:.3f} ms by their bytes alone (an estimate)"
        lines.append(f"{name} exchanges{took}:")
        lines += [
            f"{one['count']:>5} x {one['kind']:20}{one['shape']:24}{one['bytes'] / 1e6:>10.3f} MB each"
            for one in found["collectives"]
        ]
    return [*lines, ""]


def _kflat(arguments: SimpleNamespace) -> int:
    """Derive a verify pass by its rows on every chip from shapes; returns the exit status."""
    target, drafter = tpu.read_configs(arguments)
    longest = positions_of(target)
    contexts = sorted({*(context for context in CONTEXTS if context <= longest), arguments.context})
    with tpu.offline():
        from jax_bridge.aot.compile import abstract_pair
        from jax_bridge.aot.kflat import kflat

        sizes = {"capacity": arguments.context, "block_size": arguments.block, "quantize": arguments.quantize}
        pair = abstract_pair(target, drafter, **sizes)
        found = kflat(pair, contexts, sorted({*BATCHES, arguments.batch}), arguments.acceptance or ())
    results = _named(arguments, target, pair.pair.plan) | found
    results |= {"quantize": arguments.quantize} if arguments.quantize else {}
    tpu.show(results, arguments.json, lambda: _kflat_table(results, arguments))
    return 0


def _kflat_table(results: dict[str, Any], arguments: SimpleNamespace) -> str:
    """The rows from which each chip is bound by compute, then the given context and batch by rows."""
    chips = [*results["chips"]]
    lines = [
        f"{results['target']} with {results['drafter']}, {results['layers']} layers, one chip"
        + (f", in {arguments.quantize}" if arguments.quantize else ""),
        "",
        "rows from which a chip computes longer than it reads",
        f"{'context':>8}{'batch':>7}" + "".join(f"{chip:>8}" for chip in chips),
    ]
    for cell in results["cells"]:
        turns = "".join(f"{cell['bound_from'][chip] or '-':>8}" for chip in chips)
        lines.append(f"{cell['context']:>8}{cell['batch']:>7}{turns}")
    chosen = arguments.context, arguments.batch
    cell = next(one for one in results["cells"] if (one["context"], one["batch"]) == chosen)
    speeds = cell["speedup"]
    title = f"context {chosen[0]}, batch {chosen[1]}: ms of a verify pass" + "; x: speed-up" * bool(speeds)
    lines += ["", title]
    heads = "".join(f"{chip:>9}" + f"{'x':>7}" * bool(speeds) for chip in chips)
    lines.append(f"{'rows':>6}{'GB':>9}{'TFLOP':>9}{'':>10}" + f"{'tokens':>8}" * bool(speeds) + heads)
    for at, work in enumerate(cell["rows"]):
        routed = f"({work['routed_flops'] / 1e12:.3f})" if work["routed_flops"] != work["flops"] else ""
        line = f"{work['rows']:>6}{work['bytes'] / 1e9:>9.3f}{work['flops'] / 1e12:>9.3f}{routed:>10}"
        line += f"{results['tokens'][at]:>8.2f}" * bool(speeds)
        for chip in chips:
            line += f"{cell['ms'][chip][at]:>9.2f}" + (f"{speeds[chip][at]:>7.2f}" if speeds else "")
        lines.append(line)
    return "\n".join([*lines, "", DERIVED])
