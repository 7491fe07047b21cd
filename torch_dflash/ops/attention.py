"""Grouped-query attention over one or several K/V parts, without repeating K/V heads."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from torch_dflash.ops.lowerable import lowerable
from torch_dflash.ops.trees import Tree, rows_at
from torch_dflash.ops.windows import write_rows


class KeyValue(NamedTuple):
    """Keys and values with their mask. The values are finite (`finite_values`).

    Shapes: ``key`` [B, G, S, D], ``value`` [B, G, S, Dv]; ``mask`` bool [B, 1, M, S], True = visible.

    With ``blocks`` A > 1, query rows and keys are A equal blocks in order, none of which sees another
    (training drafts many blocks in a pass); ``mask`` is then over a block's own keys: [B, 1, M, S / A].
    """

    key: Float[Tensor, "B G S D"]
    value: Float[Tensor, "B G S Dv"]
    mask: Bool[Tensor, "B one M seen"] | None
    blocks: int = 1


class AttentionInputs(NamedTuple):
    """Inputs of a layer's attention: M new rows per sequence, whose K and V the cache keeps.

    Attributes:
        query, key, value: the rows' own, rotated.
        start: the position of each sequence's first row; the others follow.
        scale: factor on the scores.
        window: positions that a row sees, itself included; None for all.
        sinks: one learned logit per query head, part of the softmax, without a value.
        softcap: ``c`` in ``c * tanh(score / c)``.
        tree: the tree of the rows, whose keys and values no cache holds yet; None: each follows the last.
        shared: a key is ``[value | key]``, of one head: latents are values and, with ``key``, keys.
        chosen: the positions that an indexer has chosen for each row; None: all.
        expand: makes all heads' keys and values of latents [B, 1, S, R] and rotated keys, for these queries.
    """

    query: Float[Tensor, "B Q M D"]
    key: Float[Tensor, "B G M D"]
    value: Float[Tensor, "B G M Dv"]
    start: Int[Tensor, " B"]
    scale: float
    window: int | None = None
    sinks: Float[Tensor, " Q"] | None = None
    softcap: float | None = None
    tree: Tree | None = None
    shared: bool = False
    chosen: Bool[Tensor, "B one M S"] | None = None
    expand: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    def joined(self) -> AttentionInputs:
        """With whole keys, for attention whose values are the keys: its first lanes are the result."""
        rows = torch.cat([self.value, self.key], dim=-1)
        return self._replace(key=rows, value=rows, shared=False) if self.shared else self

    @property
    def at(self) -> Int[Tensor, "B M"]:
        """The rows' positions."""
        return rows_at(self.start, self.query.shape[2], self.tree)


@lowerable
def grouped_attention(
    query: Float[Tensor, "B Q M D"],
    parts: list[KeyValue],
    scale: float,
    sinks: Float[Tensor, " Q"] | None = None,
    softcap: float | None = None,
) -> Float[Tensor, "B M Q Dv"]:
    """Softmax attention of M query rows over the concatenation of ``parts``.

    The parts are joined at the scores, never at the K/V, so a long cache is not copied. Query heads that
    share a K/V head become rows of one product, so no K/V head is repeated in memory.

    Args:
        query: query rows; ``Q`` is a multiple of the K/V heads ``G``.
        scale: factor on the scores.
        sinks, softcap: as in `AttentionInputs`.
    """
    batch, heads, rows, dim = query.shape
    groups = parts[0].key.shape[1]
    shared = query.view(batch, groups, heads // groups, rows, dim)
    scores = []
    for key, _, mask, blocks in parts:
        score = _per_block(shared, key.transpose(2, 3), blocks, dim=-1) * scale
        if softcap is not None:
            score = torch.tanh(score / softcap) * softcap
        if mask is not None:
            # finfo.min, not -inf: a padded row may see nothing, and its softmax must stay finite.
            score = torch.where(mask[:, None], score, torch.finfo(score.dtype).min)
        scores.append(score)
    if sinks is not None:
        sink = sinks.to(query.dtype).view(1, groups, -1, 1, 1)
        scores.append(sink.expand(batch, groups, heads // groups, rows, 1))
    weights = torch.softmax(torch.cat(scores, dim=-1), dim=-1, dtype=torch.float32).to(query.dtype)
    outputs, start = [], 0
    for _, value, _, blocks in parts:
        share = weights[..., start : start + value.shape[2] // blocks]
        outputs.append(_per_block(share, value, blocks, dim=-2))
        start += value.shape[2] // blocks
    return reduce(torch.add, outputs).view(batch, heads, rows, -1).transpose(1, 2)


@lowerable
def finite_values(
    key: Float[Tensor, "B G M D"], value: Float[Tensor, "B G M Dv"]
) -> tuple[Float[Tensor, "B G M D"], Float[Tensor, "B G M Dv"]]:
    """Keys and values for the cache: a value that is not finite becomes zero, and its key NaN.

    A mask hides scores, but not values: a weight of zero times NaN is NaN, in every row. The key's NaN
    reaches only the rows that see it, through their scores, so a rejected draft that overflows changes no
    other row. New rows are marked once: no form of attention reads a cache for this.
    """
    bad = ~torch.isfinite(value).all(dim=-1, keepdim=True)
    return torch.where(bad, torch.nan, key), torch.where(bad, 0, value)


def with_rows(inputs: AttentionInputs, key: Tensor, value: Tensor, seen: int) -> KeyValue:
    """A copy of cached keys and values [B, G, S, D], slot p the position p, with a tree's rows appended.

    In half precision a tree's text would differ if its sums had another order than plain decoding's. So its
    rows take the slots of a chain: the first branch rounds as plain decoding does, other branches nearly,
    for their rows follow their siblings'.
    ``seen``: slots to attend to, up to the tree's last row at least.
    """
    assert inputs.tree is not None
    start, at, rows = inputs.start, inputs.at, inputs.key.shape[2]
    slot = torch.arange(seen, device=start.device, dtype=start.dtype)
    row = slot - start[:, None]
    before = visible(at, slot[None], inputs.window, causal=True) & (row < 0)[:, None, None]
    inside = visible(at, at, inputs.window, causal=True) & inputs.tree.seen()[:, None]
    inside = inside.gather(3, row.clamp(0, rows - 1).long()[:, None, None].expand_as(before))
    own = inside & ((row >= 0) & (row < rows))[:, None, None]

    def put(held: Tensor, fresh: Tensor) -> Tensor:
        extended = held.new_zeros(*held.shape[:2], seen, held.shape[3])
        extended[:, :, : held.shape[2]] = held[:, :, :seen]
        return write_rows(extended, fresh, start, dim=2)

    return KeyValue(put(key, inputs.key), put(value, inputs.value), before | own)


Attend = Callable[[Tensor, float], Tensor]
"""``(query [B, Q, M, D], scale) -> output [B, M, Q, Dv]``: attention over given K/V."""


def attend_to(*parts: KeyValue, sinks: Float[Tensor, " Q"] | None = None) -> Attend:
    """Grouped attention over ``parts``; ``sinks`` as in `AttentionInputs`."""
    return lambda query, scale: grouped_attention(query, list(parts), scale, sinks)


def _per_block(rows: Tensor, keyed: Tensor, blocks: int, dim: int) -> Tensor:
    """``rows`` [B, G, heads, M, X] times ``keyed`` [B, G, X, Y]; block by block along M and ``dim``."""
    batch, groups, heads, count, _ = rows.shape
    if blocks == 1:
        return (rows.reshape(batch, groups, heads * count, -1) @ keyed).view(batch, groups, heads, count, -1)
    own = keyed.unflatten(dim, (blocks, -1))
    own = own.transpose(2, 3) if dim == -1 else own  # [B, G, A, X, Y of one block]
    return (rows.unflatten(3, (blocks, -1)) @ own[:, :, None]).flatten(3, 4)


def visible(
    query_position: Tensor, key_position: Tensor, window: int | None, causal: bool
) -> Bool[Tensor, "B one M S"]:
    """The mask by position: [B, M] query and [B or 1, S] key positions -> [B, 1, M, S].

    A causal window counts back from each query; a non-causal one is symmetric (``is_causal: false`` in
    ``dflash_config``).
    """
    gap = query_position[:, :, None] - key_position[:, None, :]
    mask = gap >= 0 if causal else torch.ones_like(gap, dtype=torch.bool)
    if window is not None:
        mask = mask & (gap < window)
        if not causal:
            mask = mask & (gap > -window)
    return mask[:, None]


@lowerable
def dense_attention(
    inputs: AttentionInputs,
    key: Float[Tensor, "B G S D"],
    value: Float[Tensor, "B G S Dv"],
    mask: Bool[Tensor, "B one M seen"],
) -> Float[Tensor, "B M Q Dv"]:
    """Causal attention of M rows to buffers that hold these rows already, slot p the position p.

    This plain form reads the slots of ``mask``; `jax_bridge.kernels.streamed` ends at the last in use.

    Args:
        inputs: of the rows; the plain form does not read ``key`` and ``value``.
        key, value: the buffers.
        mask: `visible` by ``inputs.start`` and ``inputs.window``, shared between layers.
    """
    seen = mask.shape[3]
    part = KeyValue(key[:, :, :seen], value[:, :, :seen], mask)
    out = grouped_attention(inputs.query, [part], inputs.scale, inputs.sinks, inputs.softcap)
    return out.to(inputs.query.dtype)  # a cache may be wider
