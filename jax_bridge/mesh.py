"""Where each weight of a target lies on a mesh of devices: by its name, the way Megatron cuts layers."""

from __future__ import annotations

import re

from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "model"
# Name of the layer -> the dimension of its weight [out, in] that is cut. What a column-cut layer gives, a
# row-cut one takes: between the two nothing is exchanged.
_COLUMNS = re.compile(r"\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.(weight|bias)$")
_ROWS = re.compile(r"\.(o_proj|down_proj)\.weight$")
_VOCABULARY = re.compile(r"(^|\.)(embed_tokens|lm_head)\.(weight|bias)$")


def check_mesh(mesh: Mesh) -> None:
    """Raise unless ``mesh`` is a mesh with an axis "model"."""
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh={type(mesh).__name__}: pass a jax.sharding.Mesh with an axis {AXIS!r}.")
    if AXIS not in mesh.axis_names:
        raise ValueError(f"mesh has the axes {mesh.axis_names}: one must be called {AXIS!r}.")


def sharding(name: str, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """The sharding of the weight ``name`` of ``shape`` over the mesh's axis "model".

    Query, key, value, gate and up projections are cut by outputs, output and down projections by inputs,
    embedding and head by the vocabulary. All else is on every device, as is what does not divide evenly,
    and the experts of a mixture.
    """
    dim = 1 if _ROWS.search(name) else 0 if _COLUMNS.search(name) or _VOCABULARY.search(name) else None
    if dim is None or shape[dim] % mesh.shape[AXIS]:
        return NamedSharding(mesh, PartitionSpec())
    return NamedSharding(mesh, PartitionSpec(*[None] * dim, AXIS))
