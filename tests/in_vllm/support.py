"""Pairs by name, and engines whose answers are kept for the whole run."""

import tempfile
from functools import cache
from pathlib import Path

import engine
import pair
from replay import Replay

FOLDER = Path(tempfile.mkdtemp(prefix="in_vllm_"))
DRAFTS = pair.BLOCK - 1
PAIRS = {
    "tied": {},
    "apart": {"agree": 0.0},  # drafts from all tokens, few of them accepted: each depends on the rows it read
    "flat": {"agree": 2.0, "scale": 0.2},  # many tokens are likely, as with targets that were trained
    "untied": {"target": {"tie_word_embeddings": False}},
    "windows": {
        "drafter": {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 8,
            "is_causal": False,
        }
    },
    # Windows in a part of the target's layers: several groups of pages, and untied heads.
    "groups": {"family": "ministral", "drafter": {"num_key_value_heads": 2, "head_dim": 128}},
    "groups of two shapes": {"family": "ministral", "speculators": True},
    "dflash2": {"drafter": {"selector_rank": 8, "selector_top_k": 4, "conv_group_size": 16}},
}


@cache
def pair_folder(name):
    folder = FOLDER / name
    folder.mkdir()
    pair.save(folder, **PAIRS[name])
    pair.word_tokenizer().save_pretrained(folder / "target")
    return folder


def options_of(name, drafted=True):
    folder = pair_folder(name)
    found = {"model": str(folder / "target")}
    if drafted:
        given = {"method": "dflash", "model": str(folder / "drafter"), "num_speculative_tokens": DRAFTS}
        found["speculative_config"] = given
    return found


@cache
def replay_of(name):
    return Replay(pair_folder(name) / "target", pair_folder(name) / "drafter")


_known = {}


def run(name, batches, drafted=True, keep=True, **options):
    """The answer of an engine with the pair ``name``; the engine answers the same question once."""
    key = repr((name, batches, drafted, sorted(options.items())))
    if key not in _known or not keep:
        answer = engine.run(batches, **options_of(name, drafted), **options)
        if not keep:
            return answer
        _known[key] = answer
    return _known[key]
