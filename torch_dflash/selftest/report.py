"""The results of a self-test: checks that pass or fail by name, printed as they finish."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

PASS, FAIL, NOT_RUN, NOT_APPLICABLE = "pass", "FAIL", "NOT RUN", "n/a"
NAME_COLUMN = 66


@dataclass(frozen=True)
class Check:
    """One line of the table.

    ``status`` is `PASS`, `FAIL`, `NOT_RUN` (the check could not run, which counts as a failure) or
    `NOT_APPLICABLE`; ``detail`` is the observation or the reason.
    """

    name: str
    status: str
    detail: str
    figures: dict[str, Any] = field(default_factory=dict)


def judged(name: str, passed: bool, detail: str, **figures: Any) -> Check:
    """A check that ran."""
    return Check(name, PASS if passed else FAIL, detail, figures)


def within(name: str, error: float, tolerance: float, note: str = "") -> Check:
    """A check that the largest absolute difference is at most ``tolerance``; NaN fails."""
    passed = math.isfinite(error) and error <= tolerance
    detail = f"max abs error {error:.2e}, tolerance {tolerance:.2e}"
    return judged(name, passed, f"{detail}; {note}" if note else detail, error=error, tolerance=tolerance)


class Report:
    """Collects checks, and prints each check at once, so that a crash loses none."""

    def __init__(self, write: Callable[[str], None]):
        self._write = write
        self.checks: list[Check] = []

    def attempt(self, name: str, run: Callable[[], Iterable[Check]]) -> None:
        """Add the checks that ``run`` yields; an exception becomes a failure of ``name``."""
        try:
            for check in run():
                self.add(check)
        except Exception as error:  # any error of a device, a compiler or a driver is a finding
            words = " ".join(str(error).split())
            self.add(Check(name, FAIL, f"{type(error).__name__}: {words[:400]}"))

    def add(self, check: Check) -> None:
        """Keep and print a check."""
        self.checks.append(check)
        self._write(f"{check.status:8}{check.name:{NAME_COLUMN}}  {check.detail}")

    @property
    def passed(self) -> bool:
        """Whether every check that applies here ran and passed."""
        return all(check.status in (PASS, NOT_APPLICABLE) for check in self.checks)

    def failures(self) -> list[str]:
        """Names of the checks that failed or could not run."""
        return [check.name for check in self.checks if check.status in (FAIL, NOT_RUN)]

    def as_json(self) -> list[dict[str, Any]]:
        """The checks as plain data."""
        return [asdict(check) for check in self.checks]
