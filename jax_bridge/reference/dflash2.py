"""The parts that DFlash2 adds to a drafter: convolutions, and a selector after the head.

Both parts do nothing if the config has no ``dflash2``, so each pass is written once.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.lax import Precision
from jaxtyping import Array, Float, Int

from jax_bridge.reference.attention import Params, linear
from jax_bridge.reference.config import DrafterConfig

SELECTOR = "candidate_selector"


def convolved(
    params: Params, config: DrafterConfig, name: str, rows: Float[Array, "B W H"]
) -> tuple[Float[Array, "B W H"], Callable]:
    """(The sublayer's input, the function for its output) of the convolution ``name``."""
    if config.dflash2 is None:
        return rows, lambda out: out
    taps, group = config.dflash2.conv_kernel_size, config.dflash2.conv_group_size
    dynamic = linear(params, f"{name}.kernel_projection", rows)
    dynamic = dynamic.reshape(*rows.shape[:2], 2, taps, -1)
    kernels = params[f"{name}.base_kernel"] + jnp.repeat(dynamic, group, axis=-1)  # [B, W, 2, taps, H]

    def convolve(rows: Array, side: int) -> Array:
        shifted = [jnp.pad(rows, ((0, 0), (back, 0), (0, 0)))[:, : rows.shape[1]] for back in range(taps)]
        return jnp.einsum("bwth,tbwh->bwh", kernels[:, :, side], jnp.stack(shifted))

    return convolve(rows, 0), lambda out: convolve(out, 1)


def choose(
    params: Params,
    config: DrafterConfig,
    hidden: Float[Array, "B N H"],
    scores: Float[Array, "B N V"],
    anchor: Int[Array, " B"],
) -> Int[Array, "B N"]:
    """The draft of each row: the row's best token, or the selector's choice given the draft before."""
    if config.dflash2 is None:
        return jnp.argmax(scores, axis=-1).astype(jnp.int32)
    value, token = jax.lax.top_k(scores, config.dflash2.selector_top_k)
    state = linear(params, f"{SELECTOR}.hidden_projection", hidden)
    before, after = (params[f"{SELECTOR}.{name}_codebook"] for name in ("predecessor", "successor"))

    def step(previous, row):
        value, token, state = row
        bonus = jnp.einsum(
            "br,br,bkr->bk", before[previous], state, after[token], precision=Precision.HIGHEST
        )
        best = jnp.argmax(value + bonus, axis=-1)
        chosen = token[jnp.arange(token.shape[0]), best]
        return chosen, chosen

    rows = (jnp.moveaxis(array, 1, 0) for array in (value, token, state))
    _, drafts = jax.lax.scan(step, anchor.astype(token.dtype), tuple(rows))
    return jnp.moveaxis(drafts, 0, 1).astype(jnp.int32)
