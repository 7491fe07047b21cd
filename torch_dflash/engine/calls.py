"""A call read against the target alone: its rows without padding, and what each asks for."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_dflash.checks import check_target
from torch_dflash.decode import RowRequests
from torch_dflash.engine.arguments import take_arguments
from torch_dflash.engine.prompts import check_ids, split_rows
from torch_dflash.engine.request import Request, defaults_of, resolve
from torch_dflash.engine.seeds import seed_key
from torch_dflash.plan import DecodePlan
from torch_dflash.state import Sampling
from torch_dflash.target.weights import model_of


def read_request(
    target: Any, input_ids: Tensor | None, attention_mask: Tensor | None, options: dict[str, Any]
) -> tuple[list[np.ndarray], Request]:
    """Validate a call: ragged rows of real tokens, and options resolved over the model's own.

    Raises:
        TypeError, ValueError: naming what cannot be honoured, before anything runs.
    """
    target = model_of(target)
    check_target(target)
    options = dict(options)
    config = defaults_of(target, options.pop("generation_config", None))
    position_ids = options.pop("position_ids", None)
    take_arguments(options, target)
    check_ids(input_ids)
    assert input_ids is not None
    given_pad = options.get("pad_token_id")
    request = resolve(config, input_ids.shape[0], input_ids.shape[1], options)
    # A pad that nobody named is a stop id. One that may end a row's text is no sign of padding in it.
    named = given_pad is not None or config.pad_token_id is not None
    pad = request.pad_token_id if named else None
    pads = [None if pad in stops else pad for stops in request.stop_ids]
    embedding: Tensor = target.get_input_embeddings().weight  # pyright: ignore[reportAssignmentType]
    return split_rows(input_ids, attention_mask, embedding.shape[0], pads, position_ids), request


def row_requests(rows: list[np.ndarray], request: Request, plan: DecodePlan) -> RowRequests:
    """The rows' limits, stop ids and sampling as tensors of the plan's batch, with idle rows done."""

    def column(values, dtype, fill: Any = 0):
        return torch.tensor([*values, *[fill] * (plan.batch_size - len(rows))], dtype=dtype, device="cpu")

    lengths = [len(row) for row in rows]
    limits = [a + b for a, b in zip(lengths, request.max_new_tokens, strict=True)]
    stops = [[*ids, *[-1] * (plan.stop_slots - len(ids))] for ids in request.stop_ids]
    keys = [seed_key(seed) for seed in request.seed]  # here, where Python's integers do not overflow
    return RowRequests(
        limit=column(limits, torch.int32),
        stop_ids=column(stops, torch.int32, fill=[-1] * plan.stop_slots),
        done=column([False] * len(rows), torch.bool, fill=True),
        sampling=Sampling(
            temperature=column(request.temperature, torch.float32),
            top_k=column(request.top_k, torch.int32),
            top_p=column(request.top_p, torch.float32, fill=1.0),
            min_p=column(request.min_p, torch.float32),
            seed=column([key - (key >> 31 << 32) for key in keys], torch.int32),
        ),
    )
