"""Rotary position embedding: inverse frequencies from a checkpoint config, and the rotation.

The scaling rules are those of transformers 5.23 (``modeling_rope_utils``), restated: linear
position interpolation, YaRN (arXiv 2309.00071) and the Llama 3.1 rule.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int


@dataclass(frozen=True)
class Rope:
    """Rotary frequencies of one checkpoint.

    Attributes:
        inv_freq: D/2 angular frequencies in radians per position, float32 values.
        scale: factor on cosine and sine (YaRN's attention temperature), 1.0 otherwise.
    """

    inv_freq: tuple[float, ...]
    scale: float = 1.0


def check_field(fields: Mapping[str, Any], name: str, *known: Any) -> None:
    """Raise ``ValueError`` for a value of ``name`` that would make a wrong parity without an error."""
    if fields.get(name) not in (None, *known):
        raise ValueError(f"{name} is {fields[name]!r}; this reference computes {known}")


def read_rope(raw: Mapping[str, Any], head_dim: int) -> Rope:
    """Rotary frequencies from a config in the old or the new transformers layout.

    Args:
        raw: parsed config.json. ``rope_scaling`` (old layout, next to a top-level ``rope_theta``)
            wins over ``rope_parameters`` (new layout) if the config has both, as in transformers.
        head_dim: D, even.

    Raises:
        ValueError: an unknown kind, a partial rotation, a rope per layer type. KeyError: a missing parameter.
    """
    rope = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError("rope parameters per layer type; this reference has one rope for all layers")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    check_field({"rope_type": kind}, "rope_type", "default", "linear", "yarn", "llama3")
    check_field({**raw, **rope}, "partial_rotary_factor", 1)
    base = rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0
    # NumPy in float32, not jax.numpy: the config stays hashable.
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inv_freq = (1 / np.float32(base) ** exponent).astype(np.float32)
    scale = 1.0
    if kind == "linear":
        inv_freq = inv_freq / np.float32(rope["factor"])
    elif kind == "yarn":
        inv_freq, scale = _yarn(inv_freq, base, head_dim, rope, raw)
    elif kind == "llama3":
        inv_freq = _llama3(inv_freq, rope, raw)
    return Rope(tuple(float(f) for f in inv_freq), float(scale))


def _trained_length(rope: Mapping[str, Any], raw: Mapping[str, Any]) -> int | float:
    """Context length before scaling; in transformers the top-level field wins."""
    name = "original_max_position_embeddings"
    return raw.get(name) or rope.get(name) or raw["max_position_embeddings"]


def _yarn(inv_freq, base, head_dim, rope, raw) -> tuple[np.ndarray, float]:
    trained = _trained_length(rope, raw)
    factor = rope["factor"]
    if factor is None:
        factor = raw["max_position_embeddings"] / trained

    def temperature(weight: int | float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    scale = rope.get("attention_factor")
    if scale is None:
        weight, weight_all = rope.get("mscale"), rope.get("mscale_all_dim")
        if weight and weight_all:
            scale = temperature(weight) / temperature(weight_all)
        else:
            scale = temperature()

    def index_of(rotations: int | float) -> float:
        """Index of the frequency with this many turns over the trained length."""
        return head_dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = index_of(rope.get("beta_fast") or 32), index_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # Equal bounds would divide by zero; transformers widens the ramp by the same amount.
    width = (high - low) or 0.001
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(width)
    interpolated = np.clip(ramp, 0, 1)
    return inv_freq / np.float32(factor) * interpolated + inv_freq * (1 - interpolated), scale


def _llama3(inv_freq, rope, raw) -> np.ndarray:
    factor = np.float32(rope["factor"])
    low = np.float32(rope["low_freq_factor"])
    high = np.float32(rope["high_freq_factor"])
    turns = np.float32(_trained_length(rope, raw)) * inv_freq / np.float32(2 * math.pi)
    # Frequencies of few turns over the trained length are stretched, those of many kept; between, linearly.
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - kept) * inv_freq / factor + kept * inv_freq


def rotary_tables(
    rope: Rope, positions: Int[Array, "B S"], dtype: DTypeLike
) -> tuple[Float[Array, "B 1 R D"], Float[Array, "B 1 R D"]]:
    """Cosine and sine per position, computed in float32, returned in ``dtype``."""
    angles = positions.astype(jnp.float32)[:, None, :, None] * jnp.array(rope.inv_freq, jnp.float32)
    angles = jnp.concatenate([angles, angles], axis=-1)
    return ((jnp.cos(angles) * rope.scale).astype(dtype), (jnp.sin(angles) * rope.scale).astype(dtype))


def rotate(
    heads: Float[Array, "B heads R D"], cos: Float[Array, "B 1 R D"], sin: Float[Array, "B 1 R D"]
) -> Float[Array, "B heads R D"]:
    """Rotates dimension i with dimension i + D/2 (the half-split pairing of Hugging Face)."""
    first, second = jnp.split(heads, 2, axis=-1)
    return heads * cos + jnp.concatenate([-second, first], axis=-1) * sin
