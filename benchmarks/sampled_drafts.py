"""Counts accepted drafts of sampled text: the likeliest tokens, or those that the row's noise picks.

The target's pick at a position is the largest of its logits and a noise that depends on seed, position and id
alone. A drafter that adds the same noise to its logits picks the same token wherever the two distributions
are near enough. Both forms emit the same text, which this compares.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch_dflash as td
from torch_dflash.cli.loading import load_named
from torch_dflash.cli.outputs import write_results
from torch_dflash.proposers import DFlashProposer
from torch_dflash.requests.prompts import pad_rows
from torch_dflash.train.answers.data import encode_conversation, read_prompts


class Likeliest(DFlashProposer):
    """Drafts the likeliest tokens for any noise of the rows."""

    name = "dflash without the rows' noise"

    def __init__(self, drafter: Any):
        super().__init__(drafter)
        self.drafter: Any = drafter

    def draft(self, pstate, anchor, length, embed, head, request):
        return self.propose(pstate, anchor, length, embed, head)


def main() -> None:
    """Decode each set with both forms, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--drafters", nargs="+", default=["demo"])
    parser.add_argument("--prompts", nargs="+", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=16, help="prompts of each set")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", required=True)
    arguments = parser.parse_args()
    rows = {}
    for name in arguments.drafters:
        loaded = load_named(arguments.target, name)
        forms = {"likeliest": Likeliest(loaded.drafter), "shared noise": loaded.drafter}
        print(name, flush=True)
        rows[name] = judge(arguments, loaded, forms)
    write_results(arguments.json, {"temperature": arguments.temperature, "drafters": rows})


def judge(arguments: argparse.Namespace, loaded: Any, forms: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Mean acceptance lengths by set and form, whose texts must be the first form's."""
    found, first = {}, next(iter(forms))
    for path in arguments.prompts:
        asked = [
            encode_conversation(loaded.tokenizer, [{"role": "user", "content": prompt.turns[0]}])
            for prompt in read_prompts([path])[: arguments.limit]
        ]
        texts, found[path.stem] = {}, {}
        for form, drafter in forms.items():
            texts[form], found[path.stem][form] = decode(arguments, loaded.target, drafter, asked)
            assert texts[form] == texts[first], f"{path}, {form}: a draft changed the text"
        print(path.stem, found[path.stem], flush=True)
    return found


def decode(arguments: argparse.Namespace, target: Any, drafter: Any, asked: list) -> tuple[list, float]:
    """(new tokens of all prompts, mean acceptance length)."""
    texts, lengths = [], []
    options: dict[str, Any] = {"do_sample": arguments.temperature > 0}
    if options["do_sample"]:
        options |= {"temperature": arguments.temperature, "top_k": 0, "top_p": 1.0, "seed": arguments.seed}
    for start in range(0, len(asked), arguments.batch_size):
        ids, mask = pad_rows(asked[start : start + arguments.batch_size])
        out: Any = td.generate(
            target,
            drafter,
            ids,
            mask,
            max_new_tokens=arguments.max_new_tokens,
            return_dict_in_generate=True,
            **options,
        )
        texts += out.new_tokens
        lengths += out.stats.whole_rounds
    return texts, round(sum(lengths) / len(lengths), 4)


if __name__ == "__main__":
    main()
