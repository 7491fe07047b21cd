"""With penalties, bans, forced ids and ends of transformers the text is its own, through both doors."""

import pytest
import torch
from support.refusals import refuses
from support.tiny import make_target
from support.tokenizers import letters
from support.versions import COUNTS_PADDING
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process, stopping_criteria

import torch_dflash as td
from torch_dflash.requests import prompts

NEW = 14


def theirs(pair, batch, **options):
    """transformers' own new tokens, one row after the other: padding counts for some of its processors."""
    rows = []
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        row = ids[mask.bool()][None]
        out = pair[0].generate(row, attention_mask=torch.ones_like(row), **asked(options))
        rows.append(out[0, row.shape[1] :].tolist())
    return rows


def asked(options):
    return {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None} | options


def ours(pair, batch, runtime="eager", **options):
    out = td.generate(*pair, **batch, runtime=runtime, return_dict_in_generate=True, **asked(options))
    return out.new_tokens, out.stats


def through_transformers(pair, batch, **options):
    """The new tokens, padded, of the target's own ``generate``, and those of ours in its place."""
    block, width = td.dflash(pair[1], runtime="eager"), batch["input_ids"].shape[1]
    plain = pair[0].generate(**batch, **asked(options))[:, width:]
    return plain, pair[0].generate(**batch, **asked(options), custom_generate=block)[:, width:]


@pytest.fixture(scope="module")
def plain(pair, batch):
    return theirs(pair, batch)


@pytest.fixture
def config(pair, monkeypatch):
    return lambda **fields: monkeypatch.setattr(pair[0], "generation_config", GenerationConfig(**fields))


def in_both(pair, batch, option, make, **options):
    """(Output, user code) of transformers' loop and of ours; each has its own code from ``make``."""
    kind, found = {"logits_processor": LogitsProcessorList, "stopping_criteria": StoppingCriteriaList}, []
    for call in ({}, {"custom_generate": td.dflash(pair[1], runtime="eager")}):
        listed = {option: kind[option]([code := make()])}
        found.append((pair[0].generate(**batch, **asked(listed | options), **call), code))
    return found


def cases(plain):
    """Options that change this text: they ban, force and bias its tokens."""
    first, second = plain
    stop = max(set(first), key=first.count)
    return {
        "repetition_penalty": {"repetition_penalty": 1.6},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
        "bad_words_ids": {"bad_words_ids": [first[2:5], [second[3]]]},
        "suppress_tokens": {"suppress_tokens": [first[1], second[2]]},
        "begin_suppress_tokens": {"begin_suppress_tokens": [first[0], second[0]]},
        "sequence_bias": {"sequence_bias": [[[first[3]], -3.0], [[first[0], 7], 9.0], [[second[1], 5], 9.0]]},
        "min_new_tokens": {"min_new_tokens": 8, "eos_token_id": stop},
        "forced_eos_token_id": {"forced_eos_token_id": 7},
        "forced ids": {"forced_eos_token_id": [7, 9], "suppress_tokens": [first[-2]]},
        "decay": {"exponential_decay_length_penalty": (4, 1.3), "eos_token_id": [11, 12]},
        "many": {
            "repetition_penalty": 1.2,
            "no_repeat_ngram_size": 3,
            "sequence_bias": {(first[3],): -2.0},
            "min_new_tokens": 5,
            "eos_token_id": stop,
            "suppress_tokens": [second[0]],
        },
    }


NAMES = list(cases([[1] * NEW] * 2))


@pytest.mark.parametrize("name", NAMES)
def test_eager_text_is_that_of_transformers(pair, batch, plain, name):
    options = cases(plain)[name]
    want = theirs(pair, batch, **options)
    rows, stats = ours(pair, batch, **options)
    assert rows == want and want != plain
    assert ours(pair, batch, verify_width=1, **options)[0] == rows
    assert td.generate(pair[0], None, **batch, runtime="eager", **asked(options)).shape[0] == 2
    if COUNTS_PADDING and "repetition_penalty" in options:
        with refuses(ValueError, "RepetitionPenaltyLogitsProcessor", "counts their padding", "td.generate"):
            through_transformers(pair, batch, **options)
        batch = {name: value[:1] for name, value in batch.items()}
    padded, block = through_transformers(pair, batch, **options)
    if name not in ("no_repeat_ngram_size", "many"):  # in a batch, transformers' counts the padding too
        assert torch.equal(block, padded)
    assert [row[: len(new)].tolist() for row, new in zip(block, want, strict=False)] == want[: len(block)]


def test_another_value_compiles_nothing(pair, batch):
    def run(**options):
        return ours(pair, batch, runtime="xla", **options)

    run(repetition_penalty=1.3, suppress_tokens=[3])
    rows, stats = run(repetition_penalty=[1.0, 1.8], suppress_tokens=[4, 5, 6])
    assert stats.compilations == 0
    assert rows[0] == theirs(pair, batch, suppress_tokens=[4, 5, 6])[0]
    assert rows[1] == theirs(pair, batch, repetition_penalty=1.8, suppress_tokens=[4, 5, 6])[1]


def test_rows_that_do_not_see_the_drafts_before_them_show(pair, batch, monkeypatch):
    options = {"repetition_penalty": 6.0, "max_new_tokens": 40}
    monkeypatch.setattr("torch_dflash.processors.penalties.inside", lambda text, logits: 0 * logits[:, :1])
    assert ours(pair, batch, **options)[0] != theirs(pair, batch, **options)


def test_what_the_models_own_config_asks_for_works_unasked(pair, batch, config):
    config(repetition_penalty=1.4, suppress_tokens=[3, 5], eos_token_id=[88, 91], pad_token_id=0)
    ids, mask = batch["input_ids"][:1, -3:], torch.ones(1, 3, dtype=torch.long)
    call = {"attention_mask": mask, "max_new_tokens": NEW}
    want = pair[0].generate(ids, **call)
    assert torch.equal(td.generate(*pair, ids, **call, runtime="eager"), want)
    engine = td.compile(*pair, runtime="eager", max_length=64)
    assert torch.equal(engine.generate(ids, **call), want)
    block = td.dflash(pair[1], runtime="eager")
    assert torch.equal(pair[0].generate(ids, **call, custom_generate=block), want)


def test_an_engine_says_what_it_was_compiled_without(pair):
    ids = torch.tensor([[1, 2, 3]])
    engine = td.compile(*pair, runtime="eager", max_length=64, processors=("suppress_tokens",))
    engine.generate(ids, max_new_tokens=3, suppress_tokens=[4])
    with refuses(ValueError, "compiled without repetition_penalty", "processors=('repetition_penalty',)"):
        engine.generate(ids, max_new_tokens=3, repetition_penalty=1.2)
    with refuses(ValueError, "or suppress_tokens", "Bans(entries=64, prefix=4)"):
        engine.generate(ids, max_new_tokens=3, suppress_tokens=list(range(4, 40)), bad_words_ids=[[1, 2]])


def test_more_texts_of_one_prompt(pair, batch):
    options = {"do_sample": True, "temperature": 1.5, "top_k": 0, "seed": 5, "max_new_tokens": 6}
    three = td.generate(*pair, **batch, runtime="eager", num_return_sequences=3, **options)
    twice = {name: value.repeat_interleave(3, dim=0) for name, value in batch.items()}
    assert torch.equal(three, td.generate(*pair, **twice, runtime="eager", **options))
    assert len({tuple(row) for row in three[:3].tolist()}) == 3


@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_stop_strings_end_a_row_where_transformers_ends_it(pair, batch, plain, runtime):
    tokenizer, names = letters()
    strings = ["".join(names[i] for i in plain[0][4:6]), names[plain[1][9]]]
    options = {"stop_strings": strings, "tokenizer": tokenizer}
    rows, stats = ours(pair, batch, runtime, **options)
    assert rows == theirs(pair, batch, **options)
    assert min(map(len, rows)) < NEW
    assert [1 + sum(lengths) for lengths in stats.acceptance_lengths] == list(map(len, rows))
    streamed = [[], []]
    engine = td.compile(*pair, runtime=runtime, max_length=64, batch_size=2)
    for gained in engine.stream(**batch, **asked(options)):
        streamed = [a + b for a, b in zip(streamed, gained, strict=True)]
    assert streamed == rows


def test_a_time_ends_all_rows(pair, batch, plain):
    rows, _ = ours(pair, batch, max_time=1e-6, rounds_per_chunk=1)
    assert rows == [row[:1] for row in plain]
    assert ours(pair, batch, max_time=900.0)[0] == plain


class Counted:  # bans the id that it banned least: one call for each token is right
    def __init__(self):
        self.asked = []

    def __call__(self, ids, scores):
        self.asked.append(ids.clone())
        return scores.index_fill(1, scores.argmax(dim=1)[len(self.asked) % 2][None], -torch.inf)


def assert_asked_alike(calls):
    (want, theirs), (found, ours) = calls
    assert torch.equal(found, want)
    assert all(torch.equal(a, b) for a, b in zip(theirs.asked, ours.asked, strict=True))


@pytest.mark.parametrize("masked", [0, 7])
def test_a_users_processor_is_asked_what_transformers_asks(pair, batch, masked):
    ids = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, masked)  # no padding token
    assert (ids == masked).any()
    assert_asked_alike(in_both(pair, batch | {"input_ids": ids}, "logits_processor", Counted))


@pytest.mark.parametrize("worth, context", [(1, 512), (2048, 90)], ids=["padded", "beyond the context"])
def test_a_users_processor_is_asked_once_for_prompts_that_others_read_in_pieces(worth, context, monkeypatch):
    monkeypatch.setattr(prompts, "WORTH", worth)
    target = make_target("llama", max_position_embeddings=context)
    ids, mask = torch.arange(2 * 70).view(2, 70) % 83 + 3, torch.ones(2, 70, dtype=torch.long)
    mask[1, :50] = 0  # a row that would end in the first piece
    engine = td.compile(target, None, runtime="eager", max_length=min(context, 80), batch_size=2)
    pieces, passes = [], engine.runtime.prefill
    engine.runtime.prefill = lambda *given: pieces.append(given[2]) or passes(*given)
    assert engine.generate(ids, mask, max_new_tokens=1, do_sample=False).shape == (2, 71) and len(pieces) > 1
    batch = {"input_ids": ids, "attention_mask": mask}
    assert_asked_alike(in_both((target, None), batch, "logits_processor", Counted))


def test_a_pure_processor_runs_inside_of_blocks(pair, batch):
    rule = logits_process.RepetitionPenaltyLogitsProcessor(1.6)
    options = {"processors": (td.HostProcessor(rule, pure=True),)}
    rows, stats = ours(pair, batch, **options)
    assert rows == theirs(pair, batch, repetition_penalty=1.6)
    assert stats.mean_acceptance_length > 1
    once, stats = ours(pair, batch, processors=(td.HostProcessor(rule),))
    assert once == rows and stats.mean_acceptance_length == 1


def test_a_users_criterion_is_asked_what_transformers_asks(pair, batch):
    class Odd(stopping_criteria.StoppingCriteria):
        def __call__(self, ids, scores, **more):
            self.asked = [*getattr(self, "asked", []), ids.clone()]
            return torch.tensor([len(self.asked) >= 4, len(self.asked) >= 9])

    # Without a stop id transformers continues rows that have ended.
    calls = in_both(pair, batch, "stopping_criteria", Odd, eos_token_id=96)
    assert_asked_alike(calls)
    assert len(calls[0][1].asked) == 9


@pytest.mark.parametrize("runtime", ["eager", "xla"])
@pytest.mark.parametrize("first, ends", [("the prompt's last", True), ("the id 0", False)])
def test_a_stop_string_may_begin_in_the_prompt_and_nowhere_else(pair, batch, runtime, first, ends):
    tokenizer, names = letters()
    one = {name: value[:1] for name, value in batch.items()}
    free = theirs(pair, one)[0]
    begins = int(one["input_ids"][0, -1]) if ends else 0
    options = {"stop_strings": [names[begins] + names[free[0]]], "tokenizer": tokenizer}
    wanted = theirs(pair, one, **options)[0]
    assert (len(wanted) == 1) == ends
    assert ours(pair, one, runtime, **options)[0] == [wanted]


@pytest.mark.parametrize(
    "given",
    [
        {"output_scores": True, "return_dict_in_generate": True, "repetition_penalty": 1.3},
        {"output_scores": True, "return_dict_in_generate": True, "renormalize_logits": True},
        {"output_logits": True, "return_dict_in_generate": True},
        {"output_scores": True},
    ],
    ids=str,
)
def test_a_users_criterion_gets_the_scores_so_far(pair, batch, given):
    if COUNTS_PADDING and "repetition_penalty" in given:
        batch = {name: value[:1] for name, value in batch.items()}

    class Sure(stopping_criteria.StoppingCriteria):
        def __call__(self, ids, scores, **more):
            steps = None if scores is None else torch.stack(tuple(scores)).nan_to_num(neginf=-1e9)
            self.asked = [*getattr(self, "asked", []), steps]
            return torch.full((len(ids),), scores is not None and len(scores) >= 5)

    texts = []
    for out, criterion in in_both(pair, batch, "stopping_criteria", Sure, eos_token_id=96, **given):
        texts.append((out if isinstance(out, torch.Tensor) else out.sequences, criterion.asked))
    (theirs_text, theirs_scores), (ours_text, ours_scores) = texts
    assert torch.equal(theirs_text, ours_text) and len(theirs_scores) == len(ours_scores)
    for wanted, found in zip(theirs_scores, ours_scores, strict=True):
        assert (wanted is None) == (found is None)
        if wanted is not None:
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("answer", [int, lambda over: torch.tensor([over])], ids=["0", "[0]"])
def test_a_criterion_may_answer_for_all_rows(pair, batch, answer):
    most = batch["input_ids"].shape[1] + 4
    criteria = StoppingCriteriaList([lambda ids, scores: answer(ids.shape[1] >= most)])
    plain, block = through_transformers(pair, batch, stopping_criteria=criteria)
    assert torch.equal(block, plain) and plain.shape[1] == 4


@pytest.mark.parametrize("least", [{"min_new_tokens": new} for new in (3, 0, 11)] + [{}], ids=str)
def test_a_number_of_new_tokens_replaces_that_of_all(pair, batch, least):
    row = {name: value[1:] for name, value in batch.items()}  # padded: padding counts
    options = least | {"eos_token_id": 33, "min_length": 31}
    plain, block = through_transformers(pair, row, **options)
    assert torch.equal(block, plain)
    assert ours(pair, row, **options)[0] == [plain[0].tolist()]


def test_the_models_own_least_length_gives_way_too(pair, batch, config):
    row = {name: value[1:] for name, value in batch.items()}
    config(min_length=31, eos_token_id=33, pad_token_id=0)
    block = td.dflash(pair[1], runtime="eager")
    for least in (2, 0):
        options = {"max_new_tokens": NEW, "min_new_tokens": least}
        want = pair[0].generate(**row, **options)
        assert torch.equal(pair[0].generate(**row, **options, custom_generate=block), want)
        assert least == 0 or torch.equal(td.generate(*pair, **row, **options, runtime="eager"), want)


def test_penalties_of_servers_are_no_field_of_a_config(pair, batch, plain, config):
    config(presence_penalty=4.0, frequency_penalty=2.0)
    assert ours(pair, batch)[0] == plain  # as transformers, which keeps and ignores such fields
    assert ours(pair, batch, presence_penalty=4.0)[0] != plain


def test_a_kind_that_is_named_twice_is_applied_once(pair, batch):
    options = {"sequence_bias": [[[10], -4.0]], "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    larger = td.processors.SequenceBias(entries=64)
    want = pair[0].generate(**batch, **options)
    for given in (("sequence_bias", larger), (larger, td.processors.SequenceBias(prefix=8))):
        engine = td.compile(*pair, runtime="eager", max_length=64, batch_size=2, processors=given)
        assert len(engine.plan.processors) == 1
        assert torch.equal(engine.generate(**batch, **options), want)
    assert torch.equal(td.generate(*pair, **batch, **options, processors=(larger,), runtime="eager"), want)


def test_a_rule_of_ones_own_may_be_given_twice(pair, batch):
    def less(tokens, length, logits, by=3.0):
        return logits - by * (torch.arange(logits.shape[-1]) == 10)

    once, twice = td.BlockProcessor(less), td.BlockProcessor(lambda *given: less(*given, by=6.0))
    assert ours(pair, batch, processors=(once, once))[0] == ours(pair, batch, processors=(twice,))[0]
    assert ours(pair, batch, processors=(once,))[0] != ours(pair, batch, processors=(twice,))[0]


def test_a_stop_id_that_is_named_twice_grows_once(pair, batch):
    options = {"exponential_decay_length_penalty": (1, 1.05), "eos_token_id": [33, 33, 33]}
    assert ours(pair, batch, **options)[0] == theirs(pair, batch, **options)


@pytest.mark.parametrize("stop, extra", [(47, 0), (96, 0), (47, 3)])
def test_what_a_users_code_sees_has_transformers_columns(pair, batch, stop, extra):
    """The columns agree also after the end of the longest row, and where every row is padded."""
    blank = torch.zeros(2, extra, dtype=torch.long)
    batch = {name: torch.cat([blank, value], dim=1) for name, value in batch.items()}

    def wide(ids, scores):
        return scores.index_fill(1, torch.tensor([5]), torch.inf) if ids.shape[1] >= 31 else scores

    def ended(ids, scores, **more):
        return torch.full((len(ids),), ids.shape[1] >= 33)

    processors, criteria = LogitsProcessorList([wide]), StoppingCriteriaList([ended])
    options = {"logits_processor": processors, "stopping_criteria": criteria, "eos_token_id": stop}
    plain, block = through_transformers(pair, batch, **options)
    assert torch.equal(block, plain) and plain.shape[1] == 33 - batch["input_ids"].shape[1]


def test_what_no_option_can_say_is_refused(pair, batch):
    block = td.dflash(pair[1], runtime="eager")

    def generate(item, **options):
        listed = LogitsProcessorList([item])
        pair[0].generate(**batch, **asked(options), logits_processor=listed, custom_generate=block)

    with refuses(ValueError, "TypicalLogitsWarper in a greedy call", "do_sample=True"):
        generate(logits_process.TypicalLogitsWarper(0.2))
    with refuses(ValueError, "RepetitionPenaltyLogitsProcessor", "counts their padding"):
        generate(logits_process.RepetitionPenaltyLogitsProcessor(3.0))  # counts the padding
    with refuses(ValueError, "logits_processor print", "torch_dflash.generate", "pure=True"):
        td.compile(*pair, runtime="eager", processors=(td.HostProcessor(print),), verify_width=1)


def test_an_empty_processor_of_the_users_takes_the_place_of_an_option(pair, batch, plain):
    empty = LogitsProcessorList([logits_process.SuppressTokensLogitsProcessor([])])
    theirs_, block = through_transformers(pair, batch, suppress_tokens=[plain[0][0]], logits_processor=empty)
    assert torch.equal(block, theirs_) and block[0].tolist() == plain[0]


def test_more_texts_where_a_config_asks_for_them(pair, batch, config):
    config(num_return_sequences=3, do_sample=True, pad_token_id=0)
    row = {name: value[:1] for name, value in batch.items()}
    own = GenerationConfig(max_new_tokens=4)
    assert td.generate(*pair, **row, generation_config=own, runtime="eager").shape[0] == 3
    engine = td.compile(*pair, runtime="eager", max_length=64, batch_size=3)
    assert int((~engine.start(**row, max_new_tokens=4).done).sum()) == 3


def test_an_engine_serves_what_its_models_config_asks_for(pair, batch, config):
    banned = {"bad_words_ids": [[0]], "suppress_tokens": list(range(1, 29))}
    config(**banned, min_length=30, pad_token_id=0, eos_token_id=[*range(40, 47)])
    engine = td.compile(*pair, runtime="eager", max_length=64, batch_size=2)
    want = pair[0].generate(**batch, max_new_tokens=8)
    assert torch.equal(engine.generate(**batch, max_new_tokens=8), want)


def test_a_criterion_that_answers_nonsense_is_named(pair, batch):
    with pytest.raises(ValueError, match="stopping_criteria <lambda> returned 'yes': return a bool"):
        ours(pair, batch, stopping_criteria=[lambda *given: "yes"])


def test_a_pure_processor_sees_each_row_without_padding_behind_it(pair):
    def after(ids, scores):
        wanted = (ids[:, -1] * 7 + 3) % scores.shape[1]
        return scores + 6.0 * torch.nn.functional.one_hot(wanted, scores.shape[1])

    batch = {"input_ids": torch.tensor([[1, 2, 3, 4], [9, 8, 7, 6], [20, 21, 22, 23]])}  # uneven acceptance
    want = pair[0].generate(**batch, **asked({"logits_processor": LogitsProcessorList([after])}))
    pure = (td.HostProcessor(after, pure=True),)
    assert torch.equal(td.generate(*pair, **batch, runtime="eager", processors=pure, **asked({})), want)


def test_the_first_token_after_one_is_not_begun_with_what_may_not_begin(pair):
    batch = {"input_ids": torch.tensor([[7], [5]])}
    plain, block = through_transformers(pair, batch, begin_suppress_tokens=[10])
    free, _ = through_transformers(pair, batch)
    assert torch.equal(block, plain) and not torch.equal(plain, free)


def test_a_row_without_a_number_of_new_tokens_heeds_that_of_all(pair, plain, batch):
    options = {"eos_token_id": plain[0][5], "min_length": 30, "max_new_tokens": NEW}
    row = {name: value[:1] for name, value in batch.items()}
    rows, _ = ours(pair, batch, **options, min_new_tokens=[None, 4])
    assert rows[0] == theirs(pair, row, **options)[0] != theirs(pair, row, **options | {"min_length": 0})[0]


def test_a_forced_first_token_moves_what_may_not_begin(pair):
    """transformers applies the bans of the beginning to the token after a forced one."""
    one = {"input_ids": torch.tensor([[5]]), "attention_mask": torch.ones(1, 1, dtype=torch.long)}
    plain, _ = through_transformers(pair, one, forced_bos_token_id=7)
    options = {"forced_bos_token_id": 7, "begin_suppress_tokens": [int(plain[0, 1])]}
    banned, block = through_transformers(pair, one, **options)
    assert torch.equal(block, banned) and banned[0, 0] == 7 and banned[0, 1] != plain[0, 1]


def test_of_ids_that_are_forced_those_that_are_suppressed_are_left_out(pair):
    """Bans come after forced ids, as in transformers; if no id is left, the call is refused."""
    one, two = (
        {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
        for ids in ([5], [5, 6])
    )
    begin = {"forced_bos_token_id": 3, "begin_suppress_tokens": [7]}
    for prompt, options in (
        (two, {"forced_eos_token_id": [7, 9], "suppress_tokens": [7]}),
        (two, {"forced_eos_token_id": [7, 9], "begin_suppress_tokens": [7], "max_new_tokens": 1}),
        (one, begin | {"forced_eos_token_id": 7, "max_new_tokens": 1}),
        (one, begin | {"forced_eos_token_id": [7, 9], "max_new_tokens": 2}),
    ):
        plain, block = through_transformers(pair, prompt, **options)
        assert torch.equal(block, plain)
        assert ours(pair, prompt, **options)[0] == plain.tolist()
    with refuses(ValueError, "forced_eos_token_id and begin_suppress_tokens both hold 7", "out of one"):
        ours(pair, two, forced_eos_token_id=[7, 9], begin_suppress_tokens=[9, 7], max_new_tokens=1)
