"""``torch-dflash aot --kflat``: a verify pass by its rows on every chip, derived from shapes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch_dflash.checks import positions_of
from torch_dflash.cli.aot_options import read_configs, show
from torch_dflash.cli.errors import UserError, one_line

CONTEXTS, BATCHES = (1024, 4096, 32768), (1, 8, 64)
MEANING = """\
Derived, not compiled or measured: weights, K/V of the context and each row's own bytes, and two FLOPs per
weight and row, at the chips' published peaks. A pass of few rows is bound by memory: more rows come at the
same time. Experts are multiplied for all rows; in brackets: FLOPs of those that rows are routed to."""


def kflat(arguments: SimpleNamespace) -> int:
    """Derive and report; returns the exit status."""
    target, drafter = read_configs(arguments)
    try:
        from jax_bridge.offline import compile_only

        compile_only()
        from jax_bridge.aot.compile import abstract_pair
        from jax_bridge.aot.kflat import kflat
    except ImportError as error:
        raise UserError(one_line(error)) from None
    longest = positions_of(target)
    contexts = sorted({*(context for context in CONTEXTS if context <= longest), arguments.context})
    try:
        pair = abstract_pair(target, drafter, capacity=arguments.context, block_size=arguments.block)
        found = kflat(pair, contexts, sorted({*BATCHES, arguments.batch}), arguments.acceptance or ())
    except (ValueError, TypeError) as error:
        raise UserError(one_line(error)) from None
    named = {"target": arguments.target, "drafter": arguments.drafter}
    layers = {"layers": target.get_text_config().num_hidden_layers, "block": pair.pair.plan.block_size}
    results = named | layers | found
    show(results, arguments.json, lambda: _table(results, arguments))
    return 0


def _table(results: dict[str, Any], arguments: SimpleNamespace) -> str:
    """From how many rows each chip is bound by compute, then the rows at the context and batch asked for."""
    chips = [*results["chips"]]
    lines = [
        f"{results['target']} with {results['drafter']}, {results['layers']} layers, one chip",
        "",
        "rows from which a chip computes longer than it reads",
        f"{'context':>8}{'batch':>7}" + "".join(f"{chip:>8}" for chip in chips),
    ]
    for cell in results["cells"]:
        turns = "".join(f"{cell['bound_from'][chip] or '-':>8}" for chip in chips)
        lines.append(f"{cell['context']:>8}{cell['batch']:>7}{turns}")
    asked = arguments.context, arguments.batch
    cell = next(one for one in results["cells"] if (one["context"], one["batch"]) == asked)
    speeds = cell["speedup"]
    lines += [
        "",
        f"context {asked[0]}, batch {asked[1]}: ms of a verify pass" + "; x: speed-up" * bool(speeds),
    ]
    heads = "".join(f"{chip:>9}" + f"{'x':>7}" * bool(speeds) for chip in chips)
    lines.append(f"{'rows':>6}{'GB':>9}{'TFLOP':>9}{'':>10}" + f"{'tokens':>8}" * bool(speeds) + heads)
    for at, work in enumerate(cell["rows"]):
        routed = f"({work['routed_flops'] / 1e12:.3f})" if work["routed_flops"] != work["flops"] else ""
        line = f"{work['rows']:>6}{work['bytes'] / 1e9:>9.3f}{work['flops'] / 1e12:>9.3f}{routed:>10}"
        line += f"{results['tokens'][at]:>8.2f}" * bool(speeds)
        for chip in chips:
            line += f"{cell['ms'][chip][at]:>9.2f}" + (f"{speeds[chip][at]:>7.2f}" if speeds else "")
        lines.append(line)
    return "\n".join([*lines, "", MEANING])
