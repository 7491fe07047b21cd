"""A weight that lies in parts, and what it does in a program."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

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


@partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["way"])
@dataclass(frozen=True, eq=False)
class Cut:
    """A weight whose products are written out, so that XLA has no choice of what to exchange.

    A form of `jax_bridge.forms.StoredWeight`.
    """

    array: Any  # a jax.Array over the mesh, or what JAX puts in its place while it traces
    way: Way

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def unwrap(self) -> jax.Array:
        return self.array

    def look_up(self, ids: Int[Array, "*R"]) -> Float[Array, "*R H"]:
        """Rows of a table [V, H] that is cut over the vocabulary: each comes from the chip that has it."""

        def local(table: Array, ids: Array) -> Array:
            count = table.shape[0]
            at = ids - jax.lax.axis_index(ALL) * count
            rows = jnp.take(table, jnp.clip(at, 0, count - 1), axis=0)
            own = ((at >= 0) & (at < count))[..., None]
            return jax.lax.psum(jnp.where(own, rows, 0), ALL)

        whole = PartitionSpec()
        given = self.way.spec, whole
        return jax.shard_map(local, mesh=self.way.mesh, in_specs=given, out_specs=whole, check_vma=False)(
            self.array, ids
        )
