"""Every row of a training block sees the rows of inference, and computes the values of inference."""

import dataclasses

import pytest
import torch
from support.authors import SECOND
from support.blocks import make_batch
from support.tiny import MASK, make_pair, randomise

from torch_dflash.train.fit.blocks import block_targets, context_mask, draft_blocks, draw_anchors

CASES = {
    "full": {}, "sliding": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5},
    "mixed": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    "symmetric": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5, "is_causal": False},
    "causal": {"is_causal": True}, "wide": {"block_size": 24}, "convolutions": SECOND,
    "convolutions of three taps": SECOND | {"conv_kernel_size": 3},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_block_is_what_inference_computes(case):
    target, drafter = make_pair("qwen3", seed=3, **CASES[case])
    if drafter.config.dflash2:
        randomise(drafter, 3)  # untrained convolutions do nothing
    batch, width = make_batch(drafter), drafter.config.block_size
    embedding = target.get_input_embeddings().weight
    with torch.no_grad():
        hidden = draft_blocks(drafter, batch, embedding, width)
        worst = 0.0
        for row in range(2):
            for number, anchor in enumerate(batch.anchors[row].tolist()):
                if anchor < 0:
                    continue
                ids = torch.full((1, width), MASK)
                ids[0, 0] = batch.ids[row, anchor]
                alone = drafter(
                    noise_embeds=torch.nn.functional.embedding(ids, embedding)
                    * drafter.config.input_embedding_scale,
                    context_hidden_states=batch.features[row : row + 1, :anchor],
                    position_ids=torch.arange(anchor + width)[None],
                ).last_hidden_state[0]
                worst = max(worst, float((hidden[row, number] - alone).abs().max()))
    assert worst < 1e-5


def brute_force(anchors, total, width, window, causal):
    """The definition, row by row: [A*W, T + A*W] over context slots, then over all blocks' rows."""
    mask = torch.zeros(len(anchors) * width, total + len(anchors) * width, dtype=torch.bool)
    for block, anchor in enumerate(anchors):
        for i in range(width):
            row, at = block * width + i, anchor + i
            for slot in range(total):
                seen = slot < anchor  # the anchor's own feature is not there yet
                if window is not None:
                    seen = seen and at - slot < window
                mask[row, slot] = seen
            for other in range(len(anchors)):
                for j in range(width):
                    gap = i - j
                    seen = other == block and (gap >= 0 or not causal)
                    if window is not None:
                        seen = seen and gap < window and (causal or -gap < window)
                    mask[row, total + other * width + j] = seen
    return mask


@pytest.mark.parametrize("window", [None, 3, 7])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("width", [2, 5, 20])
def test_masks_equal_their_definition(window, causal, width):
    from torch_dflash.ops.attention import visible

    anchors, total = [4, 9, 10, 21], 24
    at = torch.tensor([anchors], dtype=torch.int32)
    slots = torch.arange(total, dtype=torch.int32)
    outside = context_mask(at, slots, width, window, causal)[0, 0]
    inside_at = torch.arange(width)[None]
    inside = torch.block_diag(*[visible(inside_at, inside_at, window, causal)[0, 0]] * len(anchors)).bool()
    assert torch.equal(
        torch.cat([outside, inside], dim=1), brute_force(anchors, total, width, window, causal)
    )


def test_anchors_are_tokens_of_the_answer_whose_successor_is_known():
    generator = torch.Generator().manual_seed(0)
    assert draw_anchors(5, 9, 16, generator).tolist() == [5, 6, 7] + [-1] * 13
    assert draw_anchors(5, 6, 2, generator).tolist() == [-1, -1]
    drawn = draw_anchors(3, 500, 64, generator)
    assert len(set(drawn.tolist())) == 64 and drawn.min() >= 3 and drawn.max() <= 498
    assert not torch.equal(drawn, draw_anchors(3, 500, 64, generator))


def test_targets_are_the_tokens_after_the_anchor():
    _, drafter = make_pair("qwen3", seed=3)
    batch = dataclasses.replace(
        make_batch(drafter), anchors=torch.tensor([[5, 21, -1], [6, 29, 20]], dtype=torch.int32)
    )
    targets, known = block_targets(batch, 5)
    assert targets[0, 0].tolist() == batch.ids[0, 6:10].tolist()
    assert known[0].tolist() == [[True] * 4, [True, False, False, False], [False] * 4]
    assert known[1].tolist() == [[True] * 4, [True, False, False, False], [True] * 4]
