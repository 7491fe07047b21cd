"""torch tensors to JAX arrays and back, for any tree of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.experimental.layout import Format, Layout
from jax.sharding import Sharding

from torch_dflash.guards.processes import check_process

SMALL = 1 << 20
"""Bytes up to which tensors share one transfer."""
_NARROW = {torch.int64: torch.int32, torch.float64: None}


def default_device() -> Any:
    """JAX's default device; each of several processes has its own."""
    check_process("xla")
    return jax.local_devices()[0]


def to_jax(tree: Any, *, copy: bool = True, device: Any | None = None) -> Any:
    """Every torch tensor in ``tree`` as a JAX array on ``device`` (JAX's default).

    int64 becomes int32, even with ``jax_enable_x64`` set; other dtypes stay.

    Args:
        tree: any pytree; leaves that are not tensors stay.
        copy: False gives zero-copy views of CPU tensors where memory allows: read-only, and never to be
            donated, for JAX does not own their memory.

    Raises:
        ValueError: an int64 that does not fit int32, or float64.
    """
    leaves, kind = jax.tree.flatten(tree)
    tensors = [(at, leaf) for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    small = [at for at, leaf in tensors if leaf.nbytes <= SMALL]
    # Small tensors share one transfer; of large ones the host holds one copy at a time.
    for places in (small, *([at] for at, leaf in tensors if leaf.nbytes > SMALL)):
        for at, array in zip(places, _to_jax([leaves[at] for at in places], copy, device), strict=True):
            leaves[at] = array
    return jax.tree.unflatten(kind, leaves)


def to_torch(tree: Any, *, copy: bool = True, device: torch.device | str = "cpu") -> Any:
    """Every JAX array in ``tree`` as a torch tensor on ``device``; dtypes are kept.

    ``copy=False`` gives views of host arrays where memory allows: do not write to them.
    """
    leaf = lambda x: _array_to_torch(x, copy).to(device) if isinstance(x, jax.Array) else x  # noqa: E731
    return jax.tree.map(leaf, tree)


def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a weight on the device, or of the array that `to_jax` would make of a tensor."""
    kind = _dtype(leaf) if isinstance(leaf, torch.Tensor) else leaf.dtype
    with jax.enable_x64(False):
        return jax.ShapeDtypeStruct(tuple(leaf.shape), jax.dtypes.canonicalize_dtype(kind))


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A copy of ``tensor`` on the host, in the dtype that `to_jax` gives it."""
    host = _narrowed(tensor).to("cpu", copy=True, memory_format=torch.contiguous_format)
    return _numpy(host) if host.numel() else np.zeros(host.shape, _dtype(host))


def own_copy(tensor: torch.Tensor, dtype: torch.dtype | None, place: Any) -> jax.Array:
    """A copy of a weight in memory that JAX keeps, row-major on a TPU; never to be donated."""
    kind = dtype or tensor.dtype
    own = tensor.to("cpu", kind, copy=True, memory_format=torch.contiguous_format)
    # Without the wait copies would pile up.
    return row_major(to_jax(own, copy=False, device=place)).block_until_ready()


def row_major_format(place: Sharding, axes: int) -> Format:
    """The row-major format of an array with so many axes at ``place``."""
    return Format(Layout(major_to_minor=tuple(range(axes))), place)


def row_major(array: Any) -> jax.Array:
    """``array``, row-major on a TPU.

    By itself, XLA turns axes there where that needs less padding (gpt-oss: 2,880 is no multiple of 128, its
    90 groups are none of 8), and programs begin with a copy of it that is turned back.
    """
    elsewhere = any(device.platform != "tpu" for device in array.sharding.device_set)
    if elsewhere or array.ndim < 2 or array.format.layout.major_to_minor == tuple(range(array.ndim)):
        return array
    return jax.device_put(array, row_major_format(array.sharding, array.ndim))


def _narrowed(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return _narrow(tensor) if tensor.dtype in _NARROW else tensor


def _to_jax(tensors: list[torch.Tensor], copy: bool, device: Any | None) -> list[jax.Array]:
    target = device or default_device()
    if copy:
        # JAX aliases these copies, and a donated array must be JAX's own allocation. A second transfer makes
        # one without a program to compile. numpy holds the copies meanwhile: memory that JAX holds by DLPack
        # may be freed by a JAX thread when Python ends, and torch then aborts the process.
        hosts = [to_numpy(tensor) for tensor in tensors]
        return jax.device_put(jax.device_put(hosts, target), target, may_alias=False)
    return [_viewed(_narrowed(tensor), target) for tensor in tensors]


def _viewed(tensor: torch.Tensor, target: Any) -> jax.Array:
    host = tensor.cpu().contiguous()
    if not host.numel():
        return jax.device_put(jnp.zeros(host.shape, _dtype(host)), target)
    return jax.device_put(jax.dlpack.from_dlpack(host), target)


def _narrow(tensor: torch.Tensor) -> torch.Tensor:
    narrow = _NARROW[tensor.dtype]
    if narrow is None:
        raise ValueError(
            f"a {tensor.dtype} tensor has no place in XLA's programs, which compute in at most 32 bits; "
            "decode with runtime='eager', or pass model.float() or tensor.float()."
        )
    limits = torch.iinfo(narrow)
    if tensor.numel() and (tensor.min() < limits.min or tensor.max() > limits.max):
        raise ValueError(
            f"int64 from {int(tensor.min())} to {int(tensor.max())} is beyond int32; pass runtime='eager'."
        )
    return tensor.to(narrow)


def _numpy(host: torch.Tensor) -> np.ndarray:
    # Some of these types numpy knows only through JAX.
    return host.flatten().view(torch.uint8).numpy().view(_dtype(host)).reshape(host.shape)


def _dtype(tensor: torch.Tensor) -> np.dtype:
    return jnp.dtype(str(tensor.dtype).removeprefix("torch."))


def _array_to_torch(array: jax.Array, copy: bool) -> torch.Tensor:
    check_process("xla")
    host = jax.device_put(array, jax.local_devices(backend="cpu")[0])
    if not host.size:
        return torch.empty(host.shape, dtype=getattr(torch, host.dtype.name))
    tensor = torch.from_dlpack(host)
    return tensor.clone() if copy else tensor
