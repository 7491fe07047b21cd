"""The cases that `make test` leaves out: each repeats the point of another case, or takes long."""

import re

from support import ROOT

PATTERNS = (ROOT / "tests" / "heavy.txt").read_text().splitlines()
"""Node ids below tests/; ``*`` stands for any text."""


def heavy_cases(cases: set[str]) -> tuple[set[str], list[str]]:
    """The heavy ones among ``cases``, and the patterns that match no case."""
    named = {pattern: _named(pattern, cases) for pattern in PATTERNS}
    return set().union(*named.values()), [pattern for pattern, found in named.items() if not found]


def _named(pattern: str, cases: set[str]) -> set[str]:
    if "*" not in pattern:
        return cases & {pattern}
    return set(filter(re.compile(".*".join(map(re.escape, pattern.split("*")))).fullmatch, cases))
