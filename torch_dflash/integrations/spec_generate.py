"""``drafter.spec_generate``: the call of z-lab's package, answered by our loop."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torch_dflash.engine.outputs import GenerateOutput
from torch_dflash.generation import generate
from torch_dflash.integrations.prepared import OF_SAMPLES, OFF
from torch_dflash.proposers.dflash.model import DFlashDraftModel

# Nothing of the target's ``generation_config`` counts, as there.
_UNASKED: dict[str, Any] = OFF | OF_SAMPLES | {"exponential_decay_length_penalty": (0, 1.0)}
_UNASKED |= {"stop_strings": [], "max_time": math.inf}


def spec_generate(
    drafter: DFlashDraftModel,
    target: Any,
    input_ids: Tensor,
    max_new_tokens: int,
    stop_token_ids: list[int] | None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    **options: Any,
) -> torch.LongTensor | GenerateOutput:
    """Decode as ``spec_generate`` of z-lab's ``dflash`` does: the same arguments, the same greedy tokens.

    The target's ``generation_config`` is not asked: no stop ids, penalties or filters but those given.
    Sampled tokens are of the same law, with noise of our own.

    Args:
        drafter: bound, as a method of `DFlashDraftModel`.
        target: as in `torch_dflash.generate`.
        input_ids: LongTensor [B, T], all real tokens; z-lab's takes one row.
        max_new_tokens: hard cap.
        stop_token_ids: each ends a row; None: nothing does.
        temperature: 0 is greedy. top_p, top_k: 1 and 0 leave them out.
        **options: others of `torch_dflash.generate`: ``runtime``, ``seed``, ``block_size``,
            ``return_dict_in_generate`` (acceptance lengths are in its ``.stats``).

    Returns:
        LongTensor [B, T + new]: prompt and new tokens, the stop id included.

    Raises:
        TypeError, ValueError: bad input, before any generation starts.

    Source: dflash 0.1.0, ``DFlashDraftModel.spec_generate``.
    """
    sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    arguments: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "eos_token_id": stop_token_ids,
        "attention_mask": torch.ones_like(input_ids) if isinstance(input_ids, Tensor) else None,
        "do_sample": temperature != 0,
    }
    call = _UNASKED | sampling | arguments | options
    return generate(target, drafter, input_ids, **call)


DFlashDraftModel.spec_generate = spec_generate  # from here: the class lies below the loop
