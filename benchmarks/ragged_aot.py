"""Bytes of the verify pass with jax's own ragged_paged_attention in the place of this library's kernel.

No TPU, no weights; libtpu compiles for one v5p chip::

    PYTHONPATH=.venv/libtpu python benchmarks/ragged_aot.py --json docs/results/ragged_aot.json

jax's kernel reads pages [page, 2 G, D] and leaves the writing to its caller, which here is one
``dynamic_update_slice`` per new row. Everything else of the pass is the same.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.sharding import Mesh
from transformers import AutoConfig

from jax_bridge._torchax import call_jax, environment
from jax_bridge.aot import compile as aot
from jax_bridge.aot.floor import floor_of
from jax_bridge.ops import _paged_attention
from torch_dflash.cache.paged import PagedLayer
from torch_dflash.cli.outputs import write_results
from torch_dflash.ops.paged_attention import paged_attention
from torch_dflash.proposers.dflash.config import DFlashConfig

TOPOLOGY, CONTEXT = "v5p:2x2x1", 4096
CONFIGS = Path(__file__).parent / "configs"


def allocate(spec, plan, dtype, device) -> PagedLayer:
    """Pages as jax's kernel reads them: K and V heads in turns."""
    shape = (plan.pages, plan.page_size, 2 * spec.heads, spec.k_dim)
    return PagedLayer(torch.zeros(shape, dtype=dtype, device=device))


def attend(inputs, pages):
    """`paged_attention` by jax's kernel."""
    return call_jax(attend_jax, inputs, pages)


def attend_jax(inputs, pages):
    """Row by row into the pages, then one call over all sequences."""
    (query, key, value, start), (pool, table) = inputs[:4], pages
    batch, heads, rows, dim = query.shape
    fresh = jnp.stack([key, value], axis=2).reshape(batch, -1, rows, dim).transpose(0, 2, 1, 3)
    page = pool.shape[1]

    def write(index, pool):
        b, row = index // rows, index % rows
        at = start[b] + row
        return jax.lax.dynamic_update_slice(
            pool, fresh[b, row][None, None].astype(pool.dtype), (table[b, at // page], at % page, 0, 0)
        )

    pool = jax.lax.fori_loop(0, batch * rows, write, pool)
    flat = query.transpose(0, 2, 1, 3).reshape(batch * rows, heads, dim)
    out = ragged_paged_attention(
        flat,
        pool,
        start + rows,
        table,
        jnp.arange(batch + 1, dtype=jnp.int32) * rows,
        jnp.array([batch], jnp.int32),
        sm_scale=inputs.scale,
        sliding_window=inputs.window,
        soft_cap=inputs.softcap,
        num_kv_pages_per_block=8,
        num_queries_per_block=min(32, batch * rows),
        vmem_limit_bytes=64 << 20,
    )
    return out.reshape(batch, rows, heads, dim), pool


def verify(rows: int, layers: int, ragged: bool) -> dict:
    """One compiled verify pass of Qwen3-4B's dimensions."""
    target = AutoConfig.from_pretrained(CONFIGS / "qwen3-4b")
    drafter = DFlashConfig.from_pretrained(CONFIGS / "qwen3-4b-dflash")
    target.num_hidden_layers = drafter.num_target_layers = layers
    drafter.target_layer_ids = [layer * (layers - 1) // 4 for layer in range(5)]
    with ExitStack() as swapped:
        if ragged:
            # The kernel asks at trace time which chip it is on.
            devices = list(aot.find_topology(TOPOLOGY).devices)
            swapped.enter_context(mock.patch.object(PagedLayer, "allocate", allocate))
            environment().override_op_definition(paged_attention, attend)
            swapped.callback(environment().override_op_definition, paged_attention, _paged_attention)
            swapped.enter_context(jax.set_mesh(Mesh(np.array(devices[:1]), ("chip",))))
            swapped.enter_context(mock.patch.object(jax, "devices", lambda *_, **__: devices))
        model = aot.abstract_pair(
            target,
            drafter,
            capacity=CONTEXT,
            block_size=max(rows, 16),
            verify_width=rows,
            cache="paged",
            matmul_precision="default",  # jax's kernel refuses "highest" with bfloat16
        )
        compiled = aot.compile_step(model, "verify", topology=TOPOLOGY)
    floor = floor_of(model.pair, model.params, CONTEXT).verify
    return {
        "kernel": "jax ragged_paged_attention" if ragged else "paged_attention",
        "rows": rows,
        "layers": layers,
        "verify_hbm_bytes": compiled.traffic_bytes,
        "verify_floor_bytes": floor,
        "ratio": compiled.traffic_bytes / floor,
        "temp_bytes": compiled.temp_bytes,
        "compile_seconds": compiled.compile_seconds,
    }


def main() -> None:
    """Compile both kernels at each width and print their bytes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    for rows in options.rows:
        for ragged in (True, False):
            results.append(verify(rows, options.layers, ragged))
            line = results[-1]
            print(
                f"{line['kernel']:28}{rows:4} rows {line['verify_hbm_bytes'] / 1e9:8.3f} GB "
                f"{line['ratio']:6.3f} of the floor, {line['temp_bytes'] / 1e6:.1f} MB of temporaries",
                flush=True,
            )
    if options.json:
        write_results(str(options.json), {"topology": TOPOLOGY, "context": CONTEXT, "results": results})


if __name__ == "__main__":
    main()
