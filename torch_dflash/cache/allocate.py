"""`LAYERS`: the cache of a target's layer, by the layer's kind and the plan's cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from torch_dflash.cache.dense import StaticLayer
from torch_dflash.cache.indexed import IndexedLayer, IndexPages, IndexRows
from torch_dflash.cache.latent import LatentLayer, SharedLayer, SharedPages
from torch_dflash.cache.paged import PagedLayer
from torch_dflash.cache.recurrent import BothLayer, RecurrentLayer
from torch_dflash.cache.spec import CacheLayer, LayerSpec
from torch_dflash.ops.recurrence import at_least_float32
from torch_dflash.plan import DecodePlan

LAYERS: dict[tuple[str, str], tuple[Any, ...]] = {
    ("attention", "static"): (StaticLayer,),
    ("attention", "paged"): (PagedLayer,),
    ("shared", "static"): (SharedLayer,),
    ("shared", "paged"): (SharedPages,),
    ("latent", "static"): (LatentLayer,),
    ("recurrent", "static"): (RecurrentLayer,),
    ("recurrent", "paged"): (RecurrentLayer,),
    ("both", "static"): (StaticLayer, RecurrentLayer),
    ("both", "paged"): (PagedLayer, RecurrentLayer),
}
"""By `LayerSpec.kind` and `DecodePlan.cache`: a class, or the two of a `BothLayer`.

Each is a `CacheLayer` with ``allocate(spec, plan, dtype, device)``, and ``trees`` where drafts may be trees.
"""

INDEXES: dict[str, Any] = {"static": IndexRows, "paged": IndexPages}
"""By `DecodePlan.cache`: the keys of a layer's indexer."""

EXPANDED = "they expand what they cache, for their kv_b_proj is no plain linear layer or carries a hook"


def allocate(spec: LayerSpec, plan: DecodePlan, dtype: torch.dtype, device) -> CacheLayer:
    """An empty cache of one layer."""
    made = [kind.allocate(spec, plan, dtype, device) for kind in LAYERS[spec.kind, plan.cache]]
    layer: Any = made[0] if len(made) == 1 else BothLayer(*made)
    if spec.index is not None:
        keys = replace(spec, heads=1, k_dim=spec.index)
        kind = at_least_float32(dtype) if spec.index_wide else dtype
        layer = IndexedLayer(layer, INDEXES[plan.cache].allocate(keys, plan, kind, device))
    return layer


def check_specs(specs: tuple[LayerSpec, ...], plan: DecodePlan) -> None:
    """Raise ``ValueError`` for a layer without an entry in `LAYERS`, or one that cannot verify a tree."""
    for kind in sorted({spec.kind for spec in specs}):
        caches = [repr(cache) for known, cache in LAYERS if known == kind]
        if not caches:
            known = sorted({known for known, _ in LAYERS})
            raise ValueError(f"kind={kind!r} of a layer: no cache is written for it; there are {known}.")
        if repr(plan.cache) not in caches:
            fix = f"choose {' or '.join(caches)}"
            fix = f"{EXPANDED}; {fix}" if kind == "latent" else fix
            raise ValueError(f"cache={plan.cache!r}: holds no {kind} layers, which the target has; {fix}.")
        indexed = any(spec.index for spec in specs if spec.kind == kind)
        if plan.depth is not None and (indexed or not all(one.trees for one in LAYERS[kind, plan.cache])):
            named = "with an indexer" if indexed else f"of kind {kind!r}"
            raise ValueError(
                f"a tree of drafts with layers {named}: they verify chains alone; draft with the drafter "
                "itself, td.Union(td.NGramProposer(), drafter) without rows, or td.NGramProposer() alone."
            )


def empty_page_table(plan: DecodePlan, device) -> Int[Tensor, "B row_pages"] | None:
    """Page tables of rows without pages; None for a static cache."""
    if plan.cache == "static":
        return None
    return torch.zeros(plan.batch_size, plan.row_pages, dtype=torch.int32, device=device)
