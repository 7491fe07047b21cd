"""Rows of a decayed outer-product recurrence from a saved state, and the state after some of them.

Gated delta rule, Kimi delta attention and Mamba-2 are one formula, for each head and row t::

    S_t = exp(g_t) S_{t-1} + k_t u_t^T,    o_t = q_t^T S_t,    u_t = beta_t (v_t - (exp(g_t) S_{t-1})^T k_t)

where Mamba-2 has u_t = v_t. ``u_t`` depends on no later row, so the state after any of the rows is one
product of what the pass has computed anyway (`state_after`): no row runs twice. Everything is computed in the
state's type, which is float32 at least.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

SMALLEST = -100.0
"""Logarithm of a decay that leaves nothing: sums with a smaller one would lose precision."""
CHUNK = 64
"""Rows of a prompt in one triangular system."""
LEAF = 16
"""Most rows of a triangular system that is solved by products of whole matrices."""
CHUNK_OF_CHANNELS = 16
"""`CHUNK` where each channel decays by itself: every pair of rows then has a decay per channel."""


def at_least_float32(kind: torch.dtype) -> torch.dtype:
    """The dtype of sums over rows of ``kind``; tensors of a program have no ``promote_types``."""
    return torch.float64 if kind == torch.float64 else torch.float32


class ScanRows(NamedTuple):
    """M rows of a recurrence, in the state's type.

    Attributes:
        query, key: [B, H, M, dk]; value: [B, H, M, dv].
        decay: logarithms, at most 0: [B, H, M], or [B, H, M, dk] where each channel of a key has its own.
        beta: [B, H, M] of the delta rule; None writes values as they are.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor | None = None

    def finite(self) -> ScanRows:
        """The rows with zeros for values that are not finite, which a product with zero would not hide.

        A query reaches only its own row.
        """
        key, value = finite(self.key), finite(self.value)
        beta = None if self.beta is None else finite(self.beta)
        return ScanRows(self.query, key, value, self.decay.nan_to_num(nan=0.0).clamp(SMALLEST, 0.0), beta)

    def only(self, real: Bool[Tensor, "B M"]) -> ScanRows:
        """The finite rows; all but the ``real`` ones leave the state unchanged."""
        real = real[:, None]
        decay = torch.where(real if self.decay.ndim == 3 else real[..., None], self.decay, 0.0)
        return self._replace(key=torch.where(real[..., None], self.key, 0.0), decay=decay)


class Kept(NamedTuple):
    """Values of a pass for `state_after`: keys, updates u, and decays summed along each row's path."""

    key: Float[Tensor, "B H M dk"]
    update: Float[Tensor, "B H M dv"]
    total: Float[Tensor, "B H M decays"]


class _Solved(NamedTuple):
    """Parts of a chunk's result that do not depend on the state: [..., M, M] and [..., M, d]."""

    inverse: Tensor | None
    weights: Tensor
    wanted: Tensor
    erase_key: Tensor | None
    reads: Tensor
    key: Tensor
    total: Tensor

    def step(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """The rows' outputs and updates from ``state``."""
        update = self.wanted if self.erase_key is None else self.wanted - self.erase_key @ state
        update = update if self.inverse is None else self.inverse @ update
        return self.reads @ state + self.weights @ update, update

    def at(self, chunk: int) -> _Solved:
        parts: Any = (None if one is None else one[:, :, chunk] for one in self)
        return _Solved(*parts)


def scan_block(
    state: Float[Tensor, "B H dk dv"], rows: ScanRows, seen: Bool[Tensor, "B M M"] | None = None
) -> tuple[Float[Tensor, "B H M dv"], Kept]:
    """Outputs of M rows after ``state``, and the values for `state_after` once some rows are accepted.

    ``seen``: `torch_dflash.ops.trees.Tree.seen` of a tree's rows; None: each follows the last.
    """
    solved = _solve(rows.finite(), None if seen is None else seen[:, None])
    out, update = solved.step(state)
    return out, Kept(solved.key, update, solved.total)


def state_after(
    state: Float[Tensor, "B H dk dv"],
    kept: Kept,
    count: Int[Tensor, " B"],
    path: Int[Tensor, "B path"] | None = None,
) -> Float[Tensor, "B H dk dv"]:
    """The state after the first ``count`` [B] rows of a pass, or of its rows ``path``.

    ``where`` selects rows, so that no value of a rejected row reaches the state: with a count of 0 the state
    is multiplied by 1, and 0 is added.
    """
    row = torch.arange(kept.key.shape[2], device=count.device, dtype=count.dtype)
    if path is None:
        on, last = row < count[:, None], row == count[:, None] - 1
    else:
        place = torch.arange(path.shape[1], device=count.device, dtype=count.dtype)
        which = path[:, :, None].to(count.dtype) == row
        on = (which & (place < count[:, None])[:, :, None]).any(dim=1)
        last = (which & (place == count[:, None] - 1)[:, :, None]).any(dim=1)
    on, last = on[:, None, :, None], last[:, None, :, None]
    total = torch.where(last, kept.total, 0.0).sum(dim=2, keepdim=True)
    left = torch.where(on, total - kept.total, -torch.inf).exp()
    key, update = torch.where(on, kept.key, 0.0) * left, torch.where(on, kept.update, 0.0)
    return _added(total.mT.exp() * state, key, update)


def scan_prompt(
    state: Float[Tensor, "B H dk dv"], rows: ScanRows, count: Int[Tensor, " B"]
) -> tuple[Float[Tensor, "B H M dv"], Float[Tensor, "B H dk dv"]]:
    """Outputs of a prompt's M rows after ``state``, and the state after the first ``count`` [B] of them."""
    height = rows.key.shape[2]
    row = torch.arange(height, device=count.device, dtype=count.dtype)
    rows = rows.finite().only(row < count[:, None])
    size = min(CHUNK if rows.decay.ndim == 3 else CHUNK_OF_CHANNELS, height)
    chunks: Any = (_chunks(one, size) for one in rows)
    solved = _solve(ScanRows(*chunks), None)
    total = solved.total[:, :, :, -1:]
    key, left = solved.key * (total - solved.total).exp(), total.mT.exp()
    outs = []
    for chunk in range(-(-height // size)):
        out, update = solved.at(chunk).step(state)
        state = _added(left[:, :, chunk] * state, key[:, :, chunk], update)
        outs.append(out)
    return torch.cat(outs, dim=2)[:, :, :height], state


def _solve(rows: ScanRows, seen: Tensor | None) -> _Solved:
    query, key, value, decay, beta = rows
    height = key.shape[-2]
    row = torch.arange(height, device=key.device)
    if seen is None:
        seen = row <= row[:, None]
        total = decay.cumsum(dim=key.ndim - 2)
    else:
        total = seen.to(decay.dtype) @ (decay if decay.ndim == key.ndim else decay[..., None])
    total = total.view(*key.shape[:-1], -1)
    # Masked before exp: a decay from a row to an earlier one would overflow.
    compared = (query,) if beta is None or height == 1 else (query, key)
    if total.shape[-1] == 1:
        left = torch.where(seen, total - total.mT, -torch.inf).exp()
        products = [one @ key.mT * left for one in compared]
    else:
        gaps = total[..., :, None, :] - total[..., None, :, :]
        left = torch.where(seen[..., None], gaps, -torch.inf).exp() * key[..., None, :, :]
        products = [(one[..., :, None, :] * left).sum(dim=-1) for one in compared]
    weights, since = torch.where(seen, products[0], 0.0), total.exp()
    inverse, wanted, erase_key = None, value, None
    if beta is not None:
        wanted, erase_key = value * beta[..., None], key * since * beta[..., None]
        if height > 1:
            before = seen & (row != row[:, None])
            inverse = _inverse(torch.where(before, products[1] * beta[..., None], 0.0))
    return _Solved(inverse, weights, wanted, erase_key, query * since, key, total)


def _added(state: Tensor, key: Tensor, update: Tensor) -> Tensor:
    """``state + key^T update``."""
    parts = (one.flatten(0, 1) for one in (state, key.mT, update))
    return torch.baddbmm(*parts).view(state.shape)


def _inverse(lower: Tensor) -> Tensor:
    """``(1 + lower)^-1`` of a strictly lower triangular matrix, by inverses of blocks of twice the size.

    As exact as substitution: each product is of a block's exact inverse. A series of powers would be less
    exact, for powers grow where keys repeat.
    """
    height = lower.shape[-1]
    if height <= LEAF or height % (2 * LEAF):
        return _inverse_of_few(lower)
    half = height // 2
    above, below = lower[..., :half, :half], lower[..., half:, half:]
    above, below = _inverse(torch.stack([above, below])).unbind()
    across = -(below @ lower[..., half:, :half] @ above)
    upper = torch.cat([above, torch.zeros_like(above)], dim=-1)
    return torch.cat([upper, torch.cat([across, below], dim=-1)], dim=-2)


def _inverse_of_few(lower: Tensor) -> Tensor:
    """`_inverse` by products of whole matrices: few rows are one tile of a TPU."""
    row = torch.arange(lower.shape[-1], device=lower.device)

    def below(size: int) -> Tensor:
        """The quarter below the diagonal of each block of twice the size."""
        block = row // size
        quarter = (block[:, None] % 2 == 1) & (block == block[:, None] - 1)
        return torch.where(quarter, lower, 0.0)

    found, size = torch.eye(len(row), dtype=lower.dtype, device=lower.device) - below(1), 2
    while size < len(row):
        found = found - found @ below(size) @ found
        size *= 2
    return found


def _chunks(rows: Tensor | None, size: int) -> Tensor | None:
    """[B, H, M, ...] -> [B, H, chunks, size, ...]; rows of zeros at the end leave a state unchanged."""
    if rows is None:
        return None
    spare = -rows.shape[2] % size
    rows = F.pad(rows, (0, 0) * (rows.ndim - 3) + (0, spare)) if spare else rows
    return rows.unflatten(2, (-1, size)).contiguous()


def finite(rows: Tensor) -> Tensor:
    """``rows`` with zeros for values that are not finite; a product with zero would keep NaN."""
    return rows.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
