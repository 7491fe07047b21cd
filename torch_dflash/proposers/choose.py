"""Makes a proposer of the ``drafter`` argument, after checking that it fits the target."""

from __future__ import annotations

import copy
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from torch_dflash.checks import check_counts, check_loaded, check_target
from torch_dflash.proposers import DFlashProposer, PlainProposer, Proposer
from torch_dflash.proposers.composed import Composed, inner_of
from torch_dflash.proposers.dflash.model import DFlashDraftModel
from torch_dflash.proposers.eagle3.model import Eagle3DraftModel
from torch_dflash.proposers.eagle3.proposer import Eagle3Proposer
from torch_dflash.proposers.medusa.model import MedusaDraftModel
from torch_dflash.proposers.medusa.proposer import MedusaProposer
from torch_dflash.proposers.notes import warn_once
from torch_dflash.proposers.pair import check_pair
from torch_dflash.targets.weights import model_of

PROPOSERS: dict[Any, Any] = {
    DFlashDraftModel: DFlashProposer,
    Eagle3DraftModel: Eagle3Proposer,
    MedusaDraftModel: MedusaProposer,
}


class Missing:
    """Default of a ``drafter`` argument that was not given; None means plain decoding."""


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
                f"drafter={type(drafter).__name__}: a drafter's files loaded as another model, with weights "
                "missing; load them with torch_dflash.DFlashDraftModel.from_pretrained."
            )
    if not (drafter is None or isinstance(drafter, (Proposer, *PROPOSERS))):
        order = " input_ids come third." if isinstance(drafter, Tensor) else ""
        for way in ("merge_and_unload()", "_orig_mod", "module"):  # of PEFT, torch.compile, data parallel
            if isinstance(drafter, nn.Module) and hasattr(drafter, way.removesuffix("()")):
                order = f" It wraps one: pass its .{way}."
                break
        raise TypeError(
            f"drafter={type(drafter).__name__}: pass a DFlashDraftModel (of torch_dflash.load_drafter), a "
            f"Proposer such as NGramProposer(), or None for plain decoding.{order}"
        )
    key = getattr(drafter, "key", None)
    try:
        hash(key)
    except TypeError as error:
        fix = f"must be hashable ({error}); make it a tuple of numbers and words."
        raise TypeError(f"drafter={type(drafter).__name__}: key={key!r}: it {fix}") from error


def check_models(target: Any, drafter: Any) -> None:
    """Raise ``TypeError`` unless ``target`` is a causal LM, and ``drafter`` as in `check_drafter`."""
    check_target(model_of(target))
    check_drafter(drafter)


def make_proposer(target: PreTrainedModel, drafter, block_size: int | None) -> Proposer:
    """The proposer for a ``drafter`` argument: a drafter model, a proposer, or None.

    Raises:
        TypeError, ValueError: ``drafter`` cannot draft, or does not fit the target.
    """
    check_drafter(drafter)
    check_counts(block_size=block_size)
    if isinstance(drafter, Composed):
        return drafter.build(make_proposer(target, drafter.drafter, block_size))
    kind = next((kind for model, kind in PROPOSERS.items() if isinstance(drafter, model)), None)
    if kind is not None:
        check_pair(target, drafter)
        if kind is not MedusaProposer:
            warn_once(target, drafter)
        if block_size is not None and block_size < 2:
            raise ValueError(f"block_size={block_size}: set >= 2, or drafter=None to decode without drafts.")
        return kind(drafter, block_size)
    # A copy without weights: an engine must not keep the user's module alive, nor touch it.
    proposer = PlainProposer() if drafter is None else copy.deepcopy(drafter)
    name = type(proposer).__name__
    if not isinstance(getattr(proposer, "name", None), str):
        raise TypeError(f"drafter={name}: it has no name, which saved states carry; set one (name = 'mine').")
    if not hasattr(proposer, "width"):
        raise TypeError(f"drafter={name}: it has no width; set its rows, the anchor included (width = 8).")
    check_counts(width=proposer.width)
    if block_size not in (None, proposer.width):
        raise ValueError(f"block_size={block_size}, but {name} drafts {proposer.width}; set it there.")
    return cast(Proposer, proposer.to("meta"))
