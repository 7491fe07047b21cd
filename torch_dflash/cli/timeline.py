"""An answer as it is decoded: what was drafted and accepted in colour, and the acceptance as a picture."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch_dflash.engine.engine import Engine
from torch_dflash.engine.text import TextStream
from torch_dflash.storage.files import write_atomically

GREEN, RESET = "\033[32m", "\033[0m"


def stream_answer(engine: Engine, tokenizer: Any, ids: Any, colour: bool, **options: Any) -> None:
    """Decode one row to stdout round by round.

    With ``colour``, accepted drafts are green; the target's own tokens (one a round) are not. The engine
    should read after every round (``rounds_per_chunk=1``), or pieces of text hold several.
    """
    text = TextStream(tokenizer)
    for number, (tokens,) in enumerate(engine.stream(ids, **options)):
        for place, token in enumerate(tokens):
            accepted = number > 0 and place + 1 < len(tokens)  # the first piece is prefill's token
            piece = text.push([token])
            if piece and colour and accepted:
                piece = f"{GREEN}{piece}{RESET}"
            sys.stdout.write(piece)
        sys.stdout.flush()
    print(text.push([], final=True))


def draw_timeline(path: Path, timelines: dict[str, list[int]], width: int) -> None:
    """Acceptance length of every round, one row of bars per method, with its mean, as a PNG.

    Raises:
        ModuleNotFoundError: matplotlib is missing (extra ``demo``).
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.2 * len(timelines)), layout="constrained")
    rows = figure.subplots(len(timelines), 1, squeeze=False, sharex=True)[:, 0]
    for axes, (name, lengths) in zip(rows, timelines.items(), strict=True):
        mean = sum(lengths) / max(len(lengths), 1)
        axes.bar(range(1, len(lengths) + 1), lengths, width=0.9, color="tab:green")
        axes.axhline(mean, color="black", linewidth=1, linestyle="--")
        axes.set(ylim=(0, width + 0.5), ylabel="tokens", title=f"{name}: mean acceptance length {mean:.2f}")
    rows[-1].set_xlabel("round")
    write_atomically(path, lambda part: figure.savefig(part, format="png", dpi=120))
