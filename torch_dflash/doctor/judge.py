"""Judges how well a convention drafts the target's own text, teacher-forced: acceptance and likelihood."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from torch_dflash.doctor.changes import Convention
from torch_dflash.proposers.dflash.model import DFlashDraftModel
from torch_dflash.proposers.dflash.vocabulary import look_up
from torch_dflash.targets.blocks import block_of, check_tappable, tapped
from torch_dflash.targets.final_norm import final_norm
from torch_dflash.targets.skeleton import build_skeleton
from torch_dflash.targets.trace import blocks_of
from torch_dflash.targets.weights import collect_tensors
from torch_dflash.train.fit.blocks import (
    AnchorBatch,
    block_targets,
    draft_blocks,
    gather_rows,
    previous_tokens,
)

TEMPERATURES = [2 ** (step / 2) for step in range(-4, 13)]
"""From 1/4 to 64, at which all tokens are about equally likely; a convention counts at its best one."""


@dataclass(frozen=True)
class Drafted:
    """The blocks of one convention.

    Attributes:
        accepted: number of each block's drafts that the target would accept.
        likelihood: log-likelihood in nats of the target's tokens, all rows, at each of `TEMPERATURES`.
    """

    accepted: Int[Tensor, " blocks"]
    likelihood: Float[Tensor, "blocks temperatures"]

    @property
    def nats(self) -> Float[Tensor, " blocks"]:
        """`likelihood` at its best temperature: sharper logits alone make no drafter better."""
        return self.likelihood[:, self.likelihood.mean(dim=0).argmax()]


class Judge:
    """Drafts the same blocks of recorded texts by any convention.

    Args:
        target, drafter: the pair; neither changes.
        recorded: the target's outputs, from `record`.
        blocks: number of blocks; their anchors are spread evenly over the answers.

    Attributes:
        places: (text, anchor) of each block.
        most: number of blocks that fit into the answers.
    """

    def __init__(self, target: Any, drafter: DFlashDraftModel, recorded: Sequence[Tapped], blocks: int = 256):
        self.target, self.drafter, self.recorded = target, drafter, list(recorded)
        self.width = drafter.config.block_size
        self._norm = final_norm(target)
        self._embedding = (drafter.embed_tokens or target.get_input_embeddings()).weight
        self._output = drafter.lm_head or target.get_output_embeddings()
        self._words = torch.cat([one.text.ids for one in self.recorded]).long().unique().to(target.device)
        places = [
            (at, place)
            for at, one in enumerate(self.recorded)
            for place in range(one.text.start, len(one.text.ids) - 1)
        ]
        self.most = len(places)
        step = max(1.0, len(places) / blocks)
        self.places = [places[int(i * step)] for i in range(min(blocks, len(places)))]

    @torch.no_grad()
    def __call__(self, convention: Convention) -> Drafted:
        """Draft every block by ``convention``."""
        counts, nats = [], []
        for twin, batch, rows in self._drafted(convention, 1):
            counts.append(self.count(twin, convention, batch, rows))
            nats.append(self.log_likelihood(twin, convention, batch, rows))
        return Drafted(torch.cat(counts), torch.cat(nats))

    @torch.no_grad()
    def likelihood(self, convention: Convention, every: int) -> float:
        """Mean nats of every ``every``-th block: cheaper than acceptance, which needs the whole head."""
        drafted = self._drafted(convention, every)
        nats = [self.log_likelihood(twin, convention, batch, rows) for twin, batch, rows in drafted]
        return float(torch.cat(nats).mean(dim=0).max())

    def _drafted(self, convention: Convention, every: int) -> Iterator[tuple[Any, AnchorBatch, Tensor]]:
        twin, places = convention.applied(self.drafter), self.places[::every]
        for at, one in enumerate(self.recorded):
            anchors = [place for text, place in places if text == at]
            if anchors:
                batch = self.batch(convention, one, anchors)
                yield twin, batch, self.rows(twin, convention, batch)

    def count(
        self, twin: Any, convention: Convention, batch: AnchorBatch, rows: Float[Tensor, "one A N H"]
    ) -> Int[Tensor, " A"]:
        """Accepted drafts of the blocks of ``batch``."""
        wanted, known = block_targets(batch, self.width)
        counts = torch.zeros(rows.shape[1], dtype=torch.int32, device=rows.device)
        alive = torch.arange(rows.shape[1], device=rows.device)
        before, head = gather_rows(batch.ids, batch.anchors[..., None])[0, :, 0], self._head(convention)
        for row in range(self.width - 1):  # the head is most of the work, and few rows need it
            tokens = twin.choose(rows[0, alive, row : row + 1], before[alive], head)[:, 0]
            alive = alive[(tokens == wanted[0, alive, row]) & known[0, alive, row]]
            before = wanted[0, :, row]
            counts[alive] += 1
        return counts.cpu()

    def log_likelihood(
        self, twin: Any, convention: Convention, batch: AnchorBatch, rows: Float[Tensor, "one A N H"]
    ) -> Float[Tensor, "A temperatures"]:
        """Log-likelihood in nats of the target's tokens, among the tokens that occur in the texts."""
        wanted, known = block_targets(batch, self.width)
        logits = self.read(twin, convention, batch, rows, self._words)[0].float()
        logits = torch.where(torch.isfinite(logits).all(dim=-1, keepdim=True), logits, 0)  # no evidence
        at = torch.searchsorted(self._words, wanted[0].long())[..., None]
        nats = [
            ((logits / heat).log_softmax(dim=-1).gather(-1, at)[..., 0] * known[0]).sum(dim=1)
            for heat in TEMPERATURES
        ]
        return torch.stack(nats, dim=1).cpu()

    def batch(self, convention: Convention, one: Tapped, anchors: list[int]) -> AnchorBatch:
        """The drafter's inputs for the blocks of a text at ``anchors``."""
        states = [one.states[tap + 1] for tap in convention.taps]
        norm = self._norm if convention.normed else None
        features = torch.cat([state if norm is None else norm(state) for state in states], dim=-1)
        device = features.device
        return AnchorBatch(
            ids=one.text.ids[None].to(device).int(),
            length=torch.tensor([len(one.text.ids)], device=device, dtype=torch.int32),
            features=features[None],
            anchors=torch.tensor([anchors], device=device, dtype=torch.int32),
        )

    def rows(self, twin: Any, convention: Convention, batch: AnchorBatch) -> Float[Tensor, "B A N H"]:
        """The drafter's states for the tokens after each anchor."""
        hidden = draft_blocks(twin, batch, self._embedding, self.width)
        return hidden[:, :, convention.first_row : convention.first_row + self.width - 1]

    def read(
        self,
        twin: Any,
        convention: Convention,
        batch: AnchorBatch,
        rows: Float[Tensor, "B A N H"],
        words: Int[Tensor, " V"] | None = None,
    ) -> Float[Tensor, "B A N V"]:
        """Logits of the states ``rows`` for all tokens or ``words``, given the true tokens before them."""
        logits, markov = twin.logits(rows, self._head(convention, words)), twin.markov_head
        if markov is None:
            return logits
        before = look_up(previous_tokens(batch, self.width), markov.markov_w1.weight)
        table = markov.markov_w2.weight
        return logits + F.linear(before, table if words is None else look_up(words, table))

    def _head(self, convention: Convention, words: Tensor | None = None) -> Callable[[Tensor], Tensor]:
        head = self._output
        source = self.target.get_input_embeddings() if convention.tied else head
        weight, bias = source.weight, getattr(source, "bias", None)
        if words is not None:
            weight, bias = weight[words], None if bias is None else bias[words]
        elif not convention.tied:
            return lambda rows: head(rows.to(weight.dtype))
        return lambda rows: F.linear(rows.to(weight.dtype), weight, bias)


def standard_score(new: Tensor, old: Tensor) -> float:
    """Mean gain of ``new`` over ``old``, block by block, in standard errors."""
    mean, error = (new - old).double().mean(), standard_error(new, old)
    return float(mean / error) if error > 0 else float(mean.sign()) * len(new)


def standard_error(new: Tensor, old: Tensor) -> float:
    """Standard error of the mean gain of ``new`` over ``old``, block by block; 0 of a single block."""
    return float((new - old).double().std() / len(new) ** 0.5) if len(new) > 1 else 0.0


@dataclass(frozen=True)
class Answered:
    """A prompt of ``start`` tokens and the target's own greedy answer to it: ``ids`` [T]."""

    ids: Int[Tensor, " T"]
    start: int


@dataclass(frozen=True)
class Tapped:
    """A text, and ``states``: the embedding's output, then that of each block, before the final norm."""

    text: Answered
    states: list[Float[Tensor, "T H"]]


@torch.no_grad()
def record(target: Any, texts: Sequence[Answered]) -> list[Tapped]:
    """Run ``target`` over each text once.

    Raises:
        ValueError: the layers of ``target`` cannot be tapped, or it does not decode here.
    """
    blocks = blocks_of(target)
    check_tappable(target, blocks)
    skeleton = build_skeleton(target, target.config._attn_implementation)  # takes the hooks, not the model
    tensors, outputs, found = collect_tensors(skeleton, target, ""), {}, []

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        outputs[-1] = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))

    block_of(skeleton, blocks, 0).register_forward_pre_hook(keep, with_kwargs=True)
    layers = tuple(range(len(blocks.paths)))
    with tapped(skeleton, blocks, layers, outputs):
        for text in texts:
            step = {"input_ids": text.ids[None].to(target.device), "use_cache": False}
            torch.func.functional_call(skeleton, tensors, (), step)
            found.append(Tapped(text, [outputs[layer][0].detach() for layer in (-1, *layers)]))
    return found
