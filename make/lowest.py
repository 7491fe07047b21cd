"""The lowest version of each dependency that pyproject.toml states, as a constraints file for pip.

python make/lowest.py > build/lowest.txt
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = ("demo", "train", "grammar", "serve")  # what tests run of; tools for development have no such bound


def lowest() -> dict[str, str]:
    """The version by the name of each dependency of the package and of `EXTRAS`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stated = [*project["dependencies"], *sum((project["optional-dependencies"][one] for one in EXTRAS), [])]
    found = {}
    for line in stated:
        match = re.match(r"([\w-]+)>=([\w.]+)", line)
        if not match:
            raise SystemExit(f"pyproject.toml: {line}: has no lower bound; write {line}>=VERSION.")
        found[match[1]] = match[2]
    return found


if __name__ == "__main__":
    print("\n".join(f"{name}=={version}" for name, version in lowest().items()))
