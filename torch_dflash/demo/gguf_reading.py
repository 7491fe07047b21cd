"""A GGUF file that is parsed once.

transformers parses the whole file anew for the config, for the tokenizer and for the weights, and makes the
table of tensors' names anew for each module: half of what a conversion takes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

MADE = "GGUFReader", "get_tensor_name_map"
"""What transformers takes from the package gguf each time it needs one."""
_patching = threading.RLock()


@contextmanager
def parsed_once() -> Iterator[None]:
    """While open, gguf gives the same reader of a file, and the same names of an architecture, each time.

    The package is the process's: one thread at a time.
    """
    import gguf

    with _patching:
        own = {name: getattr(gguf, name) for name in MADE}
        try:
            for name, make in own.items():
                setattr(gguf, name, cache(make))
            yield
        finally:
            for name, make in own.items():
                setattr(gguf, name, make)
