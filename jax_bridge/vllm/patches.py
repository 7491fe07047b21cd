"""Fixes faults of tpu-inference 0.32.0 with drafts: grammars, log-probabilities and temperatures.

Upstream places one grammar mask per request, by the request's index in the batch. With drafts a request has
several rows of logits, so masks fell on rows of other requests and changed their texts.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@jax.jit
def mask_rows(logits: Float[Array, "R V"], bits: Int[Array, "R N"]) -> Float[Array, "R V"]:
    """``logits``, -inf for tokens whose bit is 0; token t is bit t % 32 of word t // 32."""
    allowed = (bits[:, :, None] >> jnp.arange(32)) & 1
    return jnp.where(allowed.reshape(len(bits), -1)[:, : logits.shape[1]] == 1, logits, -jnp.inf)


def bits_of_rows(grammar: Any, scheduled: Any, index: Any, drafts: np.ndarray, rows: int) -> np.ndarray:
    """The bits [R, N] of a step's rows of logits; a request without a grammar may have every token.

    Args:
        grammar: vLLM's ``GrammarOutput``: for each of its requests a mask after the anchor and after each
            scheduled draft.
        scheduled: drafts by request id, as the scheduler counts them. index: batch rows by request id.
        drafts: [S], number of drafts of each request. rows: R.
    """
    bits = np.full((rows, grammar.grammar_bitmask.shape[1]), -1, np.int32)
    firsts, at = np.cumsum(drafts + 1) - (drafts + 1), 0
    for name in grammar.structured_output_request_ids:
        count = len(scheduled.get(name, ())) + 1
        if name in index:
            first = firsts[index[name]]
            bits[first : first + count] = grammar.grammar_bitmask[at : at + count]
        at += count
    return bits


def of_undrafted_steps(materialize: Callable) -> Callable:
    """tpu-inference's ``_jax_logprobs_materialize``, correct also in steps without any draft.

    It has rows for all drafts and then one per request. Without drafts upstream reads the first rows.
    """

    @wraps(materialize)
    def read(tensors: Any, *args: Any, spec_decode_metadata: Any = None, **named: Any) -> Any:
        if spec_decode_metadata is not None and not spec_decode_metadata.draft_lengths_cpu.any():
            requests = len(spec_decode_metadata.draft_lengths_cpu)
            tensors = tensors._replace(
                logprob_token_ids=tensors.logprob_token_ids[-requests:],
                logprobs=tensors.logprobs[-requests:],
                selected_token_ranks=tensors.selected_token_ranks[-requests:],
            )
            spec_decode_metadata = None
        return materialize(tensors, *args, spec_decode_metadata=spec_decode_metadata, **named)

    return read


def of_each_temperature(compute: Callable) -> Callable:
    """tpu-inference's ``_compute_probs``, correct for greedy rows, with the temperature before the filters.

    Upstream filters verified rows by top-k and top-p before the temperature, others after it. A greedy
    request's temperature is -1, so next to a sampled request its least likely token had the highest
    probability.
    """

    @wraps(compute)
    def probs(logits: Float[Array, "R V"], drafts: Int[Array, " S"], params: Any) -> Float[Array, "R V"]:
        owner = jnp.repeat(jnp.arange(len(drafts)), drafts, total_repeat_length=len(logits))
        temperature = params.temperature[owner][:, None]
        greedy = temperature < 1e-5
        scaled = logits.astype(jnp.float32) / jnp.where(greedy, 1.0, temperature)
        found = compute(scaled, drafts, replace(params, temperature=jnp.ones_like(params.temperature)))
        found = jnp.where(greedy, jax.nn.one_hot(logits.argmax(-1), logits.shape[1]), found)
        # Upstream accepts a draft whose probability is not below a number of [0, 1), which may be 0.
        return jnp.where(found > 0, found, -1.0)

    return probs
