"""Converts a user's state to the runtime's and back; on a CPU the runtime keeps caches in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import torch

from jax_bridge.arrays import to_jax
from jax_bridge.programs.lower import Programs
from jax_bridge.state import check_alive, widened
from torch_dflash.checks import check_dtype
from torch_dflash.plan import DecodePlan
from torch_dflash.rows import RowRequests
from torch_dflash.state import DecodeState


class StateDtypes:
    """States in the models' types outside of a runtime, and in the steps' types inside.

    Args:
        begin: ``(params, rows) -> state`` in the models' types.
        plan: of the states. programs: compiles the conversions.
        wide: the steps keep caches in float32 (`jax_bridge.state.widened`).
    """

    def __init__(self, begin: Callable, plan: DecodePlan, programs: Programs, wide: bool):
        self._begin, self._plan, self._programs, self._wide = begin, plan, programs, wide
        self._known: dict[Any, tuple[DecodeState, DecodeState]] = {}
        self._latest: tuple[Any, Any] = object(), None  # weights, and the shapes of their states

    def begin(self, params: Any, rows: RowRequests) -> DecodeState:
        """An empty state in the steps' types. To be traced."""
        state = self._begin(params, rows)
        return widened(state) if self._wide else state

    def import_state(self, params: Any, state: DecodeState) -> DecodeState:
        """A user's state in the steps' types; consumes it.

        Raises:
            ValueError: it was consumed before, is of another plan or proposer, or a model was cast to another
            type since it was made. TypeError: it holds torch tensors.
        """
        check_alive(state)
        own, kept_as = self._shapes_of(params)
        if jax.tree.structure(state) != jax.tree.structure(own) or _shapes(state) != _shapes(own):
            raise ValueError(
                "the state is one of another plan or proposer than this engine's; go on with the engine that "
                "made it, or with one compiled alike."
            )
        if any(isinstance(leaf, torch.Tensor) for leaf in jax.tree.leaves(state)):
            raise TypeError("the state holds torch tensors; pass jax_bridge.state_to_jax(state).")
        for what, kept, now in (
            ("target", state.cache, own.cache),
            ("drafter", state.proposer, own.proposer),
        ):
            for pair in zip(jax.tree.leaves(kept), jax.tree.leaves(now), strict=False):
                check_dtype(what, *(getattr(torch, str(leaf.dtype)) for leaf in pair))
        return self._cast(state, kept_as) if self._wide else state

    def export_state(self, params: Any, state: DecodeState) -> DecodeState:
        """A state of the steps in the models' types; consumes it."""
        return self._cast(state, self.shapes(params)) if self._wide else state

    def release(self) -> None:
        """Hold no weights."""
        self._latest = object(), None

    def shapes(self, params: Any) -> DecodeState:
        """The shapes of a user's empty state; ``params`` may be shapes too."""
        return self._shapes_of(params)[0]

    def _shapes_of(self, params: Any) -> tuple[DecodeState, DecodeState]:
        """`shapes`, and those of the same state in the steps' types."""
        latest, found = self._latest
        if latest is params:  # weights come in the same dict while none changes
            return found
        key = tuple((name, str(leaf.dtype)) for name, leaf in params.items())
        if key not in self._known:
            rows = to_jax(RowRequests.idle(self._plan))
            own = self._programs.shapes(self._begin, (params, rows))
            self._known[key] = own, jax.eval_shape(widened, own) if self._wide else own
        self._latest = params, self._known[key]
        return self._known[key]

    def _cast(self, state: DecodeState, like: DecodeState) -> DecodeState:
        leaves, kind = jax.tree.flatten(state)
        wanted = [leaf.dtype for leaf in jax.tree.leaves(like)]
        other = [at for at, leaf in enumerate(leaves) if leaf.dtype != wanted[at]]
        if other:
            given, types = [leaves[at] for at in other], [wanted[at] for at in other]
            name = f"the state in {', '.join(sorted(map(str, set(types))))}"
            made = self._programs.get(name, partial(_converted, types), (given,))(given)
            for at, new in zip(other, made, strict=True):
                if isinstance(leaves[at], jax.Array):
                    leaves[at].delete()
                leaves[at] = new
        return jax.tree.unflatten(kind, leaves)


def _shapes(state: DecodeState) -> list[tuple[int, ...]]:
    return [tuple(leaf.shape) for leaf in jax.tree.leaves(state)]


def _converted(types: list, arrays: list[jax.Array]) -> list[jax.Array]:
    return [array.astype(kind) for array, kind in zip(arrays, types, strict=True)]
