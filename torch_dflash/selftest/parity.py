"""Drafter states and target logits of the path under test, against eager fp32 PyTorch on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_dflash import decode as steps
from torch_dflash.decode import Pair, Params
from torch_dflash.requests.prompts import pad_rows
from torch_dflash.selftest.backend import Backend, Case, prompts
from torch_dflash.selftest.report import Check, within
from torch_dflash.state import DecodeState

# A share of the largest value compared. Each side computes the features of all rounds, so rounding grows; a
# broken convention (a mask, a tap, a norm, a position) differs by more than 1e-3.
TOLERANCE = 1e-4
DEPTHS = (0, 2)
"""Chunks of rounds before a comparison: none, right after prefill, and two, on a cache that rounds wrote."""


@dataclass(frozen=True)
class Pass:
    """Inputs and outputs of one round's passes for one row.

    ``committed``: all tokens up to the anchor, ``drafts`` [N] the drafts after it, ``hidden`` [W-1, H]
    the drafter's states, ``logits`` [M, V] the target's.
    """

    committed: list[int]
    drafts: list[int]
    hidden: Tensor
    logits: Tensor


def probe(pair: Pair, params: Params, state: DecodeState) -> tuple[Tensor, ...]:
    """A round's draft and verify passes, uncommitted: (tokens, length, drafts, hidden states, logits)."""
    return pair.run(_probe, params, state)


def _probe(pair: Pair, state: DecodeState) -> tuple[Tensor, ...]:
    drafter, seen = pair.proposer.drafter, []
    plain = drafter.logits

    def watched(hidden, head):
        seen.append(hidden)
        return plain(hidden, head)

    # A proposer does not return the states, so the step that turns them into drafts is watched.
    drafter.logits = watched
    try:
        drafted, _ = steps.draft(pair, state)
    finally:
        del drafter.logits
    logits = steps.verify(pair, state, drafted).logits
    return state.tokens, state.length, drafted.tokens, seen[0], logits


def passes(case: Case, backend: Backend, depth: int) -> list[Pass]:
    """The next round of every row after ``depth`` chunks of rounds."""
    engine = case.engine("agreeing", len(prompts()))
    state = engine.start(*pad_rows(prompts()), max_new_tokens=50, do_sample=False, eos_token_id=None)
    for _ in range(depth):
        state = engine.advance(state)
    tokens, length, drafts, hidden, logits = backend.run(engine, probe, state)
    return [
        Pass(tokens[row, : end + 1].tolist(), drafts[row].tolist(), hidden[row].float(), logits[row].float())
        for row, end in enumerate(length.tolist())
    ]


@torch.no_grad()
def eager_features(target: Any, taps: list[int], tokens: list[int], context: int) -> tuple[Tensor, Tensor]:
    """(Features [1, context, n*H], logits [R, V]) of transformers' own forward pass, without a cache."""
    out = target(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    features = torch.cat([out.hidden_states[tap + 1] for tap in taps], dim=-1)  # 0 is the embedding
    return features[:, :context], out.logits[0]


@torch.no_grad()
def eager_hidden(case: Case, anchor: int, features: Tensor, width: int) -> Tensor:
    """The drafter's states [W-1, H] from one pass over the whole context, without a cache."""
    config = case.drafter.config
    ids = torch.tensor([[anchor, *[config.mask_token_id] * (width - 1)]])
    noise = case.target.get_input_embeddings().weight[ids] * config.input_embedding_scale
    position = torch.arange(features.shape[1] + width)[None]
    return case.drafter(noise, features, position).last_hidden_state[0, 1:]


Reference = Callable[[Any, Any, int, Tensor, int], Tensor]
"""An independent drafter: ``(drafter, embedding weight, anchor, features, W) -> hidden states``."""


def parity(case: Case, backend: Backend, reference: Reference | None) -> Iterator[Check]:
    """Compare both passes at every depth: all rows with eager PyTorch, one with ``reference``, if any."""
    for depth in DEPTHS:
        when = f"{case.family}, after {'prefill' if not depth else 'rounds'}"
        pairs: dict[str, list[tuple[Tensor, Tensor]]] = {"target logits": [], "drafter hidden states": []}
        found, first = passes(case, backend, depth), {}
        for row, item in enumerate(found):
            verified = item.logits.shape[0]
            tokens = item.committed + item.drafts[: verified - 1]
            context, width = len(item.committed) - 1, len(item.drafts) + 1
            taps = case.drafter.config.target_layer_ids
            features, logits = eager_features(case.target, taps, tokens, context)
            hidden = eager_hidden(case, item.committed[-1], features, width)
            if row == 1:  # a short row, for the reference compiles for every length
                first = {"item": item, "features": features, "width": width}
            pairs["target logits"].append((item.logits, logits[-verified:]))
            pairs["drafter hidden states"].append((item.hidden, hidden))
        rows, scale = f"{len(found)} rows, fp32 eager on CPU", 1.0
        for name, both in pairs.items():
            # torch's max keeps a NaN.
            error = float(torch.stack([(ours - theirs).abs().max() for ours, theirs in both]).max())
            scale = max(1.0, *(float(theirs.abs().max()) for _, theirs in both))
            yield within(f"{name}, {when}", error, TOLERANCE * scale, rows)
        if reference is not None:
            yield _against_reference(case, reference, when, TOLERANCE * scale, **first)


def _against_reference(case: Case, reference: Reference, when: str, tolerance: float, **given) -> Check:
    item, embedding = given["item"], case.target.get_input_embeddings().weight
    hidden = reference(case.drafter, embedding, item.committed[-1], given["features"], given["width"])
    error = float((item.hidden - hidden).abs().max())
    return within(f"drafter hidden states, {when}, pure JAX", error, tolerance, "1 row, jax_bridge.reference")
