"""Grammars, log-probabilities and temperatures beside drafts: faults of tpu-inference 0.32.0, mended.

Upstream places one mask of a grammar for each request, by the request's index in the batch. With drafts a
request has several rows of logits, so a mask fell on rows of other requests and changed their texts.
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
    """``logits`` with the tokens at -inf whose bit is 0; token t is bit t % 32 of word t // 32."""
    allowed = (bits[:, :, None] >> jnp.arange(32)) & 1
    return jnp.where(allowed.reshape(len(bits), -1)[:, : logits.shape[1]] == 1, logits, -jnp.inf)


def bits_of_rows(grammar: Any, scheduled: Any, index: Any, drafts: np.ndarray, rows: int) -> np.ndarray:
    """The bits [R, N] of a step's rows of logits; a request without a grammar may say every token.

    Args:
        grammar: vLLM's ``GrammarOutput``: for each of its requests a mask behind the anchor and behind each
            scheduled draft.
        scheduled: drafts by request id, as the scheduler counts them. index: rows of the batch by request id.
        drafts: [S], how many drafts each request of the batch has. rows: R.
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
    """``_jax_logprobs_materialize`` of tpu-inference, for steps in which no request has a draft, too.

    Its rows are those of all drafts and then one for each request. Without drafts upstream reads the first.
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
    """``_compute_probs`` of tpu-inference, for greedy rows and with the temperature before the filters, too.

    Upstream filters verified rows by top-k and top-p first, others last. A greedy request's temperature is -1
    there, so beside a sampled request the least likely token had the highest probability.
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
