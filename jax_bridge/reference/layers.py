"""What every layer has besides attention: RMSNorm, SwiGLU, linear maps.

Every part takes the flat parameter mapping and the checkpoint name of its tensors.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.lax import Precision
from jaxtyping import Array, Float

Params = Mapping[str, jax.Array]


def linear(params: Params, name: str, rows: Float[Array, "B R in"]) -> Float[Array, "B R out"]:
    """``rows @ weight.T``, plus the bias where the checkpoint has one."""
    out = jnp.einsum("...i,oi->...o", rows, params[f"{name}.weight"], precision=Precision.HIGHEST)
    bias = params.get(f"{name}.bias")
    return out if bias is None else out + bias


def rms_norm(params: Params, name: str, rows: Float[Array, "*rows D"], eps: float) -> Float[Array, "*rows D"]:
    """RMSNorm over the last axis in float32; the weight multiplies in the input's dtype."""
    wide = rows.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return params[f"{name}.weight"] * wide.astype(rows.dtype)


def swiglu(params: Params, name: str, rows: Float[Array, "B W H"]) -> Float[Array, "B W H"]:
    """Gated MLP: down(silu(gate(x)) * up(x))."""
    gate = jax.nn.silu(linear(params, f"{name}.gate_proj", rows))
    return linear(params, f"{name}.down_proj", gate * linear(params, f"{name}.up_proj", rows))
