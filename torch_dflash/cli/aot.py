"""``torch-dflash aot``: what a decoding round costs on a TPU, from the compiler alone."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

from torch_dflash.checks import check_counts, check_precision, positions_of
from torch_dflash.cli.configs import WITHOUT_WEIGHTS, load_configs
from torch_dflash.cli.dataclass_options import add_options
from torch_dflash.cli.errors import UserError, fail, one_line
from torch_dflash.cli.provenance import provenance, write_json
from torch_dflash.cli.writable import check_outputs, make_folder
from torch_dflash.plan import DecodePlan

PASSES = ("verify", "draft", "round")
# Fields of the plan that have an option of their own here, change nothing in one round, or are for outputs.
BY_HAND = (
    "batch_size",
    "capacity",
    "block_size",
    "verify_width",
    "stop_slots",
    "rounds_per_chunk",
    "processors",
    "outputs",
    "top_logprobs",
)
STDOUT = "-"
MEANING = """\
GB: what one run moves through HBM, recounted from the scheduled program (no VMEM; an estimate, not a
measurement). Floor: weights once and the K/V of the context once; a round's floor is the sum of both passes',
for each reads the head. Roofline: the longer of HBM time and FLOP time at the chip's published peaks."""


def add_parser(commands) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "aot",
        help="compile a round for a TPU that is not there; bytes against their floor",
        description="Needs configs and libtpu (pip install 'torch-dflash[tpu]'), neither weights nor a TPU. "
        "Compiling takes minutes for a large model.",
    )
    drafters = ", ".join(WITHOUT_WEIGHTS)
    parser.add_argument("--target", required=True, metavar="CONFIG", help="directory, config.json or hub id")
    parser.add_argument("--drafter", required=True, metavar="CONFIG", help=f"the same, or {drafters}")
    parser.add_argument(
        "--topology", default="v5p:2x2x1", help="generation and shape; one chip of it is used (%(default)s)"
    )
    parser.add_argument(
        "--mesh", type=int, default=1, metavar="N", help="chips of it that share each weight (%(default)s)"
    )
    for name, short, letter, shown in (
        ("--block-size", "block", "W", "rows of the draft pass (the drafter's own)"),
        ("--verify-width", "verify", "M", "rows of the verify pass (the whole block)"),
    ):
        parser.add_argument(name, f"--{short}", dest=short, type=int, metavar=letter, help=shown)
    parser.add_argument("--context", type=int, default=4096, metavar="N", help="tokens per row (%(default)s)")
    parser.add_argument(
        "--batch-size", "--batch", dest="batch", type=int, default=1, metavar="B", help="rows (%(default)s)"
    )
    parser.add_argument("--layers", type=int, metavar="N", help="keep N of the target's layers")
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES, help="what is compiled (all)")
    add_options(parser, DecodePlan, without=BY_HAND)
    parser.add_argument("--dump-hlo", metavar="DIR", help="write each scheduled program there, as text")
    parser.add_argument(
        "--json",
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help="write all figures there; alone or -: print them",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compile and report; returns the exit status."""
    try:
        results = _results(arguments)
        if arguments.json == STDOUT:
            _print_json(results)
            return 0
        if arguments.json is not None:
            _write_or_print(arguments.json, results)
        print(_table(results, arguments))
        return 0
    except UserError as error:
        return fail("aot", error)
    except KeyboardInterrupt:
        return 130


def _print_json(results: dict[str, Any]) -> None:
    print(json.dumps({"provenance": provenance(), **results}, indent=1))


def _write_or_print(file: str, results: dict[str, Any]) -> None:
    try:
        write_json(file, results)
    except OSError as error:
        _print_json(results)  # minutes of compiling
        raise UserError(
            f"--json {file}: could not be written ({error.strerror}); the figures went to standard output."
        ) from None


def _results(arguments: argparse.Namespace) -> dict[str, Any]:
    _check_arguments(arguments)
    target, drafter = load_configs(arguments.target, arguments.drafter, arguments.block, arguments.layers)
    _check_context(arguments.context, target)
    try:
        from jax_bridge.offline import compile_only  # only when asked for: it loads JAX

        compile_only()
        from jax_bridge.aot.compile import abstract_pair
        from jax_bridge.aot.report import CompileError, check_topology, report
    except ImportError as error:
        raise UserError(one_line(error)) from None
    plan = {
        field.name: getattr(arguments, field.name)
        for field in dataclasses.fields(DecodePlan)
        if field.name not in BY_HAND
    }
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
            **plan,
        )
        figures = report(
            model,
            context=arguments.context,
            topology=arguments.topology,
            passes=tuple(arguments.passes),
            chips=arguments.mesh,
            dump=arguments.dump_hlo,
            say=lambda line: print(line, file=sys.stderr, flush=True),
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
        "context": arguments.context,
        "batch": fixed.batch_size,
        "plan": plan,
        **figures,
    }


def _check_arguments(arguments: argparse.Namespace) -> None:
    counts = {
        name: getattr(arguments, name) for name in ("block", "verify", "context", "batch", "layers", "mesh")
    }
    try:
        check_counts(**counts)
    except ValueError as error:
        raise UserError(f"--{error}") from None
    try:
        check_precision(arguments.matmul_precision)
    except ValueError as error:
        raise UserError(str(error).replace("matmul_precision=", "--matmul-precision=", 1)) from None
    check_outputs(json=None if arguments.json == STDOUT else arguments.json)


def _check_context(context: int, target: Any) -> None:
    longest = positions_of(target)
    if context > longest:
        raise UserError(
            f"--context {context}: is beyond the target's max_position_embeddings={longest}; lower it."
        )


def _table(results: dict[str, Any], arguments: argparse.Namespace) -> str:
    """The figures to read, and what they mean."""
    shape = {name: results[name] for name in ("layers", "block", "verify", "context", "batch")}
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
