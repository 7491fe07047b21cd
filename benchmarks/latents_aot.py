r"""Bytes of latent attention compiled for TPUs that are not there: one layer at published widths, on pages.

No TPU, no weights; libtpu compiles for one chip::

    PYTHONPATH=.venv/libtpu python benchmarks/latents_aot.py --json docs/results/latents_aot.json

What is compiled is what a verify pass of 16 rows runs between a layer's projections: W_k on the queries, the
paged kernel, W_v on its sums. The floor is the latents of the context once, 576 numbers a position (a page
keeps 640), and W_k and W_v once.
"""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

from jax_bridge.offline import compile_only

compile_only()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from jax_bridge.aot.compile import compile_function  # noqa: E402
from jax_bridge.aot.hlo import forbidden  # noqa: E402
from jax_bridge.programs.lower import lower, tracing  # noqa: E402
from jax_bridge.weights.formats import Halved  # noqa: E402
from torch_dflash.cache.latent import SharedPages  # noqa: E402
from torch_dflash.cache.view import CacheView  # noqa: E402
from torch_dflash.cli.outputs import write_results  # noqa: E402
from torch_dflash.ops.attention import AttentionInputs  # noqa: E402
from torch_dflash.ops.latents import Widths  # noqa: E402
from torch_dflash.ops.paged_attention import pool_width  # noqa: E402
from torch_dflash.targets.latents import EXPAND, Handed, attend_latents  # noqa: E402

MODELS = {
    "DeepSeek-V3": (128, Widths(512, 128, 64, 128)),
    "Kimi-K2.5": (64, Widths(512, 128, 64, 128)),
    "Mistral-Small-4": (32, Widths(256, 64, 64, 128)),
}
TOPOLOGIES = ("v6e:2x2", "v5e:2x2", "v5p:2x2x1")
PAGE, ROWS = 128, 16


def figures(name: str, topology: str, context: int) -> dict[str, Any]:
    """Bytes of one layer's attention of `ROWS` rows behind ``context`` positions, with its floor."""
    heads, widths = MODELS[name]
    wide, half = widths.rank + widths.rope, jnp.bfloat16

    def shape(*sizes: int, dtype: Any = half) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype)

    def attend(params: Any, state: Any, query: Any, latent: Any, turned: Any) -> Any:
        pool, table, start = state
        view = CacheView((SharedPages(pool),), (None,), start, table)
        module = SimpleNamespace(kv_b_proj=SimpleNamespace(weight=params["w"]), **{EXPAND: Handed(*widths)})
        inputs = AttentionInputs(query, latent, turned, start, 0.1)
        out = attend_latents(module, inputs, lambda one: view.attend(0, one))
        return (view.states[0].pool, table, start), out

    weight = shape(heads * (widths.nope + widths.value), widths.rank)
    params = {"w": Halved.shapes(weight.shape, weight.dtype, widths)}
    pool = shape(context // PAGE + 2, 1, PAGE, pool_width(wide, 0))
    state = pool, shape(1, context // PAGE + 1, dtype=jnp.int32), shape(1, dtype=jnp.int32)
    rows = (heads, widths.nope + widths.rope), (1, widths.rank), (1, widths.rope)
    given = [shape(1, count, ROWS, size) for count, size in rows]
    with tracing("default"):
        step = compile_function(lower(attend), params, state, *given, topology=topology)
    floor = 2 * (context * wide + weight.size)
    return {
        "model": name,
        "topology": topology,
        "context": context,
        "hbm_bytes": step.traffic_bytes,
        "floor_bytes": floor,
        "of_floor": round(step.traffic_bytes / floor, 4),
        "temp_bytes": step.temp_bytes,
        "pool_in_place": not step.unaliased or "[0]" not in step.unaliased,
        "scatters": step.hlo.count(" scatter("),
        "gathers": step.hlo.count(" gather("),
        "forbidden": forbidden(step.hlo),
        "compile_seconds": round(step.compile_seconds, 1),
    }


def main() -> None:
    """Compile all and print the bytes of each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=[*MODELS])
    parser.add_argument("--topologies", nargs="+", default=TOPOLOGIES)
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 32768])
    parser.add_argument("--json")
    options = parser.parse_args()
    found = []
    for name in options.models:
        for topology in options.topologies:
            for context in options.contexts:
                found.append(figures(name, topology, context))
                print(found[-1], flush=True)
                if options.json:
                    write_results(options.json, {"rows": ROWS, "page": PAGE, "attention": found})


if __name__ == "__main__":
    main()
