"""Slices that one can ask for, and the smallest of each generation that has room for a pair."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jax_bridge.aot.layouts import Laid, Unfilled
from jax_bridge.aot.sizes import Size, Spread, needed
from jax_bridge.aot.topology import find_topology

HBM = {
    name: int(size * 2**30) for name, size in {"v4": 15.25, "v5e": 15.75, "v5p": 95.74, "v6e": 31.25}.items()
}
"""Bytes that the compiler lets a program have of a device: a chip, of v4 a core. `tests/aot` asks it."""
FLAT = ("2x2", "2x4", "4x4", "4x8", "8x8")
SLICES = {"v5e": FLAT, "v6e": FLAT, "v5p": ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4")}
"""By generation, from the smallest on."""


def smallest_slices(
    pair: Spread, size: Size, laid: Laid | Unfilled, spent: int
) -> dict[str, dict[str, Any] | None]:
    """Of each generation the smallest slice, or chip, that has room for ``size``; None: none of those tried.

    ``spent``: bytes of temporaries, taken to be the same everywhere.
    """
    return {generation: _smallest(generation, pair, size, laid, spent) for generation in SLICES}


def _smallest(
    generation: str, pair: Spread, size: Size, laid: Laid | Unfilled, spent: int
) -> dict[str, Any] | None:
    room = HBM[generation]
    alone = needed(replace(pair, chips=1).held(size, laid), 0)
    for topology, chips in _tried(generation):
        if alone > chips * room:
            continue  # not even if everything could be cut
        try:
            held = replace(pair, topology=topology, chips=chips).held(size, laid)
        except ValueError as error:  # a pair that is not decoded on several
            return {"refused": str(error)}
        if needed(held, spent) <= room:
            return {
                "topology": topology,
                "chips": chips,
                "needed_bytes": needed(held, spent),
                "hbm_bytes": room,
            }
    return None


def _tried(generation: str) -> list[tuple[str, int]]:
    """Topologies with how many of their chips: the first chip alone, then whole slices."""
    names = [f"{generation}:{shape}" for shape in SLICES[generation]]
    return [(names[0], 1), *((name, len(find_topology(name).devices)) for name in names)]
