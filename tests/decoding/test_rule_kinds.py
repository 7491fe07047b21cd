"""At every row of a block each processor gives the logits of transformers' own for the text before."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.versions import BIASES_ZERO
from transformers.generation import logits_process as theirs

from torch_dflash.processors.interface import Text, process
from torch_dflash.requests.rules import KINDS, Batch, arranged, options_of_rules, requested_processors

VOCAB, WIDTH, SLOTS = 9, 4, 24
ids = st.integers(0, VOCAB - 1)
texts = st.lists(ids, min_size=2, max_size=9)
words = st.lists(ids, min_size=1, max_size=4)
biased = words if BIASES_ZERO else st.lists(ids.filter(bool), min_size=1, max_size=4)
number = st.floats(-4, 4, allow_nan=False).map(lambda value: round(value, 2))

penalties, decays = (
    st.sampled_from([0.5, 1.3, 4.0]),
    st.tuples(st.integers(0, 6), st.sampled_from([0.9, 1.5])),
)
suppressed, begun = (st.lists(one, min_size=1, max_size=3) for one in (ids.filter(bool), ids))
banned = st.lists(words.filter(lambda word: word != [0]), min_size=1, max_size=5)
pairs = st.tuples(biased, number).map(list)
biases = st.lists(pairs, min_size=1, max_size=5, unique_by=lambda pair: tuple(pair[0]))


def of(kind, *more):
    return lambda value, start, cap: kind(value, *more)


def of_start(kind, *more):
    return lambda value, start, cap: kind(value, *more, start)


# Each option's values, and transformers' processor for a value, the prompt's length and the cap.
OPTIONS = {
    "sequence_bias": (biases, of(theirs.SequenceBiasLogitsProcessor)),
    "repetition_penalty": (penalties, of(theirs.RepetitionPenaltyLogitsProcessor)),
    "no_repeat_ngram_size": (st.integers(1, 5), of(theirs.NoRepeatNGramLogitsProcessor)),
    "bad_words_ids": (banned, of(theirs.NoBadWordsLogitsProcessor, 0)),
    "min_new_tokens": (
        st.integers(1, 8),
        lambda value, start, cap: theirs.MinNewTokensLengthLogitsProcessor(start, value, 0),
    ),
    "min_length": (st.integers(1, 14), of(theirs.MinLengthLogitsProcessor, 0)),
    "forced_eos_token_id": (
        ids,
        lambda value, start, cap: theirs.ForcedEOSTokenLogitsProcessor(start + cap, value),
    ),
    "exponential_decay_length_penalty": (decays, of_start(theirs.ExponentialDecayLengthPenalty, 0)),
    "suppress_tokens": (suppressed, of(theirs.SuppressTokensLogitsProcessor)),
    "begin_suppress_tokens": (begun, of_start(theirs.SuppressTokensAtBeginLogitsProcessor)),
}
ONE = st.sampled_from(list(OPTIONS)).flatmap(lambda name: st.tuples(st.just(name), OPTIONS[name][0]))


def ours(options, prompts, blocks, cap, memory_takes=lambda count: count):
    """Logits [B, M, V] of rows that follow each prompt and ``blocks``, processed and raw."""
    rows, starts = len(prompts), [len(prompt) for prompt in prompts]
    batch = Batch(max(starts), [cap] * rows, [(0,)] * rows, True, VOCAB)
    asked = requested_processors(options, batch)
    kinds = arranged([*asked])
    memories = [kind.start(kind.values(asked[kind], starts), VOCAB) for kind in kinds]
    tokens = torch.zeros(rows, SLOTS, dtype=torch.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
        tokens[row, len(prompt) : len(prompt) + WIDTH] = torch.tensor(blocks[row])
    count = torch.tensor(starts, dtype=torch.int32)
    taken = memory_takes(count)
    read = [kind.read(memory, tokens, taken) for kind, memory in zip(kinds, memories, strict=True)]
    length = count[:, None] + torch.arange(1, WIDTH + 1, dtype=torch.int32)
    logits = torch.randn(rows, WIDTH, VOCAB, generator=torch.Generator().manual_seed(sum(starts)))
    text = Text(tokens, length, torch.tensor(blocks, dtype=torch.int32))
    found = process(kinds, tuple(read), text, logits)
    return process(kinds, tuple(read), text, found, scaled=True), logits, tokens, length


def expected(options, tokens, length, logits, start, cap):
    """The logits of one row after transformers' processors, in the order of transformers."""
    text = tokens[None, :length].long()
    for name in OPTIONS:
        # Of the two kinds of least length, `generate` leaves that of the new tokens.
        if name in options and not (name == "min_length" and "min_new_tokens" in options):
            logits = OPTIONS[name][1](options[name], start, cap)(text, logits)
    return logits


@settings(max_examples=150)
@given(
    st.lists(ONE, min_size=1, max_size=3).map(dict),
    st.lists(st.tuples(texts, st.lists(ids, min_size=WIDTH, max_size=WIDTH)), min_size=1, max_size=3),
    st.integers(1, 6),
)
def test_rows_of_a_block_are_what_transformers_makes_of_the_text_before_them(options, rows, cap):
    prompts, blocks = map(list, zip(*rows, strict=True))
    if "forced_eos_token_id" in options:  # refused with these, where both hold for the same token
        options.pop("suppress_tokens", None)
        options.pop("begin_suppress_tokens" if cap == 1 else "", None)
    if "min_length" in options:  # this one counts the padding of a batch
        prompts, blocks = prompts[:1], blocks[:1]
    found, logits, tokens, length = ours(options, prompts, blocks, cap)
    for b, prompt in enumerate(prompts):
        for i in range(WIDTH):
            want = expected(options, tokens[b], length[b, i], logits[b, i][None], len(prompt), cap)[0]
            torch.testing.assert_close(found[b, i], want, msg=f"row {i} of {b}, {options}")


def test_the_property_sees_a_memory_that_misses_a_token():
    given = {"repetition_penalty": 4.0}, [[1, 2, 3, 4]], [[5, 6, 7, 8]], 6
    late = ours(*given, memory_takes=lambda count: count - 1)[0]
    assert not torch.equal(late, ours(*given)[0])


@pytest.mark.parametrize(
    "name, value, warper",
    [
        ("typical_p", 0.3, theirs.TypicalLogitsWarper),
        ("typical_p", 0.9, theirs.TypicalLogitsWarper),
        ("epsilon_cutoff", 0.1, theirs.EpsilonLogitsWarper),
        ("epsilon_cutoff", 0.5, theirs.EpsilonLogitsWarper),
        ("eta_cutoff", 0.2, theirs.EtaLogitsWarper),
    ],
)
def test_warpers_keep_what_transformers_keeps(name, value, warper):
    logits = torch.randn(5, 6, 40, generator=torch.Generator().manual_seed(1)) * 2
    logits[0, 0, 3:] = -math.inf  # after other filters
    kind = KINDS[name]
    memory = kind.start(kind.values([value] * 4 + [None], [1] * 5), 40)
    found = process((kind,), (memory,), Text(*torch.zeros(2, 5, 6, dtype=torch.int32)), logits, scaled=True)
    want = warper(value)(torch.zeros(30, 1), logits.flatten(0, 1)).view_as(logits)
    assert torch.equal(found[:4], want[:4]) and torch.equal(found[4], logits[4])
    assert torch.isinf(found[1:4]).any()


def test_a_row_asks_for_itself():
    values = {"repetition_penalty": [1.0, 4.0], "no_repeat_ngram_size": [2, 0], "min_new_tokens": [0, 3]}
    assert all(options_of_rules()[name].per_row for name in values)
    found, logits, *_ = ours(values, [[1, 2, 1], [3, 4, 3]], [[2, 1, 2, 1], [4, 3, 4, 3]], 6)
    alone = [
        ours({name: value[row] for name, value in values.items()}, [prompt], [block], 6)[0]
        for row, (prompt, block) in enumerate([([1, 2, 1], [2, 1, 2, 1]), ([3, 4, 3], [4, 3, 4, 3])])
    ]
    # The logits are drawn for both rows at once; the bans tell rows apart.
    assert torch.equal(torch.isinf(found[0]), torch.isinf(alone[0][0])) and torch.isinf(found[0]).any()
    assert torch.equal(torch.isinf(found[1]), torch.isinf(alone[1][0])) and torch.isinf(found[1]).any()
    assert torch.equal(found[0][~torch.isinf(found[0])], logits[0][~torch.isinf(found[0])])


def test_penalties_of_servers_count_what_the_target_picked():
    options = {"presence_penalty": 0.5, "frequency_penalty": [0.25]}
    found, logits, *_ = ours(options, [[1, 1, 2]], [[1, 5, 5, 1]], 9)
    taken = (logits - found)[0]
    want = torch.zeros(WIDTH, VOCAB)  # the prompt counts for nothing
    want[:, 1] = torch.tensor([0.75, 0.75, 0.75, 1.0])
    want[:, 5] = torch.tensor([0, 0.75, 1.0, 1.0])
    torch.testing.assert_close(taken, want)
