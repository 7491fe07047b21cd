"""Which cache a layer of the target gets: by its spec, and by the plan's kind."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from torch_dflash.cache.dense import StaticLayer, allocate_dense
from torch_dflash.cache.latent import LatentLayer
from torch_dflash.cache.paged import allocate_pool
from torch_dflash.cache.recurrent import BothLayer, allocate_recurrent
from torch_dflash.cache.spec import CacheLayer, LayerSpec
from torch_dflash.plan import DecodePlan


def allocate(spec: LayerSpec, plan: DecodePlan, dtype: torch.dtype, device) -> CacheLayer:
    """An empty cache of one layer, of the plan's kind."""
    if spec.kind == "recurrent":
        return allocate_recurrent(spec, plan, dtype, device)
    if spec.kind == "both":
        own = allocate(replace(spec, kind="attention"), plan, dtype, device)
        return BothLayer(own, allocate_recurrent(spec, plan, dtype, device))
    if plan.cache == "paged":
        return allocate_pool(spec, plan, dtype, device)
    return allocate_dense(plan, spec.heads, spec.k_dim, spec.v_dim, dtype, device, DENSE[spec.kind])


DENSE = {"attention": StaticLayer, "latent": LatentLayer}
"""The layer of each kind of `LayerSpec`, in a static cache."""


KINDS = DENSE.keys() | {"recurrent", "both"}


def check_specs(specs: tuple[LayerSpec, ...], plan: DecodePlan) -> None:
    """Raise ``ValueError`` for a layer of a kind that no cache knows, or a latent one in a paged cache."""
    odd = sorted({spec.kind for spec in specs} - KINDS)
    if odd:
        raise ValueError(
            f"kind={odd[0]!r} of a layer: no cache is written for it; there are {sorted(KINDS)}."
        )
    if plan.cache == "paged" and any(spec.kind == "latent" for spec in specs):
        raise ValueError(
            "cache='paged': the target's layers expand what they cache (latent attention); choose 'static'."
        )


def check_tree(specs: tuple[LayerSpec, ...], plan: DecodePlan) -> None:
    """Raise ``ValueError`` where drafts are trees, which were not tried with what the plan names besides."""
    odd = sorted({spec.kind for spec in specs} - {"attention", "recurrent", "both"})
    if plan.depth is not None and odd:
        raise ValueError(
            f"a tree of drafts with layers of kind {odd[0]!r}: they verify chains alone; draft with the "
            "drafter itself, or td.Union(td.NGramProposer(), drafter) without rows."
        )


def no_pages(plan: DecodePlan, device) -> Int[Tensor, "B row_pages"] | None:
    """The page tables of rows that have no page; None where the cache has none."""
    if plan.cache == "static":
        return None
    return torch.zeros(plan.batch_size, plan.row_pages, dtype=torch.int32, device=device)
