"""The published pairs as a table, of the data in the package; `figures.py` fills it in."""

from __future__ import annotations

from figure_text import table

import torch_dflash as td
from torch_dflash.published.rows import share

DECODED = {True: "yes", False: "no: {}", None: "not compared"}
HEADS = [
    "name",
    "target",
    "drafter",
    "kind, layout",
    "block",
    "taps",
    "mask",
    "size",
    "licence",
    "acceptance length",
]


def published() -> str:
    """The share, then every row; an empty cell is unknown."""
    return f"{share()}.\n\n" + table([*HEADS, "decodes here"], *map(_cells, td.checkpoints))


def _cells(row: td.Checkpoint) -> list[str]:
    kind = ", ".join(part for part in (row.kind, row.layout) if part)
    lengths = ", ".join(f"{name} {length:g}" for name, length in (row.acceptance or {}).items())
    known = [
        row.block_size,
        ", ".join(map(str, row.target_layer_ids or ())),
        row.mask_token_id,
        row.size,
        row.license,
    ]
    decodes, why = row.verdict
    said = DECODED[decodes].format(why)
    cells = [row.name, row.target or row.model, row.drafter, kind, *known, lengths, said]
    return ["" if cell is None else str(cell) for cell in cells]
