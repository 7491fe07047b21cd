"""Keep the versions that all tests passed with: docs/results/versions_*.json, named for the environment.

python make/versions.py JUNIT_XML ...
"""

from __future__ import annotations

import argparse
import platform
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from lowest import ROOT, lowest

from torch_dflash.cli.provenance import write_json


def counts(paths: list[Path]) -> Counter[str]:
    """Tests, failures, errors, skipped and seconds of pytest's XML files together."""
    total: Counter[str] = Counter()
    for path in paths:
        for suite in ElementTree.parse(path).getroot().iter("testsuite"):
            total.update(
                {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
            )
            total["seconds"] += round(float(suite.attrib["time"]))
    return total


def main() -> int:
    """1 where a test did not pass: nothing is written then."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("xml", nargs="+", type=Path, help="what pytest --junitxml wrote; all tests together")
    found = counts(parser.parse_args().xml)
    if found["failures"] or found["errors"]:
        print(f"{found['failures']} tests failed, {found['errors']} had errors", file=sys.stderr)
        return 1
    name = Path(sys.prefix).name.removeprefix(".venv").strip("-") or "{}.{}".format(*sys.version_info)
    path = ROOT / f"docs/results/versions_{name.replace('-', '_')}.json"
    packages = {package: version(package) for package in sorted([*lowest(), "jaxlib"])}
    write_json(str(path), {"interpreter": platform.python_version(), "versions": packages, "tests": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
