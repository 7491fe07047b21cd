"""Formats of weights in memory, and products with them."""
