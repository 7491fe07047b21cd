r"""Bytes of latent attention compiled for TPUs that are not there: published widths, on pages.

No TPU, no weights; libtpu compiles for one chip::

    PYTHONPATH=.venv/libtpu python benchmarks/latents_aot.py --json docs/results/latents_aot.json

What is compiled is what a verify pass of 16 rows runs between a layer's projections: W_k on the queries, the
paged kernel, W_v on its sums. The floor is the latents of the context once, 576 numbers a position (a page
keeps 640), and W_k and W_v once.

GLM-5.2 is four layers, of which one has an indexer and three share its choice, as in most of the model;
beside it, the same layers attend to all positions. The indexer is transformers' own, without its projections;
the keys it reads count once in the floor. ``score_bytes`` are a pass's scores of all index heads in float32,
and ``scores_kept`` says whether the program has them in HBM.
"""

from __future__ import annotations

import argparse
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from jax_bridge.offline import compile_only

compile_only()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaIndexer  # noqa: E402

from jax_bridge.aot.compile import compile_function  # noqa: E402
from jax_bridge.aot.hlo import Program, forbidden, hbm_bytes  # noqa: E402
from jax_bridge.programs.lower import lower, tracing  # noqa: E402
from jax_bridge.weights.formats import Halved  # noqa: E402
from torch_dflash.cache.indexed import IndexedLayer, IndexPages  # noqa: E402
from torch_dflash.cache.latent import SharedPages  # noqa: E402
from torch_dflash.cache.view import CacheView  # noqa: E402
from torch_dflash.cli.outputs import write_results  # noqa: E402
from torch_dflash.ops.attention import AttentionInputs  # noqa: E402
from torch_dflash.ops.latents import Widths  # noqa: E402
from torch_dflash.ops.paged_attention import pool_width  # noqa: E402
from torch_dflash.targets.latents import EXPAND, Handed, attend_latents  # noqa: E402


class Indexer(NamedTuple):
    """Widths of an indexer, and the positions that it chooses."""

    heads: int
    width: int
    most: int


class Sizes(NamedTuple):
    """Attention of layers alike, which share the choice of the first one's indexer, if there is one."""

    heads: int
    widths: Widths
    layers: int = 1
    indexer: Indexer | None = None


MODELS = {
    "DeepSeek-V3": Sizes(128, Widths(512, 128, 64, 128)),
    "Kimi-K2.5": Sizes(64, Widths(512, 128, 64, 128)),
    "Mistral-Small-4": Sizes(32, Widths(256, 64, 64, 128)),
    "GLM-5.2": Sizes(64, Widths(512, 192, 64, 256), 4, Indexer(32, 128, 2048)),
    "GLM-5.2 without its indexer": Sizes(64, Widths(512, 192, 64, 256), 4),
}
TOPOLOGIES = ("v6e:2x2", "v5e:2x2", "v5p:2x2x1")
PAGE, ROWS = 128, 16


def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> Any:
    """An array's shape."""
    return jax.ShapeDtypeStruct(sizes, dtype)


def pools(sizes: Sizes, context: int) -> list[Any]:
    """Pages of each layer, and of the indexer's keys."""
    pages, wide = context // PAGE + 2, sizes.widths.rank + sizes.widths.rope
    widths = [wide] * sizes.layers
    widths += [sizes.indexer.width] if sizes.indexer else []
    return [shape(pages, 1, PAGE, pool_width(width, 0)) for width in widths]


def rows_of(sizes: Sizes) -> dict[str, Any]:
    """Arrays that the projections of a pass make."""
    (heads, widths, layers, indexer), given = sizes, {}
    given["query"] = [shape(1, heads, ROWS, widths.nope + widths.rope)] * layers
    given["latent"] = [shape(1, 1, ROWS, widths.rank)] * layers
    given["turned"] = [shape(1, 1, ROWS, widths.rope)] * layers
    if indexer:
        given["queries"] = shape(1, ROWS, indexer.heads * indexer.width)
        given["keys"] = shape(1, ROWS, indexer.width)
        given["shares"] = shape(1, ROWS, indexer.heads)
        given["angles"] = [shape(1, ROWS, widths.rope)] * 2
    return given


class Given:
    """In the place of a projection: its result."""

    def __init__(self, result: Any):
        self.result = self.weight = result

    def __call__(self, _: Any) -> Any:
        return self.result


def choose(sizes: Sizes, given: dict[str, Any], view: CacheView) -> Any:
    """The indexer's choice [B, M, K], from the results of its projections."""
    indexer = sizes.indexer
    assert indexer is not None
    module = SimpleNamespace(
        n_heads=indexer.heads,
        head_dim=indexer.width,
        qk_rope_head_dim=sizes.widths.rope,
        index_topk=indexer.most,
        softmax_scale=indexer.width**-0.5,
        layer_idx=0,
        wq_b=Given(given["queries"]),
        wk=Given(given["keys"]),
        weights_proj=Given(given["shares"]),
        k_norm=lambda rows: rows,
    )
    forward: Any = GlmMoeDsaIndexer.forward
    mask = view.choosable(0, ROWS)[:, 0]
    return forward(module, given["shares"], None, given["angles"], mask, None, cache=view)


def figures(name: str, topology: str, context: int) -> dict[str, Any]:
    """Bytes of attention of `ROWS` rows behind ``context`` positions, with its floor."""
    sizes = MODELS[name]
    heads, widths, layers, indexer = sizes
    wide = widths.rank + widths.rope

    def attend(params: Any, state: Any, given: dict[str, Any]) -> Any:
        held, table, start = state
        states: list[Any] = [SharedPages(pool) for pool in held[:layers]]
        if indexer:
            states[0] = IndexedLayer(states[0], IndexPages(held[layers]))
        view = CacheView(tuple(states), (None,) * layers, start, table)
        more = {"indices": choose(sizes, given, view)} if indexer else {}
        outs = []
        for layer in range(layers):
            weight = SimpleNamespace(weight=params[f"w{layer}"])
            module = SimpleNamespace(kv_b_proj=weight, **{EXPAND: Handed(*widths)})
            rows = (given[part][layer] for part in ("query", "latent", "turned"))
            inputs = AttentionInputs(*rows, start, 0.1)
            attended = partial(view.attend, layer, _=None, more=more)
            outs.append(attend_latents(module, inputs, attended))
        kept = [one.own.pool if isinstance(one, IndexedLayer) else one.pool for one in view.states]
        kept += [view.states[0].index.pool] if indexer else []
        return (kept, table, start), outs

    weight = shape(heads * (widths.nope + widths.value), widths.rank)
    params = {f"w{layer}": Halved.shapes(weight.shape, weight.dtype, widths) for layer in range(layers)}
    state = pools(sizes, context), shape(1, context // PAGE + 1, dtype=jnp.int32), shape(1, dtype=jnp.int32)
    with tracing("default"):
        step = compile_function(lower(attend), params, state, rows_of(sizes), topology=topology)
    scores = 4 * indexer.heads * ROWS * context if indexer else 0
    kinds = [one.type for one in Program(step.hlo).computations["ENTRY"].values()]
    largest = max([hbm_bytes(kind) for kind in kinds if "f32[" in kind and "bf16[" not in kind], default=0)
    floor = 2 * layers * (context * wide + weight.size) + (2 * context * indexer.width if indexer else 0)
    return {
        "model": name,
        "layers": layers,
        "topology": topology,
        "context": context,
        "hbm_bytes": step.traffic_bytes,
        "floor_bytes": floor,
        "of_floor": round(step.traffic_bytes / floor, 4),
        "temp_bytes": step.temp_bytes,
        "pool_in_place": not any(path.startswith("[0]") for path in step.unaliased),
        "scatters": step.hlo.count(" scatter("),
        "gathers": step.hlo.count(" gather("),
        "score_bytes": scores,
        "scores_kept": 0 < scores <= largest,
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
