"""TPUs that are not there, as libtpu describes them."""

from __future__ import annotations

import os
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import jax
from jax.experimental import topologies


@lru_cache
def find_topology(name: str) -> Any:
    """What libtpu knows of a topology; one object per name and process, for those of two never compare equal.

    Raises:
        ModuleNotFoundError: libtpu is not installed. ValueError: it knows no such topology.
    """
    if find_spec("libtpu") is None:
        raise ModuleNotFoundError(
            "libtpu is not installed, and it is the TPU compiler: pip install 'jax[tpu]'. "
            "export_round works without it."
        )
    # libtpu locks the chips it expects to drive, so a second process that only compiles would abort.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"topology={name!r}: {' '.join(str(error).split())[:200]}; name a generation and its shape, such "
            "as v5p:2x2x1, v5e:2x2 or v6e:2x2."
        ) from None
