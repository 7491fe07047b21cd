"""Keep the versions that the tests passed with: docs/results/versions_*.json, named for the environment.

python make/versions.py JUNIT_XML ...

`make versions` runs all tests. Where that takes too long, runs of single folders will do, each with an XML of
its own: the JSON names the folders of `tests` that were not run.
"""

from __future__ import annotations

import argparse
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from lowest import ROOT, lowest

from torch_dflash.cli.outputs import write_results

ENDS = "failure", "error", "skipped"
"""What becomes of a test that does not pass, as pytest names it in XML."""


def outcomes(paths: list[Path]) -> tuple[Counter[str], Counter[str], float]:
    """Tests that passed by folder, tests by what else became of them, and seconds, of pytest's XML files."""
    passed, other, seconds = Counter(), Counter(), 0.0
    for path in paths:
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            seconds += float(case.attrib["time"])
            if (end := next((part.tag for part in case if part.tag in ENDS), None)) is None:
                passed[case.attrib["classname"].split(".")[1]] += 1
            else:
                other[end] += 1
    return passed, other, seconds


def main() -> int:
    """1 where a test did not pass: nothing is written then."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("xml", nargs="+", type=Path, help="what pytest --junitxml wrote")
    passed, other, seconds = outcomes(parser.parse_args().xml)
    if other["failure"] or other["error"]:
        print(f"{other['failure']} tests failed, {other['error']} had errors", file=sys.stderr)
        return 1
    name = Path(sys.prefix).name.removeprefix(".venv").strip("-") or "{}.{}".format(*sys.version_info)
    path = ROOT / f"docs/results/versions_{name.replace('-', '_')}.json"
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    found = {
        "versions": {package: version(package) for package in sorted([*lowest(), "jaxlib"])},
        "passed": dict(sorted(passed.items())),
        "skipped": other["skipped"],
        "seconds": round(seconds),
        "not_run": sorted(folders - {*passed}),
    }
    write_results(str(path), found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
