"""Compiles decoding for an absent TPU: no weights, no chip, only shapes.

`abstract_pair` builds a target and a drafter from their configs. `export_round` lowers their decoding round
for TPU on plain CPU jax. `compile_round` runs the TPU compiler of the libtpu wheel (the ``tpu`` extra) on it
and returns the compiler's figures; `compile_step` does so for one pass of a round and for a prompt chunk.
`jax_bridge.aot.report` compares the bytes of all three with their floors.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch import Tensor
from transformers import PreTrainedConfig

from jax_bridge.aot.floor import Shapes
from jax_bridge.aot.hlo import Program, read_aliases
from jax_bridge.aot.shapes import find_topology, on_slice, shape_at, slice_devices
from jax_bridge.aot.traffic import hbm_traffic
from jax_bridge.arrays import shape_of
from jax_bridge.devices.on_mesh import OnMesh, places_of
from jax_bridge.devices.one_device import rules_of
from jax_bridge.programs.lower import lower, lower_begin, lower_prefill, lower_rounds, tracing
from jax_bridge.runtime import idle_chunk
from jax_bridge.state import register_states
from jax_bridge.weights.codes import GROUP, Blocks, Groups
from torch_dflash import decode as steps
from torch_dflash.decode import Pair, decode_round
from torch_dflash.ops.windows import read_rows, write_rows
from torch_dflash.plan import MIN_BUCKET, DecodePlan
from torch_dflash.proposers.base import take_in
from torch_dflash.proposers.checkpoints import drafter_of
from torch_dflash.proposers.choose import make_proposer
from torch_dflash.proposers.trees.proposer import TreeProposer
from torch_dflash.requests.prompts import bucket
from torch_dflash.rows import RowRequests
from torch_dflash.state import DecodeState, Draft
from torch_dflash.targets.adapter import Target
from torch_dflash.targets.auto import auto_class

ABSENT = SimpleNamespace(platform="tpu")
FP8_BLOCK = (128, 128)


@dataclass(frozen=True)
class AbstractPair:
    """A pair with the shapes of its parameters (tied weights once) and of its state, without arrays."""

    pair: Pair
    params: Shapes
    state: DecodeState


@dataclass(frozen=True)
class CompiledStep:
    """A step as the TPU compiler compiled it.

    Sizes are bytes of HBM on one chip. ``alias_bytes`` counts outputs that live in a donated input's
    buffer; ``aliases`` maps the path of each such output in the state, ``.cache[0].key`` for one, to the
    path of that input in ``(params, state)``: ``[1].cache[0].key``. ``unaliased`` holds the state's other
    paths. ``traffic_bytes`` is read and written by one run (`traffic.py`). ``cost`` is XLA's own
    ``cost_analysis``; its ``"bytes accessed"`` counts on-chip VMEM traffic too, so a prefetched weight
    counts about three times.
    """

    compile_seconds: float
    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    traffic_bytes: int
    aliases: dict[str, str]
    unaliased: list[str]
    hlo: str
    cost: dict[str, float]

    def traffic_at(self, context: int) -> int:
        """``traffic_bytes`` with ``context`` slots of the static caches in use."""
        return hbm_traffic(Program(self.hlo, context))

    @property
    def hbm_bytes(self) -> int:
        """HBM that a chip needs to run it: arguments, outputs that are not in place, temporaries."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


def abstract_pair(
    target: PreTrainedConfig,
    drafter: PreTrainedConfig | torch.nn.Module | None,
    *,
    capacity: int,
    batch_size: int = 1,
    block_size: int | None = None,
    verify_width: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    rows: int | None = None,
    quantize: str | None = None,
    **plan: Any,
) -> AbstractPair:
    """A target and its proposer, from configs alone.

    Args:
        target: config of any supported causal LM.
        drafter: a drafter's config, a proposer without weights (`NGramProposer`), or None: no drafting.
        capacity: positions a row may fill, prompt and new tokens.
        batch_size: rows B.
        block_size: rows W of the draft pass; unset: the drafter's own.
        verify_width: rows M of the verify pass; the whole block by default.
        rows: of a tree of the drafter's block (`td.TreeProposer`), the anchor included; None: a chain.
        quantize: "int8" as in `torch_dflash.compile`, or "fp8": the target's linear weights as FP8
            checkpoints hold them, and experts, with a scale for each `FP8_BLOCK`, or "mxfp4": experts stored
            [experts, in, out], as gpt-oss's, in 4 bits, or "int4": those that are stored [experts, out, in],
            in 4 bits with scales in ``dtype``, as Kimi-K2.5's.
        dtype: of the weights, and so of every cache. Buffers such as rotary frequencies keep theirs.
        plan: further fields of `DecodePlan`.

    Raises:
        TypeError, ValueError: a model that cannot be decoded, or a drafter that does not fit the target.
    """
    with torch.device("meta"):
        model = auto_class(target).from_config(target)
        if isinstance(drafter, PreTrainedConfig):
            drafter = drafter_of(drafter).to(model.dtype)
    given = drafter if rows is None else TreeProposer(drafter, rows)
    proposer = make_proposer(model, given, block_size)
    width = proposer.width
    fixed = DecodePlan(batch_size, capacity, width, verify_width or width, depth=proposer.depth, **plan)
    pair = Pair(Target(model), proposer, fixed)
    return _with_state(pair, _abstract_params(pair, dtype, quantize))


def resized(model: AbstractPair, **fields: Any) -> AbstractPair:
    """The same models under a plan with other ``fields``."""
    pair = model.pair
    return _with_state(Pair(pair.target, pair.proposer, replace(pair.plan, **fields)), model.params)


def export_round(model: AbstractPair, *, chunk: bool = False) -> jax.export.Exported:
    """One decoding round lowered for TPU, state donated; needs neither libtpu nor a chip.

    ``chunk=True`` lowers the runtime's `lax.while_loop` over rounds instead.
    """
    step = "chunk" if chunk else "round"
    with tracing(model.pair.plan.matmul_precision):
        lowered = jax.export.export(_jit(STEPS[step](model.pair)), platforms=["tpu"])
        return lowered(*_arguments(model, step))


def compile_round(
    model: AbstractPair, *, chunk: bool = False, topology: str = "v5p:2x2x1", chips: int = 1
) -> CompiledStep:
    """Compile a round (``chunk=True``: the loop over rounds) for one chip; see `compile_step`."""
    return compile_step(model, "chunk" if chunk else "round", topology=topology, chips=chips)


def compile_step(
    model: AbstractPair,
    step: str,
    *,
    topology: str = "v5p:2x2x1",
    chips: int = 1,
    prompt_rows: int | None = None,
) -> CompiledStep:
    """Compile a step for one chip of a TPU topology, or for several that share each weight.

    Args:
        model: from `abstract_pair`.
        step: a key of `jax_bridge.aot.compile.STEPS`.
        topology: generation and shape as libtpu names them: "v5p:2x2x1", "v5e:2x2", "v6e:2x2".
        chips: number of its first chips; sizes of the result are of one of them.
        prompt_rows: of "prefill" alone, the rows R of the prompt chunk [B, R].

    Raises:
        ModuleNotFoundError: libtpu is not installed. ValueError: no such topology, fewer chips in it, a pair
            that is not decoded on several, or ``prompt_rows`` that no prompt chunk has.
        jax.errors.JaxRuntimeError: the program does not fit the chip's HBM or VMEM.
    """
    function, args = STEPS[step](model.pair), _arguments(model, step, prompt_rows)
    with tracing(model.pair.plan.matmul_precision):
        if chips == 1:
            return compile_function(function, *args, topology=topology)
        place = place_of(model, topology, chips)
        return compile_placed(place.step(function), *on_slice(place, *args))


def place_of(model: AbstractPair, topology: str, chips: int) -> OnMesh:
    """The first ``chips`` (two or more) of a topology, with the pair cut over them.

    Raises: as `compile_step`.
    """
    (place,) = places_of(model.pair, model.pair.plan, slice_devices(topology, chips), 1)
    assert isinstance(place, OnMesh)
    return place


def compile_function(step: Any, params: Any, state: Any, *more: Any, topology: str) -> CompiledStep:
    """Compile any ``(params, state, ...) -> state`` or ``(state, ...)`` for one chip, ``state`` donated.

    Arguments are trees of shapes; matrices of ``params`` have the layout of `jax_bridge.weights.layout`.
    Raises: as `compile_step`.
    """
    mesh = Mesh(np.array(find_topology(topology).devices[:1]), ("chip",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    weights = jax.tree.map(partial(shape_at, place=everywhere, by_rows=True), params)
    return compile_placed(step, weights, *jax.tree.map(partial(shape_at, place=everywhere), (state, *more)))


def compile_placed(step: Any, params: Any, state: Any, *more: Any) -> CompiledStep:
    """`compile_function` for the chips in the shardings of the arguments' shapes."""
    args = params, state, *more
    lowered = _jit(step).trace(*args).lower(lowering_platforms=("tpu",))
    started = time.perf_counter()
    with warnings.catch_warnings():
        # A program for an absent chip cannot be read back from the disk cache.
        warnings.filterwarnings("ignore", "Error reading persistent compilation cache")
        compiled = lowered.compile()
    seconds = time.perf_counter() - started
    memory, hlo = compiled.memory_analysis(), compiled.as_text()
    outputs = _paths(state)
    # A pass may return more than the state; the state comes first.
    others = len(jax.tree.leaves(lowered.out_info)) - len(outputs)
    aliases = read_aliases(hlo, _paths(args), outputs + [f"result[{index}]" for index in range(others)])
    return CompiledStep(
        compile_seconds=seconds,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        traffic_bytes=hbm_traffic(Program(hlo)),
        aliases=aliases,
        unaliased=[path for path in outputs if path not in aliases],
        hlo=hlo,
        cost=dict(compiled.cost_analysis()),
    )


def _abstract_params(pair: Pair, dtype: torch.dtype, quantize: str | None) -> Shapes:
    """Shapes by name; ``named_parameters`` gives a tied weight once, as the engine passes it."""
    published = quantize in ("fp8", "mxfp4", "int4")
    rules = rules_of(pair, quantize=None if published else quantize)
    fp8 = rules.linear - rules.latents.keys() if quantize == "fp8" else ()
    coded = {name for name in fp8 if name.startswith("target.")}
    stacks = _stacks(pair, quantize) if published else ()
    block = FP8_BLOCK if quantize == "fp8" else None

    def shapes(name: str, shape: tuple[int, ...]) -> Any:
        if name in coded and not shape[1] % FP8_BLOCK[1]:
            return Blocks.shapes(shape, dtype, FP8_BLOCK)
        if name in stacks:
            return Groups.shapes(shape, dtype, int4=quantize == "int4", block=block)
        return rules.shapes(name, shape, dtype, ABSENT)

    weights = {name: shapes(name, tuple(weight.shape)) for name, weight in pair.named_parameters()}
    return weights | {name: _shape(buffer) for name, buffer in pair.named_buffers()}


def _stacks(pair: Pair, quantize: str) -> set[str]:
    """Names of the target's experts: MXFP4 holds [experts, in, out], int4 and FP8 [experts, out, in]."""
    transposed = quantize == "mxfp4"
    rows, columns = FP8_BLOCK if quantize == "fp8" else (1, GROUP)
    parts = [(f"target.{name}", part) for name, part in pair.target.named_modules()]
    found = {
        f"{name}.{own}"
        for name, part in parts
        if getattr(part, "is_transposed", None) is transposed
        for own, weight in part.named_parameters(recurse=False)
        if weight.ndim == 3
        and not weight.shape[1 if transposed else 2] % columns
        and not weight.shape[2 if transposed else 1] % rows
    }
    if not found and quantize != "fp8":
        raise ValueError(
            f"quantize={quantize!r}: no experts of the target are stored "
            f"[experts, {'in, out' if transposed else 'out, in'}]; leave it out."
        )
    return found


def _with_state(pair: Pair, params: Shapes) -> AbstractPair:
    register_states()
    rows = jax.tree.map(_shape, RowRequests.idle(pair.plan))
    with tracing(pair.plan.matmul_precision):
        return AbstractPair(pair, params, jax.eval_shape(lower_begin(pair), params, rows))


def _shape(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> jax.ShapeDtypeStruct:
    return shape_of(tensor.to("meta", dtype))


def _jit(step: Any) -> Any:
    # keep_unused: parameter numbers in the HLO are then positions in the flattened arguments.
    return jax.jit(step, donate_argnums=1, keep_unused=True)


def _arguments(model: AbstractPair, step: str, prompt_rows: int | None = None) -> tuple:
    more, plan = (), model.pair.plan
    if step == "draft":
        shape, dtype = feature_shape(model.pair), jax.tree.leaves(model.state.cache)[0].dtype
        more = (None if shape is None else jax.ShapeDtypeStruct(shape, dtype),)
    if step == "prefill":
        if prompt_rows is None or prompt_rows != bucket(prompt_rows) or prompt_rows > plan.slots:
            raise ValueError(
                f"prompt_rows={prompt_rows}: prompts are fed in chunks of a power of two of rows, at least "
                f"{MIN_BUCKET} and here at most {plan.slots}; pass one, such as 256."
            )
        more = (jax.tree.map(_shape, idle_chunk(plan, prompt_rows)),)
    return model.params, model.state, *more


def _paths(tree: Any) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


# The two passes split a round's work between target and proposer without a rest, so that the bytes of each
# have a floor: the proposer's pass includes the features that the target's pass returns.
def verify_pass(pair: Pair, state: DecodeState) -> tuple[DecodeState, Tensor | None]:
    """The target on M rows from the anchor, and its picks: (state, tapped features [B, M, n*H])."""
    drafts = read_rows(state.tokens, state.committed, pair.plan.verify_width - 1)
    seen = steps.verify(pair, state, Draft(drafts, state.length * 0))
    tokens = write_rows(state.tokens, seen.picks, state.committed, dim=1)
    return replace(state, cache=seen.cache, tokens=tokens), seen.features


def draft_pass(pair: Pair, state: DecodeState, features: Tensor | None) -> DecodeState:
    """The proposer's part of a round: a draft, then the ``features`` of the rows verified after it."""
    drafted, pstate = steps.draft(pair, state)
    tokens = write_rows(state.tokens, drafted.tokens, state.committed, dim=1)
    ids = read_rows(tokens, state.length, pair.plan.verify_width + 1)
    rows = ids[:, :-1], ids[:, 1:]
    pstate = pair.proposer.verified(pstate, *rows)
    pstate = take_in(pair.proposer.observe, pstate, features, *rows, drafted.valid, pair.target.embed)
    return replace(state, tokens=tokens, proposer=pstate)


STEPS: dict[str, Callable[[Pair], Callable]] = {
    "prefill": lower_prefill,
    "round": lambda pair: lower(partial(decode_round, pair)),
    "chunk": lower_rounds,
    "verify": lambda pair: lower(partial(pair.run, verify_pass)),
    "draft": lambda pair: lower(partial(pair.run, draft_pass)),
}
"""Functions of ``(params, state)``; the state is donated.

``prefill`` also takes a `PromptChunk`, and ``draft`` features (`feature_shape`).
"""


def feature_shape(pair: Pair) -> tuple[int, int, int] | None:
    """[B, M, n*H] of the features for the proposer; None if it taps nothing."""
    taps: Any = pair.proposer.taps
    rows = pair.plan.batch_size, pair.plan.verify_width
    return (*rows, len(taps) * pair.target.hidden_size) if taps else None
