"""Pairs whose weights are codes on several CPU devices, compared with one. Run in a separate process."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

import jax_bridge as jb
import torch_dflash as td
from jax_bridge.weights import layout
from jax_bridge.weights.formats import plain
from support.hybrids import SLICEABLE
from support.quantised import KINDS as FORMS
from support.quantised import publish, publish_int4
from support.slices import HEADS, make_sliceable
from support.tiny import BASE
from torch_dflash.requests.prompts import pad_rows

__all__ = ["MIXED", "PROMPTS", "ROOM", "alike", "as_off_the_cpu", "drafted", "jax", "jb", "make_sliceable"]
__all__ += ["np", "pad_rows", "publish_as", "said", "same_values", "share", "td", "torch"]
PROMPTS = [[5, 17, 80, 33, 2, 9, 41], [3, 1, 4], list(range(1, 30))]
ROOM = {"max_length": 96, "batch_size": 3, "prefill_chunk_size": 32, "filters": False}
MIXED = {"do_sample": True, "temperature": [0.0, 1.0, 2.0], "top_k": 0, "seed": 3, "max_new_tokens": 24}
MIXED |= {"eos_token_id": None, "return_dict_in_generate": True}


def as_off_the_cpu() -> None:
    """Weights in int8 keep rows as they are, as on a TPU."""
    layout.ARITHMETIC["cpu"] = layout.ARITHMETIC["tpu"]


def said(engine: Any) -> list[list[int]]:
    return engine.generate(*pad_rows(PROMPTS), **MIXED).new_tokens


def drafted(engine: Any) -> list[list[int]]:
    """The text, of which some drafts must be accepted."""
    out = engine.generate(*pad_rows(PROMPTS), **MIXED)
    assert max(map(max, out.stats.acceptance_lengths)) > 1
    return out.new_tokens


def same_values(arrays: dict[str, Any], others: dict[str, Any]) -> None:
    for name, weight in arrays.items():
        np.testing.assert_array_equal(plain(weight), plain(others[name]), err_msg=name)


def alike(arrays: dict[str, Any]) -> None:
    """Devices that have the same part of an array hold the same values."""
    for name, weight in arrays.items():
        for leaf in jax.tree.leaves(weight):
            parts: dict[str, Any] = {}
            for shard in leaf.addressable_shards:
                bits = np.asarray(shard.data).tobytes()
                assert parts.setdefault(str(shard.index), bits) == bits, name


def share(arrays: dict[str, Any]) -> float:
    """The first device's part of all bytes."""
    leaves = jax.tree.leaves(arrays)
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves) / sum(x.nbytes for x in leaves)


def publish_as(form: str, folder: str) -> Path:
    """A checkpoint of a form of `support.quantised`, perhaps with the size of blocks behind: "fp8 32".

    "hybrid" has recurrent layers.
    """
    if form == "int4":
        return publish_int4(Path(folder), scales=torch.float32)
    kind, _, block = form.partition(" ")
    cls, config, extra = SLICEABLE["qwen3_5"]
    fields = BASE | extra | HEADS["2x2"][0] | {"vocab_size": 100, "num_hidden_layers": 2}
    FORMS["hybrid"] = cls, config, fields
    return publish(kind, Path(folder), block=int(block or 16))
