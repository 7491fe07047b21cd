r"""Bytes of each drafting method's round beside a plain round's, compiled for TPUs that are not there.

No TPU, no weights. EAGLE-3's drafter is one layer of the target's widths with a vocabulary of 32,000 ids, as
published ones; its passes are counted trip by trip. Medusa has five heads with projections of their own::

    PYTHONPATH=.venv/libtpu python benchmarks/methods_aot.py --json docs/results/compare/methods_aot.json

Lines of the JSON file are not compiled again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax_bridge.offline import compile_only

compile_only()

import torch  # noqa: E402

import torch_dflash as td  # noqa: E402
from jax_bridge.aot.methods import derive_rounds  # noqa: E402
from torch_dflash.cli.loading import load_configs  # noqa: E402
from torch_dflash.cli.outputs import write_results  # noqa: E402
from torch_dflash.proposers.checkpoints import drafter_of  # noqa: E402

CONFIGS = Path(__file__).parent / "configs"
PAIRS = "llama-3.1-8b", "qwen3-4b"
TOPOLOGIES = "v5p:2x2x1", "v6e:2x2"
DRAFT_IDS = 32_000
Make = Callable[[Any, Any], Any]
"""(The target's config, the DFlash drafter's) -> a drafter of a method."""


def eagle3(drafts: int) -> Make:
    """A chain of ``drafts`` passes."""

    def made(target: Any, drafter: Any) -> Any:
        names = "hidden_size intermediate_size num_attention_heads num_key_value_heads vocab_size"
        sizes = {name: getattr(target, name) for name in (*names.split(), "max_position_embeddings")}
        sizes["num_target_layers"] = target.num_hidden_layers
        sizes["head_dim"] = (
            getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads
        )
        own = {"own_head": True, "draft_vocab_size": DRAFT_IDS, "block_size": drafts + 1}
        return drafter_of(td.Eagle3Config(**sizes, **own))

    return made


def medusa(target: Any, drafter: Any) -> Any:
    """Five heads."""
    sizes = {"vocab_size": target.vocab_size, "hidden_size": target.hidden_size}
    return drafter_of(td.MedusaConfig(**sizes, num_target_layers=target.num_hidden_layers))


METHODS: dict[str, Make] = {
    "plain": lambda target, drafter: None,
    "dflash": lambda target, drafter: drafter_of(drafter),
    "tree:16": lambda target, drafter: td.TreeProposer(drafter_of(drafter), rows=16),
    "union:16": lambda target, drafter: td.Union(td.NGramProposer(), drafter_of(drafter), rows=16),
    **{f"eagle3, {drafts} drafts": eagle3(drafts) for drafts in (2, 5, 10)},
    "medusa": medusa,
    "lookahead": lambda target, drafter: td.LookaheadProposer(),
}


def main() -> None:
    """Compile all and print the bytes of each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", nargs="+", default=PAIRS)
    parser.add_argument("--layers", type=int, help="of the target, instead of all")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--topologies", nargs="+", default=TOPOLOGIES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    size = {"layers": options.layers, "context": options.context}
    found = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    rounds = found.get("rounds", {}) if size.items() <= found.items() else {}
    for name in options.pairs:
        target, drafter = load_configs(
            str(CONFIGS / name), str(CONFIGS / f"{name}-dflash"), None, options.layers
        )
        for topology in options.topologies:
            own = rounds.setdefault(name, {}).setdefault(topology, {})
            for method, make in METHODS.items():
                if method in own:
                    continue
                with torch.device("meta"):
                    made = {method: make(target, drafter)}
                given = {"context": options.context, "topology": topology, "status": print}
                own |= derive_rounds(target, made, **given)
                own[method]["plain_rounds"] = round(
                    own[method]["round_bytes"] / own["plain"]["round_bytes"], 4
                )
                print(name, topology, method, own[method], flush=True)
                if options.json:
                    write_results(str(options.json), size | {"rounds": rounds})


if __name__ == "__main__":
    main()
