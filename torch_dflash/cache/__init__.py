"""Caches of layers: dense buffers, pages and recurrent states of the target, rings of a drafter."""
