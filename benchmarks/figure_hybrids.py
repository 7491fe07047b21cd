"""Tables about targets with recurrent layers, each from its JSON."""

from __future__ import annotations

from figure_text import result, table


def cached_forwards() -> str:
    """How far transformers' own cached forwards are from its uncached ones."""
    found = result("cached_forwards")["distances"]
    rows = [[case, *(f"{gap:.0e}" for gap in gaps.values())] for case, gaps in found.items()]
    return table(["family", *next(iter(found.values()))], *rows)
