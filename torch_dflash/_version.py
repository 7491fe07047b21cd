"""The version of both packages, as in ``pyproject.toml``."""

__version__ = "0.1.0"
