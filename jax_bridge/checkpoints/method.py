"""The ``quantization_config`` of a config.json: the method, and the sizes of blocks that share a scale.

Sources: transformers 5.24, ``FineGrainedFP8Config`` and ``CompressedTensorsConfig``; compressed-tensors,
``quantization/quant_args.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch_dflash.checks import is_count

METHODS = ("mxfp4", "fp8", "compressed-tensors")
_OF_CODES = (*METHODS, None, "bitsandbytes", "gptq", "awq", "auto-round", "hqq", "quanto", "modelopt")
"""Methods whose weights are codes: if all weights are plain, the field is a leftover."""
_PACKED = "pack-quantized"
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", _PACKED)
_BITS = {"num_bits": (8,), "symmetric": (True,)}
_PACKED_BITS = {"num_bits": (4,), "symmetric": (True,), "type": ("int",), "input_activations": (None,)}
_PACKED_BITS |= {"output_activations": (None,), "actorder": (None, False, "weight", "static")}
"""The values that are read of a group's fields, and of its weights'; "weight" changes no file."""
_FP8_BLOCK = [128, 128]  # of a config that leaves weight_block_size out
INSTEAD = (
    "load it with AutoModelForCausalLM.from_pretrained if transformers dequantises it, or use plain weights."
)

Block = tuple[int | None, int | None]
"""Rows and columns of a weight that share a scale; None: all."""


@dataclass(frozen=True)
class Method:
    """The quantisation of a checkpoint's weights.

    Attributes:
        name: of `METHODS`.
        blocks: possible sizes per scale, besides a whole matrix; None: the format fixes the size.
    """

    name: str
    blocks: tuple[Block, ...] | None

    def block_of(self, shape: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int] | None:
        """The block of a weight that shares a scale, smaller at the end; None: none fits, or several do."""
        found, sides = set(), shape[-2:]
        for named in ((None, None), *(self.blocks or ())):
            block = tuple(max(1, min(side or whole, whole)) for side, whole in zip(named, sides, strict=True))
            if scales[-2:] == tuple(-(-whole // side) for side, whole in zip(block, sides, strict=True)):
                found.add(block)
        return found.pop() if len(found) == 1 else None


def method_of(config: Mapping[str, Any], where: str, plain: bool = False) -> Method | None:
    """The quantisation in a config.json; None: weights are plain.

    ``plain``: the files hold no codes, so that the field of a method with codes is ignored.

    Raises:
        ValueError: a method or a block size that is not read; names the field.
    """
    text = config.get("text_config")
    given = config.get("quantization_config")
    if given is None and isinstance(text, dict):  # a wrapper's, of its language model alone
        given = text.get("quantization_config")
    if given is None:
        return None
    given = _object(given, "quantization_config", where)
    name = given.get("quant_method")
    if plain and name in _OF_CODES and not given.get("transform_config"):
        return Method(str(name), ())
    if name == "mxfp4":
        return Method(name, None)
    if name == "fp8":
        size = given.get("weight_block_size", _FP8_BLOCK)
        return Method(name, () if size is None else (_block(size, "weight_block_size", where),))
    if name == "compressed-tensors":
        return Method(name, _compressed(given, where))
    raise ValueError(
        f"{where}: quantization_config says quant_method={name!r}; {', '.join(METHODS)} and plain "
        f"weights are read. Else {INSTEAD}"
    )


def _compressed(given: Mapping[str, Any], where: str) -> tuple[Block, ...]:
    """The blocks of each group of layers that compressed-tensors quantises."""
    groups = _object(given.get("config_groups"), "config_groups", where)
    blocks = []
    for title, group in groups.items():
        group = _object(group, f"config_groups[{title!r}]", where)
        weights = _object(group.get("weights"), f"weights of config_groups[{title!r}]", where)
        form = group.get("format") or given.get("format")
        scheme = {"symmetric": True, "type": "int", **group, **weights, "format": form}
        read = {"format": _FORMATS} | (_PACKED_BITS if form == _PACKED else _BITS)
        for name, known in read.items():
            if scheme.get(name) not in known:
                raise ValueError(
                    f"{where}: {name}={scheme.get(name)!r} of compressed-tensors in quantization_config; "
                    f"{', '.join(map(str, known))} is read. Else {INSTEAD}"
                )
        blocks += _of_strategy(weights, where)
    for name in ("sparsity_config", "transform_config"):
        if given.get(name) and _object(given[name], name, where).get("format") != "dense":
            raise ValueError(f"{where}: {name} of compressed-tensors is not read; {INSTEAD}")
    return tuple(blocks)


def _of_strategy(weights: Mapping[str, Any], where: str) -> list[Block]:
    size, strategy = weights.get("group_size"), weights.get("strategy")
    if strategy is None:  # as compressed-tensors infers it
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy == "tensor":
        return []
    if strategy == "channel":
        return [(1, None)]
    if strategy == "group":
        return [_block([1, size], "group_size", where)]
    if strategy == "block":
        return [_block(weights.get("block_structure"), "block_structure", where)]
    raise ValueError(
        f"{where}: strategy={strategy!r} of compressed-tensors in quantization_config; tensor, channel, "
        f"group and block are read. Else {INSTEAD}"
    )


def _block(size: Any, name: str, where: str) -> Block:
    if not (isinstance(size, list) and len(size) == 2 and all(is_count(side) and side > 0 for side in size)):
        raise ValueError(
            f"{where}: {name}={size!r} in quantization_config: must be positive numbers of rows and columns; "
            "fetch config.json again."
        )
    return size[0], size[1]


def _object(value: Any, name: str, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {name}={value!r} must be an object; fetch config.json again.")
    return value
