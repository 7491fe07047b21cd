"""Arguments of a call as bytes, for processes that serve it together."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig

from torch_dflash.engine.request import UNSET

_KINDS: dict[str, Any] = {
    "list": list,
    "tuple": tuple,
    "dict": dict,
    "tensor": lambda found: torch.tensor(found[1], dtype=getattr(torch, found[0])).reshape(found[2]),
    "config": lambda found: GenerationConfig.from_dict(dict(found)),
    "unset": lambda found: UNSET,
}


def packed(given: Any) -> bytes:
    """Numbers, strings, lists, dicts, tensors and generation configs of ``given``; `unpacked` reads them.

    What else it holds, a tokenizer say, stays where it is.
    """
    return json.dumps(_plain(given)).encode()


def unpacked(sent: bytes, own: Any) -> Any:
    """What `packed` was given in another process; what that kept is ``own``'s, in the same place."""
    return _read(json.loads(sent), own)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if value is UNSET:
        return {"unset": []}
    if isinstance(value, GenerationConfig):
        return {"config": _plain(value.to_dict())["dict"]}
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if isinstance(value, Tensor):
        name = str(value.dtype).removeprefix("torch.")
        return {"tensor": [name, value.detach().flatten().tolist(), list(value.shape)]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_plain(one) for one in value]}
    if isinstance(value, dict):
        return {"dict": [[_plain(name), _plain(one)] for name, one in value.items()]}
    return {"own": []}


def _read(sent: Any, own: Any) -> Any:
    if not isinstance(sent, dict):
        return sent
    ((kind, found),) = sent.items()
    if kind == "own":
        return own
    if kind in ("list", "tuple"):
        owns = own if isinstance(own, list | tuple) and len(own) == len(found) else [None] * len(found)
        return _KINDS[kind](_read(one, mine) for one, mine in zip(found, owns, strict=True))
    if kind in ("dict", "config"):
        names = [(_read(name, None), one) for name, one in found]
        owns = own if isinstance(own, dict) else {}
        return _KINDS[kind]((name, _read(one, owns.get(name))) for name, one in names)
    return _KINDS[kind](found)
