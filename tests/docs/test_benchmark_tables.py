"""The tables of benchmarks/README.md are those of their JSON files."""

from __future__ import annotations

import json

from support import ROOT

PAGE = (ROOT / "benchmarks/README.md").read_text()
STEPS = {
    "dflash round": "round of the demo pair, 8 rows",
    "dflash prompt": "its prompt of 25 tokens",
    "plain round": "step of plain decoding, 1 row",
    "plain prompt": "its prompt of 25 tokens, plain",
}
SCANS = {
    "unrolled": "unrolled, static caches",
    "scanned": "`lax.scan`, static caches in and out",
    "carried": "`lax.scan` that carries the stacked static caches",
    "paged_unrolled": "unrolled, pools of pages",
    "paged_sliced": "`lax.scan` that carries stacked pools, sliced for the kernel",
    "paged_flat": "`lax.scan` that carries one pool of all layers' pages",
}


def result(name: str) -> dict:
    """One JSON file of docs/results."""
    return json.loads((ROOT / "docs/results" / name).read_text())


def test_weight_layout_table():
    steps = result("weight_layout_cpu.json")["steps"]
    assert [one["step"] for one in steps] == list(STEPS)
    for one in steps:
        low, high = one["quartiles"]
        row = f"| {STEPS[one['step']]} | {one['ratio']:.2f} | {low:.2f} to {high:.2f} |"
        assert row in PAGE.splitlines()


def test_weight_layout_products():
    products = result("weight_layout_cpu.json")["products"]
    single = [one["ratio"] for one in products if one["dtype"] == "float32"]
    rows = [one["rows"] for one in products if one["dtype"] == "float32"]
    many = [ratio for ratio, count in zip(single, rows, strict=True) if count > 1]
    one = sorted(ratio for ratio, count in zip(single, rows, strict=True) if count == 1)
    said = f"{min(many):.2f} to {max(many):.2f} at 2 to 16 rows, and {one[0]:.2f} to {one[-2]:.2f} at one row"
    assert f"- Single products: {said} (but {one[-1]:.2f} for one shape, 9728 x 2560)." in PAGE


def test_scanned_layers_table():
    forms = result("scan_aot.json")["forms"]
    assert list(forms) == list(SCANS)
    for name, one in forms.items():
        moved, temporary = f"{one['hbm_bytes'] / 1e9:.3f}", f"{one['peak_temp_bytes'] / 1e6:.1f}"
        row = f"| {SCANS[name]} | {one['compile_seconds']} | {moved} | {one['ratio']:.3f} | {temporary} |"
        assert row in PAGE.splitlines()


def test_scanned_layers_run_time():
    steps = result("scan_cpu.json")["steps"]
    assert [one["rows"] for one in steps] == [1, 8]
    for one in steps:
        low, high = one["quartiles"]
        assert f"| {one['rows']} | {one['ratio']:.2f} | {low:.2f} to {high:.2f} |" in PAGE.splitlines()


def test_first_answer_table():
    found = result("first_answer_cpu.json")
    names = {
        "empty": "the first, no compiled program on disk",
        "full": "the first, with those of another process",
        "second": "the second",
    }
    for name, row in names.items():
        assert f"| {row} | {found[name]['median']:.1f} |" in PAGE.splitlines()
        assert len(found[name]["seconds"]) >= 3
    assert found["compilations"] == 4 and "cpu" in str(found["provenance"]).lower()
