"""Drafters that others have published, as data, and a pair of them by its name."""
