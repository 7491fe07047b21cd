"""Counter-based sampling: a token is a pure function of (seed, position, logits).

Without a generator a compiled loop cannot repeat or leak random state, and a seed gives the same text for
any drafter, block width, batch or runtime (up to near-ties of the logits).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from torch_dflash.ops.control_flow import branch
from torch_dflash.state import Sampling


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int32 (torch's own is arithmetic)."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def mix(x: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """A bijective 32-bit finaliser (C. Wellons, "lowbias32") on wrapping int32 arithmetic."""
    x = x ^ _shift_right(x, 16)
    x = x * 0x7FEB352D
    x = x ^ _shift_right(x, 15)
    x = x * (0x846CA68B - (1 << 32))
    return x ^ _shift_right(x, 16)


def noise_bits(
    seed: Int[Tensor, " B"], position: Int[Tensor, "B M"], ids: int | Int[Tensor, " V"]
) -> Int[Tensor, "B M V"]:
    """32 random bits for each of ``ids`` (an int: all ids below it) as the token at ``position``."""
    key = mix(mix(seed[:, None] ^ 0x3C6EF372) + position)
    second = mix(key ^ 0x1B873593)
    if isinstance(ids, int):
        ids = torch.arange(ids, device=seed.device, dtype=torch.int32)
    # Two keyed rounds: with one, rows of nearby keys would be shifted copies of each other.
    return mix(mix(ids + key[..., None]) ^ second[..., None])


def gumbel_of(bits: Int[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Standard Gumbel noise from 32 random bits; finite for all of them.

    The largest noise decides a sample, and comes from the smallest uniform: floats are densest next to 0,
    where 31 bits survive. Next to 1 they would round to 1, and the noise to infinity.
    """
    uniform = (_shift_right(bits, 1).to(torch.float32) + 0.5) * 2.0**-31
    return -torch.log(-torch.log1p(-uniform.clamp(max=1 - 2.0**-24)))


def gumbel(
    seed: Int[Tensor, " B"], position: Int[Tensor, "B M"], ids: int | Int[Tensor, " V"]
) -> Float[Tensor, "B M V"]:
    """Standard Gumbel noise for the token at ``position``; ``ids`` as in `noise_bits`."""
    return gumbel_of(noise_bits(seed, position, ids))


def noisy_logits(
    logits: Float[Tensor, "B M V"],
    position: Int[Tensor, "B M"],
    sampling: Sampling,
    ids: int | Int[Tensor, " V"],
) -> Float[Tensor, "B M V"]:
    """``logits`` with noise, so that the largest is the row's sample; a greedy row's logits unchanged.

    They are temperature * (logits / temperature + noise): further terms may be added to them.
    """
    temperature = sampling.temperature.clamp(min=0)[:, None, None]
    return logits.to(torch.float32) + temperature * gumbel(sampling.seed, position, ids)


def filter_logits(scaled: Float[Tensor, "B M V"], sampling: Sampling) -> Float[Tensor, "B M V"]:
    """Top-k, then top-p, then min-p on temperature-scaled logits, in Hugging Face's order and meaning."""
    ordered = torch.sort(scaled, dim=-1, descending=True).values
    vocab = scaled.shape[-1]
    top_k = torch.where(sampling.top_k > 0, sampling.top_k, vocab).clamp(max=vocab)[:, None, None]
    rank = torch.arange(vocab, device=scaled.device, dtype=torch.int32)
    kept = torch.where(rank < top_k, ordered, -torch.inf)
    mass = torch.softmax(kept, dim=-1)
    # A rank stays while the mass before it is below top_p; the best always stays. Rounded sums reach 1
    # before the tail ends, so top_p = 1 is off explicitly.
    top_p = torch.where(sampling.top_p < 1, sampling.top_p, torch.inf)[:, None, None]
    inside = (torch.cumsum(mass, dim=-1) - mass < top_p) | (rank == 0)
    inside = inside & (mass >= sampling.min_p[:, None, None] * mass[..., :1]) & (rank < top_k)
    lowest = torch.where(inside, ordered, torch.inf).amin(dim=-1, keepdim=True)
    return torch.where(scaled >= lowest, scaled, -torch.inf)


def _scaled(
    logits: Float[Tensor, "B M V"], sampling: Sampling, filters: bool, warp: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """(sampled rows' logits after temperature and filters, the best moved to 0; the best, scaled)."""
    # The best logit is moved to 0 first: others would overflow when divided by a tiny temperature. The clamp
    # is for logits that a rule made infinite: the difference of two infinities is NaN.
    logits = logits.clamp(max=torch.finfo(logits.dtype).max)
    greedy, best = sampling.temperature <= 0, logits.amax(dim=-1, keepdim=True)
    temperature = torch.where(greedy, 1.0, sampling.temperature).clamp(min=1e-30)[:, None, None]
    scaled = (logits - best) / temperature
    return warp(filter_logits(scaled, sampling) if filters else scaled), best / temperature


def warped_logits(
    logits: Float[Tensor, "B M V"], sampling: Sampling, filters: bool, warp: Callable[[Tensor], Tensor]
) -> Float[Tensor, "B M V"]:
    """The scores of `pick_tokens`: a greedy row's logits, a sampled row's warped logits."""

    def sampled(logits: Tensor) -> Tensor:
        scaled, best = _scaled(logits, sampling, filters, warp)
        return torch.where((sampling.temperature <= 0)[:, None, None], logits, scaled + best)

    any_sampled = (sampling.temperature > 0).any()
    return branch(any_sampled, sampled, lambda logits: logits.clone(), logits.to(torch.float32))


def pick_tokens(
    logits: Float[Tensor, "B M V"],
    position: Int[Tensor, "B M"],
    sampling: Sampling,
    filters: bool,
    warp: Callable[[Tensor], Tensor] = lambda scaled: scaled,
) -> Int[Tensor, "B M"]:
    """The target's pick for each ``position``: argmax, or a Gumbel-max sample.

    Rows with temperature 0 are greedy; ``warp`` is the last filter of the other rows' scaled logits.
    """

    def sample(logits: Tensor, position: Tensor) -> Tensor:
        scaled, _ = _scaled(logits, sampling, filters, warp)
        noisy = scaled + gumbel(sampling.seed, position, logits.shape[-1])
        greedy = (sampling.temperature <= 0)[:, None, None]
        return argmax(torch.where(greedy, logits, noisy), position)

    def argmax(logits: Tensor, position: Tensor) -> Tensor:
        return torch.argmax(logits, dim=-1).to(torch.int32)

    # A greedy batch skips the noise: hashing the vocabulary costs as much as a small head.
    any_sampled = (sampling.temperature > 0).any()
    return branch(any_sampled, sample, argmax, logits.to(torch.float32), position)
