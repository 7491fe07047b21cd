"""`load_pair` checks and fetches a published pair by its name."""

from __future__ import annotations

import os
import warnings
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, AutoTokenizer

from torch_dflash.proposers.checkpoints import load_drafter
from torch_dflash.proposers.notes import mask_in_texts
from torch_dflash.published.rows import Checkpoint, checkpoints
from torch_dflash.targets.auto import auto_class

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from torch_dflash.proposers.dflash.model import DFlashDraftModel

NEAR = 3


class IncompleteWeights(ValueError):
    """A checkpoint lacks weights that transformers would fill at random."""


def load_pair(
    name: str, dtype: Any = "auto", **options: Any
) -> tuple["PreTrainedModel", "DFlashDraftModel", "PreTrainedTokenizerBase"]:
    """A published target, its drafter and its tokenizer, ready for `torch_dflash.generate`.

    A pair that does not decode here is refused before any fetch. The drafter, which is small, is fetched and
    compared with the target's config before the target.

    Args:
        name: name of one of `torch_dflash.checkpoints`, such as "qwen3-4b".
        dtype: dtype of both models' weights; "auto": the stored dtype.
        **options: options of the fetches (``cache_dir``, ``token``, ``local_files_only``).

    Returns:
        Target, drafter and tokenizer, as `torch_dflash.load_demo_pair`.

    Raises:
        ValueError: no such pair, a pair that does not decode here, or files that do not fit.
        OSError: a fetch failed.
    """
    row = find(name)
    check_row(row)
    target, source = str(row.target), str(row.drafter)
    config: Any = AutoConfig.from_pretrained(target, **options)
    if dtype != "auto":
        config.get_text_config().dtype = dtype
    tokenizer = AutoTokenizer.from_pretrained(target, **options)
    drafter: Any = load_drafter(source, config, dtype, **options)
    for odd in mask_in_texts(tokenizer, drafter.config.mask_token_id):
        warnings.warn(str(odd), stacklevel=2)
    return load_target(target, dtype, config, **options).eval(), drafter.eval(), tokenizer


def find(name: str) -> Checkpoint:
    """The pair ``name``.

    Raises:
        ValueError: no such pair; the message has similar names.
    """
    named = {row.name: row for row in checkpoints}
    if name in named:
        return named[name]
    wanted = str(name).lower()
    near = [row.name for row in checkpoints if wanted in (str(row.drafter).lower(), str(row.target).lower())]
    near = near or get_close_matches(wanted, named, NEAR) or [one for one in named if wanted in one][:NEAR]
    meant = f"did you mean {', '.join(map(repr, near))}?" if near else "none is like it."
    raise ValueError(f"name={name!r}: no published pair; {meant} `torch-dflash list` shows them all.")


def check_row(row: Checkpoint) -> None:
    """Raise ``ValueError`` for a row whose pair does not decode here."""
    if row.decoded is False:
        raise ValueError(
            f"name={row.name!r}: its target {row.model} ({row.family}) is refused here, for it has "
            f"{row.refused_for}; choose another with torch_dflash.checkpoints."
        )
    if row.foreign is not None:
        fix = "choose one of kind DFlash, DFlash2 or DSpark"
        if row.kind == "DSpark":
            fix = "torch_dflash.load_drafter tells by its files which field is missing"
        raise ValueError(f"name={row.name!r}: its drafter is {row.foreign}, so it is not fetched; {fix}.")
    missing = [field for field in ("target", "drafter") if getattr(row, field) is None]
    if missing:
        raise ValueError(
            f"name={row.name!r}: the hub id of its {' and '.join(missing)} is not known here; load both by "
            "their ids, the drafter with torch_dflash.load_drafter."
        )


def load_target(source: str | os.PathLike[str], dtype: Any, config: Any, **options: Any) -> Any:
    """A causal LM of ``config`` with all of its weights, from the safetensors in ``source``.

    Raises:
        IncompleteWeights: weights are missing. OSError, ValueError: as transformers.
    """
    where = {name: options[name] for name in ("cache_dir", "local_files_only") if name in options}
    options["adapter_kwargs"] = where  # else transformers looks for an adapter on the network, with retries
    loading: Any = auto_class(config).from_pretrained(
        source, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
    )
    model, info = loading
    if info["missing_keys"]:
        raise IncompleteWeights(
            f"{source}: its weights lack {sorted(info['missing_keys'])[:3]}; transformers would fill them at "
            "random. Check that the checkpoint is complete and a causal LM."
        )
    return model
