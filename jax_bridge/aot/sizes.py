"""A pair's bytes on one chip: arrays, and temporaries of programs."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from jax_bridge.aot.compile import (
    AbstractPair,
    CompiledStep,
    abstract_pair,
    compile_step,
    place_of,
    resized,
)
from jax_bridge.aot.floor import Shapes
from jax_bridge.aot.shapes import find_topology
from jax_bridge.aot.traffic import Laid, Unfilled
from jax_bridge.device_memory import bytes_of
from torch_dflash.plan import DecodePlan
from torch_dflash.requests.options import LARGEST_CHUNK
from torch_dflash.requests.prompts import bucket
from torch_dflash.targets.truncate import keep_layers

PROGRAMS = ("chunk", "prefill")
"""The largest programs: the loop over rounds, and a prompt's largest chunk."""
HELD = ("target_weights", "drafter_weights", "cache", "drafter_state", "rest")


class Size(NamedTuple):
    """Rows, and positions that each row may fill."""

    batch: int
    context: int

    @property
    def fields(self) -> dict[str, int]:
        """The two as fields of a `DecodePlan`."""
        return {"batch_size": self.batch, "capacity": self.context}


@dataclass(frozen=True)
class Spread:
    """A ``whole`` pair on the first ``chips`` of a topology, and one of ``few`` layers to compile."""

    whole: AbstractPair
    few: AbstractPair
    topology: str
    chips: int

    def held(self, size: Size, laid: Laid | Unfilled) -> dict[str, int]:
        """Bytes on one chip by `HELD`, from shapes alone, with the padding of ``laid``."""
        params, state = _share(resized(self.whole, **size.fields), self.topology, self.chips)
        weights = {f"{kind}_weights": part for kind, part in _by_model(params).items()}
        rest = replace(state, cache=(), proposer=(), page_table=None)
        parts = weights | {"cache": (state.cache, state.page_table), "drafter_state": state.proposer}
        return {kind: laid.of(part) for kind, part in (parts | {"rest": rest}).items()}

    def compiled(self, size: Size, program: str, whole: bool = False) -> CompiledStep:
        """One of `PROGRAMS` for rows and positions of this size.

        Raises: as `jax_bridge.aot.compile.compile_step`.
        """
        model = resized(self.whole if whole else self.few, **size.fields)
        rows = prompt_rows(model.pair.plan) if program == "prefill" else None
        return compile_step(model, program, topology=self.topology, chips=self.chips, prompt_rows=rows)

    def laid(self, size: Size, step: CompiledStep) -> Laid:
        """The compiler's padding of the arguments of a compiled "chunk" of ``few``."""
        return Laid(step.hlo, _share(resized(self.few, **size.fields), self.topology, self.chips))

    @property
    def weights(self) -> dict[str, int]:
        """Bytes of target and drafter, uncut."""
        return {kind: bytes_of(part) for kind, part in _by_model(self.whole.params).items()}

    @property
    def layers(self) -> int:
        """Number of the target's layers in ``few``."""
        return len(self.few.pair.target.specs)


def spread(
    target: PreTrainedConfig, drafter: Any, size: Size, topology: str, chips: int, **plan: Any
) -> Spread:
    """`Spread` of a pair by its configs; arguments as in `jax_bridge.aot.compile.abstract_pair`."""
    whole = abstract_pair(target, drafter, **size.fields, **plan)
    configs = copy.deepcopy((target, drafter))
    keep_layers(*configs, enough_layers(whole))
    return Spread(whole, abstract_pair(*configs, **size.fields, **plan), topology, chips)


def enough_layers(model: AbstractPair) -> int:
    """The fewest first layers of the target with every kind of layer, and one per tap."""
    shapes: dict[int, list] = defaultdict(list)
    for name, leaf in model.params.items():
        found = re.search(r"\.(\d+)\.(.*)", name)
        if found and name.startswith("target."):
            shapes[int(found[1])].append((found[2], leaf.shape))
    specs = model.pair.target.specs
    kinds = [(spec, tuple(sorted(shapes[at]))) for at, spec in enumerate(specs)]
    last = max(kinds.index(kind) for kind in set(kinds)) + 1
    return min(len(specs), max(last, len(set(model.pair.proposer.taps or ())), 2))


def prompt_rows(plan: DecodePlan) -> int:
    """Rows of the largest prompt chunk."""
    largest = bucket(plan.slots)
    return min(LARGEST_CHUNK, largest if largest == plan.slots else largest // 2)


def temporaries(step: CompiledStep) -> int:
    """Bytes on a chip besides the arguments while the step runs, results that are not in place included."""
    return step.temp_bytes + step.output_bytes - step.alias_bytes


def needed(held: dict[str, int], spent: float) -> int:
    """Total bytes."""
    return sum(held.values()) + round(spent)


def _by_model(params: Shapes) -> dict[str, Shapes]:
    parts = {"target": "target.", "drafter": "proposer."}
    return {
        kind: {name: leaf for name, leaf in params.items() if name.startswith(prefix)}
        for kind, prefix in parts.items()
    }


def _share(model: AbstractPair, topology: str, chips: int) -> tuple[Any, Any]:
    """One chip's part of weights and state, as shapes."""
    if chips == 1:
        return model.params, model.state
    return place_of(model, topology, chips).share(model.params, model.state)


HBM = {
    name: int(size * 2**30) for name, size in {"v4": 15.25, "v5e": 15.75, "v5p": 95.74, "v6e": 31.25}.items()
}
"""The compiler's limit in bytes for a program on a device: a chip, for v4 a core. Checked in `tests/aot`."""
FLAT = ("2x2", "2x4", "4x4", "4x8", "8x8")
SLICES = {"v5e": FLAT, "v6e": FLAT, "v5p": ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4")}
"""By generation, smallest first."""


def smallest_slices(
    pair: Spread, size: Size, laid: Laid | Unfilled, spent: int
) -> dict[str, dict[str, Any] | None]:
    """By generation the smallest slice, or chip, that fits ``size``; None: none of those tried.

    ``spent``: bytes of temporaries, taken to be equal everywhere.
    """
    return {generation: _smallest(generation, pair, size, laid, spent) for generation in SLICES}


def _smallest(
    generation: str, pair: Spread, size: Size, laid: Laid | Unfilled, spent: int
) -> dict[str, Any] | None:
    hbm = HBM[generation]
    alone = needed(replace(pair, chips=1).held(size, laid), 0)
    for topology, chips in _tried(generation):
        if alone > chips * hbm:
            continue  # too large even if everything could be cut
        try:
            held = replace(pair, topology=topology, chips=chips).held(size, laid)
        except ValueError as error:  # a pair that is not decoded on several
            return {"refused": str(error)}
        if needed(held, spent) <= hbm:
            return {
                "topology": topology,
                "chips": chips,
                "needed_bytes": needed(held, spent),
                "hbm_bytes": hbm,
            }
    return None


def _tried(generation: str) -> list[tuple[str, int]]:
    """(Topology, chips): the first chip alone, then whole slices."""
    names = [f"{generation}:{shape}" for shape in SLICES[generation]]
    return [(names[0], 1), *((name, len(find_topology(name).devices)) for name in names)]
