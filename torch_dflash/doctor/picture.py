"""A diagnosis as a picture."""

from __future__ import annotations

from pathlib import Path

from torch_dflash.doctor.diagnosis import Diagnosis
from torch_dflash.storage.files import write_atomically

SHOWN = 16


def draw(found: Diagnosis, path: Path) -> None:
    """Acceptance length by convention, the best ones, and the share of right drafts by position, as a PNG.

    Raises:
        ModuleNotFoundError: matplotlib is missing (extra ``demo``).
    """
    from matplotlib.figure import Figure

    base = next(one for one in found.tried if not one.changes)
    shown = found.tried[:SHOWN]
    shown = shown if base in shown else [*shown[:-1], base]
    figure = Figure(figsize=(11, 0.35 * len(shown) + 1.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    chosen = {change.name for change in found.changes}
    for place, one in enumerate(reversed(shown)):
        names = {change.name for change in one.changes}
        colour = "tab:orange" if not names else "tab:green" if names == chosen else "lightgrey"
        left.barh(place, one.length, color=colour)
    left.set_yticks(range(len(shown)), [one.name for one in reversed(shown)])
    left.set_xlabel("acceptance length")
    left.set_title(found.verdict)
    right.plot(range(1, len(found.positions) + 1), found.positions, marker="o", color="tab:orange")
    right.set_ylim(0, 1)
    right.set_xlabel("first k drafts right, as it is")
    right.set_ylabel("share of blocks")
    write_atomically(path, lambda part: figure.savefig(part, format="png"))
