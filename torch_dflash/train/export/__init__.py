"""A fitted drafter as a directory that others can load."""
