"""tpu-inference 0.32.0 on CPUs: stand-ins for a TPU's answers, and its attention kernel in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np


def apply():
    import tpu_inference.layers.common.attention_interface as attention
    import tpu_inference.layers.vllm.quantization.unquantized as linear
    import tpu_inference.runner.tpu_runner as runner
    import tpu_inference.utils as utils

    utils.make_optimized_mesh = runner.make_optimized_mesh = mesh
    utils.get_device_name = lambda count=None: "TPU v6e"
    utils.hbm_usage_bytes = lambda devices: [(0, 1 << 30) for _ in devices]
    attention.ragged_paged_attention = attention.ragged_paged_attention_hd64 = ragged_paged_attention
    # It loads no PyTorch target in float32: `resize_` cannot free a weight with a NumPy view.
    load = linear.t2j
    linear.t2j = lambda tensor, **options: load(tensor.clone(), **options)


def mesh(axis_shapes, axis_names, *, devices=None):
    devices = jax.devices() if devices is None else devices
    count = int(np.prod(axis_shapes))
    return jax.sharding.Mesh(np.array(devices[:count]).reshape(axis_shapes), axis_names)


def ragged_paged_attention(
    q, k, v, pages, lengths, tables, starts, distribution, sink=None, *rest, sm_scale=1.0,
    sliding_window=None, soft_cap=None, update_kv_cache=True, use_causal_mask=True, **unused,
):  # fmt: skip
    """The kernels' contract, over whole tables; heads of 64 have a kernel of their own, and pages of k|v."""
    from tpu_inference.kernels.ragged_paged_attention.v3 import kernel, kernel_hd64

    rows, heads, dim = q.shape
    requests, size, groups = lengths.shape[0], pages.shape[1], k.shape[1]
    merge_kv, width = (kernel_hd64.merge_kv, dim) if dim == 64 else (kernel.merge_kv, pages.shape[-1])
    table = tables.reshape(requests, -1)
    at = jnp.arange(rows)
    owner = jnp.clip(jnp.searchsorted(starts[1:], at, side="right"), 0, requests - 1)
    valid = at < starts[distribution[2]]
    position = lengths[owner] - (starts[owner + 1] - starts[owner]) + at - starts[owner]
    position = jnp.where(valid, position, 0)
    if update_kv_cache:
        page = jnp.where(valid, table[owner, position // size], pages.shape[0])
        pages = pages.at[page, position % size].set(merge_kv(k, v).astype(pages.dtype), mode="drop")
    all_rows = pages[table].reshape(requests, table.shape[1] * size, -1, width)[:, :, : 2 * groups]
    all_rows = all_rows.reshape(requests, -1, groups, 2, width)[owner, ..., :dim].astype(jnp.float32)
    keys, values = all_rows[..., 0, :], all_rows[..., 1, :]
    grouped = q.reshape(rows, groups, heads // groups, dim).astype(jnp.float32)
    scores = jnp.einsum("tkgd,tlkd->tkgl", grouped, keys) * sm_scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    key_at = jnp.arange(keys.shape[1])[None]
    seen = key_at < lengths[owner][:, None]
    if use_causal_mask:
        seen &= key_at <= position[:, None]
    if sliding_window is not None:
        seen &= key_at > position[:, None] - sliding_window
    scores = jnp.where(seen[:, None, None], scores, -1e30)
    if sink is not None:
        sink = jnp.broadcast_to(sink.astype(jnp.float32).reshape(groups, -1, 1), (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, sink], -1)
    weights = jax.nn.softmax(scores, -1)[..., : keys.shape[1]]
    mixed = jnp.einsum("tkgl,tlkd->tkgd", weights, values).reshape(rows, heads, dim)
    return jnp.where(valid[:, None, None], mixed, 0).astype(q.dtype), pages
