r"""Bytes of a draft step of the vLLM plug-in, compiled for a TPU that is not there, by requests that live.

No TPU, no vLLM, no weights::

    PYTHONPATH=.venv/libtpu python benchmarks/vllm_aot.py --json docs/results/vllm_aot.json

A loop over pages turns as often as the context of each live request needs; the compiler does not know the
number, so this file counts the loop's body that often. "before" is the step that ran for all rows, whose loop
gathered pages of each of them; "scattered" wrote rows by one scatter a layer.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

from jax_bridge.offline import compile_only

compile_only()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import torch  # noqa: E402
from torchax.interop import jax_view, torch_view  # noqa: E402

from jax_bridge.aot import traffic  # noqa: E402
from jax_bridge.aot.hlo import Program  # noqa: E402
from jax_bridge.aot.shapes import find_topology  # noqa: E402
from jax_bridge.vllm import pages as paging  # noqa: E402
from jax_bridge.vllm import steps as stepping  # noqa: E402
from jax_bridge.vllm.steps import Steps, rows_for  # noqa: E402
from torch_dflash.cli.loading import load_configs  # noqa: E402
from torch_dflash.cli.outputs import write_results  # noqa: E402
from torch_dflash.integrations.vllm.drafter import PagedDrafter, most_drafts  # noqa: E402
from torch_dflash.proposers.checkpoints import drafter_of  # noqa: E402

CONFIGS = Path(__file__).parent / "configs"
PAGE = 128  # rows; vLLM's choice on TPUs for contexts like these
bf16 = jnp.bfloat16


def shape(size: Any, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    """An array without values."""
    return jax.ShapeDtypeStruct(tuple(size), dtype)


class Measured:
    """The steps of a pair, and their shapes.

    Args:
        name: of the pair's configs. seqs: ``max_num_seqs``. context: tokens of each request.
        device: of the topology.
    """

    def __init__(self, name: str, seqs: int, context: int, device: Any):
        target, config = load_configs(str(CONFIGS / name), str(CONFIGS / f"{name}-dflash"), None, None)
        with torch.device("meta"):
            drafter: Any = drafter_of(config).to(torch.bfloat16)
            module = PagedDrafter(drafter.eval(), most_drafts(config))
        self.seqs, self.context, self.place = seqs, context, jax.sharding.SingleDeviceSharding(device)
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self.weights = {key: shape(one.shape, _dtype(one)) for key, one in named.items()}
        table = shape((target.vocab_size, target.hidden_size), bf16)
        self.target = {"embed": table, "head": table}
        heads, width = config.num_key_value_heads, config.head_dim
        pages = shape((seqs * context // PAGE, PAGE, heads, 2, width), bf16)
        self.layers = config.num_hidden_layers
        self.pages = dict.fromkeys(range(self.layers), pages)
        self.places = tuple((0, layer) for layer in range(self.layers))
        self.tables = {0: shape((seqs, context // PAGE))}
        self.hidden, self.taps = target.hidden_size, len(config.target_layer_ids)
        self.steps = Steps(module, heads, width, _embed, _head)

    def draft(self, rows: int) -> Program:
        """The draft step for ``rows`` requests."""
        each = shape((self.seqs,))
        given = (self.weights, self.target, self.pages, self.tables, each, each)
        return self._compile(self.steps.draft_step, given, (), places=self.places, rows=rows)

    def prepare(self, tokens: int) -> Program:
        """The step that writes keys and values of ``tokens`` rows."""
        each, features = shape((self.seqs,)), (shape((tokens, self.hidden), bf16),) * self.taps
        given = (self.weights, self.pages, self.tables, shape((self.seqs + 1,)), each, each, shape((1,)))
        given = (*given, features, each, each, each)
        return self._compile(self.steps.prepare_step, given, (1,), places=self.places)

    def _compile(self, step: Any, given: Any, donated: tuple[int, ...], **static: Any) -> Program:
        given = jax.tree.map(
            lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=self.place), given
        )
        compiled = (
            jax.jit(lambda *args: step(*args, **static), donate_argnums=donated).lower(*given).compile()
        )
        self.hlo = compiled.as_text()
        return Program(self.hlo)


def bytes_of(program: Program, turns: int) -> int:
    """Bytes that a program moves if each loop whose turns XLA does not know turns so often."""
    known = traffic._trips

    def trips(program: Program, loop: Any) -> int:
        found = known(program, loop)
        return turns if found == 1 else found

    with patch.object(traffic, "_trips", trips):
        return traffic.hbm_traffic(program)


def scattered(pages: Any, new: Any, tables: Any, source: Any, first: Any, count: Any) -> Any:
    """`write_rows` by one scatter a layer."""
    pages, rows = dict(pages), len(new[0][2])
    owner = jnp.clip(jnp.searchsorted(source, jnp.arange(rows), side="right") - 1, 0)
    within = jnp.arange(rows) - source[owner]
    at = first[owner] + within
    for index, group, own in new:
        page = jnp.where(within < count[owner], tables[group][owner, at // PAGE], len(pages[index]))
        pages[index] = pages[index].at[page, at % PAGE].set(own, mode="drop")
    return pages


def _dtype(tensor: torch.Tensor) -> Any:
    return {torch.bfloat16: bf16, torch.float32: jnp.float32, torch.int64: jnp.int32}[tensor.dtype]


def _embed(target: Any, ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(ids, torch_view(target["embed"]))


def _head(target: Any, hidden: torch.Tensor) -> torch.Tensor:
    rows = jax_view(hidden)
    return torch_view(jnp.einsum("bwh,vh->bwv", rows, target["head"]))


def main() -> None:
    """Compile each program and print its bytes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pair", default="qwen3-8b")
    parser.add_argument("--seqs", type=int, default=256)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--live", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--topology", default="v6e:2x2")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--hlo", type=Path, help="folder for the programs' texts")
    options = parser.parse_args()
    device = find_topology(options.topology).devices[0]
    turns, found = -(-options.context // paging.ROWS_AT_ONCE), {}
    tokens, windows = options.seqs * 16, options.seqs * 2  # of each request a block, which crosses a window

    def measure(word: str, pair: Measured, program: Program, turns: int) -> int:
        moved = bytes_of(program, turns)
        print(f"{word}: {moved / 1e9:.3f} GB", flush=True)
        if options.hlo:
            options.hlo.mkdir(exist_ok=True)
            (options.hlo / f"{word.replace(' ', '-')}.txt").write_text(pair.hlo)
        return moved

    one = Measured(options.pair, 1, options.context, device)
    own: dict[str, Any] = {"engine_of_one_bytes": measure("engine of one", one, one.draft(1), turns)}
    pair = Measured(options.pair, options.seqs, options.context, device)
    for live in options.live:
        moved = measure(f"{live} live", pair, pair.draft(rows_for(live)), turns)
        context = moved - bytes_of(Program(pair.hlo), 0)
        ratio = round(moved / own["engine_of_one_bytes"], 4)
        found[str(live)] = {"bytes": moved, "context_bytes": context, "engines_of_one": ratio}
    own["live"] = found
    with patch.object(stepping, "attend_in_turn", paging.attend_block):
        own["before_bytes"] = measure("before", pair, pair.draft(rows_for(options.seqs)), turns)
    own |= {
        "written_tokens": tokens,
        "prepare_bytes": measure("written", pair, pair.prepare(tokens), windows),
    }
    with patch.object(stepping, "write_rows", scattered):
        own["scattered_bytes"] = measure("scattered", pair, pair.prepare(tokens), 1)
    shown = {name: getattr(options, name) for name in ("pair", "seqs", "context", "topology")}
    if options.json:
        write_results(str(options.json), shown | own)
    print(json.dumps(own, indent=1))


if __name__ == "__main__":
    main()
