"""A whole state on the host, for tests that compare all fields."""

from types import SimpleNamespace

FIELDS = ("tokens", "length", "done", "accepted", "rounds")


def look(runtime, state) -> SimpleNamespace:
    """The fields of ``state`` as numpy arrays; the state stays usable."""
    found = runtime.fetch({name: getattr(state, name) for name in FIELDS})
    return SimpleNamespace(**{name: value.numpy() for name, value in found.items()})
