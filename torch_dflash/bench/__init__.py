"""``torch-dflash bench``: drafting methods on one target, in counts, walls, derived bytes and dollars."""
