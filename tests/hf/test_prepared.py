"""``target.generate(custom_generate=...)`` honours or refuses a user's processors and criteria."""

import copy

import pytest
import torch
from support.refusals import refuses
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    MinPLogitsWarper,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.logits_process import (
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    MinLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TypicalLogitsWarper,
)
from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor as NoRepeatNGram

import torch_dflash as td
from torch_dflash.integrations.prepared import read_processors
from torch_dflash.processors.options import TransformersCall

NEW = 12
WIDTH = 7


def ignoring(lengths):
    """A repetition penalty with a length for each row, as newer versions of transformers have."""
    penalty = RepetitionPenaltyLogitsProcessor(2.0)
    penalty.prompt_ignore_length = torch.tensor(lengths)
    return penalty


@pytest.fixture(scope="module")
def text(pair, batch):
    return pair[0].generate(**batch, max_new_tokens=NEW, do_sample=False, pad_token_id=0)


def both(pair, batch, **options):
    """The output of transformers by itself, and of transformers with block decoding."""
    asked = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | options
    block = td.dflash(pair[1], runtime="eager", seed=3)
    return pair[0].generate(**batch, **asked), pair[0].generate(**batch, **asked, custom_generate=block)


@pytest.mark.parametrize("columns", [[4], [9, 4], [NEW + 5], [4, NEW + 5]], ids=str)
def test_lengths_of_the_users_criteria(pair, batch, columns):
    width = batch["input_ids"].shape[1]
    criteria = StoppingCriteriaList([MaxLengthCriteria(width + new) for new in columns])
    theirs, ours = both(pair, batch, stopping_criteria=criteria)
    assert ours.shape[1] == width + min(columns)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("own", [None, 3])
def test_stop_ids_of_the_users_criteria(pair, batch, text, own):
    width = batch["input_ids"].shape[1]
    first, second, third = (int(text[row, width + place]) for row, place in ((0, 3), (1, 6), (0, 8)))
    eos = None if own is None else int(text[0, width + 1])
    for criteria in (
        [EosTokenCriteria(first)],
        [EosTokenCriteria([third, second])],
        [EosTokenCriteria(torch.tensor([first])), EosTokenCriteria([second])],
        [EosTokenCriteria(first), MaxLengthCriteria(width + 5)],
    ):
        theirs, ours = both(pair, batch, stopping_criteria=StoppingCriteriaList(criteria), eos_token_id=eos)
        assert torch.equal(ours, theirs)
        assert not torch.equal(ours, text)


def test_padding_after_a_criterion_is_that_of_transformers(pair, batch, text):
    width = batch["input_ids"].shape[1]
    criteria = StoppingCriteriaList([EosTokenCriteria(int(text[0, width + 3]))])
    theirs, ours = both(pair, batch, stopping_criteria=criteria, eos_token_id=[91, 92], pad_token_id=None)
    assert torch.equal(ours, theirs) and ours[0, -1] == 91


GREEDY = [
    [TopKLogitsWarper(1)],
    [MinPLogitsWarper(0.3), TopKLogitsWarper(1)],
    [TopKLogitsWarper(9), TopKLogitsWarper(1)],
    [TemperatureLogitsWarper(1e-3), TopKLogitsWarper(1), LogitNormalization()],
]


@pytest.mark.parametrize("warpers", GREEDY, ids=lambda items: "+".join(type(item).__name__ for item in items))
def test_warpers_of_the_users_that_leave_one_token(pair, batch, text, warpers):
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0}
    options |= {"logits_processor": LogitsProcessorList(warpers)}
    theirs, ours = both(pair, batch, **options)
    assert torch.equal(ours, text) and torch.equal(theirs, text)


def test_a_temperature_of_the_users_multiplies_the_options(pair, batch, text):
    # 4 alone is noise; with the user's 1e-4 before it, it is greedy.
    warpers = LogitsProcessorList([TemperatureLogitsWarper(1e-4)])
    options = {"do_sample": True, "temperature": 4.0, "logits_processor": warpers}
    theirs, ours = both(pair, batch, **options)
    assert torch.equal(ours, text) and torch.equal(theirs, text)


def test_what_the_options_alone_make_reads_back(pair, batch):
    asked = {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.1}
    expected = td.generate(
        *pair, **batch, **asked, max_new_tokens=NEW, pad_token_id=0, seed=3, runtime="eager"
    )
    assert torch.equal(both(pair, batch, **asked)[1], expected)
    # The stricter of two warpers counts, and the product of two temperatures.
    warpers = [TemperatureLogitsWarper(1.4), TopKLogitsWarper(20)]
    loose = asked | {"temperature": 0.5, "logits_processor": LogitsProcessorList(warpers)}
    assert torch.equal(both(pair, batch, **loose)[1], expected)


ORDERS = [
    [TemperatureLogitsWarper(0.5), TopKLogitsWarper(11), TopPLogitsWarper(0.8), MinPLogitsWarper(0.05)],
    [TopKLogitsWarper(11), TemperatureLogitsWarper(0.5), TopKLogitsWarper(30), MinPLogitsWarper(0.05)],
    [MinPLogitsWarper(0.02), TopKLogitsWarper(5), MinPLogitsWarper(0.1)],
    [LogitNormalization(), TemperatureLogitsWarper(2.0), TemperatureLogitsWarper(0.3), MinPLogitsWarper(0.2)],
    [TopKLogitsWarper(3, min_tokens_to_keep=8), TopPLogitsWarper(0.5)],
]


@pytest.mark.parametrize("warpers", ORDERS, ids=lambda items: "+".join(type(item).__name__ for item in items))
def test_what_is_read_has_the_lists_own_law(warpers):
    logits = torch.randn(64, 40, generator=torch.Generator().manual_seed(1)) * 3
    found, own = read_processors(warpers, TransformersCall(WIDTH, WIDTH + NEW, frozenset()))
    assert not own
    built = [TemperatureLogitsWarper(found["temperature"])]
    built += [TopKLogitsWarper(found["top_k"])] if found["top_k"] else []
    built += [TopPLogitsWarper(found["top_p"]), MinPLogitsWarper(found["min_p"])]
    law = [LogitsProcessorList(items)(None, logits.clone()).softmax(-1) for items in (warpers, built)]
    torch.testing.assert_close(*law, rtol=1e-5, atol=1e-7)
    assert torch.equal(law[0] == 0, law[1] == 0)


class Quiet(TopKLogitsWarper):  # a subclass may do anything
    pass


class Loud(LogitsProcessor):  # reads the size of scores
    def __call__(self, input_ids, scores):
        return torch.where(scores > -1.0, -50.0, scores)


def same(tokens, length, logits):
    return logits


class InBlocks(td.BlockProcessor):
    pass


PADDED = ["counts their padding", "repetition_penalty"]
UNREADABLE = [
    ([TopPLogitsWarper(0.9), TemperatureLogitsWarper(0.5)], ["TopPLogitsWarper(0.9) before Temp", "top_p"]),
    ([TopPLogitsWarper(0.9), TopKLogitsWarper(5)], ["TopPLogitsWarper(0.9) before TopKLogitsWarper(5)"]),
    ([TopPLogitsWarper(0.9), TopPLogitsWarper(0.8)], ["TopPLogitsWarper(0.9) before TopPLogitsWarper(0.8)"]),
    ([MinPLogitsWarper(0.5), TemperatureLogitsWarper(4.0)], ["MinPLogitsWarper(0.5)", "pass min_p"]),
    ([MinPLogitsWarper(0.5), TopPLogitsWarper(0.9)], ["MinPLogitsWarper(0.5) before TopPLogitsWarper(0.9)"]),
    ([TopKLogitsWarper(5, filter_value=-9.0)], ["TopKLogitsWarper with filter_value=-9.0", "leave"]),
    ([TopPLogitsWarper(0.5, min_tokens_to_keep=3)], ["TopPLogitsWarper with min_tokens_to_keep=3", "leave"]),
    ([MinPLogitsWarper(0.5, min_tokens_to_keep=3)], ["MinPLogitsWarper with min_tokens_to_keep=3", "leave"]),
    ([InBlocks(same), NoRepeatNGram(2)], ["logits_processor holds InBlocks before NoRepeat", "then warpers"]),
    ([TypicalLogitsWarper(0.5), TopKLogitsWarper(5)], ["TypicalLogitsWarper(0.5) before TopK", "typical_p"]),
    (
        [SuppressTokensLogitsProcessor([3]), NoRepeatNGram(2), NoRepeatNGram(3)],
        ["NoRepeatNGramLogits", "twice"],
    ),
    (
        [ForcedBOSTokenLogitsProcessor(5), SequenceBiasLogitsProcessor([[[3], -1.0]])],
        ["ForcedBOS", " before Seq"],
    ),
    ([ExponentialDecayLengthPenalty((1, 1.5), 5, WIDTH)], ["another prompt", "exponential_decay"]),
    ([RepetitionPenaltyLogitsProcessor(2.0, prompt_ignore_length=3)], PADDED),
    ([ignoring([3, 1])], PADDED),  # not the padding of these two rows
    ([MinLengthLogitsProcessor(99, [5])], ["MinLengthLogitsProcessor for another", "min_length"]),
    ([ForcedEOSTokenLogitsProcessor(99, [5])], ["ForcedEOSTokenLogitsProcessor for another", "forced_eos"]),
    ([SuppressTokensAtBeginLogitsProcessor([3], 1)], ["for another prompt", "begin_suppress_tokens"]),
]


@pytest.mark.parametrize(("warpers", "words"), UNREADABLE, ids=lambda value: None)
@pytest.mark.parametrize("sampled", [True, False])
def test_warpers_that_the_options_cannot_say(pair, batch, warpers, words, sampled):
    block = td.dflash(pair[1], runtime="eager")
    options = {"max_new_tokens": 3, "do_sample": sampled, "logits_processor": LogitsProcessorList(warpers)}
    with refuses(ValueError, *words):
        pair[0].generate(**batch, **options, custom_generate=block)


@pytest.mark.parametrize("decay", [(-1, 1.5), (2, -1.5)], ids=str)
def test_a_decay_that_was_given_as_an_option_is_named_as_one(pair, batch, decay):
    block = td.dflash(pair[1], runtime="eager")
    options = {"exponential_decay_length_penalty": decay, "eos_token_id": 96, "do_sample": False}
    with refuses(ValueError, f"exponential_decay_length_penalty={decay}", "from 0 on, factor above 0"):
        pair[0].generate(**batch, **options, max_new_tokens=3, custom_generate=block)
    with refuses(ValueError, f"exponential_decay_length_penalty={decay}", "from 0 on, factor above 0"):
        td.generate(*pair, **batch, **options, max_new_tokens=3, runtime="eager")


def test_criteria_that_a_round_cannot_honour(pair, batch):
    block, width = td.dflash(pair[1], runtime="eager"), batch["input_ids"].shape[1]
    for criterion, words in (
        (MaxLengthCriteria(width), [f"max_length={width}", f"at least {width + 1}"]),
        (MaxLengthCriteria(width + 0.5), [f"max_length={width + 0.5}", "integer"]),
        (EosTokenCriteria([-1]), ["eos_token_id holds -1", "None or []"]),
    ):
        with refuses(ValueError, *words):
            options = {"max_new_tokens": 3, "stopping_criteria": StoppingCriteriaList([criterion])}
            options |= {"custom_generate": block}
            pair[0].generate(**batch, **options)
    # transformers would make one list of them.
    with refuses(ValueError, "eos_token_id=[[5], [9]]", "torch_dflash.generate"):
        pair[0].generate(**batch, max_new_tokens=3, eos_token_id=[[5], [9]], custom_generate=block)


def test_neutral_options_that_transformers_makes_a_processor_of(pair, batch, text):
    none = {"suppress_tokens": [], "begin_suppress_tokens": []}
    for asked in ({"renormalize_logits": True}, none, {"min_new_tokens": 0, "eos_token_id": 96}):
        theirs, ours = both(pair, batch, **asked)
        assert torch.equal(ours, theirs) and torch.equal(ours, text)
    target = copy.deepcopy(pair[0])
    target.generation_config.update(min_new_tokens=5, eos_token_id=96)
    block = td.dflash(pair[1], runtime="eager")
    options = {"max_new_tokens": NEW, "min_new_tokens": 0, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(target.generate(**batch, **options, custom_generate=block), text)


class Shorter(MaxLengthCriteria):  # a subclass may do anything: block decoding asks it for every token
    pass


def test_other_criteria_of_transformers(pair, batch, text):
    width = batch["input_ids"].shape[1]
    for criterion in (Shorter(width + 3), MaxTimeCriteria(900.0)):
        criteria = StoppingCriteriaList([criterion])
        theirs, ours = both(pair, batch, stopping_criteria=criteria, eos_token_id=96)
        assert torch.equal(ours, theirs)
        assert ours.shape[1] == (width + 3 if isinstance(criterion, Shorter) else text.shape[1])


LISTS = [
    [RepetitionPenaltyLogitsProcessor(1.9), NoBadWordsLogitsProcessor([[10], [33, 90]])],
    [SuppressTokensLogitsProcessor([10]), RepetitionPenaltyLogitsProcessor(1.9)],
    [SequenceBiasLogitsProcessor([[[10], -9.0]]), NoRepeatNGram(2), MinLengthLogitsProcessor(30, [96])],
    [Quiet(1), RepetitionPenaltyLogitsProcessor(1.9)][:1],
]


@pytest.mark.parametrize("items", LISTS, ids=lambda items: "+".join(type(item).__name__ for item in items))
def test_processors_of_the_users(pair, batch, text, items):
    row = {name: value[:1] for name, value in batch.items()}
    asked = {"logits_processor": LogitsProcessorList(items), "eos_token_id": 96}
    theirs, ours = both(pair, row, **asked)
    assert torch.equal(ours, theirs)
    assert isinstance(items[0], Quiet) or not torch.equal(ours, text[:1])


MIXED = [
    [LogitNormalization(), RepetitionPenaltyLogitsProcessor(8.0)],
    [LogitNormalization(), ExponentialDecayLengthPenalty((0, 1.2), 96, WIDTH)],
    [LogitNormalization(), Loud()],
    [Loud(), LogitNormalization(), SuppressTokensLogitsProcessor([10])],
    [TopKLogitsWarper(5), Loud(), NoRepeatNGram(2)],
]


@pytest.mark.parametrize("items", MIXED, ids=lambda items: "+".join(type(item).__name__ for item in items))
def test_what_reads_scores_is_asked_in_the_order_of_the_list(pair, batch, text, items):
    row = {name: value[:1, -WIDTH:] for name, value in batch.items()}
    assert row["attention_mask"].all()
    theirs, ours = both(pair, row, logits_processor=LogitsProcessorList(items), eos_token_id=96)
    assert torch.equal(ours, theirs)


def test_lists_stand_for_what_is_asked_even_where_the_config_says_more(pair, batch, text):
    # A direct caller, with a config alone.
    config = GenerationConfig(max_length=text.shape[1], pad_token_id=0)
    block = td.dflash(pair[1], runtime="eager")
    assert torch.equal(block(pair[0], **batch, generation_config=config), text)
