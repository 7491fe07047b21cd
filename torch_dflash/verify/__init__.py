"""Comparison of block decoding with a target's own forward, by logits."""
