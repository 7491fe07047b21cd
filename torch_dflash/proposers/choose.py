"""What a user passes as ``drafter``, made a proposer. Whether it fits is asked before anything is built."""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from torch_dflash.checks import check_counts, check_loaded, check_target
from torch_dflash.proposers import DFlashProposer, PlainProposer, Proposer
from torch_dflash.proposers.composed import Composed, inner_of
from torch_dflash.proposers.dflash.model import DFlashDraftModel
from torch_dflash.proposers.notes import warn_once
from torch_dflash.proposers.pair import check_pair
from torch_dflash.targets.weights import model_of


class Missing:
    """Stands for a drafter that was not given, for None asks for plain decoding."""


def check_drafter(drafter) -> None:
    """Raise ``TypeError`` unless ``drafter`` is a drafter model, a proposer with a hashable key, or None."""
    drafter = inner_of(drafter)
    check_loaded("drafter", drafter, "torch_dflash.load_drafter({}, target)")
    if drafter is Missing:
        raise TypeError(
            "drafter is missing: pass torch_dflash.load_drafter(path_or_id, target), a Proposer such as "
            "NGramProposer(), or None for plain decoding."
        )
    if isinstance(drafter, PreTrainedModel) and not isinstance(drafter, DFlashDraftModel):
        if hasattr(drafter.config, "dflash_config"):
            raise TypeError(
                f"drafter={type(drafter).__name__}: a drafter's files read as another model, with weights "
                "missing; load them with torch_dflash.DFlashDraftModel.from_pretrained."
            )
    if not (drafter is None or isinstance(drafter, Proposer | DFlashDraftModel)):
        order = " input_ids come third." if isinstance(drafter, Tensor) else ""
        for way in ("merge_and_unload()", "_orig_mod", "module"):  # of PEFT, torch.compile, data parallel
            if isinstance(drafter, nn.Module) and hasattr(drafter, way.removesuffix("()")):
                order = f" It wraps one: pass its .{way}."
                break
        raise TypeError(
            f"drafter={type(drafter).__name__}: pass a DFlashDraftModel (of torch_dflash.load_drafter), a "
            f"Proposer such as NGramProposer(), or None for plain decoding.{order}"
        )
    try:
        hash(getattr(drafter, "key", None))
    except TypeError as error:
        raise TypeError(
            f"drafter={type(drafter).__name__}: key={getattr(drafter, 'key', None)!r}: it must be hashable "
            f"({error}); make it a tuple of numbers and words."
        ) from error


def check_models(target: Any, drafter: Any) -> None:
    """Raise ``TypeError`` unless ``target`` is a causal LM, and ``drafter`` as in `check_drafter`."""
    check_target(model_of(target))
    check_drafter(drafter)


def holds_tensors(drafter: nn.Module) -> bool:
    """Whether ``drafter`` has parameters or buffers, which are one object's own."""
    return next(chain(drafter.parameters(), drafter.buffers()), None) is not None


def make_proposer(target: PreTrainedModel, drafter, block_size: int | None) -> Proposer:
    """The proposer for what a user passes as ``drafter``: a drafter model, a proposer, or None.

    Raises:
        TypeError, ValueError: not something that drafts, or it does not fit the target.
    """
    check_drafter(drafter)
    check_counts(block_size=block_size)
    if isinstance(drafter, Composed):
        return drafter.build(make_proposer(target, drafter.drafter, block_size))
    if isinstance(drafter, DFlashDraftModel):
        check_pair(target, drafter)
        warn_once(target, drafter)
        if block_size is not None and block_size < 2:
            raise ValueError(
                f"block_size={block_size}: a block is the anchor and at least one draft; pass drafter=None "
                "to decode without drafting."
            )
        return DFlashProposer(drafter, block_size)
    # A copy without weights: an engine must not keep the user's module alive, nor touch it.
    proposer = PlainProposer() if drafter is None else copy.deepcopy(drafter)
    if not isinstance(getattr(proposer, "name", None), str):
        raise TypeError(
            f"drafter={type(proposer).__name__}: it has no name; give the class one (name = 'mine'), which "
            "states saved with it will carry."
        )
    if not hasattr(proposer, "width"):
        raise TypeError(
            f"drafter={type(proposer).__name__}: it has no width; set how many rows it drafts, the anchor "
            "included (width = 8)."
        )
    check_counts(width=proposer.width)
    if block_size not in (None, proposer.width):
        raise ValueError(
            f"block_size={block_size}, but {type(proposer).__name__} drafts {proposer.width}; set it there."
        )
    return cast(Proposer, proposer.to("meta"))
