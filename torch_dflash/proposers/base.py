"""`Proposer`: the interface of every drafting method."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torch_dflash.accept import drafted_by
from torch_dflash.ops.windows import clear_rows
from torch_dflash.plan import DecodePlan
from torch_dflash.proposers.trees.nodes import Nodes, unscored
from torch_dflash.state import Draft, DraftRequest


class Cost(NamedTuple):
    """A proposer's reads and computation for a draft, without weights and head.

    Attributes:
        cached: elements of one row's cache that a draft pass reads.
        flops: of attention over the context, all rows together.
        prompt: modules that turn a prompt's features into cached values.
        passes: of a round's draft, one after the other; ``cached`` and ``flops`` are of all.
        looped: modules that each pass reads anew, as the head.
    """

    cached: int = 0
    flops: int = 0
    prompt: tuple[nn.Module, ...] = ()
    passes: int = 1
    looped: tuple[nn.Module, ...] = ()


class Proposer(nn.Module):
    """Drafts N tokens a round. Pure: its memory is ``pstate``, which the loop carries and never reads.

    A new proposer needs a ``name``, a ``width`` and `propose`; the other methods have defaults for a proposer
    without memory. Its weights are bound with the target's in one call. Every leaf of ``pstate`` is a tensor
    whose first axis is the batch.

    A state may show the number of tokens taken in as ``committed`` [B]; eager rounds assert that it equals
    the target's committed length. A proposer without weights may have a hashable ``key``: objects with equal
    keys share engines.

    Attributes:
        name: of the method; saved states carry it, so it must not change.
        taps: target layers whose outputs it reads (0-based block indices), () for none.
        width: rows W of its draft, the anchor included.
        depth: nodes on the deepest path of a tree (`Draft.parent`); None: it drafts chains.
        ahead: tokens behind a token on which the memory of that token depends.
    """

    name: str
    taps: tuple[int, ...] = ()
    width: int
    depth: int | None = None
    ahead: int = 0

    def start(self, plan: DecodePlan, device) -> Any:
        """Empty state for ``plan``."""
        return ()

    def reset(self, pstate: Any, rows: Bool[Tensor, " B"]) -> Any:
        """``pstate`` with the rows marked in ``rows`` as `start` makes them, for new requests."""
        return pytree.tree_map_only(Tensor, lambda leaf: clear_rows(leaf, rows), pstate)

    def earliest(self, pstate: Any, length: int) -> int:
        """The fewest tokens that `rewind` can return to without a snapshot, after ``length`` tokens.

        Reads only the tree of ``pstate`` and its shapes.
        """
        return length if pytree.tree_leaves(pstate) else 0

    def snapshot(self, pstate: Any) -> Any:
        """The part of ``pstate`` that later tokens overwrite."""
        return pstate

    def rewind(self, pstate: Any, kept: Int[Tensor, " B"], snapshot: Any = None) -> Any:
        """``pstate`` as after the first ``kept`` [B] tokens, from the `snapshot` made then.

        Without a snapshot ``kept`` is at least `earliest`.
        """
        return pstate if snapshot is None else snapshot

    def ingest(
        self,
        pstate: Any,
        features: Tensor | None,
        ids: Tensor,
        next_ids: Tensor,
        count: Tensor,
        embed: Any = None,
    ) -> Any:
        """Take in the first ``count`` [B] of C rows of a prompt; arguments as in `observe`.

        As `observe`, an ``ingest`` may name ``embed`` as a sixth argument or not.
        """
        return take_in(self.observe, pstate, features, ids, next_ids, count, embed)

    def verified(self, pstate: Any, ids: Int[Tensor, "B M"], picks: Int[Tensor, "B M"]) -> Any:
        """Take in the target's ``picks`` [B, M] after all M rows ``ids`` of a round, before `observe`.

        The rows off the accepted path are among them: the anchor, then the draft's first M - 1 tokens. M is
        the width of the round's verify pass, which may be narrower than the draft. A proposer within a
        `torch_dflash.Union` or a `torch_dflash.TreeProposer` is not asked.
        """
        return pstate

    def observe(
        self, pstate: Any, features: Tensor | None, ids: Tensor, next_ids: Tensor, count: Tensor
    ) -> Any:
        """Take in the first ``count`` [B] of the M rows of a round, after `propose` or `skip`.

        M varies up to the plan's ``gain``: of a tree, only the accepted path's rows arrive.

        ``ids`` [B, M] are the tokens of the features [B, M, n*H] (the anchor and accepted drafts),
        ``next_ids`` [B, M] the tokens after them (accepted and bonus; the bonus has no feature yet).
        A method that names a further argument ``embed`` gets the target's raw embedding, as `propose` does.
        """
        return pstate

    def propose(self, pstate: Any, anchor: Tensor, length: Tensor, embed, head) -> tuple[Draft, Any]:
        """Draft after ``anchor`` [B] at position ``length`` [B].

        ``embed(ids)`` gives raw target embeddings, ``head(hidden)`` target logits.
        """
        raise NotImplementedError(f"{type(self).__name__}: write propose.")

    def draft(
        self, pstate: Any, anchor: Tensor, length: Tensor, embed, head, request: DraftRequest
    ) -> tuple[Draft, Any]:
        """`propose` with the ``request`` of a round; rounds call this method."""
        return self.propose(pstate, anchor, length, embed, head)

    def nodes(
        self, pstate: Any, anchor: Tensor, length: Tensor, embed, head, request: DraftRequest
    ) -> tuple[Nodes, Any]:
        """`draft` as scored nodes for a tree; by default siblings are equally likely.

        Returns:
            `torch_dflash.Nodes`: tokens and parent int32 [B, C], score float32 [B, C], with the same C in
            every round; and the state. A node's parent has a lower number and no lower score.
        """
        draft, pstate = drafted_by(self, self.draft(pstate, anchor, length, embed, head, request))
        return unscored(draft, self.deepest), pstate

    @property
    def deepest(self) -> int:
        """Nodes on the longest path of a draft."""
        return self.width - 1 if self.depth is None else self.depth

    def skip(self, pstate: Any, anchor: Tensor, length: Tensor, embed, head) -> Any:
        """``pstate`` ready for `observe`, in a round that verifies no draft; arguments as in `propose`."""
        return drafted_by(self, self.propose(pstate, anchor, length, embed, head))[1]

    def idle(self, pstate: Any, anchor: Tensor, length: Tensor, embed, head) -> Any:
        """``pstate`` ready for `observe`, in a round that verifies another proposer's draft."""
        return drafted_by(self, self.propose(pstate, anchor, length, embed, head))[1]

    def cost(self, plan: DecodePlan, context: int) -> Cost:
        """The cost of a draft with ``context`` committed tokens in every row."""
        return Cost()


def take_in(method: Callable[..., Any], *given: Any) -> Any:
    """Call a proposer's ``ingest`` or ``observe``.

    Args:
        method: bound. given: its five arguments, then ``embed``, which only a method that names it gets.
    """
    *rows, embed = given
    named = "embed" in inspect.signature(method).parameters
    return method(*rows, embed=embed) if named else method(*rows)
