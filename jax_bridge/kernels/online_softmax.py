"""The running softmax of the kernels: keys come a block at a time, and no score outlives its block."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from torch_dflash.ops.paged_attention import LANES

LOWEST = -1e30
VMEM = 64 << 20  # bytes a kernel may use: all that a v5p core has


class SoftmaxRefs(NamedTuple):
    """Refs on the chip: per K/V head and query row the largest score, the weights' sum, the weighted values.

    Shapes: ``top`` and ``total`` [own, rows, lanes], the same in every lane; ``sums`` [own, rows, Dv].
    """

    top: Any
    total: Any
    sums: Any

    def begin(self, first: Any) -> None:
        """Reset to ``first`` [own, rows, 1]: a sink's logit, or `LOWEST` for none."""
        self.top[...] = jnp.broadcast_to(first, self.top.shape)
        # A sink takes part in the softmax, without a value.
        self.total[...] = jnp.where(self.top[...] > LOWEST, 1.0, 0.0)
        self.sums[...] = jnp.zeros_like(self.sums)

    def add(
        self,
        head: int,
        query: Any,
        key: Any,
        value: Any,
        seen: Any,
        scale: float,
        softcap: float | None = None,
        turned: bool = False,
    ) -> None:
        """Add keys and values [keys, D] of one head (``turned``: [D, keys]) under the mask [rows, keys]."""
        score = product(query, key, 0 if turned else 1) * scale
        if softcap is not None:
            score = jnp.tanh(score / softcap) * softcap
        score = jnp.where(seen, score, LOWEST)
        before = self.top[head][:, :1]
        peak = jnp.maximum(before, jnp.max(score, axis=1, keepdims=True))
        weight = jnp.where(seen, jnp.exp(score - peak), 0.0)
        fade = jnp.exp(before - peak)
        added = jnp.sum(weight, axis=1, keepdims=True)
        self.total[head] = jnp.broadcast_to(self.total[head][:, :1] * fade + added, self.total.shape[1:])
        self.top[head] = jnp.broadcast_to(peak, self.top.shape[1:])
        self.sums[head] = self.sums[head] * fade + product(weight.astype(value.dtype), value, int(turned))

    def result(self, head: int) -> Any:
        """The attention's output [rows, Dv] in float32."""
        return self.sums[head] / self.total[head][:, :1]

    def part(self, head: int) -> Any:
        """The result of half of the keys, for `joined`: float32 [rows, LANES + Dv], log-sum in LANES, output.

        A half without keys has `LOWEST`, and zeros.
        """
        total = jnp.where(self.total[head] > 0, self.total[head], 1.0)
        logsum = self.top[head] + jnp.log(total)
        return jnp.concatenate([logsum, self.sums[head] / total[:, :1]], axis=1)


def joined(parts: jax.Array, dtype: Any) -> jax.Array:
    """The output [B, G, ..., rows, Dv] of both halves' `SoftmaxRefs.part`, [B, 2 * G, ..., rows, LANES + Dv].

    The second half has keys. No lane leaves its tile: XLA would transpose everything for that.
    """
    first, second = jnp.split(parts, 2, axis=1)
    dim = parts.shape[-1] - LANES
    share = jax.nn.sigmoid(second[..., :LANES] - first[..., :LANES])
    share = jnp.concatenate([share] * -(-dim // LANES), axis=-1)[..., :dim]
    return (first[..., LANES:] * (1 - share) + second[..., LANES:] * share).astype(dtype)


def product(left: Any, right: Any, axis: int) -> jax.Array:
    """``left`` [a, k] times ``right``, contracted over its ``axis``, summed in float32."""
    # bfloat16 products are exact in one pass; float32 needs all six.
    precision = jax.lax.Precision.HIGHEST if right.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dims = (((1,), (axis,)), ((), ()))
    return jax.lax.dot_general(left, right, dims, precision=precision, preferred_element_type=jnp.float32)
