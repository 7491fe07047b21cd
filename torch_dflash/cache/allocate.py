"""Which cache a layer of the target gets: by its spec, and by the plan's kind."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from torch_dflash.cache.dense import LatentLayer, StaticLayer, allocate_dense
from torch_dflash.cache.paged import allocate_pool
from torch_dflash.cache.spec import CacheLayer, LayerSpec
from torch_dflash.plan import DecodePlan


def allocate(spec: LayerSpec, plan: DecodePlan, dtype: torch.dtype, device) -> CacheLayer:
    """An empty cache of one layer, of the plan's kind."""
    if plan.cache == "paged":
        return allocate_pool(spec, plan, dtype, device)
    return allocate_dense(plan, spec.heads, spec.k_dim, spec.v_dim, dtype, device, DENSE[spec.kind])


DENSE = {"attention": StaticLayer, "latent": LatentLayer}
"""The layer of each kind of `LayerSpec`, in a static cache."""


def check_specs(specs: tuple[LayerSpec, ...], plan: DecodePlan) -> None:
    """Raise ``ValueError`` for a layer of a kind that no cache knows, or a latent one in a paged cache."""
    odd = sorted({spec.kind for spec in specs} - DENSE.keys())
    if odd:
        raise ValueError(f"kind={odd[0]!r} of a layer: no cache is written for it; there are {[*DENSE]}.")
    if plan.cache == "paged" and any(spec.kind == "latent" for spec in specs):
        raise ValueError(
            "cache='paged': the target's layers expand what they cache (latent attention); choose 'static'."
        )


def no_pages(plan: DecodePlan, device) -> Int[Tensor, "B row_pages"] | None:
    """The page tables of rows that have no page; None where the cache has none."""
    if plan.cache == "static":
        return None
    return torch.zeros(plan.batch_size, plan.row_pages, dtype=torch.int32, device=device)
