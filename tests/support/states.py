"""A whole state as the host sees it, for tests that look at all of it."""

from types import SimpleNamespace

FIELDS = ("tokens", "length", "done", "accepted", "rounds")


def look(runtime, state) -> SimpleNamespace:
    """The fields of ``state`` as numpy arrays; it stays usable."""
    found = runtime.fetch({name: getattr(state, name) for name in FIELDS})
    return SimpleNamespace(**{name: value.numpy() for name, value in found.items()})
