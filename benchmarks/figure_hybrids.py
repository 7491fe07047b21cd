"""Tables about targets with recurrent layers, each from its JSON."""

from __future__ import annotations

from figure_text import result, table


def cached_forwards() -> str:
    """The distance of transformers' own cached forwards from its uncached ones."""
    found = result("cached_forwards")["distances"]
    rows = [[case, *(f"{gap:.0e}" for gap in gaps.values())] for case, gaps in found.items()]
    return table(["family", *next(iter(found.values()))], *rows)
