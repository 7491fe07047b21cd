"""An answer as it is decoded: what was drafted and accepted in colour, and the acceptance as a picture."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch_dflash.pieces import TextStream
from torch_dflash.storage.files import write_atomically

GREEN, RESET = "\033[32m", "\033[0m"


class Printer:
    """Writes an answer to stdout piece by piece.

    With ``colour``, accepted drafts are green; the target's own tokens are not.
    """

    def __init__(self, tokenizer: Any, colour: bool):
        self._text, self._colour = TextStream(tokenizer), colour

    def __call__(self, piece: list[int], drafted: list[bool] | None = None) -> None:
        """Show tokens, and which of them were drafted; unset: all but the last, as of one target pass."""
        drafted = [True] * (len(piece) - 1) + [False] if drafted is None else drafted
        for token, accepted in zip(piece, drafted, strict=False):
            text = self._text.push([token])
            sys.stdout.write(f"{GREEN}{text}{RESET}" if text and accepted and self._colour else text)
        sys.stdout.flush()

    def end(self) -> None:
        """Show what was held back, and end the line."""
        print(self._text.push([], final=True), flush=True)


def draw_timeline(path: Path, timelines: dict[str, list[int]], width: int) -> None:
    """Acceptance length of every round, one row of bars per method, with its mean, as a PNG.

    Raises:
        ModuleNotFoundError: matplotlib is missing (extra ``demo``).
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.2 * len(timelines)), layout="constrained")
    rows = figure.subplots(len(timelines), 1, squeeze=False, sharex=True)[:, 0]
    for axes, (name, lengths) in zip(rows, timelines.items(), strict=True):
        axes.bar(range(1, len(lengths) + 1), lengths, width=0.9, color="tab:green")
        axes.set(ylim=(0, width + 0.5), ylabel="tokens", title=f"{name}: no round")
        if lengths:
            mean = sum(lengths) / len(lengths)
            axes.axhline(mean, color="black", linewidth=1, linestyle="--")
            axes.set_title(f"{name}: mean acceptance length {mean:.2f}")
    rows[-1].set_xlabel("round")
    write_atomically(path.resolve(), lambda part: figure.savefig(part, format="png", dpi=120))
