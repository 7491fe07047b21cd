"""Pairs on four CPU devices, compared with one device. Run as a module, in a separate process."""

import json
import os
import runpy
import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import transformers as hf
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from jax_bridge.mesh.refusals import INDEXED, LATENT
from support import COMPILE_FAST, ROOT
from support.families import MORE
from support.hybrids import SLICEABLE
from support.tiny import BASE, FAMILIES, correlate, make_drafter, randomise
from support.widths import mix
from torch_dflash.proposers import NGramProposer
from torch_dflash.proposers.trees.proposer import TreeProposer
from torch_dflash.proposers.union import Union
from torch_dflash.targets.auto import auto_class

FLAGS = f"--xla_force_host_platform_device_count=4 {COMPILE_FAST}"
VOCAB = 100
"""Ids that divide over four devices."""
TWO = {"num_attention_heads": 4, "num_key_value_heads": 2}
FOUR = {"num_attention_heads": 8, "num_key_value_heads": 4}
SIX = {"num_attention_heads": 6, "num_key_value_heads": 2}
ONE = {"num_attention_heads": 6, "num_key_value_heads": 1}
HEADS = {"2x2": (TWO, TWO), "4x1": (FOUR, FOUR), "odd": (TWO, FOUR), "whole": (SIX, SIX), "one": (FOUR, ONE)}
HEADS["neither"] = SIX, {"num_attention_heads": 4, "num_key_value_heads": 1}
"""K/V heads of target and drafter: two, each on two devices; four, one each; some that stay whole."""
MIXTURES = {
    "minimax_m2": (hf.MiniMaxM2ForCausalLM, hf.MiniMaxM2Config,
                   {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8}),
}  # fmt: skip
PICKS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.9, "top_k": 0},
    "filters": {"do_sample": True, "temperature": 0.9, "top_k": 7, "top_p": 0.9},
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "v1": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9},
    "dflash2": {"selector_rank": 12, "selector_top_k": 4, "conv_group_size": 8},
}
WIDTHS = 1, 4, 1, 1, 1, 4, 4, 1
FORMS: dict[str, Any] = {
    "": lambda drafter: drafter,
    "tree": partial(TreeProposer, rows=8),
    "union": partial(Union, NGramProposer(6), rows=8),
    "chain": partial(Union, NGramProposer(6)),
}
OTHERS = {"plain": None, "ngram": NGramProposer(4)}


class Case(NamedTuple):
    """A target's family, its cache, the K/V heads (`HEADS`), the way tokens are picked, and the drafter.

    The drafter is one of `DRAFTERS` or `OTHERS`, perhaps with one of `FORMS` behind.

    ``compiled``, ``asked``: further options of the engine and of each call. ``runtime``: of the one device.
    """

    family: str
    cache: str
    chips: str
    pick: str
    drafter: str
    compiled: dict[str, Any] = {}
    asked: dict[str, Any] = {}
    break_by: str = ""
    runtime: str = "xla"


def attends_to_latents(family: str, chips: str) -> Any:
    """A target whose sizes divide over four devices but for its heads, perhaps."""
    configs = runpy.run_path(str(ROOT / "benchmarks/family_configs.py"))
    heads = HEADS[chips][0]["num_attention_heads"]
    sizes = {"vocab_size": VOCAB, "num_attention_heads": heads, "num_key_value_heads": heads}
    own = configs["FAMILY"].get(family, {})
    inner = {"text_config": own["text_config"] | sizes} if "text_config" in own else sizes
    config = configs["shrink"](CONFIG_MAPPING[family], own | inner)
    return randomise(auto_class(config).from_config(config, dtype=torch.float32).eval(), 0)


def make_sliceable(family: str, chips: str, drafter: str) -> tuple[Any, Any]:
    """A pair whose sizes divide over four devices, of two layers each; with latents of four."""
    torch.manual_seed(0)  # of decays, which no other seed reaches
    if family in (*LATENT, *INDEXED):
        target = attends_to_latents(family, chips)
    else:
        cls, config, extra = (FAMILIES | MORE | SLICEABLE | MIXTURES)[family]
        sizes = {"vocab_size": VOCAB, "num_hidden_layers": 2, **HEADS[chips][0]}
        target = randomise(cls(config(**(BASE | extra | sizes))), 0)
    head_dim = {"head_dim": 16}
    sizes = {"vocab_size": VOCAB, "target_layer_ids": [0, 1], "block_size": 4, **HEADS[chips][1], **head_dim}
    drafter, _, form = drafter.partition(" ")
    if drafter in OTHERS:
        return target, OTHERS[drafter]
    text = SimpleNamespace(config=target.config.get_text_config())
    drafts = make_drafter(text, 1, **(sizes | DRAFTERS[drafter]))
    correlate(target, drafts, 8.0)
    return target, FORMS[form](drafts)


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids, mask = torch.randint(1, 96, (3, 19), generator=generator), torch.ones(3, 19, dtype=torch.long)
    mask[1, :5], mask[2, :11] = 0, 0
    return ids, mask


def compare(case: Case) -> dict[str, Any]:
    """The text and acceptance lengths of one device and of four, and the compilations of a second call."""
    import torch_dflash as td

    target, drafter = make_sliceable(case.family, case.chips, case.drafter)
    compiled = {
        name: tuple(given) if isinstance(given, list) else given for name, given in case.compiled.items()
    }
    said, again = [], 0
    for where in ({"runtime": case.runtime}, {"mesh": 4}):
        options = {"max_length": 96, "batch_size": 3, "cache": case.cache, "prefill_chunk_size": 32}
        filters = case.pick == "filters"
        engine = td.compile(target, drafter, filters=filters, **where, **options, **compiled)
        if compiled.get("verify_width") == "auto":  # costs of rounds would make the two differ
            mix(engine, WIDTHS)
        for seed in (5, 6):
            asked = {"max_new_tokens": 30, "eos_token_id": None, "seed": seed}
            asked |= PICKS[case.pick] | case.asked
            out = engine.generate(*prompts(), return_dict_in_generate=True, **asked)
            said.append([out.sequences.tolist(), out.stats.acceptance_lengths, _told(out)])
            again += out.stats.compilations if seed == 6 else 0
    return {"one": said[:2], "four": said[2:], "again": again}


def _told(out: Any) -> list[Any]:
    scores = [] if out.scores is None else [best.tolist() for best in torch.stack(out.scores).argmax(dim=-1)]
    ids = [] if out.top_ids is None else out.top_ids.tolist()
    logs = [] if out.logprobs is None else (out.logprobs * 100).round().tolist()
    return [scores, ids, logs]


def run_cases(cases: list[Case]) -> list[dict[str, Any]]:
    return json.loads(run_on_four(["-m", "support.slices"], json.dumps(cases)).splitlines()[-1])


def run_on_four(arguments: list[str], given: str = "") -> str:
    environment = os.environ | {"XLA_FLAGS": FLAGS, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    options = {"input": given, "capture_output": True, "text": True, "env": environment, "cwd": ROOT}
    options |= {"timeout": 900}
    done = subprocess.run([sys.executable, *arguments], **options)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def main() -> None:
    torch.set_num_threads(1)
    found = []
    for fields in json.load(sys.stdin):
        case = Case(*fields)
        BREAKS[case.break_by]() if case.break_by else None
        found.append(compare(case))
    print(json.dumps(found))


def wrong_copies() -> None:
    """Gives a chip queries that do not belong to its K/V heads."""
    import jax_bridge.mesh.rules as rules

    rules.are_cut = lambda heads, mesh: True


def first_chips_place() -> None:
    """Forgets in the argmax the chip of a place."""
    import jax_bridge.mesh.best as best

    best.jax.lax.axis_index = lambda axes: 0


def channels_in_a_row() -> None:
    """Cuts a convolution's channels as if they were not blocks of queries, keys and values."""
    from jax_bridge.mesh.cut import Partition

    Partition.rows_of = lambda way, chip: [chip]


def first_chips_drafts() -> None:
    """Forgets the chip of the likeliest drafts."""
    import jax_bridge.ops as ops

    likeliest = ops.likeliest_on_slice

    def local(own: Any, rows: Any, *given: Any) -> Any:
        values, places, total = likeliest(own, rows, *given)
        return values, places % (rows.shape[-1] // own.mesh.size), total

    ops.likeliest_on_slice = local


BREAKS = {"wrong copies": wrong_copies, "first chip's place": first_chips_place}
BREAKS |= {"first chip's drafts": first_chips_drafts, "channels in a row": channels_in_a_row}

if __name__ == "__main__":
    main()
