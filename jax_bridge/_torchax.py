"""Import torchax, or say which versions work together."""

from __future__ import annotations

import torch

try:
    import torchax
except Exception as error:  # 0.0.13 fails with AttributeError from deep inside, not ImportError
    raise ImportError(
        f"torchax does not import with torch {torch.__version__} ({type(error).__name__}: {error}). torchax "
        "0.0.13 fails on torch >= 2.13; torchax 0.0.14.dev20261026 works with it: "
        'pip install "torchax>=0.0.14.dev20261001".'
    ) from error

from torchax.interop import call_jax, call_torch

environment = torchax.default_env

__all__ = ["call_jax", "call_torch", "environment", "torchax"]
