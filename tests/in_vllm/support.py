"""Pairs by name, and engines whose answers are kept for the whole run."""

import shutil
import tempfile
from functools import cache
from pathlib import Path

import engine
import pair
from replay import Replay

FOLDER = Path(tempfile.mkdtemp(prefix="in_vllm_"))
DRAFTS = pair.BLOCK - 1
THREE = {"num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64}
DSPARK = {"sample_from_anchor": True, "markov_rank": 8}
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
    "groups of two shapes": {"family": "ministral", "layout": pair.as_speculators},
    # Of shapes and seeds that no other pair has: a third of the heads, three taps, blocks of 9.
    "thirds": {
        "target": {
            "tie_word_embeddings": False,
            "hidden_size": 384,
            "num_attention_heads": 6,
            "num_hidden_layers": 6,
        },
        "drafter": THREE | {"block_size": 9, "target_layer_ids": [1, 3, 4]},
    },
    # tpu-inference has another attention kernel for a target's heads of 64, and other pages.
    "heads of 64": {"target": {"head_dim": 64}, "drafter": {"head_dim": 128}},
    "narrow": {"said": 120},
    # Windows shorter than a page, in two of three layers.
    "windows of 11": {
        "drafter": THREE
        | {
            "num_attention_heads": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 11,
            "is_causal": False,
        }
    },
    "dspark": {"drafter": DSPARK | {"own_embedding": True, "own_head": True}, "layout": pair.as_deepspec},
    "dspark of specforge": {"drafter": DSPARK, "layout": pair.as_specforge},
    "dspark of speculators": {"drafter": DSPARK, "said": 120, "layout": pair.as_speculators_dspark},
    # Configs with images, read as text; layers of two shapes, windows in half of them.
    **{family: {"family": family, "scale": 12.0} for family in pair.IMAGES},
    "fp8": {},
    "dflash2": {"drafter": {"selector_rank": 8, "selector_top_k": 4, "conv_group_size": 16}},
}


FROM_THE_BLOCK = ("thirds", "dspark", "dspark of specforge", "dspark of speculators")
"""Pairs of which no option names the number of drafts."""


@cache
def pair_folder(name):
    folder = FOLDER / name
    folder.mkdir()
    pair.save(folder, **PAIRS[name])
    pair.word_tokenizer().save_pretrained(folder / "target")
    if name == "fp8":  # the replay reads what the file was made from
        shutil.copytree(folder / "target", folder / "exact")
        pair.to_fp8(folder / "target")
    return folder


def options_of(name, drafted=True):
    folder = pair_folder(name)
    found = {"model": str(folder / "target")}
    if name in pair.IMAGES:
        found["language_model_only"] = True
    if drafted:
        method = "dspark" if name.startswith("dspark") else "dflash"
        found["speculative_config"] = {"method": method, "model": str(folder / "drafter")}
        if name not in FROM_THE_BLOCK:
            found["speculative_config"]["num_speculative_tokens"] = DRAFTS
    return found


def drafts_of(name):
    """The number of tokens that an engine with `options_of` drafts."""
    return replay_of(name).drafts


@cache
def replay_of(name):
    folder = pair_folder(name)
    found = Replay(folder / ("exact" if name == "fp8" else "target"), folder / "drafter")
    config = found.drafter.config
    whole = config.block_size - int(not config.sample_from_anchor)
    found.drafts = whole if name in FROM_THE_BLOCK else DRAFTS
    return found


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
