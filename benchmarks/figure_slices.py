"""Tables of docs/slices.md: rounds compiled for slices, and the slice that a pair needs."""

from __future__ import annotations

import json

from figure_text import RESULTS, result, table

GENERATIONS = ("v5e", "v6e", "v5p")


def slices_aot() -> str:
    """The bytes of each chip in a round, and the exchanges of the chips."""
    rows = []
    for one in result("slices_aot")["rounds"]:
        wide = 2 * one["rows"] * one["hidden_size"]
        kinds = {True: [], False: []}
        for found in one["exchanges"]:
            of_rows = found["kind"] == "all-reduce" and found["bytes"] in (wide, 2 * wide)
            kinds[of_rows].append(found)
        most = max(kinds[False], key=lambda found: found["bytes"])
        others = f"{sum(found['count'] for found in kinds[False])}; {most['kind']}, {most['bytes'] / 1e6:.3f}"
        rows.append(
            [
                one["pair"],
                f"{one['topology']}, {one['chips']}",
                f"{one['hbm_bytes'] / 1e9:.3f}",
                f"{one['floor_bytes'] / 1e9:.3f}",
                f"{one['ratio']:.3f}",
                sum(found["count"] for found in kinds[True]),
                others,
                f"{one['exchange_least_us']:.0f}",
            ]
        )
    heads = ["round of", "slice, chips", "GB a chip", "floor GB", "ratio"]
    return table([*heads, "sums of all rows", "others; the largest, MB", "least us"], *rows)


def slices_hybrids() -> str:
    """The bytes of each chip in a round, and the exchanges of the chips: recurrent layers, and latents."""
    rows = []
    for path in sorted(RESULTS.glob("slices_hybrids/*.json")) + sorted(RESULTS.glob("slices_latents/*.json")):
        found = json.loads(path.read_text())
        moved, floor = found["round_hbm_bytes"], found["round_floor_bytes"]
        exchanged = found["exchanges"]["round"]
        sums = [one for one in exchanged["collectives"] if one["kind"] == "all-reduce"]
        most = max(one["bytes"] for one in sums)
        rows.append(
            [
                f"[{path.stem}](results/{path.parent.name}/{path.name})",
                f"{found['topology']}, {found['chips']}",
                f"{moved / 1e9:.3f}",
                f"{floor / 1e9:.3f}",
                f"{moved / floor:.3f}",
                sum(one["count"] for one in sums if one["bytes"] == most),
                f"{1e3 * exchanged['least_ms']:.0f}",
            ]
        )
    heads = ["round of", "slice, chips", "GB a chip", "floor GB", "ratio", "sums of all rows in float32"]
    return table([*heads, "least us"], *rows)


def slices_needed(folder: str = "slices") -> str:
    """The smallest slice of each generation that has room for a pair."""
    rows = []
    for path in sorted((RESULTS / folder).glob("*.json")):
        found = json.loads(path.read_text())
        weights = found["weights_bytes"]
        rows.append(
            [
                f"[{path.stem}](results/{folder}/{path.name})",
                f"{weights['target'] / 1e9:.1f} + {weights['drafter'] / 1e9:.1f}",
                f"{found['bytes']['temporaries'] / 1e9:.2f}" if found["layers_compiled"] else "not counted",
                *(_needs(found["slices"][generation]) for generation in GENERATIONS),
            ]
        )
    return table(["pair", "weights GB", "programs GB", *GENERATIONS], *rows)


def _needs(slice_: dict | None) -> str:
    if slice_ is None or "refused" in slice_:
        return "none"
    where = (
        "one chip"
        if slice_["chips"] == 1
        else f"{slice_['topology'].partition(':')[2]}, {slice_['chips']} chips"
    )
    return f"{where}: {slice_['needed_bytes'] / 1e9:.1f} of {slice_['hbm_bytes'] / 1e9:.1f} GB"
