"""How many positions an engine behind `generate` has room for: few sizes, so that few programs serve all."""

from __future__ import annotations

SMALLEST = 256
LARGEST_DOUBLED = 2048


def round_up(needed: int, context: int) -> int:
    """The room for a row that ends at ``needed``, never more than the target's ``context``.

    Every size is a compilation. A chat grows with each turn, so up to 2,048 positions sizes double: idle
    positions cost little there. Above, where they cost memory and time, an octave has four sizes.
    """
    octave = 1 << (needed - 1).bit_length()
    step = octave if octave <= LARGEST_DOUBLED else octave // 8
    return min(max(SMALLEST, -(-needed // step) * step), context)
