"""A drafter's head, and how to add a larger one.

A drafter with convolutions alone has no published layout. It is stored as a DFlash2 drafter whose selector
has one candidate a position, so loaders of DFlash2 draft the likeliest tokens.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from torch_dflash.proposers.dflash.config import DFlashConfig
from torch_dflash.proposers.dflash.model import DFlashDraftModel
from torch_dflash.proposers.dflash2.model import SIZES, DFlash2Config, DFlash2DraftModel
from torch_dflash.train.fit.kinds import kind_of
from torch_dflash.train.fit.options import SELECTOR, check_head

NO_CHOICE = {"selector_rank": 1, "selector_top_k": 1}
_GROWS = {"dflash": ("convolutions", "dflash2", "dspark"), "convolutions": ("dflash2",)}
_MARKOV_RANK = 256


def head_of(config: Any) -> str:
    """The head of a drafter with this config."""
    if (head := kind_of(config).head) is not None:
        return head
    if not isinstance(config, DFlash2Config):
        return "dspark" if config.markov_rank else "dflash"
    return "convolutions" if config.selector_top_k == 1 else "dflash2"


def with_head(
    drafter: Any, head: str | None, seed: int = 0, freeze: bool = False, **sizes: int | None
) -> Any:
    """``drafter`` with the parts of ``head``; None: as it is.

    Present parts keep their weights, new parts begin as nothing: untrained, the drafts stay the same.

    Args:
        seed: of random new weights.
        freeze: present parts ask for no gradient, so a fit leaves them.
        sizes: fields of the new config, for the new parts; None: the published ones.

    Raises:
        ValueError: the drafter has parts that ``head`` lacks, or already has the parts of ``sizes``; or
            there is no new part, and ``freeze`` would leave nothing to train.
    """
    check_head(head, **sizes)
    config: Any = drafter.config
    has = head_of(config)
    if head is None or head == has:
        given = [f"{name}={size}" for name, size in sizes.items() if size is not None]
        if given:
            raise ValueError(f"{given[0]}: the drafter's own is kept; leave it out.")
        if freeze:
            raise ValueError(f"freeze=True with head={head!r}: pass a head that adds parts to {has!r}.")
        return drafter
    if head not in _GROWS.get(has, ()):
        raise ValueError(f"head={head!r}: the drafter's is {has!r}, and no part is removed; leave it out.")
    if has == "convolutions" and sizes.get("conv_group_size") is not None:
        group = sizes["conv_group_size"]
        raise ValueError(f"conv_group_size={group}: the drafter's own is kept; leave it out.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        grown = _grown(config, head, {name: size for name, size in sizes.items() if size is not None})
    weights = {
        name: weight
        for name, weight in drafter.state_dict().items()
        if not name.startswith("candidate_selector.")
    }
    unknown = grown.load_state_dict(weights, strict=False).unexpected_keys
    assert not unknown, unknown
    for name, weight in grown.named_parameters():
        weight.requires_grad_(not freeze or name not in weights)
    return cast(Any, grown).to(drafter.device, drafter.dtype)


def _grown(config: DFlashConfig, head: str, chosen: dict[str, Any]) -> DFlashDraftModel:
    """A drafter of ``config`` with ``head``; new parts begin as nothing."""
    fields: dict[str, Any] = config.to_dict()
    if head == "dspark":
        fields["markov_rank"] = chosen.get("markov_rank", _MARKOV_RANK)
        grown: Any = DFlashDraftModel(DFlashConfig(**fields))
        grown.markov_head.begin_as_nothing()
        return grown
    published: dict[str, Any] = {name: getattr(DFlash2Config, name) for name in SIZES}
    kept = {name: fields[name] for name in SIZES if name not in SELECTOR and name in fields}
    chosen = published | kept | chosen | (NO_CHOICE if head == "convolutions" else {})
    fields["dflash_config"] = fields["dflash_config"] | chosen
    fields["architectures"] = [DFlash2DraftModel.__name__]
    return DFlash2DraftModel(DFlash2Config(**fields | chosen))
