"""Published drafters as data, and pairs loaded by name."""
