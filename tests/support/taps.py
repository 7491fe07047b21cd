"""Outputs of a target's layers: by our taps, and by transformers' ``hidden_states``."""

import runpy
from contextlib import ExitStack
from types import SimpleNamespace

import torch

from support import ROOT
from support.tiny import make_drafter, randomise
from torch_dflash.decode import Pair
from torch_dflash.plan import DecodePlan
from torch_dflash.proposers.plain import PlainProposer
from torch_dflash.targets.adapter import Target
from torch_dflash.targets.trace import blocks_of
from torch_dflash.targets.weights import collect_tensors

CONFIGS = runpy.run_path(str(ROOT / "benchmarks/family_configs.py"))
ROWS = 9


def build(case, seed=0):
    torch.manual_seed(seed)
    target = randomise(CONFIGS["build"](case), seed)
    if case == "gemma2":
        target.set_attn_implementation("eager")  # sdpa drops its softcap in some versions
    with torch.no_grad():
        for module in target.modules():  # `randomise` does not know these norms by name
            weight = getattr(module, "weight", None)
            if "norm" in type(module).__name__.lower() and weight is not None and weight.abs().mean() < 0.6:
                weight.mul_(4)
    return target


def drafter_for(target, **overrides):
    """A random drafter for a target; a text config may lie within the target's config."""
    base = target.config.get_text_config()
    sizes = {"hidden_size": base.hidden_size, "num_hidden_layers": base.num_hidden_layers}
    sizes |= {"vocab_size": base.vocab_size, "intermediate_size": 40}
    return make_drafter(SimpleNamespace(config=SimpleNamespace(**sizes)), **overrides)


def ids_for(target):
    """Two prompts [2, T] without the last ids, which may stand for images."""
    return torch.randint(3, 93, (2, ROWS), generator=torch.Generator().manual_seed(1))


def tapped_states(target, taps):
    """Outputs [B, T, H] of the layers ``taps``, as a verify pass has them."""
    ids, skeleton = ids_for(target), Target(target)
    skeleton.check_taps(taps)
    plan = DecodePlan(*ids.shape, 1, 1)
    pair = Pair(skeleton, PlainProposer(), plan)
    params = collect_tensors(skeleton.model, target, "target.model.")
    layers, start = pair.run(lambda pair: pair.target.start(plan), params), torch.zeros(2, dtype=torch.int32)
    out = pair.run(lambda pair: pair.target(ids.int(), start, layers, taps), params)
    return dict(zip(taps, out.features.chunk(len(taps), dim=-1), strict=True))


def own_states(target):
    """transformers' ``hidden_states``, with the last one before the norm."""
    for module in target.modules():
        if hasattr(module, "config"):
            module.config.tie_last_hidden_states = False
    passed, within = [], tuple(f"{path}." for path in blocks_of(target).paths)
    with torch.no_grad(), ExitStack() as hooks:
        for name, module in target.named_modules():
            if "Norm" in type(module).__name__ and not name.startswith(within):
                hooks.enter_context(
                    module.register_forward_hook(lambda _, args, out: passed.append((args[0], out)))
                )
        out = target(input_ids=ids_for(target), output_hidden_states=True, use_cache=False)
    *states, last = out.hidden_states
    # Versions without that setting give the last state normed.
    return *states, next((given for given, normed in passed if torch.equal(normed, last)), last)


def gap(target, taps=None):
    """The largest difference of a tap from ``hidden_states[tap + 1]``, over the states' size."""
    count = target.config.get_text_config().num_hidden_layers
    taps = tuple(range(count)) if taps is None else taps
    ours, theirs = tapped_states(target, taps), own_states(target)
    assert len(theirs) == count + 1
    return max(float((ours[tap] - theirs[tap + 1]).abs().max() / theirs[tap + 1].std()) for tap in taps)
