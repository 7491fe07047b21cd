"""`LayerSpec`, and the `CacheLayer` protocol."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from torch_dflash.ops.attention import AttentionInputs
from torch_dflash.ops.trees import take_rows
from torch_dflash.pytrees import register_state

Layer = TypeVar("Layer", bound="CacheLayer")


@dataclass(frozen=True)
class LayerSpec:
    """The cache that one target layer needs, read from a traced forward (`torch_dflash.targets.trace`).

    Attributes:
        kind: "attention" of cached keys and values, "shared" of latents, the values in the first entries of
            one head's keys, "latent" where the model expands cached rows to keys and values, "recurrent"
            without any cache by position, "both" of a layer that attends and recurs.
        scan: heads, key width and value width of a recurrent state.
        conv: channels of a short convolution, and the positions that it reads before a row.
        index: width of the keys of an indexer, which chooses the positions that a row attends to.
        index_wide: whether these keys are float32 in any model.
    """

    kind: str
    heads: int
    k_dim: int
    v_dim: int
    window: int | None
    scan: tuple[int, int, int] | None = None
    conv: tuple[int, int] | None = None
    index: int | None = None
    index_wide: bool = False

    @property
    def width(self) -> int:
        """Numbers that a position takes in the cache."""
        own = self.heads * (self.k_dim + (0 if self.kind == "shared" else self.v_dim))
        return own + (self.index or 0)

    def state_bytes(self, item: int) -> int:
        """Bytes of a row's recurrent state and tail, in a model with ``item`` bytes a number."""
        return max(item, 4) * prod(self.scan or (0,)) + item * prod(self.conv or (0,))


@runtime_checkable
class CacheLayer(Protocol):
    """The state of one layer between passes: a frozen dataclass of tensors, registered by `register_state`.

    Hugging Face attention modules call ``update`` with new rows; our attention function, which they call
    next, calls ``attend``. Both consume the layer and return the next one. ``view`` is the current pass
    (`torch_dflash.cache.view.CacheView`): its page table, and the number of real rows of a prompt chunk.
    """

    def update(self: Layer, key: Tensor, value: Tensor, view: Any) -> tuple[Tensor, Tensor, Layer]:
        """Keys and values for the attention module to continue with, and the next layer."""
        ...

    def attend(self, inputs: AttentionInputs, view: Any) -> tuple[Float[Tensor, "B M Q Dv"], Any]:
        """Causal attention of the rows to all positions so far, their own included, and the next layer.

        After a pass over a tree the next layer is a `FreshRows`, until ``commit``.
        """
        ...

    def commit(self, count: Int[Tensor, " B"], path: Int[Tensor, "B path"] | None) -> Any:
        """Keep the first ``count`` [B] rows of the pass and drop the rest, which the round rejected.

        ``path``: after a pass over a tree, the rows to count; None: all rows in order.
        """
        ...

    def snapshot(self) -> Any:
        """The values that later rows overwrite, as torch tensors for `restore`."""
        ...

    def restore(self: Layer, snapshot: Any) -> Layer:
        """The layer as of its `snapshot`; the caller restores the rows' lengths."""
        ...

    def reset(self: Layer, rows: Tensor) -> Layer:
        """Clear the batch rows marked in ``rows`` [B] for other requests."""
        ...


class ByPosition:
    """Defaults of a `CacheLayer` of keys and values by position: masks hide rows that are not accepted."""

    trees: ClassVar[bool] = True

    def update(self, key: Tensor, value: Tensor, view: Any) -> tuple[Tensor, Tensor, ByPosition]:
        """The module's own rows: ``attend`` adds the cached ones."""
        return key, value, self

    def commit(self, count: Int[Tensor, " B"], path: Int[Tensor, "B path"] | None) -> ByPosition:
        """A chain's accepted rows are already in place."""
        return self

    def snapshot(self) -> Any:
        """Nothing: later rows leave earlier ones as they are."""
        return ()

    def restore(self, snapshot: Any) -> ByPosition:
        """Every mask hides the rows behind the restored length."""
        return self


@register_state
@dataclass(frozen=True)
class FreshRows:
    """A layer before a pass over a tree, and the keys and values of the M rows, not written yet.

    Replaces the layer from the pass to `commit`, within one round.
    """

    layer: Any
    key: Float[Tensor, "B G M D"]
    value: Float[Tensor, "B G M Dv"]
    start: Int[Tensor, " B"]
    table: Int[Tensor, "B row_pages"] | None

    def commit(self, count: Int[Tensor, " B"], path: Int[Tensor, "B path"] | None) -> Any:
        """The layer with the rows ``path`` appended; the first ``count`` of them count."""
        assert path is not None, "a tree without a path"
        key, value = take_rows(self.key, path, dim=2), take_rows(self.value, path, dim=2)
        return self.layer.append(key, value, self.start, self.table)
