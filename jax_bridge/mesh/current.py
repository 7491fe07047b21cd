"""The slice that is being traced for, and functions that run on each chip's part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from jax_bridge.mesh.shape import ALL, KV
from torch_dflash.targets.experts import reading_all_experts

P = PartitionSpec
WHOLE = P()


@dataclass(frozen=True)
class Slice:
    """The mesh of a pair, and the sizes of the arrays that are cut over it.

    Args:
        mesh: of `jax_bridge.mesh.shape.slice_mesh`.
        groups: counts of K/V heads whose caches are cut.
        vocabularies: sizes of the logits that are cut.
        blocks: channels of queries, keys and values of recurrent layers that are cut; empty: they are whole.
        latents: query heads that attend to latents, if they are cut, else 0. Latents are whole on every chip.
    """

    mesh: Mesh
    groups: frozenset[int]
    vocabularies: frozenset[int]
    blocks: tuple[int, ...] = ()
    latents: int = 0

    @contextmanager
    def traced(self) -> Iterator[None]:
        """While open, operations are traced for this slice."""
        token = _current.set(self)
        try:
            with reading_all_experts():
                yield
        finally:
            _current.reset(token)

    def heads(self, groups: int, queries: int = 0) -> tuple[PartitionSpec, PartitionSpec]:
        """Specs of arrays [B, heads, ...] of query heads and of ``groups`` K/V heads.

        Latents are one head; a drafter may have one, too, and ``queries`` tells them apart.
        """
        if groups == 1 and queries and queries == self.latents:
            return P(None, ALL), WHOLE
        cut = groups in self.groups and queries % self.mesh.size == 0
        return (P(None, ALL), P(None, KV)) if cut else (WHOLE, WHOLE)

    def on_parts(self, function: Callable, given: Any, made: Any) -> Callable:
        """``function`` on each chip's part; ``given``, ``made``: specs of its arguments and results."""

        def local(*parts: Any) -> Any:
            token = _current.set(None)  # a chip's part is not cut again
            try:
                return function(*parts)
            finally:
                _current.reset(token)

        return jax.shard_map(local, mesh=self.mesh, in_specs=given, out_specs=made, check_vma=False)


_current: ContextVar[Slice | None] = ContextVar("slice", default=None)


def current() -> Slice | None:
    """The slice that is being traced for; None on one device, and for a chip's part."""
    return _current.get()
