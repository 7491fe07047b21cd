"""``torch-dflash aot``: what a decoding round costs on a TPU, from the compiler alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch_dflash.cli.aot_kflat import kflat
from torch_dflash.cli.aot_options import plan_of, read_configs, show
from torch_dflash.cli.errors import UserError, one_line
from torch_dflash.cli.writable import make_folder
from torch_dflash.progress import print_status

MEANING = """\
GB: what one run moves through HBM, recounted from the scheduled program (no VMEM; an estimate, not a
measurement). Floor: weights once and the K/V of the context once; a round's floor is the sum of both passes',
for each reads the head. Roofline: the longer of HBM time and FLOP time at the chip's published peaks."""


def run(arguments: SimpleNamespace) -> int:
    """Compile and report; returns the exit status."""
    if arguments.kflat:
        return kflat(arguments)
    results = _results(arguments)
    show(results, arguments.json, lambda: _table(results, arguments))
    return 0


def _results(arguments: SimpleNamespace) -> dict[str, Any]:
    target, drafter = read_configs(arguments)
    try:
        from jax_bridge.offline import compile_only  # only when asked for: it loads JAX

        compile_only()
        from jax_bridge.aot.compile import abstract_pair
        from jax_bridge.aot.report import CompileError, check_topology, report
    except ImportError as error:
        raise UserError(one_line(error)) from None
    plan = plan_of(arguments)
    try:
        check_topology(arguments.topology)
        if arguments.dump_hlo is not None:
            make_folder("dump-hlo", arguments.dump_hlo)
        model = abstract_pair(
            target,
            drafter,
            capacity=arguments.context,
            batch_size=arguments.batch,
            block_size=arguments.block,
            verify_width=arguments.verify,
            rows=arguments.rows,
            **plan,
        )
        figures = report(
            model,
            context=arguments.context,
            topology=arguments.topology,
            passes=tuple(arguments.passes) if arguments.rows is None else ("round",),
            chips=arguments.mesh,
            dump=arguments.dump_hlo,
            say=print_status,
        )
    except (ModuleNotFoundError, ValueError, TypeError) as error:
        raise UserError(one_line(error)) from None
    except CompileError as error:
        raise UserError(
            f"{one_line(error)} If it does not fit: fewer --layers, a smaller --batch or --context, or "
            "another --topology."
        ) from None
    fixed = model.pair.plan
    return {
        "target": arguments.target,
        "drafter": arguments.drafter,
        "layers": target.get_text_config().num_hidden_layers,
        "block": fixed.block_size,
        "verify": fixed.verify_width,
        "rows": arguments.rows,
        "context": arguments.context,
        "batch": fixed.batch_size,
        "plan": plan,
        **figures,
    }


def _table(results: dict[str, Any], arguments: SimpleNamespace) -> str:
    """The figures to read, and what they mean."""
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
    """What the chips exchange in each pass."""
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
