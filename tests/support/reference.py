"""A pair, and the pure-JAX reference's reading of the pair."""

from functools import partial

import jax
import torch

from jax_bridge.reference import load_drafter, load_target, loop
from support import authors
from support.tiny import correlate, make_drafter, make_target, randomise

EXACT = 1e-5


PROMPTS = authors.prompts()


LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}


class Pair:  # a pair of models, and the reference's reading of their saved files
    def __init__(self, folder, family, overrides):
        self.target = soften(make_target(family))
        self.drafter = make_drafter(self.target, **overrides)
        correlate(self.target, self.drafter, 8.0)
        soften(randomise(self.drafter, seed=1, gain=0.7))
        self.target.save_pretrained(folder / "target")
        self.drafter.save_pretrained(folder / "drafter")
        target, drafter = load_target(folder / "target"), load_drafter(folder / "drafter")
        self.weights = loop.PairParams(target[0], drafter[0])
        self.models = loop.Models(target[1], drafter[1])
        self.step = jax.jit(partial(loop.decode_round, self.models))


def soften(model):
    """Makes attention less sharp than `randomise` does: sharp attention multiplies rounding beyond EXACT."""
    names = [name for name, _ in model.named_parameters()]
    kind = "q_norm.weight" if any(name.endswith("q_norm.weight") for name in names) else "q_proj.weight"
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(kind):
                weight.mul_(0.36)
            if name.endswith("successor_codebook"):  # otherwise random bonuses would decide every draft
                weight.mul_(0.1)
    return model
