"""The proposer's two compiled steps, over pages and arrays alone.

Nothing here imports vLLM, so that they compile for absent TPUs, too (``benchmarks/vllm_aot.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torchax
from torchax.interop import jax_view, torch_view

from jax_bridge.vllm.pages import as_rows, attend_in_turn, write_rows
from torch_dflash.integrations.vllm.drafter import PagedDrafter

Places = tuple[tuple[int, int], ...]
"""(Group of the block table, index of the page array) of each layer of the drafter."""


def rows_for(live: int) -> int:
    """The rows of the program that drafts for ``live`` requests: a power of two."""
    return 1 << max(live - 1, 0).bit_length()


class Steps:
    """`prepare` and `draft` of a drafter, each a compiled call.

    Args:
        module: the drafter, without weights.
        groups: heads of keys and values in a page. width: of a padded head.
        embed, head: ``(the target's weights, ids or rows) -> rows or logits``.
    """

    def __init__(self, module: PagedDrafter, groups: int, width: int, embed: Callable, head: Callable):
        self.module, self.groups, self.width = module, groups, width
        self.embed, self.head = embed, head
        self.prepare = jax.jit(self.prepare_step, donate_argnames=("pages",), static_argnames=("places",))
        self.draft = jax.jit(self.draft_step, static_argnames=("places", "rows"))

    def prepare_step(
        self, weights, pages, tables, starts, lengths, rejected, live, features, sampled, following,
        prefilling, *, places: Places,
    ):  # fmt: skip
        """(Pages with keys and values of the accepted rows, anchors [S], accepted lengths [S])."""
        rows, requests = features[0].shape[0], lengths.shape[0]
        starts = jnp.where(jnp.arange(requests + 1) <= live, starts, starts[live[0]])
        alive = jnp.arange(requests) < live
        accepted = jnp.where(alive, starts[1:] - starts[:-1] - rejected, 0)
        lengths = jnp.where(alive, lengths - rejected, 0)
        owner = jnp.minimum(jnp.searchsorted(starts[1:], jnp.arange(rows), side="right"), requests - 1)
        first = lengths - accepted
        # Rows of rejected drafts and of padding have no place in the context.
        at = jnp.maximum(first[owner] + jnp.arange(rows) - starts[owner], 0)
        new = []

        def write(layer, key, value):
            group, index = places[layer]
            heads = self._repeated(jax_view(key), 1), self._repeated(jax_view(value), 1)
            new.append((index, group, as_rows(*heads, pages[index], self.width)))

        context = self._call(weights, "project", torch_view(jnp.concatenate(features, axis=-1)))
        self._call(weights, "remember", context, torch_view(at), write)
        pages = write_rows(pages, new, tables, starts[:-1], first, accepted)
        return pages, jnp.where(prefilling.astype(bool), following, sampled), lengths

    def draft_step(self, weights, target, pages, tables, anchors, lengths, *, places: Places, rows: int):
        """Drafts [S, K] of the first ``rows`` requests; zeros for the others."""
        requests = len(lengths)
        anchors, lengths = _first(anchors, rows), _first(lengths, rows)
        tables = {group: _first(table, rows) for group, table in tables.items()}

        def attend(attention, query, key, value, scale):
            group, index = places[attention.index]
            own = self._repeated(jax_view(key), 1), self._repeated(jax_view(value), 1)
            sinks = attention.attention_sink_bias
            seen = attend_in_turn(
                jax_view(query),
                *own,
                pages[index],
                tables[group],
                lengths,
                scale=scale,
                width=self.width,
                window=attention.window,
                causal=attention.causal,
                sinks=None if sinks is None else jax_view(sinks),
            )
            return torch_view(seen)

        embed, head = partial(self.embed, target), partial(self.head, target)
        drafts = self._call(weights, "draft", *torch_view((anchors, lengths)), attend, embed, head)
        return _first(jax_view(drafts).astype(jnp.int32), requests)

    def _repeated(self, rows: jax.Array, axis: int) -> jax.Array:
        """Keys or values with each head repeated to the number of ``groups``."""
        return jnp.repeat(rows, self.groups // rows.shape[axis], axis=axis)

    def _call(self, weights: Any, step: str, *args: Any) -> Any:
        with torchax.default_env(), torch.inference_mode(False), torch.no_grad():
            return torch.func.functional_call(self.module, torch_view(weights), (step, *args))


def _first(array: jax.Array, rows: int) -> jax.Array:
    """The first ``rows`` rows, zeros behind the last."""
    array = array[:rows]
    return jnp.pad(array, [(0, rows - len(array))] + [(0, 0)] * (array.ndim - 1))
