"""Parts of a drafter's network that z-lab's do not have, each switched on by a field.

Sources: vLLM's ``qwen3_dflash.py`` and ``laguna_dflash.py``, speculators 0.9.0's ``models/dflash`` and
``models/dspark``.
"""

from __future__ import annotations

from typing import Any

import transformers
from packaging.version import Version
from transformers.cache_utils import DFlashCache

from torch_dflash.checks import is_count
from torch_dflash.proposers.checkpoint.fields import FLAG, Rule, check_rules

FLAGS = ("own_embedding", "own_head", "mask_embedding", "sample_from_anchor")
FLAGS += ("attention_sink_bias", "aux_hidden_norms", "context_layernorm")
GATES = ("per-head", "per-element")


def extras_of(config: Any) -> dict[str, Any]:
    """The fields that are set, with their values; none in z-lab's own drafters."""
    found = {name: True for name in FLAGS if getattr(config, name)}
    found |= {"gating": config.gating} if config.gating is not None else {}
    found |= {"markov_rank": config.markov_rank} if config.markov_rank else {}
    return found | ({"draft_vocab_size": config.draft_vocab_size} if has_smaller_vocabulary(config) else {})


def has_smaller_vocabulary(config: Any) -> bool:
    """Whether the drafter has fewer ids than the target; ``d2t`` maps its ids to the target's."""
    return config.draft_vocab_size not in (None, config.vocab_size)


def refuse_extras(config: Any, where: str, instead: str, known: tuple[str, ...] = ()) -> None:
    """Raise ``ValueError`` if the drafter has a part unknown to ``where``; ``instead`` is the fix."""
    found = {name: value for name, value in extras_of(config).items() if name not in known}
    if found:
        name, value = next(iter(found.items()))
        raise ValueError(f"{name}={value!r} of the drafter: {where} does not know that part; {instead}")


_RULES: dict[str, Rule] = {
    **dict.fromkeys(FLAGS, FLAG),
    "gating": (lambda value: value in (None, *GATES), f"one of {', '.join(GATES)}, or null for none"),
    "markov_rank": (
        lambda value: is_count(value) and value >= 0,
        "the rank of the Markov head, or 0 for none",
    ),
    "draft_vocab_size": (
        lambda value: value is None or (is_count(value) and value >= 1),
        "a positive integer, or null for the target's",
    ),
}


def check_extras(config: Any) -> None:
    """Raise ``ValueError`` for a field of the wrong type, or fields that contradict each other."""
    check_rules(config, _RULES)
    rank, size, whole = config.markov_rank, config.draft_vocab_size, config.vocab_size
    named = config.own_embedding or config.own_head or size is not None or config.dflash2 or rank
    if named and not whole:
        raise ValueError("vocab_size=0, but the drafter has tables of ids; set the target's in its config.")
    mask = getattr(config, "mask_token_id", None)
    if config.own_embedding and is_count(mask) and mask >= whole:
        raise ValueError(
            f"mask_token_id={mask} has no row in the drafter's own embedding ({whole} rows); set the id that "
            "it was trained with."
        )
    if rank and config.dflash2:
        raise ValueError(f"markov_rank={rank} of a DFlash2 drafter: its selector chains drafts; set it to 0.")
    if has_smaller_vocabulary(config) and not config.own_head:
        raise ValueError(f"draft_vocab_size={size} of {whole} ids needs own_head=true and lm_head.weight.")


ENDS_IN_BLOCKS = "5.18"


def ends_in_blocks() -> bool:
    """Whether transformers' DFlash loop stops at a stop id within a block; before 5.18 it wrote on."""
    return Version(transformers.__version__).release >= Version(ENDS_IN_BLOCKS).release


def check_loop(cache: Any, config: Any) -> None:
    """Refuse to draft in transformers' loop where its text may be wrong or it lacks a part of the drafter.

    Raises:
        ValueError: ``cache`` is of transformers' loop, and that is older than 5.18, or a drafter of
            ``config`` has its own embedding, head or order of rows.
    """
    if not isinstance(cache, DFlashCache):
        return
    refuse_extras(config, "speculation_type='dflash'", "use custom_generate=torch_dflash.dflash(drafter).")
    if not ends_in_blocks():
        raise ValueError(
            f"speculation_type='dflash': transformers {transformers.__version__} writes on behind a stop id "
            f"inside of a block; use transformers>={ENDS_IN_BLOCKS}, or "
            "custom_generate=torch_dflash.dflash(drafter)."
        )
