"""Reads the text of a compiled TPU program: instructions, reused buffers, forbidden operations."""

from __future__ import annotations

import re
from collections import Counter
from math import prod
from typing import NamedTuple

COLLECTIVES = tuple(
    "all-gather all-reduce all-to-all collective-broadcast collective-permute ragged-all-to-all "
    "reduce-scatter".split()
)
_BITS = {"pred": 8, "bf16": 16, "f4e2m1fn": 4, "token": 0, "c64": 64, "c128": 128}
_BITS |= {f"{kind}{bits}": bits for kind in "suf" for bits in (1, 2, 4, 8, 16, 32, 64)}
_BITS |= {f"f8e{rest}": 8 for rest in "3m4 4m3 4m3b11fnuz 4m3fn 4m3fnuz 5m2 5m2fnuz 8m0fnu".split()}
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%(\S+) = (.*?) ([a-z][a-z0-9-]*)\((.*?)\)(?:,(.*))?$")
_FORBIDDEN = {
    "dynamic shape": r"\w\[[\d,]*<=|\bset-dimension-size\(",
    "64-bit float": r"\b(?:f64|c128)\[",
    "host transfer": r"[ )](?:infeed|outfeed|send|recv)\(",
    "host callback": r'custom_call_target="[^"]*(?:callback|host)[^"]*"',
}


class Instruction(NamedTuple):
    """One line of HLO: ``name = type op(operands), attributes``."""

    name: str
    type: str
    op: str
    operands: list[str]
    attributes: str
    is_root: bool
    index: int  # of a parameter
    literal: str  # of a constant

    def called(self, key: str) -> str:
        """The computation named by attribute ``key``."""
        match = re.search(rf"\b{key}=%([\w.-]+)", self.attributes)
        if match is None:
            raise ValueError(f"{self.op} {self.name} has no {key}=")
        return match[1]

    def aliased_outputs(self) -> set[int]:
        """Results in an operand's buffer, from ``output_to_operand_aliasing={{1}: (5, {})}``."""
        text = self.attributes.partition("output_to_operand_aliasing={")[2]
        return {int(out or 0) for out in re.findall(r"\{(\d*)\}: \(\d+, \{[\d, ]*\}\)", text)}


class Program:
    """A scheduled HLO module by computation and instruction name.

    ``context``: slots in use of every static cache; None: all.
    """

    def __init__(self, hlo: str, context: int | None = None):
        self.context = context
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
                literal = inside if op == "constant" else ""
                current[name] = Instruction(
                    name, kind, op, operands, attributes or "", bool(root), index, literal
                )

    def instructions(self) -> list[Instruction]:
        """The instructions of all computations."""
        return [one for body in self.computations.values() for one in body.values()]

    def collectives(self) -> dict[str, int]:
        """Counts of each kind of communication between chips; a loop's body counts once."""
        kinds = Counter(one.op.removesuffix("-start") for one in self.instructions())
        return {kind: kinds[kind] for kind in COLLECTIVES if kinds[kind]}


def forbidden(hlo: str) -> list[str]:
    """Forbidden features in a decoding step: dynamic shapes, 64-bit floats, the host."""
    return [name for name, pattern in _FORBIDDEN.items() if re.search(pattern, hlo, re.IGNORECASE)]


def read_aliases(hlo: str, inputs: list[str], outputs: list[str]) -> dict[str, str]:
    """Output -> input with one buffer, from ``input_output_alias={ {3}: (17, {}, may-alias), ... }``."""
    pairs = re.findall(r"\{(\d*)\}: \((\d+), \{\}, \w+-alias\)", hlo.partition("\n")[0])
    return {outputs[int(out or 0)]: inputs[int(parameter)] for out, parameter in pairs}


def array_bytes(kind: str) -> list[tuple[int, bool]]:
    """(Bytes, in HBM) of each array of an HLO type: layouts tagged ``S(n)`` are on the chip."""
    return [(_size(dtype, shape), "S(" not in layout) for dtype, shape, layout in _ARRAY.findall(kind)]


def all_bytes(kind: str) -> int:
    """Bytes of an HLO type, tuples included."""
    return sum(size for size, _ in array_bytes(kind))


def hbm_bytes(kind: str) -> int:
    """Bytes of the parts of an HLO type in HBM."""
    return sum(size for size, in_hbm in array_bytes(kind) if in_hbm)


def _size(dtype: str, shape: str) -> int:
    if dtype not in _BITS:
        raise ValueError(f"{dtype}[{shape}]: no element type of HLO that is known here; add its bits.")
    return prod(int(length) for length in shape.split(",") if length) * _BITS[dtype] // 8


RATES = {"v4": 300e9, "v5e": 200e9, "v5p": 600e9, "v6e": 448e9}
"""Published bytes/s between one chip and all its neighbours together."""


class Exchange(NamedTuple):
    """``count`` collectives of one kind; ``bytes``: of each result on one chip. A loop's body counts once."""

    kind: str
    shape: str
    bytes: int
    count: int


def exchanges(program: Program) -> list[Exchange]:
    """All collectives of a program, by falling total bytes."""
    found = Counter(_described(one) for one in program.instructions() if _kind(one) in COLLECTIVES)
    listed = [Exchange(*what, count) for what, count in found.items()]
    return sorted(listed, key=lambda one: (-one.bytes * one.count, one))


def least_seconds(found: list[Exchange], chips: int, topology: str) -> float | None:
    """Time of the exchanges' bytes in rings over all links at once; None: no published rate.

    A lower bound: a small exchange takes microseconds whatever its size. Others may overlap with computation.
    """
    rate = RATES.get(topology.partition(":")[0])
    passes = {"all-reduce": 2}
    moved = sum(passes.get(one.kind, 1) * one.bytes * one.count for one in found)
    return None if rate is None else moved * (chips - 1) / chips / rate


def _kind(one: Instruction) -> str:
    return one.op.removesuffix("-start")


def _described(one: Instruction) -> tuple[str, str, int]:
    """(Kind, the largest array of its result, that array's bytes)."""
    arrays = re.findall(r"\b\w+\[[\d,]*\]", one.type)
    sizes = [size for size, _ in array_bytes(one.type)]
    at = sizes.index(max(sizes))
    return _kind(one), arrays[at], sizes[at]
