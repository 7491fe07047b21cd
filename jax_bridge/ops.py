"""How torch_dflash's few special operations lower: windowed cache writes and a device-side branch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jax_bridge._torchax import call_jax, environment
from torch_dflash.control import branch
from torch_dflash.rows import write_rows

UNROLLED_ROWS = 8


def write_rows_jax(buffer: Array, rows: Array, start: Int[Array, " B"], dim: int) -> Array:
    """One ``dynamic_update_slice`` per batch row (`torch_dflash.rows.write_rows`).

    Not a vmap: JAX batches ``dynamic_update_slice`` into a scatter, which TPUs run element by element.
    """
    rows = rows.astype(buffer.dtype)

    def write_one(row: Array, buffer: Array) -> Array:
        at = [jnp.int32(0)] * buffer.ndim
        at[0], at[dim] = jnp.int32(row), start[row].astype(jnp.int32)
        return jax.lax.dynamic_update_slice(buffer, jax.lax.dynamic_slice_in_dim(rows, row, 1, axis=0), at)

    return jax.lax.fori_loop(0, buffer.shape[0], write_one, buffer, unroll=UNROLLED_ROWS)


def _write_rows(buffer, rows, start, dim):
    return call_jax(write_rows_jax, buffer, rows, start, dim)


def _branch(condition, then, otherwise, *operands):
    return call_jax(jax.lax.cond, condition, then, otherwise, *operands)


def register() -> None:
    """Teach torchax's environment the lowerings."""
    environment().override_op_definition(write_rows, _write_rows)
    environment().override_op_definition(branch, _branch)


register()
