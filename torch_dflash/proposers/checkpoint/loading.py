"""Prepares a checkpoint of any layout for ``from_pretrained``."""

from __future__ import annotations

import os
from typing import Any, cast

import torch
from torch import Tensor

from torch_dflash.proposers.checkpoint.extras import has_smaller_vocabulary
from torch_dflash.proposers.checkpoint.files import MASK, check_files, hub_of, refuse_weights
from torch_dflash.proposers.layouts.pieces import OWN
from torch_dflash.proposers.layouts.zlab import ZLAB
from torch_dflash.proposers.notes import warn_of_tokenizer, warn_once
from torch_dflash.proposers.pair import TargetFacts, facts_of
from torch_dflash.storage.weight_files import HUB_OPTIONS


class FromLayouts:
    """Mixin: a drafter's ``from_pretrained``, which reads all of `torch_dflash.proposers.layouts`."""

    kind: str

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """Load a drafter; as ``PreTrainedModel.from_pretrained``, but a missing weight is an error.

        Weights are read from safetensors only, and ``auto_map`` is ignored: no code of the checkpoint runs.
        ``target=`` checks the drafter against its target first, as `torch_dflash.load_drafter` does.

        Raises:
            ValueError: not a checkpoint of this kind of drafter, or weights missing or of another shape.
            OSError: no such checkpoint.
        """
        wants_info, target = kwargs.pop("output_loading_info", False), kwargs.pop("target", None)
        hub = hub_of(kwargs)
        facts = None if target is None else facts_of(target, **hub)
        kwargs["ignore_mismatched_sizes"] = True  # reported below, with the tensor's name
        source = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        if source is not None:  # else a state_dict is given
            args, kwargs = in_our_names(source, kwargs, cls, facts)
        parent: Any = super()
        model, info = cast(Any, parent.from_pretrained(*args, output_loading_info=True, **kwargs))
        for problem in ("missing_keys", "mismatched_keys", "unexpected_keys"):
            if info.get(problem):
                refuse_weights(problem, info[problem], source or "the state_dict", cls.kind)
        if source is not None:
            model.name_or_path = model.config.name_or_path = str(source)  # of tensors transformers knows none
        if facts is not None:
            warn_once(facts, model)
        if isinstance(target, str | os.PathLike) and hasattr(model.config, "mask_token_id"):
            warn_of_tokenizer(str(target), model, hub)
        return (model, info) if wants_info else model


def in_our_names(
    source: Any, given: dict[str, Any], kind: Any, target: TargetFacts | None
) -> tuple[tuple[Any], dict[str, Any]]:
    """The arguments with which ``from_pretrained`` loads ``source``, checked before anything is allocated.

    transformers reads a checkpoint in z-lab's layout. The tensors of other layouts are read here and passed
    on under our network's names, as are those of a drafter with its own embedding, head or mask embedding, or
    with a rotary embedding that turns neighbouring channels.

    Raises:
        OSError, ValueError: as `check_files`; or the tensors contradict each other.
    """
    files = check_files(source, given, kind, target)
    if files is None:
        return (source,), given
    plain = all(piece.stored.name == name and piece.turned is None for name, piece in files.pieces.items())
    if files.layout is ZLAB and plain and not any(getattr(files.config, field) for field in OWN):
        return (source,), files.left | {"config": files.config}
    tensors = {name: piece.read() for name, piece in files.pieces.items()}
    if files.mask is not None:
        tensors[MASK] = files.mask
    _check_ids(tensors, files.config, source)
    rest = {name: value for name, value in files.left.items() if name not in HUB_OPTIONS}
    return (None,), rest | {"config": files.config, "state_dict": tensors}


def _check_ids(tensors: dict[str, Tensor], config: Any, source: Any) -> None:
    """Compare ``d2t`` with both vocabularies and with ``t2d``, then drop ``t2d``."""
    marked, offsets = tensors.pop("t2d", None), tensors.get("d2t")
    if offsets is not None and (offsets.is_floating_point() or offsets.is_complex()):
        raise ValueError(f"d2t in {source} is of {offsets.dtype}; ids are whole numbers: fetch it again.")
    if not has_smaller_vocabulary(config):
        tensors.pop("d2t", None)
        if offsets is not None and offsets.any():
            raise ValueError(f"d2t in {source} maps ids to others, but no smaller draft_vocab_size is set.")
        return
    size, ids_known = config.draft_vocab_size, max(config.draft_vocab_size, config.vocab_size)
    if offsets is None and size == ids_known:  # a padded head, whose ids are the target's
        offsets = tensors["d2t"] = torch.zeros(size, dtype=torch.int64)
    if offsets is None or offsets.shape != (size,):
        shape = None if offsets is None else tuple(offsets.shape)
        raise ValueError(f"d2t in {source} should have shape ({size},) by draft_vocab_size, it has {shape}.")
    ids = torch.arange(len(offsets)) + offsets
    if ids.min() < 0 or ids.max() >= ids_known or len(ids.unique()) < len(ids):
        raise ValueError(
            f"d2t in {source} maps two ids to one, or beyond the target's vocab_size={ids_known}: it "
            "must hold offsets, target id = draft id + d2t[draft id]."
        )
    if marked is not None and not torch.equal(
        marked.bool().nonzero()[:, 0], ids[ids < len(marked)].sort().values
    ):
        raise ValueError(f"t2d in {source} marks other ids than d2t maps to; one of the two is damaged.")
