"""Blocks of a training batch."""

import torch

from support.tiny import VOCAB
from torch_dflash.train.fit.blocks import AnchorBatch, draw_anchors

LENGTHS = (23, 31)


def make_batch(drafter, seed=0):
    generator = torch.Generator().manual_seed(seed)
    width = 32
    ids = torch.randint(0, VOCAB - 1, (2, width), generator=generator, dtype=torch.int32)
    nh = drafter.fc.in_features
    anchors = torch.stack([draw_anchors(5, length, 6, generator) for length in LENGTHS])
    anchors[0, -1] = -1
    return AnchorBatch(
        ids=ids,
        length=torch.tensor(LENGTHS, dtype=torch.int32),
        features=torch.randn(2, width, nh, generator=generator),
        anchors=anchors,
    )
