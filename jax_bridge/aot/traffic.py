"""Bytes that a compiled TPU program moves through HBM, recounted from its scheduled instructions.

XLA's own ``bytes accessed`` also counts VMEM, so a prefetched weight counts about three times. Here only
buffers outside VMEM count. The result is an estimate from the program's text, not a measurement:

- a fusion reads each operand once (of a slice only the slice) and writes its results once;
- an update in place reads and writes the updated part, not the buffer;
- a custom call (a Pallas kernel) reads its operands once and writes its results once; a result in an
  operand's buffer is not counted again, so a paged cache that is read and extended counts once a call;
- the kernel and the loop for experts read those that rows are expected to hit, if every choice is as likely,
  on a slice those of the chip with most of them;
- the kernel for static caches reads whole blocks of slots up to the last in use (`Program.context`);
- an asynchronous pair moves the bytes of its operation, counted at its end;
- a weight that is fetched at the program's end for its next run counts once: only a first run also fetches it
  at the top (a reading of XLA's marks, not measured);
- a loop that counts to a constant repeats its body; any other (the loop over rounds) counts it once;
- of a conditional the cheapest branch counts: the branch exists to avoid the other.
"""

from __future__ import annotations

import re
from math import prod
from typing import Any

import jax

from jax_bridge.aot.hlo import Instruction, Program, all_bytes, array_bytes, hbm_bytes
from jax_bridge.device_memory import bytes_of
from jax_bridge.kernels.block_attention import CONTEXT, NAME, slots_read
from jax_bridge.kernels.hit_experts import STACKS, hits_of

_FREE = set(
    "add-dependency after-all bitcast constant get-tuple-element iota opt-barrier parameter partition-id "
    "replica-id tuple".split()
)
_SLICES = {"slice", "dynamic-slice"}
_RESHAPED = {"bitcast", "convert", "copy", "reshape", "transpose"}  # element by element, on demand
Body = dict[str, Instruction]


def hbm_traffic(program: Program, computation: str = "ENTRY") -> int:
    """Bytes that a computation reads from and writes to HBM, with the computations it calls."""
    body = program.computations[computation]
    return sum(moved(program, body, instruction) for instruction in body.values())


def moved(program: Program, body: Body, at: Instruction) -> int:
    """Bytes that one instruction of ``body`` moves through HBM."""
    if at.op in _FREE or at.op.endswith(("-start", "-update")):
        return 0
    if at.op.endswith("-done"):
        finished = _finished(body, at)
        return 0 if _fetched_before(body, finished) else moved(program, body, finished)
    operands = [body[name].type for name in at.operands]
    if at.op == "while":
        return round(_trips(program, at) * hbm_traffic(program, at.called("body")))
    if at.op in ("call", "async"):
        return hbm_traffic(program, at.called("to_apply" if at.op == "call" else "calls"))
    if at.op == "conditional":
        branches = re.findall(r"_computations?=\{?([^}=]*)", at.attributes)
        return min(hbm_traffic(program, name) for name in re.findall(r"%([\w.-]+)", " ".join(branches)))
    if at.op == "fusion":
        return _fusion(program, at, operands)
    if at.op == "custom-call":
        return _custom_call(program, at, operands)
    if at.op == "dynamic-update-slice":
        return hbm_bytes(operands[1]) + min(hbm_bytes(at.type), all_bytes(operands[1]))
    if at.op in _SLICES or at.op == "gather":
        read = all_bytes(at.type) if hbm_bytes(operands[0]) else 0
        return read + hbm_bytes(at.type)
    return sum(map(hbm_bytes, operands)) + hbm_bytes(at.type)


def _finished(body: Body, done: Instruction) -> Instruction:
    """The synchronous instruction of a chain ``x-start``, ``x-update``, ..., ``x-done``."""
    start = body[done.operands[0]]
    while start.op.endswith("-update"):
        start = body[start.operands[0]]
    return start._replace(op=start.op.removesuffix("-start"), type=done.type)


def _fetched_before(body: Body, copy: Instruction) -> bool:
    """Whether the previous run made this copy: the program ends with an equal one that it does not use."""
    if "cross_program_prefetch_index" not in copy.attributes:
        return False
    used = {name for one in body.values() for name in one.operands}
    unused = (
        body[one.operands[0]] for one in body.values() if one.op == "copy-done" and one.name not in used
    )
    return any(start.operands == copy.operands and start.name != copy.name for start in unused)


def _trips(program: Program, loop: Instruction) -> float:
    """Turns of a loop over experts, or with the condition ``counter < constant``: JAX counts from 0 by 1."""
    if hits := hits_of(loop.attributes):
        return hits[0]
    condition = program.computations.get(loop.called("condition"), {})
    root = next((one for one in condition.values() if one.is_root), None)
    if root is None or root.op != "compare" or "direction=LT" not in root.attributes:
        return 1
    limit = condition[root.operands[1]]
    return int(limit.literal) if limit.op == "constant" else 1


def _custom_call(program: Program, at: Instruction, operands: list[str]) -> int:
    if 'custom_call_target="AllocateBuffer"' in at.attributes:  # an allocation, not a write
        return 0
    aliased = at.aliased_outputs()
    written = (
        size for place, (size, in_hbm) in enumerate(array_bytes(at.type)) if in_hbm * (place not in aliased)
    )
    read = list(map(hbm_bytes, operands))
    if program.context is not None and at.name.startswith(NAME):
        slots = int(re.findall(r"\d+", operands[-1].partition("{")[0])[-1])  # of the positions [B, 1, S]
        used = slots_read(program.context, slots)
        read[CONTEXT] = [size * used // slots for size in read[CONTEXT]]
    if hits := hits_of(at.name):
        read[STACKS] = [round(size * hits[0] / hits[1]) for size in read[STACKS]]
    return sum(read) + sum(written)


def _fusion(program: Program, at: Instruction, operands: list[str]) -> int:
    inner = program.computations[at.called("calls")]
    parameters = {one.index: one for one in inner.values() if one.op == "parameter"}
    # A parameter's own type says nothing about memory; the operand's does.
    read = sum(
        _read(program, inner, parameters[index]) for index, kind in enumerate(operands) if hbm_bytes(kind)
    )
    root = next(one for one in inner.values() if one.is_root)
    results = [inner[name] for name in root.operands] if root.op == "tuple" else [root]
    sizes = array_bytes(at.type)
    if len(results) != len(sizes):  # nested tuples: results cannot be matched
        return read + hbm_bytes(at.type)
    written = (_written(inner, one) for one in results)
    return read + sum(new for new, (_, in_hbm) in zip(written, sizes, strict=True) if in_hbm)


def _written(body: Body, result: Instruction) -> int:
    """Bytes a fusion writes for one result: of an update in place only the update."""
    while result.op == "bitcast":
        result = body[result.operands[0]]
    kind = body[result.operands[1]].type if result.op == "dynamic-update-slice" else result.type
    return all_bytes(kind)


def _read(program: Program, body: Body, value: Instruction) -> int:
    """Bytes a fusion reads of one value: at most all of it once, but every gathered row."""
    whole, gathered = all_bytes(value.type), 0
    sliced = whole if value.is_root else 0
    for user in body.values():
        for place, name in enumerate(user.operands):
            if name != value.name:
                continue
            if user.op == "gather" and place == 0:
                gathered += all_bytes(user.type)
            elif user.op in _SLICES and place == 0:
                sliced += all_bytes(user.type)
            elif user.op in _RESHAPED:
                sliced += _read(program, body, user) * whole // max(1, all_bytes(user.type))
            elif user.op == "fusion":
                inner = program.computations[user.called("calls")]
                sliced += next(_read(program, inner, one) for one in inner.values() if one.index == place)
            elif not (user.op == "dynamic-update-slice" and place == 0):
                sliced += whole
    return min(whole, sliced) + gathered


_LAYOUT = re.compile(r"^\w+\[([\d,]*)\](?:\{([\d,]*)(?::(?:[^T]*)T\(([\d,]*)\))?)?")


def laid_bytes(kind: str) -> int:
    """Bytes of an array of an HLO type, padded to tiles: ``bf16[2880,4]{0,1:T(8,128)}`` has 8 by 2944."""
    match = _LAYOUT.match(kind)
    if match is None:
        raise ValueError(f"{kind!r} is no array of an HLO program.")
    shape, order, tile = ([int(one) for one in (part or "").split(",") if one] for part in match.groups())
    laid = list(shape)
    for axis, length in zip(order, reversed(tile), strict=False):  # both from the innermost on
        laid[axis] = -(-shape[axis] // length) * length
    return all_bytes(kind) * prod(laid) // max(1, prod(shape))


class Laid:
    """The compiler's padding of a program's arguments, to apply to arrays like them.

    Args:
        hlo: a scheduled program.
        arguments: its arguments as shapes of one chip's parts, in the program's order.
    """

    def __init__(self, hlo: str, arguments: Any):
        body = Program(hlo).computations["ENTRY"].values()
        sizes = {one.index: laid_bytes(one.type) for one in body if one.op == "parameter"}
        leaves = jax.tree.leaves(arguments)
        self.total = sum(sizes.values())
        self._exact = {(leaf.shape, leaf.dtype): sizes[at] for at, leaf in enumerate(leaves)}
        # By the innermost axis, which has most of the padding.
        self._ratios = {_kind(leaf): sizes[at] / max(1, bytes_of(leaf)) for at, leaf in enumerate(leaves)}
        self._usual = self.total / max(1, bytes_of(leaves))

    def of(self, tree: Any) -> int:
        """Bytes of shapes on a chip; shapes unknown to the program are padded like the most similar ones."""
        return sum(map(self._size, jax.tree.leaves(tree)))

    def _size(self, leaf: Any) -> int:
        exact = self._exact.get((leaf.shape, leaf.dtype))
        return round(bytes_of(leaf) * self._ratios.get(_kind(leaf), self._usual)) if exact is None else exact


class Unfilled:
    """Sizes without padding, where nothing was compiled."""

    def of(self, tree: Any) -> int:
        """Bytes of shapes."""
        return bytes_of(tree)


def _kind(leaf: Any) -> tuple:
    return len(leaf.shape), leaf.shape[-1:], leaf.dtype
