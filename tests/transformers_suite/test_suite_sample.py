"""Sampling: the law of the target, seeds, and rows of one prompt."""

import pytest
import torch
from support.doors import DOORS, OF_ROWS

SAMPLE = {"max_new_tokens": 10, "do_sample": True, "temperature": 3.0, "pad_token_id": 0}


@pytest.mark.parametrize("door", OF_ROWS)
def test_a_seed(pair, batch, door):
    """After `GenerationTesterMixin.test_sample_generate`: shapes, and a seed's own text again."""
    first = DOORS[door](pair, batch, **SAMPLE, seed=1)
    assert first.shape == (2, batch["input_ids"].shape[1] + 10)
    assert torch.equal(first, DOORS[door](pair, batch, **SAMPLE, seed=1))
    assert not torch.equal(first, DOORS[door](pair, batch, **SAMPLE, seed=2))


@pytest.mark.parametrize("door", DOORS)
def test_one_candidate_is_the_greedy_text(pair, row, door):
    """After `GenerationTesterMixin.test_sample_generate`: without a say of noise, the target's text."""
    expected = pair[0].generate(**row, max_new_tokens=10, do_sample=False)
    assert torch.equal(DOORS[door](pair, row, **SAMPLE, top_k=1), expected)


@pytest.mark.parametrize("door", OF_ROWS)
def test_scores_are_what_was_drawn_from(pair, row, door):
    """After `GenerationTesterMixin.test_sample_generate_dict_output`: filtered logits of the same text."""
    told = {"return_dict_in_generate": True, "output_scores": True}
    ours = DOORS[door](pair, row, **SAMPLE, top_k=5, seed=3, **told)
    width = row["input_ids"].shape[1]
    with torch.no_grad():
        logits = pair[0](ours.sequences).logits[0, width - 1 : -1] / 3.0
    expected = logits.masked_fill(logits < logits.topk(5).values[:, -1:], -torch.inf)
    found = torch.cat(ours.scores)
    assert found.shape == expected.shape and (found.isfinite().sum(dim=1) == 5).all()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert found.gather(1, ours.sequences[0, width:, None]).isfinite().all()


@pytest.mark.parametrize("door", ["generate", "custom_generate", "folder"])
def test_more_texts_of_a_prompt(pair, batch, door):
    """After `GenerationTesterMixin.test_sample_generate`, with ``num_return_sequences``."""
    out = DOORS[door](pair, batch, **SAMPLE, num_return_sequences=3, seed=1)
    width = batch["input_ids"].shape[1]
    assert torch.equal(out[:, :width], batch["input_ids"].repeat_interleave(3, dim=0))
    assert len(out[:, width:].unique(dim=0)) >= 4


@pytest.mark.parametrize("door", ["generate", "custom_generate"])
def test_the_distribution_is_the_targets(pair, row, door):
    """After `UtilsFunctionsTest.test_speculative_sampling_target_distribution`, on the loop itself."""
    rows, asked = 400, {"max_new_tokens": 3, "do_sample": True, "temperature": 1.0, "top_k": 4, "seed": 7}
    inputs = {name: value.repeat(rows, 1) for name, value in row.items()}
    new = DOORS[door](pair, inputs, **asked)[:, -3:]
    ids = row["input_ids"]
    for place in range(3):  # the anchor, then tokens of a block, after their likeliest beginning
        with torch.no_grad():
            logits = pair[0](ids).logits[0, -1]
        law = logits.masked_fill(logits < logits.topk(4).values[-1], -torch.inf).softmax(-1)
        counts = torch.bincount(new[:, place], minlength=len(law)).float()
        assert (counts[law == 0] == 0).all()
        distance = (counts / counts.sum() - law).abs().sum() / 2
        assert distance < 1.5 * (4 / len(new)) ** 0.5, (place, distance)
        likeliest = counts.argmax()
        ids, new = torch.cat([ids, likeliest[None, None]], dim=1), new[new[:, place] == likeliest]
