"""What a layer of the target needs from its cache, and what every kind of cache answers."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, TypeVar, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from torch_dflash.ops.attention import AttentionInputs
from torch_dflash.ops.trees import take_rows
from torch_dflash.pytrees import register_state

Layer = TypeVar("Layer", bound="CacheLayer")


@dataclass(frozen=True)
class LayerSpec:
    """One target layer's cache needs, as seen in a traced forward (`torch_dflash.targets.trace`).

    Attributes:
        kind: "attention" where the cached rows are what is attended to, "latent" where the model expands what
            it has cached (multi-head latent attention), "recurrent" where nothing is kept by position, "both"
            of a layer that attends and recurs.
        scan: a recurrent state's heads, key width and value width.
        conv: channels of a short convolution, and the positions before a row that it reads.
    """

    kind: str
    heads: int
    k_dim: int
    v_dim: int
    window: int | None
    scan: tuple[int, int, int] | None = None
    conv: tuple[int, int] | None = None

    def state_bytes(self, item: int) -> int:
        """Bytes that a row's recurrent state and tail take, in a model whose numbers take ``item`` bytes."""
        return max(item, 4) * prod(self.scan or (0,)) + item * prod(self.conv or (0,))


@runtime_checkable
class CacheLayer(Protocol):
    """What one layer keeps between passes: a frozen dataclass of tensors, made a pytree by `register_state`.

    Hugging Face attention modules call ``update`` with new rows; our attention function, which they call
    next, calls ``attend``. Both consume the layer and give the next one. ``view`` is the pass they belong to
    (`torch_dflash.cache.view.CacheView`): the page table, and how many rows of a prompt chunk are real.
    """

    def update(self: Layer, key: Tensor, value: Tensor, view: Any) -> tuple[Tensor, Tensor, Layer]:
        """Keys and values that the attention module goes on with."""
        ...

    def attend(self, inputs: AttentionInputs, view: Any) -> tuple[Float[Tensor, "B M Q Dv"], Any]:
        """Causal attention of the rows to all positions so far, their own included.

        With it comes the next layer or, of a tree, what becomes the next one by ``commit``.
        """
        ...

    def commit(self, count: Int[Tensor, " B"], path: Int[Tensor, "B path"] | None) -> Any:
        """Keep the first ``count`` [B] rows of the pass, drop the rest: a round has rejected them.

        ``path``: of a pass over a tree, the rows of which the first ``count`` are kept; None: all, in order.
        What stands in the layer's place after such a pass (`FreshRows`) keeps what it needs for this: keys
        and values, or whatever a recurrent layer's state is made of.
        """
        ...

    def snapshot(self) -> Any:
        """What later rows overwrite; of torch tensors or none, as `restore` takes it."""
        ...

    def restore(self: Layer, snapshot: Any) -> Layer:
        """The layer as it was when its `snapshot` was taken, once the rows' lengths are those of then."""
        ...

    def reset(self: Layer, rows: Tensor) -> Layer:
        """Forget the rows of the batch marked in ``rows`` [B]: other requests take them."""
        ...


@register_state
@dataclass(frozen=True)
class FreshRows:
    """A layer before a pass over a tree, and what the pass made of its M rows; nothing is written yet.

    It stands in the layer's place from the pass to `commit`, inside of one round.
    """

    layer: Any
    key: Float[Tensor, "B G M D"]
    value: Float[Tensor, "B G M Dv"]
    start: Int[Tensor, " B"]
    table: Int[Tensor, "B row_pages"] | None

    def commit(self, count: Int[Tensor, " B"], path: Int[Tensor, "B path"] | None) -> Any:
        """The layer with the rows ``path`` behind what it holds; the first ``count`` of them count."""
        assert path is not None, "a tree without a path"
        key, value = take_rows(self.key, path, dim=2), take_rows(self.value, path, dim=2)
        return self.layer.append(key, value, self.start, self.table)
