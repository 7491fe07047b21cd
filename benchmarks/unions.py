"""How many tokens a round brings: a drafter alone, prompt lookup alone, and both in one (`td.Union`).

Every form emits the same text, which this compares. Sampled rows are also drafted without their noise, as the
drafter's likeliest tokens.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sampled_drafts import Likeliest, judge

import torch_dflash as td
from torch_dflash.cli.loading import load_pair
from torch_dflash.cli.provenance import write_json


def main() -> None:
    """Decode each set in each form, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--drafter", default="demo")
    parser.add_argument("--prompts", nargs="+", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=16, help="prompts of each set")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", required=True)
    arguments = parser.parse_args()
    loaded = load_pair(arguments.target, arguments.drafter)
    drafter = loaded.drafter
    forms = {
        "lookup": td.NGramProposer(drafter.config.block_size),
        "drafter": drafter,
        "union": td.Union(td.NGramProposer(), drafter),
    }
    if arguments.temperature > 0:
        forms["drafter without the noise"] = Likeliest(drafter)
    found = judge(arguments, loaded, forms)
    options = {"temperature": arguments.temperature, "prompts of each set": arguments.limit}
    write_json(arguments.json, options | {"tokens a round": found})


if __name__ == "__main__":
    main()
