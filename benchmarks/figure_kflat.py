"""``torch-dflash aot --kflat`` as tables and a picture: verify passes by their rows, derived from shapes."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

from figure_text import result, table

PAIRS = {"qwen3-4b": "Qwen3-4B", "qwen3-coder-30b-a3b": "Qwen3-Coder-30B-A3B"}
CODED = {"qwen3-4b-int8": "Qwen3-4B, int8", "qwen3-32b-fp8": "Qwen3-32B, FP8 of 128 x 128"}
CODED |= {"gpt-oss-20b-mxfp4": "gpt-oss-20b, experts in MXFP4", "gpt-oss-20b": "gpt-oss-20b, bfloat16"}
COLOURS = {"v5p": "#2a7f62", "v5e": "#e0a458", "v6e": "#3867a8"}
SHOWN = (1, 4, 16, 64, 128, 256, 512, 1024)
LEFT, TOP, STEP, UNIT, MOST = 52, 56, 52, 44, 6  # pixels; STEP, UNIT: of a doubling; MOST: doublings of time


def found(pair: str) -> dict[str, Any]:
    """The figures of a pair."""
    return result(f"kflat/{pair}")


def cell(figures: dict[str, Any], context: int = 4096, batch: int = 1) -> dict[str, Any]:
    """The figures of one context and batch."""
    return next(one for one in figures["cells"] if (one["context"], one["batch"]) == (context, batch))


def kflat_bound() -> str:
    """The least number of rows that is bound by compute on each chip, by target, context and batch."""
    rows = [
        [name, f"{one['context']:,}", one["batch"], *(one["bound_from"][chip] or "none" for chip in COLOURS)]
        for pair, name in PAIRS.items()
        for one in found(pair)["cells"]
    ]
    return table(["target", "context", "sequences", *COLOURS], *rows)


def kflat_codes() -> str:
    """`kflat_bound` of weights in codes, one sequence of 4,096 tokens, and the products' passes."""
    body = []
    for pair, name in CODED.items():
        own = cell(found(pair))
        work = own["rows"][0]
        share = work["grouped_flops"] / work["flops"]
        group = f"{share:.0%} in groups of {work['group']}" if share else "none in groups"
        depths = {chip: found(pair)["chips"][chip]["depth"] for chip in COLOURS}
        times = [f"{max(1, depth // work['group'])}" if share else "1" for depth in depths.values()]
        bounds = [str(own["bound_from"][chip] or "none") for chip in COLOURS]
        body.append([name, f"{work['bytes'] / 1e9:.2f}", *bounds, group, ", ".join(times)])
    heads = ["target", "GB of one row", *COLOURS, "products", f"passes of these on {', '.join(COLOURS)}"]
    return table(heads, *body)


def kflat_rows() -> str:
    """Bytes, FLOPs and time by rows, one sequence of 4,096 tokens."""
    body = []
    for pair, name in PAIRS.items():
        own = cell(found(pair))
        for at, work in enumerate(own["rows"]):
            if work["rows"] in SHOWN:
                times = (f"{own['ms'][chip][at]:.2f}" for chip in COLOURS)
                flops = [f"{work[kind] / 1e12:.2f}" for kind in ("flops", "routed_flops")]
                body.append([name, f"{work['rows']:,}", f"{work['bytes'] / 1e9:.2f}", *flops, *times])
    heads = ["target", "rows", "GB", "TFLOP", "TFLOP of routed experts", *(f"{chip}, ms" for chip in COLOURS)]
    return table(heads, *body)


def kflat_speed() -> str:
    """Expected speed-up over one row: tokens a round over the time of its passes, Qwen3-4B, v5p and v6e."""
    own, measured = cell(found("qwen3-4b")), result("trees")["tokens a round"]["gsm8k"]
    chips, rows = found("qwen3-4b")["chips"], [one["rows"] for one in own["rows"]]
    shown = (4, 8, 16, 64, 256)

    def speeds(tokens: dict[int, float]) -> list[str]:
        cells = []
        for count in shown:
            ratios = []
            for chip in ("v5p", "v6e"):
                bandwidth, flops = chips[chip]["bandwidth"], chips[chip]["flops"]
                draft = 1e3 * max(own["draft"]["bytes"] / bandwidth, own["draft"]["flops"] / flops)
                took = own["ms"][chip]
                ratios.append(tokens[count] * took[0] / (took[rows.index(count)] + draft))
            same = f"{ratios[0]:.2f}" == f"{ratios[1]:.2f}"
            cells.append(f"{ratios[0]:.2f}" + ("" if same else f", {ratios[1]:.2f}"))
        return cells

    def chain(chance: float) -> dict[int, float]:
        sums = [1.0, *accumulate((chance**at for at in range(1, 256)), initial=1.0)][1:]
        return {count: sums[count - 1] for count in shown}

    body = [[f"chain, {chance} a draft", *speeds(chain(chance))] for chance in (0.6, 0.8, 0.9)]
    for form in ("tree", "union"):
        tokens = {count: measured.get(f"{form} of {count}", math.nan) for count in shown}
        cells = ["" if math.isnan(tokens[at]) else one for at, one in zip(shown, speeds(tokens), strict=True)]
        body.append([f"{form}, demo pair's tokens a round on GSM8K", *cells])
    return table(["draft", *(f"{count} rows" for count in shown)], *body)


def times(figures: dict[str, dict[str, Any]]) -> str:
    """The SVG: time of a verify pass over its rows, times that of one row; dashed: with experts."""
    width, height = LEFT + 10 * STEP + 60, TOP + MOST * UNIT + 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="12" fill="#1f2933" role="img">',
        "<title>Time of a verify pass over its rows, derived from shapes, for v5p, v5e and v6e</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        '<text x="12" y="20" font-size="14" font-weight="bold">Time of a verify pass over one row\'s</text>',
        f'<text x="12" y="40">whole: {PAIRS["qwen3-4b"]}; dashed: {PAIRS["qwen3-coder-30b-a3b"]}; one '
        "sequence of 4,096 tokens</text>",
    ]
    for doublings in range(MOST + 1):
        high = height - 44 - doublings * UNIT
        parts.append(f'<path d="M{LEFT} {high}H{LEFT + 10 * STEP}" stroke="#d6dbe0"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{high + 4}" text-anchor="end">{1 << doublings}</text>')
    for step in range(11):
        across = LEFT + step * STEP
        parts.append(f'<text x="{across}" y="{height - 24}" text-anchor="middle">{1 << step:,}</text>')
    parts.append(f'<text x="{LEFT + 5 * STEP}" y="{height - 6}" text-anchor="middle">rows</text>')
    for pair, dashes in zip(PAIRS, ("", ' stroke-dasharray="5 4"'), strict=True):
        for chip, colour in COLOURS.items():
            took = cell(figures[pair])["ms"][chip]
            highs = [height - 44 - UNIT * math.log2(each / took[0]) for each in took]
            line = " ".join(f"{LEFT + step * STEP},{high:.1f}" for step, high in enumerate(highs))
            parts.append(
                f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>'
            )
            if not dashes:
                parts.append(
                    f'<text x="{LEFT + 10 * STEP + 8}" y="{highs[-1] + 4:.0f}" fill="{colour}">{chip}</text>'
                )
    return "\n".join([*parts, "</svg>"]) + "\n"
