"""Processors: options and the user's own inside of blocks, scores with them and logits without."""

import pytest
import torch
from support.doors import DOORS, OF_ROWS
from transformers import LogitsProcessorList, MinLengthLogitsProcessor

GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
TOLD = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
OPTIONS = {
    "repetition": {"repetition_penalty": 1.8},
    "n-grams": {"no_repeat_ngram_size": 2},
    "words": {"bad_words_ids": [[10], [33, 90], [11]], "suppress_tokens": [5, 17]},
    "begin": {"begin_suppress_tokens": [10, 90], "forced_eos_token_id": 7},
    "least": {"min_new_tokens": 6, "eos_token_id": [10, 33]},
    "bias": {"sequence_bias": {(10,): -4.0, (33, 90): 3.0}},
}


@pytest.mark.parametrize("door", [*OF_ROWS, "native"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(pair, row, door, name):
    """After `GenerationTesterMixin.test_greedy_generate`, with the processors that it puts into each call."""
    options = GREEDY | OPTIONS[name]
    expected = pair[0].generate(**row, **options)
    assert torch.equal(DOORS[door](pair, row, **options), expected)


class Alternating:
    """A user's: after an even id an odd one, and the other way round."""

    def __call__(self, input_ids, scores):
        alike = torch.arange(scores.shape[1]) % 2 == input_ids[:, -1:] % 2
        return scores.masked_fill(alike, -torch.inf)


@pytest.mark.parametrize("door", ["custom_generate", "native"])
def test_a_users_own(pair, row, door):
    """After `GenerationIntegrationTests.test_custom_logits_processor`."""
    free = pair[0].generate(**row, **GREEDY)
    given = {"logits_processor": LogitsProcessorList([Alternating()])}
    expected = pair[0].generate(**row, **GREEDY, **given)
    assert torch.equal(DOORS[door](pair, row, **GREEDY, **given), expected)
    assert not torch.equal(free, expected)


def test_a_users_own_of_a_batch(pair, batch):
    """After `GenerationIntegrationTests.test_custom_logits_processor`."""
    given = {"logits_processor": LogitsProcessorList([Alternating()])}
    expected = pair[0].generate(**batch, **GREEDY, **given)
    assert torch.equal(DOORS["custom_generate"](pair, batch, **GREEDY, **given), expected)


@pytest.mark.filterwarnings("ignore:.*custom logits processor")
def test_one_beside_its_option(pair, row):
    """After `GenerationIntegrationTests.test_custom_logits_processor`: the user's replaces the option's."""
    width = row["input_ids"].shape[1]
    stop = int(pair[0].generate(**row, **GREEDY)[0, width])
    own = LogitsProcessorList([MinLengthLogitsProcessor(width + 9, torch.tensor([stop]))])
    options = GREEDY | {"min_length": width + 2, "eos_token_id": stop, "logits_processor": own}
    expected = pair[0].generate(**row, **options)
    assert torch.equal(DOORS["custom_generate"](pair, row, **options), expected)


def test_what_may_follow(pair, batch):
    """After `LogitsProcessorTest.test_prefix_constrained_logits_processor`: asked on the host."""

    def allowed(row, ids):
        return list(range(int(ids[-1]) % 3, 97, 3))

    expected = pair[0].generate(**batch, **GREEDY, prefix_allowed_tokens_fn=allowed)
    assert torch.equal(
        DOORS["custom_generate"](pair, batch, **GREEDY, prefix_allowed_tokens_fn=allowed), expected
    )


@pytest.mark.parametrize("door", OF_ROWS)
def test_logits_are_those_before_processors(pair, row, door):
    """After `GenerationIntegrationTests.test_return_unprocessed_logit_scores` and
    `GenerationIntegrationTests.test_logits_processor_not_inplace`."""
    options = GREEDY | TOLD | {"suppress_tokens": [10, 90]}
    theirs, ours = pair[0].generate(**row, **options), DOORS[door](pair, row, **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    torch.testing.assert_close(torch.cat(ours.logits), torch.cat(theirs.logits), rtol=1e-4, atol=1e-4)
    assert torch.cat(ours.logits).isfinite().all()
    assert (torch.cat(ours.scores)[:, [10, 90]] == -torch.inf).all()


@pytest.mark.parametrize("door", OF_ROWS)
@pytest.mark.parametrize("normalize", [False, True], ids=["", "normalized"])
def test_scores_of_transitions(pair, batch, door, normalize):
    """After `GenerationIntegrationTests.test_transition_scores_greedy_search` and
    `GenerationIntegrationTests.test_transition_scores_greedy_search_normalized`."""
    target, options = pair[0], GREEDY | TOLD
    found = [
        target.compute_transition_scores(out.sequences, out.scores, normalize_logits=normalize)
        for out in (DOORS[door](pair, batch, **options), target.generate(**batch, **options))
    ]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
