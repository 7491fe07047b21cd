"""A weight that lies in parts, and what it does in a program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jax_bridge.forms import OfOneArray
from jax_bridge.mesh.shape import ALL

COLUMN, ROW, GATHER, EXPERTS = "column", "row", "gather", "experts"


class Way(NamedTuple):
    """How a weight lies on a mesh, and what its product exchanges.

    ``kind``: "column" (outputs stay where they are computed), "row" (inputs are there, outputs are summed),
    "gather" (outputs are gathered), "experts" (each chip has experts of its own); None: no product is made
    of it on its own.
    """

    mesh: Mesh
    spec: PartitionSpec = PartitionSpec()
    kind: str | None = None

    @property
    def place(self) -> NamedSharding:
        """Where its parts lie."""
        return NamedSharding(self.mesh, self.spec)

    def on_parts(self, local: Callable, given: Any, made: Any) -> Callable:
        """``local`` on each chip's part of its arguments; ``given``, ``made``: specs of both."""
        return jax.shard_map(local, mesh=self.mesh, in_specs=given, out_specs=made, check_vma=False)


@partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["way"])
@dataclass(frozen=True, eq=False)
class Cut(OfOneArray):
    """A weight whose products are written out, so that XLA has no choice of what to exchange.

    A form of `jax_bridge.forms.StoredWeight`.
    """

    array: Any  # a jax.Array over the mesh, or what JAX puts in its place while it traces
    way: Way

    def look_up(self, ids: Int[Array, "*R"]) -> Float[Array, "*R H"]:
        """Rows of a table [V, H] that is cut over the vocabulary: each comes from the chip that has it."""

        def local(table: Array, ids: Array) -> Array:
            count = table.shape[0]
            at = ids - jax.lax.axis_index(ALL) * count
            rows = jnp.take(table, jnp.clip(at, 0, count - 1), axis=0)
            own = ((at >= 0) & (at < count))[..., None]
            return jax.lax.psum(jnp.where(own, rows, 0), ALL)

        whole = PartitionSpec()
        return self.way.on_parts(local, (self.way.spec, whole), whole)(self.array, ids)
