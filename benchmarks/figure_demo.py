"""Blocks about `torch-dflash demo`: the bundled pair on CPUs."""

from __future__ import annotations

import statistics
from typing import Any

from figure_text import RESULTS, result, table

EARLIER = "demo_cpu_xeon", "demo_cpu_avx2"
"""Results of an earlier bundled drafter."""
UNION = "DFlash + lookup"
MACHINES = {
    "demo_cpu": "EPYC, AVX512-BF16",
    "demo_cpu_bf16": "Xeon, AVX512-BF16",
    "demo_cpu_vnni": "Xeon, VNNI alone",
    "demo_cpu_xeon": "Xeon, AMX (earlier drafter)",
    "demo_cpu_avx2": "EPYC, AVX2 alone (earlier drafter)",
}
"""The CPU of each run in bfloat16; a run in int8 has the same name and `_int8`."""
CPUS = {
    "cpu_steps": "an EPYC with AVX512-BF16",
    "cpu_steps_xeon": "a Xeon with AMX",
    "cpu_steps_vnni": "a Xeon with neither",
}
PARTS = {
    "import": "imports of torch and transformers",
    "load": "fetch and convert the model (once), load the pair",
    "compile": "import JAX; trace, compile or load six programs of the models; their first run",
    "warm up": "one short answer of each method",
    "decode": "three answers of 64 tokens: plain, DFlash, transformers'",
    "rest": "pip's fetch, and the end of the process",
}


def demo(name: str = "demo_cpu") -> str:
    """The methods of ``torch-dflash demo``: all questions together."""
    found = result(name)
    rows = [
        [
            row["method"],
            f"{row['acceptance_length']:.2f}",
            f"{row['speedup']:.2f}x",
            "{:.2f} to {:.2f}".format(*row["quartiles"]),
            "yes" if row["same_text"] else "no",
        ]
        for row in found["rows"]
    ]
    heads = ["method", "tokens per target pass", "speed against plain, median", "quartiles", "same text"]
    return table(heads, *rows)


def demo_speeds() -> str:
    """The speed of DFlash on each CPU, over plain decoding and over both ways of transformers."""
    body, runs = [], sorted(path.stem for path in RESULTS.glob("demo_cpu*.json"))
    known = [name for machine in MACHINES for name in (machine, f"{machine}_int8") if name in runs]
    assert sorted(known) == runs, runs
    for name in known:
        rows = {row["method"]: row for row in result(name)["rows"]}
        theirs = [
            max(own["speedup"] for name, own in rows.items() if name.startswith(f"transformers' {way}"))
            for way in ("generate", "DFlash")
        ]
        for method in (UNION, "DFlash"):
            if method in rows:
                own = rows[method]["speedup"]
                speeds = [f"{own / speed:.2f}x" for speed in (1, *theirs)]
                kind = "int8" if name.endswith("_int8") else "bfloat16"
                tokens = f"{rows[method]['acceptance_length']:.2f}"
                body.append([MACHINES[name.removesuffix("_int8")], kind, method, tokens, *speeds])
    heads = ["CPU, two cores", "products in", "method", "tokens per target pass", "over plain decoding"]
    return table([*heads, "over transformers' `generate`", "over transformers' DFlash"], *body)


def demos() -> dict[str, dict[str, Any]]:
    """The results of the bundled drafter in bfloat16, by file: one for each CPU."""
    names = sorted(path.stem for path in RESULTS.glob("demo_cpu*.json"))
    found = {name: result(name) for name in names if name not in EARLIER}
    return {name: one for name, one in found.items() if one["dtype"] == "bfloat16" and not one["quantize"]}


def demo_line() -> str:
    """The speed-ups of DFlash on each CPU, in bfloat16."""
    plain, best = [], []
    forms = result("demo_forms_cpu")["median"]
    gained = [forms["union of 8"] / forms["drafter"]]
    for found in demos().values():
        rows = {row["method"]: row["speedup"] for row in found["rows"]}
        plain.append(rows["DFlash"])
        best.append(rows["DFlash"] / max(rows[one] for one in rows if "transformers' generate" in one))
        if UNION in rows:
            gained.append(rows[UNION] / rows["DFlash"])
    union = "x to ".join(dict.fromkeys(f"{one:.2f}" for one in (min(gained), max(gained))))
    return (
        f"{min(plain):.2f}x to {max(plain):.2f}x plain decoding, {min(best):.2f}x to {max(best):.2f}x "
        f"transformers' `generate` ({len(plain)} CPUs).<br>With lookup in a tree: {union}x that speed "
        f"({len(gained)} CPU{'s' * (len(gained) > 1)})"
    )


def demo_unions() -> str:
    """The tables of runs with the union and the drafter alone."""
    said = []
    for name, found in demos().items():
        if UNION in {row["method"] for row in found["rows"]}:
            of = found["provenance"]
            said.append(f"`{of['command']}`, {of['date']}, {of['hardware']}:\n\n{demo(name)}")
    return "\n\n".join(said) or "No run of this command has timed both in turn yet."


def demo_types() -> str:
    """The time of a round of eight rows in each type, on each CPU whose steps were timed."""
    said = []
    for name, cpu in CPUS.items():
        rows = [row for row in result(name)["rows"] if row["method"] == "DFlash" and row["size"] == 2048]
        took = {row["dtype"]: row["round_ms"] for row in rows}
        said.append(f"{took['float32']:.0f} and {took['bfloat16']:.0f} ms on {cpu}")
    return f"{', '.join(said[:-1])}, and {said[-1]}"


def demo_forms() -> str:
    """The speed of the demo's drafter and of its union, in one run."""
    found = result("demo_forms_cpu")
    ratios = [row["union of 8"] / row["drafter"] for row in found["over plain decoding"].values()]
    forms = found["median"]
    return (
        f"{forms['drafter']:.2f} and {forms['union of 8']:.2f} times plain decoding by the median question; "
        f"the union is {min(ratios):.2f} to {max(ratios):.2f} times as fast as the drafter"
    )


def demo_chat() -> str:
    """The speed-up of each form on chat questions, over plain decoding in its own type."""
    rows, found = [], result("demo_forms_chat_cpu")["over plain decoding"].values()
    for form in next(iter(found)):
        plain = ", ".join(["plain", *form.split(", ")[1:]])
        if form != plain:
            ratios = sorted(row[form] / row[plain] for row in found)
            name = form if ", " in form else f"{form}, float32"
            rows.append([name, *(f"{one:.2f}" for one in (ratios[0], statistics.median(ratios), ratios[-1]))])
    return table(["form", "least", "median", "most"], *rows)


def demo_time() -> str:
    """The time of `make demo` behind its installation, by parts."""
    found = result("demo_time_cpu")
    later = found["runs"][-1]
    rows = [
        [PARTS[name], *(f"{one['parts'][name]['cpu']:.1f}" for one in (found["first"], later))]
        for name in PARTS
    ]
    whole = ["all", *(f"{one['cpu']:.1f}" for one in (found["first"], later))]
    return table(["part", "first run, CPU s", "later run, CPU s"], *rows, whole)
