"""The tables of docs/tpu.md are those of their JSON files."""

from __future__ import annotations

import json
import re

import pytest
from support import ROOT

PAGE = (ROOT / "docs/tpu.md").read_text()
FIGURES = {
    path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "docs/results/aot").glob("*.json"))
}
HEAD = (
    "| figures | verify GB | of its floor | draft GB | of its floor | round GB | of its floor | roofline ms |"
)


def row(name: str) -> str:
    """A line of the table, as it must stand in the page."""
    found, cells = FIGURES[name], [f"[{name}](results/aot/{name}.json)"]
    for step in ("verify", "draft", "round"):
        moved, floor = found[f"{step}_hbm_bytes"], found[f"{step}_floor_bytes"]
        cells += ["", ""] if moved is None else [f"{moved / 1e9:.2f}", f"{moved / floor:.3f}"]
    return f"| {' | '.join([*cells, format(found['roofline_ms'], '.2f')])} |"


def test_every_figure_is_in_the_table():
    table = PAGE.partition(HEAD)[2].partition("\n\n")[0].splitlines()[2:]
    assert len(FIGURES) >= 12
    assert sorted(table) == sorted(map(row, FIGURES))


def test_what_the_page_says_of_all_holds():
    for name, found in FIGURES.items():
        for summary in found["passes"].values():
            assert summary["unaliased"] == summary["forbidden"] == [] and summary["collectives"] == {}, name
        assert "aot" in found["provenance"]["command"] and "/tmp" not in found["provenance"]["command"]


@pytest.mark.parametrize(
    ("cache", "words"), [("paged", "moves {:.2f} times"), ("static", "{:.2f} times on the")]
)
def test_flatness(cache, words):
    wide, one = (FIGURES[f"qwen3-4b-{cache}-{rows}"]["verify_hbm_bytes"] for rows in (64, 1))
    assert words.format(wide / one) in PAGE


def test_the_prompt_chunk():
    found = json.loads((ROOT / "docs/results/prefill_aot.json").read_text())
    results = {(line["cache"], line["topology"][:3]): line for line in found["results"]}
    assert {(line["rows"], line["layers"]) for line in found["results"]} == {(512, 4)}
    assert found["context"] == 4096
    on = {
        cache: [f"{results[cache, chip]['ratio']:.3f}" for chip in ("v5p", "v5e", "v6e")]
        for cache in ("paged", "static")
    }
    text = " ".join(PAGE.split())
    assert "on pages {} of its floor on v5p, {} on v5e and {} on v6e".format(*on["paged"]) in text
    assert "on the static cache {}, {} and {} (".format(*on["static"]) in text
    v5p = results["paged", "v5p"]
    assert f"({v5p['flop_ms']:.2f} ms) than its bytes ({v5p['memory_ms']:.2f} ms)" in text


def test_the_ragged_kernel():
    results = json.loads((ROOT / "docs/results/ragged_aot.json").read_text())["results"]
    ratios = {(line["kernel"], line["rows"]): f"{line['ratio']:.3f}" for line in results}
    assert {rows for _, rows in ratios} == {16, 64}
    jax_kernel, ours = (
        [ratios[kernel, rows] for rows in (16, 64)]
        for kernel in ("jax ragged_paged_attention", "paged_attention")
    )
    text = " ".join(PAGE.split())
    assert re.search(rf"{jax_kernel[0]} and {jax_kernel[1]} of the floor at 16 and 64 rows", text)
    assert f"ours {ours[0]} and {ours[1]}" in text


def test_the_experts():
    found = json.loads((ROOT / "docs/results/experts_aot.json").read_text())
    verify = {line["experts"]: f"{line['ratio']:.3f}" for line in found["verify"] if line["rows"] == 16}
    ragged = {line["stored"]: f"{line['ratio']:.3f}" for line in found["ragged_dot"] if line["rows"] == 16}
    text = " ".join(PAGE.split())
    assert "move {batched_mm} times their floor so, {static_experts} with ours".format(**verify) in text
    assert f"stored [experts, in, out] ({ragged['[experts, in, out]']})" in text
    assert f"transformers' [experts, out, in] ({ragged['[experts, out, in]']})" in text
