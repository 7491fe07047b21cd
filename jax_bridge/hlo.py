"""Read a compiled TPU program: which donated inputs it reuses, and how many bytes it moves through HBM.

XLA's own ``bytes accessed`` also counts VMEM, so a weight that is prefetched counts about three times.
Here only buffers outside VMEM count. The result is an estimate from the program's text, not a
measurement: a fusion is taken to read each operand once.
"""

from __future__ import annotations

import re
from math import prod
from typing import NamedTuple

_BITS = {"pred": 8, "bf16": 16}
_ARRAY = re.compile(r"\b(pred|bf16|[a-z]+\d+)\w*\[([\d,]*)\](?:\{([^}]*)\})?")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%(\S+) = (.*?) ([a-z][a-z0-9-]*)\((.*?)\)(?:,(.*))?$")
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota"}
_SLICES = {"slice", "dynamic-slice", "gather"}


class Instruction(NamedTuple):
    """One line of HLO: ``name = type op(operands), attributes``."""

    name: str
    type: str
    op: str
    operands: list[str]
    attributes: str
    is_root: bool
    index: int  # of a parameter

    def called(self, key: str) -> str:
        """The computation named by attribute ``key``."""
        match = re.search(rf"\b{key}=%([\w.-]+)", self.attributes)
        if match is None:
            raise ValueError(f"{self.op} {self.name} has no {key}=")
        return match[1]


class Program:
    """A scheduled HLO module by computation and instruction name."""

    def __init__(self, hlo: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        current: dict[str, Instruction] = {}
        for line in hlo.splitlines():
            header = re.match(r"(ENTRY )?%([\w.-]+) .*\{$", line)
            if header:
                current = self.computations.setdefault("ENTRY" if header[1] else header[2], {})
            elif match := _INSTRUCTION.match(line):
                root, name, kind, op, inside, attributes = match.groups()
                index = int(inside) if op == "parameter" else -1
                operands = re.findall(r"%([\w.-]+)", inside)
                current[name] = Instruction(name, kind, op, operands, attributes or "", bool(root), index)

    def traffic(self, computation: str = "ENTRY") -> int:
        """Bytes read from and written to HBM: a loop's body once, of a conditional the cheapest branch."""
        body = self.computations[computation]
        return sum(self._moved(body, instruction) for instruction in body.values())

    def _moved(self, body: dict[str, Instruction], at: Instruction) -> int:
        operands = [body[name].type for name in at.operands]
        if at.op in _FREE or at.op.endswith("-start"):
            return 0
        if at.op == "while":
            return self.traffic(at.called("body"))
        if at.op == "conditional":
            branches = re.findall(r"_computations?=\{?([^}=]*)", at.attributes)
            return min(self.traffic(name) for name in re.findall(r"%([\w.-]+)", " ".join(branches)))
        if at.op.endswith("-done"):  # an asynchronous copy: what arrives, counted at each end in HBM
            source = body[body[at.operands[0]].operands[0]].type
            return min(hbm_bytes(source), all_bytes(at.type)) + hbm_bytes(at.type)
        if at.op == "fusion":
            inner = self.computations[at.called("calls")]
            written = _updated(inner)
            parameters = {i.index: i for i in inner.values() if i.op == "parameter"}
            reads = (
                min(hbm_bytes(kind), self._read(inner, parameters[index]))
                for index, kind in enumerate(operands)
            )
            return sum(reads) + min(hbm_bytes(at.type), written or hbm_bytes(at.type))
        if at.op == "dynamic-update-slice":
            return hbm_bytes(operands[1]) + min(hbm_bytes(at.type), all_bytes(operands[1]))
        if at.op in _SLICES:
            return min(hbm_bytes(operands[0]), all_bytes(at.type)) + hbm_bytes(at.type)
        return sum(map(hbm_bytes, operands)) + hbm_bytes(at.type)

    def _read(self, body: dict[str, Instruction], value: Instruction) -> int:
        """Bytes a fusion reads of one value: of a slice its result, of what it updates in place nothing."""
        total = all_bytes(value.type) if value.is_root else 0
        for user in body.values():
            for place, name in enumerate(user.operands):
                if name != value.name:
                    continue
                if user.op in _SLICES and place == 0:
                    total += all_bytes(user.type)
                elif user.op == "bitcast":
                    total += self._read(body, user)
                elif user.op == "fusion":
                    inner = self.computations[user.called("calls")]
                    total += next(self._read(inner, i) for i in inner.values() if i.index == place)
                elif not (user.op == "dynamic-update-slice" and place == 0):
                    total += all_bytes(value.type)
        return total


def read_aliases(hlo: str, inputs: list[str], outputs: list[str]) -> dict[str, str]:
    """Output -> input that share a buffer, from ``input_output_alias={ {3}: (17, {}, may-alias), ... }``."""
    pairs = re.findall(r"\{(\d*)\}: \((\d+), \{\}, \w+-alias\)", hlo.partition("\n")[0])
    return {outputs[int(out or 0)]: inputs[int(parameter)] for out, parameter in pairs}


def all_bytes(kind: str) -> int:
    """Size of an HLO type, tuples included."""
    return sum(_size(*array) for array in _ARRAY.findall(kind))


def hbm_bytes(kind: str) -> int:
    """Size of the parts of an HLO type that live in HBM: layouts tagged ``S(n)`` are on the chip."""
    return sum(_size(*array) for array in _ARRAY.findall(kind) if "S(" not in array[2])


def _size(dtype: str, shape: str, layout: str) -> int:
    bits = _BITS.get(dtype) or int(re.sub(r"\D", "", dtype))
    return prod(int(length) for length in shape.split(",") if length) * bits // 8


def _updated(body: dict[str, Instruction]) -> int:
    """Bytes that a fused computation writes when its result is an in-place update, else 0."""
    root = next(i for i in body.values() if i.is_root)
    while root.op == "bitcast":
        root = body[root.operands[0]]
    return all_bytes(body[root.operands[1]].type) if root.op == "dynamic-update-slice" else 0
