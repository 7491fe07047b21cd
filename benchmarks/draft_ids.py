"""Measures the share of a target's answers that its most frequent ids cover, and writes ids for the demo.

    python benchmarks/draft_ids.py --json docs/results/draft_ids.json

Counts the answers under data/train/regenerated, once by the ids that are frequent in the same answers and
once, for every second answer, by those of the others. Writes the ids of ``--rows`` next to the drafter.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch_dflash as td
from torch_dflash.cli.outputs import write_results
from torch_dflash.cli.train.vocabulary import ROWS, covered
from torch_dflash.train.answers.data import read_answers

ROOT = Path(__file__).parents[1]
IDS = ROOT / "torch_dflash/assets/smollm2-135m-instruct-dflash/draft_ids.json"
SIZES = (1024, 2048, 4096, 8192, 12288, 16384)


def main() -> None:
    """Count, and write both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--json", required=True)
    arguments = parser.parse_args()
    files = sorted((ROOT / "data/train/regenerated").glob("*/*.jsonl.gz"))
    texts = [answer.response_ids for answer in read_answers(files)]
    learned, held_out = texts[::2], texts[1::2]
    rows = []
    for size in SIZES:
        share = covered(texts, td.frequent_ids(texts, size))
        other = covered(held_out, td.frequent_ids(learned, size))
        rows.append({"ids": size, "covered": round(share, 4), "covered held out": round(other, 4)})
    different = len({token for text in texts for token in text})
    counts = {"answers": len(texts), "tokens": sum(map(len, texts)), "ids that occur": different}
    write_results(arguments.json, counts | {"vocabulary": 49152, "rows": rows})
    IDS.write_text(json.dumps(td.frequent_ids(texts, arguments.rows)) + "\n")


if __name__ == "__main__":
    main()
