"""Drafters of fewer ids, whose draft pass reads fewer rows of the head.

A small drafter's pass is mostly its head: two layers of 5.9 M weights before 28 M of SmolLM2-135M's. The
target verifies with its whole head, so texts stay the same; ids left out are never drafted.

Source: FR-Spec (arXiv 2502.14856), which ranks ids by how often they occur; ``d2t`` is EAGLE-3's.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn

from torch_dflash.checks import check_counts, is_count
from torch_dflash.proposers.checkpoint.extras import has_smaller_vocabulary
from torch_dflash.proposers.dflash.model import DFlashDraftModel
from torch_dflash.proposers.pair import check_pair, tables_of_ids


def count_ids(texts: Iterable[Sequence[int] | Tensor]) -> Counter[int]:
    """The number of times each id occurs in ``texts``."""
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(text.tolist() if isinstance(text, Tensor) else text)
    return counts


def frequent_ids(texts: Iterable[Sequence[int] | Tensor], rows: int) -> list[int]:
    """The ``rows`` ids that occur most often in ``texts``, ascending; fewer where there are no more.

    Args:
        texts: of ids, such as the target's own answers. rows: most ids.

    Raises:
        TypeError: a text holds an object that is no id.
    """
    check_counts(rows=rows)
    counts = count_ids(texts)
    for token in counts:
        if not is_count(token):
            raise TypeError(f"texts: {token!r} is no id; give lists of ids, or tensors of them.")
    return sorted(token for token, _ in counts.most_common(rows))


@torch.no_grad()
def with_draft_vocabulary(drafter: DFlashDraftModel, target: Any, ids: Sequence[int]) -> Any:
    """A drafter with its own small head: the rows ``ids`` of the target's head, or of the drafter's.

    It shares the other weights with ``drafter``, which stays unchanged; the rows are copied.
    ``save_pretrained`` writes the head with ``lm_head.weight`` and ``d2t``, as in speculators' drafters.

    Args:
        drafter: a DFlash or DFlash2 drafter, without a smaller vocabulary yet.
        target: the live target. ids: the target's, each once, in any order; see `frequent_ids`.

    Raises:
        ValueError: an id without a row in the head or given twice, too few ids, or a head or drafter that
            cannot be cut; the message names the field and the fix.
    """
    check_pair(target, drafter)
    if has_smaller_vocabulary(drafter.config):
        size = drafter.config.draft_vocab_size
        raise ValueError(f"draft_vocab_size={size} of the drafter: give the one with the whole vocabulary.")
    head = _head(target) if drafter.lm_head is None else drafter.lm_head
    config, size = copy.deepcopy(drafter.config), head.weight.shape[0]
    if tables_of_ids(config):  # of so many ids; the target may have more
        size = min(size, config.vocab_size)
    else:
        config.vocab_size = size
    kept = _checked(ids, size, getattr(config, "selector_top_k", 1))
    config.own_head, config.draft_vocab_size = True, len(kept)
    with init_empty_weights(include_buffers=False):
        narrow: Any = type(drafter)(config)
    weights = drafter.state_dict()
    rows = kept.to(head.weight.device)
    weights["lm_head.weight"] = head.weight[rows].to(drafter.dtype)
    weights["d2t"] = (kept - torch.arange(len(kept))).to(drafter.device)
    if drafter.markov_head is not None:
        weights["markov_head.markov_w2.weight"] = drafter.markov_head.markov_w2.weight[rows]
    narrow.load_state_dict(weights, assign=True)
    return narrow.to(drafter.device).train(drafter.training)


def _head(target: Any) -> nn.Linear:
    head = target.get_output_embeddings()
    plain = type(head) is nn.Linear and head.bias is None and head.weight.is_floating_point()
    if not plain or type(head.weight) not in (Tensor, nn.Parameter):
        raise ValueError(
            f"target={type(target).__name__}: its head is no plain linear layer without bias; keep the whole "
            "vocabulary."
        )
    return head


def _checked(ids: Sequence[int], rows: int, least: int) -> Tensor:
    kept = list(ids.tolist() if isinstance(ids, Tensor) else ids)
    for token in kept:
        if not is_count(token):
            raise ValueError(f"ids: {token!r} is no id; give whole numbers.")
    kept = torch.tensor(kept, dtype=torch.int64)
    if not least <= len(kept) < rows:
        raise ValueError(
            f"ids: {len(kept)} given; give at least {least} (the selector's candidates, or one) and fewer "
            f"than the head's {rows} rows."
        )
    kept = kept.sort().values
    if kept[0] < 0 or kept[-1] >= rows:
        outside = int(kept[0] if kept[0] < 0 else kept[-1])
        raise ValueError(f"ids: {outside} has no row in the target's head of {rows} rows; leave it out.")
    twice = kept[1:][kept[1:] == kept[:-1]]
    if len(twice):
        raise ValueError(f"ids: {int(twice[0])} stands there twice; give each once.")
    return kept
