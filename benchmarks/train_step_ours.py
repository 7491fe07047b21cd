"""Timed steps: sizes, the shared setting of all contenders, our own step and the count of operations."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from torch_dflash.train.fit.architecture import new_drafter
from torch_dflash.train.fit.blocks import AnchorBatch, draw_anchors
from torch_dflash.train.fit.objective import sample_vocabulary
from torch_dflash.train.fit.options import DrafterShape, Objective
from torch_dflash.train.fit.student import Student
from torch_dflash.train.options import Layers

START = 32  # tokens of every prompt; anchors lie behind them
SAMPLED = 1024


@dataclass(frozen=True)
class Size:
    """One shape of drafter and batch; heads are Qwen3's (queries / keys and values)."""

    name: str
    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    taps: int
    width: int
    sequences: int
    tokens: int
    anchors: int  # per sequence
    answer_ids: int  # different ids in all answers: a sampled softmax always holds them

    @property
    def blocks(self) -> int:
        """Blocks of one step."""
        return self.sequences * self.anchors


SIZES = [
    Size("small", 576, 2, 896, 9, 3, 64, 49152, 3, 8, 8, 320, 64, 8192),
    Size("middle", 1024, 3, 3072, 16, 8, 128, 32000, 5, 16, 2, 512, 32, 8192),
]


@dataclass
class Setting:
    """The models and the batch that all contenders of a size share."""

    size: Size
    target: Any
    drafter: Any
    batch: AnchorBatch


def make_setting(size: Size) -> Setting:
    """Random weights and tokens; hidden states under which a target would write exactly these tokens."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=size.hidden,
        num_hidden_layers=size.taps + 2,
        intermediate_size=8,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        vocab_size=size.vocabulary,
        tie_word_embeddings=True,
    )
    target: Any = Qwen3ForCausalLM(config).eval().requires_grad_(False)
    shape = DrafterShape(
        mask_token_id=size.vocabulary - 1,
        layers=size.layers,
        block_size=size.width,
        taps=Layers(range(size.taps)),
        intermediate_size=size.intermediate,
    )
    drafter = new_drafter(target, shape)
    generator = torch.Generator().manual_seed(1)
    tokens = (size.sequences, size.tokens)
    ids = torch.randint(0, size.answer_ids, tokens, generator=generator, dtype=torch.int32)
    # Only anchors whose whole block lies in the answer: the one kind that all contenders supervise alike.
    last_anchor = size.tokens - size.width + 1
    anchors = [draw_anchors(START, last_anchor, size.anchors, generator) for _ in range(size.sequences)]
    batch = AnchorBatch(
        ids=ids,
        length=torch.full((size.sequences,), size.tokens, dtype=torch.int32),
        features=torch.randn(*tokens, size.taps * size.hidden, generator=generator),
        anchors=torch.stack(anchors),
        # The head's own row for the next token scores that token highest.
        last=target.get_output_embeddings().weight[ids.long()].roll(-1, dims=1),
    )
    return Setting(size, target, drafter, batch)


def autocast(dtype: str) -> Any:
    """Products in ``dtype``, weights in float32."""
    return torch.autocast("cpu", torch.bfloat16) if dtype == "bf16" else nullcontext()


class Contender:
    """A trainer's step. ``run`` leaves gradients behind and returns the loss, per block as ours is.

    Args:
        name: as printed. trained: the module whose weights are. flops: of the matrix products of one step.
        exact: it has to agree with the others; a sampled softmax is an estimate.
    """

    def __init__(
        self, name: str, trained: nn.Module, run: Callable[[], float], flops: float, exact: bool = True
    ):
        self.name, self.trained, self.run, self.flops, self.exact = name, trained, run, flops, exact
        self.parameters = [value for value in trained.parameters() if value.requires_grad]
        self.optimizer: Any = torch.optim.AdamW(self.parameters, lr=1e-5, weight_decay=0.01)

    def update(self) -> None:
        """Clip and step."""
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def ours(setting: Setting, dtype: str, chunk: int, sampled: bool) -> Contender:
    """`Student`, over the whole vocabulary or a sample of it."""
    size, batch = setting.size, setting.batch
    drafter = type(setting.drafter)(setting.drafter.config)
    drafter.load_state_dict(setting.drafter.state_dict())
    head_dtype = torch.bfloat16 if dtype == "bf16" else None
    student = Student(drafter, setting.target, Objective(rows_per_chunk=chunk), head_dtype=head_dtype)
    always, generator = batch.ids.unique(), torch.Generator().manual_seed(2)

    def run() -> float:
        vocabulary = None
        if sampled:  # drawn anew in every step, as in a fit
            vocabulary = sample_vocabulary(student.head_weight, None, always, SAMPLED, generator)
        with autocast(dtype):
            losses = student(batch, vocabulary)
        loss = losses.loss / size.blocks
        loss.backward()
        return float(loss.detach())

    columns = min(len(always) + SAMPLED, size.vocabulary) if sampled else size.vocabulary
    # Two head products: the logits and the states' gradient; the head is frozen.
    head = 2 * product(size.blocks * (size.width - 1), size.hidden, columns)
    name = f"ours, {f'{columns} ids' if sampled else 'all ids'}, {chunk} rows at a time"
    return Contender(name, drafter, run, stack_flops(size, size.width) + head, exact=not sampled)


def product(rows: int, inner: int, columns: int) -> float:
    """Floating-point operations of one matrix product."""
    return 2.0 * rows * inner * columns


def stack_flops(size: Size, seen: int) -> float:
    """The drafter's products of a step without the head: forward and twice that backward.

    Args:
        seen: keys of block rows that each query is multiplied with: its own block's, or with a dense mask
            those of all its sequence's blocks.
    """
    rows, tokens = size.blocks * size.width, size.sequences * size.tokens
    inner, kv = size.heads * size.head_dim, 2 * size.kv_heads * size.head_dim
    layer = product(rows, size.hidden, inner) + product(tokens + rows, size.hidden, kv)
    layer += product(rows, inner, size.hidden) + 3 * product(rows, size.hidden, size.intermediate)
    layer += 2 * product(rows, inner, size.tokens + seen)  # scores, then values
    features = product(tokens, size.taps * size.hidden, size.hidden)
    return 3 * size.layers * layer + 2 * features  # nothing flows back into the features
