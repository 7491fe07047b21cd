"""``torch-dflash selftest``: checks this device and measures a round on it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from torch_dflash.cli.arguments import DEVICE, check_device, runtime
from torch_dflash.cli.command import FILE, command, flag, option
from torch_dflash.cli.errors import UserError, one_line
from torch_dflash.cli.outputs import check_writable, provenance, write_results
from torch_dflash.runtime_kinds import RUNTIMES

if TYPE_CHECKING:
    from torch_dflash.selftest.backend import Backend, Case
    from torch_dflash.selftest.report import Check, Report

# Full attention with tied heads; then windows, sinks, biases and experts.
FAMILIES = ("qwen3", "gpt_oss")


def _check(arguments: SimpleNamespace) -> None:
    if arguments.size and arguments.quick:
        raise UserError(f"--size {arguments.size} with --quick: nothing is timed; leave one of them out.")
    check_device(arguments)
    check_writable(json=arguments.json)


@command(
    "selftest",
    [
        runtime(),
        option("--device", help=DEVICE),
        flag("--quick", help="One family, no batch of one, no timings."),
        option("--size", type=click.Choice(("tiny", "small", "base")),
               help="Pair that is timed (small on a CPU, else base)."),
        option("--json", type=FILE, metavar="FILE", help="Write everything with its provenance."),
    ],
    "Check this device: parity, losslessness and hidden costs; time its passes.",
    "Random pairs, no download. Exit status: 0 every check passed, 1 some did not, 2 wrong usage.",
    check=_check,
)  # fmt: skip
def run(arguments: SimpleNamespace) -> int:
    """Run all checks; returns the exit status."""
    from torch_dflash.selftest.backend import Case
    from torch_dflash.selftest.costs import hidden_costs
    from torch_dflash.selftest.kernels import block_forms, expert_forms, paged_forms
    from torch_dflash.selftest.losslessness import lossless
    from torch_dflash.selftest.report import Report

    backend = _backend(arguments)
    print(f"device: {backend.describe()}, runtime {backend.runtime}\n", flush=True)
    report = Report(lambda line: print(line, flush=True))
    for family in FAMILIES[:1] if arguments.quick else FAMILIES:
        case, single = Case(backend, family), family == FAMILIES[0] and not arguments.quick
        report.attempt(f"parity, {family}", lambda case=case: _parity(case, backend))
        report.attempt(f"texts, {family}", lambda case=case, single=single: lossless(case, single))
        if family == FAMILIES[0]:
            report.attempt("paged attention", lambda: paged_forms(backend))
            report.attempt("block attention", lambda: block_forms(backend))
            report.attempt("experts", lambda: expert_forms(backend))
            report.attempt("hidden costs", lambda case=case: hidden_costs(case, backend))
    timings: list[dict[str, Any]] = []
    report.attempt("timings", lambda: _timings(backend, arguments, timings))
    if timings:
        print("\n" + _table(timings))
    _conclude(report, backend, timings, arguments)
    return 0 if report.passed else 1


def _backend(arguments: SimpleNamespace) -> Backend:
    from torch_dflash.selftest.backend import EagerBackend

    try:
        if not RUNTIMES[arguments.runtime].needs_jax:
            return EagerBackend(arguments.device, arguments.runtime)
        from jax_bridge.selftest import XlaBackend

        return XlaBackend()
    except (ImportError, RuntimeError, AssertionError) as error:  # no such device, or no working JAX
        where = f"--device {arguments.device}" if arguments.device else f"--runtime {arguments.runtime}"
        raise UserError(f"{where}: {one_line(error)} Choose a device and a runtime that are here.") from None


def _parity(case: Case, backend: Backend) -> Iterator[Check]:
    from torch_dflash.selftest.parity import parity
    from torch_dflash.selftest.report import NOT_RUN, Check

    reference: Any = None
    try:
        from jax_bridge.selftest import reference_hidden as reference  # an independent drafter in JAX
    except Exception as error:
        why = f"{type(error).__name__}: {one_line(error)}"
        yield Check(f"drafter hidden states, {case.family}, pure JAX", NOT_RUN, f"JAX: {why}")
    yield from parity(case, backend, reference)


def _timings(backend: Backend, arguments: SimpleNamespace, timings: list[dict[str, Any]]) -> Iterator[Check]:
    from torch_dflash.selftest.report import NOT_APPLICABLE, Check, judged
    from torch_dflash.selftest.timing import measure

    if arguments.quick:
        yield Check("timings", NOT_APPLICABLE, "left out by --quick")
        return
    size = arguments.size or ("base" if backend.accelerated else "small")
    timings += measure(backend, size)
    sane = all(0 < row["ms"] < float("inf") for row in timings)
    yield judged("timings", sane, f"{len(timings)} passes of the {size} pair timed, see below")


def _table(timings: list[dict[str, Any]]) -> str:
    """The timings and the meaning of their columns, as text."""
    from torch_dflash.selftest.timing import FLAT, flat_rows

    first = timings[0]
    flat = ", ".join(f"{rows} rows in {name}" for name, rows in flat_rows(timings).items())
    lines = [
        f"{'arithmetic':12}{'pass':22}{'ms':>10}{'(range)':>18}{'plain steps':>13}{'MB read':>10}"
        f"{'floor ms':>10}{'GB/s':>8}"
    ]
    for row in timings:
        spread = f"({row['fastest_ms']:.2f}..{row['slowest_ms']:.2f})"
        lines.append(
            f"{row['arithmetic']:12}{row['pass']:22}{row['ms']:>10.2f}{spread:>18}{row['plain_steps']:>13.2f}"
            f"{row['bytes_read'] / 1e6:>10.1f}{row['floor_ms']:>10.2f}{row['gb_per_s']:>8.1f}"
        )
    lines.append(
        f"{first['size']} pair, {first['dtype']}, batch 1. MB read: weights once and every K/V slot once,\n"
        f"the least there is. Floor: that at the {first['read_gb_per_s']:.1f} GB/s at which this device\n"
        "reads a large array; what fits a cache can be faster.\n"
        f"Flat to {flat}: up to there a verify\n"
        f"pass costs at most {FLAT} plain steps in the same arithmetic."
    )
    return "\n".join(lines)


def _conclude(
    report: Report, backend: Backend, timings: list[dict[str, Any]], arguments: SimpleNamespace
) -> None:
    """Print the verdict and the provenance, and write them to --json."""
    import torch

    from torch_dflash.selftest.timing import flat_rows

    failures = report.failures()
    count = f"{len(report.checks) - len(failures)} of {len(report.checks)} checks passed or do not apply"
    print(f"\n{count}" + (f"; not: {'; '.join(failures)}" if failures else ""))
    origin = provenance()
    packages = ", ".join(f"{name} {version or 'none'}" for name, version in origin["packages"].items())
    print(f"{origin['date']}, Python {origin['python']}, {packages}")
    print(f"{backend.describe()}; {origin['hardware']}; {torch.get_num_threads()} torch threads")
    if arguments.json:
        results = {"passed": report.passed, "runtime": backend.runtime, "device": backend.describe()}
        results |= {"checks": report.as_json(), "timings": timings}
        write_results(arguments.json, results | ({"flat_rows": flat_rows(timings)} if timings else {}))
