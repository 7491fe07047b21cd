"""Greedy decoding gives the target's own tokens, sampling those of plain decoding with the same seed."""

from functools import cache

import pytest
import torch
from support.authors import MIXED, SECOND
from support.layouts import with_more_ids
from support.resumed import ends
from support.scripted import Scripted, assert_same_text, own_text, run
from support.tiny import FAMILIES, MASK, VOCAB, make_drafter, make_pair, ragged_prompts

import torch_dflash as td

NEW = 24
WIDTH = 6
FIXED = {"max_length": 96, "prefill_chunk_size": 16}
KINDS = ("good", "random", "broken")


@pytest.fixture(scope="module", params=["eager", "xla"])
def runtime(request):
    return request.param


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@cache
def pair(family):
    if family == "varied":  # a text that does not repeat itself
        return make_pair("qwen3")
    return make_pair(family, agree=8.0)


@cache
def weights(family, kind):
    """A drafter's weights: of the pair, of an unrelated drafter, or all NaN."""
    target, _ = pair(family)
    model = make_drafter(target, seed=77) if kind == "random" else make_pair(family, agree=8.0)[1]
    return [weight.detach() * (torch.nan if kind == "broken" else 1) for weight in model.parameters()]


def become(family, kind):
    """Turns the family's drafter into another one: weights are data, so no engine compiles again."""
    with torch.no_grad():
        for weight, new in zip(pair(family)[1].parameters(), weights(family, kind), strict=True):
            weight.copy_(new)


@cache
def engine(family, runtime, drafter="dflash", batch_size=5, **options):
    target, dflash = pair(family)
    drafter = {"dflash": dflash, "ngram": td.NGramProposer(width=WIDTH, max_ngram=2), "plain": None}[drafter]
    return td.compile(target, drafter, runtime=runtime, batch_size=batch_size, **(FIXED | options))


@cache
def scripted(runtime, family="varied"):
    """(An engine whose drafts a test writes, its proposer)."""
    proposer = Scripted(5, 112, WIDTH)
    return td.compile(pair(family)[0], proposer, runtime=runtime, batch_size=5, **FIXED), proposer


@cache
def prompts():
    """Five rows from one token to three chunks; the last repeats itself, for prompt lookup."""
    generator = torch.Generator().manual_seed(11)
    rows = [torch.randint(0, MASK, (n,), generator=generator).tolist() for n in (40, 33, 16, 1)]
    return [*rows, rows[2][:6] * 4]


@cache
def own(family, row, new=NEW, eos=()):
    return own_text(pair(family)[0], prompts()[row], new, eos)


def check(family, engine, rows=range(5), side="left", **options):
    """Decodes ``rows`` greedily, compares each with the target's own text and returns the statistics."""
    chosen = [prompts()[row] for row in rows]
    texts, stats = run(engine, chosen, side, max_new_tokens=NEW, do_sample=False, **options)
    for row, prompt, text, accepted in zip(rows, chosen, texts, stats.acceptance_lengths, strict=True):
        assert_same_text(engine, prompt, own(family, row), text, accepted)
    return stats


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_is_the_targets_own_text(family, runtime, kind):
    become(family, kind)
    stats = check(family, engine(family, runtime))
    assert stats.new_tokens == 5 * NEW
    if kind == "good":
        assert stats.mean_acceptance_length > 1.2  # otherwise this test would see no accepted draft
        assert len(set(sum(stats.acceptance_lengths, []))) > 2  # rows gain different numbers of tokens
    if kind == "broken":
        assert stats.mean_acceptance_length < 1.1


def test_one_row_in_a_batch_of_one(family):
    become(family, "good")
    check(family, engine(family, "eager", batch_size=1), rows=[0])


def test_one_row_in_a_batch_of_one_on_xla():
    become("qwen3", "good")
    alone = check("qwen3", engine("qwen3", "xla", batch_size=1), rows=[0])
    among = check("qwen3", engine("qwen3", "xla"))
    assert alone.acceptance_lengths[0] == among.acceptance_lengths[0]


def test_prompt_lookup_is_lossless(family):
    check(family, engine(family, "eager", "ngram"))


def test_prompt_lookup_is_lossless_on_xla():
    eager = check("llama", engine("llama", "eager", "ngram"))
    assert check("llama", engine("llama", "xla", "ngram")).acceptance_lengths == eager.acceptance_lengths
    assert max(map(max, eager.acceptance_lengths)) > 1


def test_both_runtimes_accept_the_same(family):
    become(family, "good")
    eager, xla = check(family, engine(family, "eager")), check(family, engine(family, "xla"))
    assert eager.acceptance_lengths == xla.acceptance_lengths


def test_every_chunk_of_a_prompt_reaches_the_drafter(family):
    become(family, "good")
    chunked, whole = engine(family, "eager"), engine(family, "eager", prefill_chunk_size=64)
    assert check(family, chunked).acceptance_lengths == check(family, whole).acceptance_lengths
    states = []
    for one in (chunked, whole):
        taken = []
        step = one.runtime.advance
        one.runtime.advance = lambda params, state, turn, taken=taken, step=step: (
            taken.append([(layer.key.clone(), layer.value.clone()) for layer in state.proposer.layers]),
            step(params, state, turn),
        )[1]
        check(family, one, rows=[0])
        del one.runtime.advance
        states.append(taken[0])
    length = len(prompts()[0])
    for ours, theirs in zip(*states, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a[0, :, :length], b[0, :, :length], rtol=1e-4, atol=1e-4)
            assert (a[0, :, :length].abs().amax(dim=(0, 2)) > 0).all()


def test_padding_side_does_not_matter(runtime):
    become("gpt_oss", "good")
    left = check("gpt_oss", engine("gpt_oss", runtime), side="left")
    right = check("gpt_oss", engine("gpt_oss", runtime), side="right")
    assert left.acceptance_lengths == right.acceptance_lengths


@pytest.mark.parametrize("block,verify", [(WIDTH, 3), (4, None), (9, None), (9, 4)])
@pytest.mark.parametrize("family", ["qwen2", "gpt_oss"])
def test_other_widths_than_the_trained_one(family, block, verify):
    become(family, "good")
    stats = check(family, engine(family, "eager", block_size=block, verify_width=verify))
    assert 1 < max(map(max, stats.acceptance_lengths)) <= (verify or block)


def test_other_widths_than_the_trained_one_on_xla():
    become("gpt_oss", "good")
    widths = {"block_size": 9, "verify_width": 4}
    stats = check("gpt_oss", engine("gpt_oss", "xla", **widths))
    assert (
        stats.acceptance_lengths == check("gpt_oss", engine("gpt_oss", "eager", **widths)).acceptance_lengths
    )


def test_rows_stop_at_their_own_limits(runtime):
    become("llama", "good")
    budgets = [1, 7, NEW, 2, 13]
    texts, stats = run(engine("llama", runtime), prompts(), max_new_tokens=budgets, do_sample=False)
    for row, (text, budget) in enumerate(zip(texts, budgets, strict=True)):
        assert text == own("llama", row)[:budget] + [0] * (NEW - budget)
        assert sum(stats.acceptance_lengths[row]) == budget - 1
    assert stats.new_tokens == sum(budgets)


def test_one_new_token_needs_no_round(runtime):
    texts, stats = run(engine("llama", runtime), prompts(), max_new_tokens=1, do_sample=False)
    assert texts == [own("llama", row)[:1] for row in range(5)]
    assert stats.rounds == 0 and stats.acceptance_lengths == [[]] * 5


def test_a_perfect_draft_is_accepted_whole_and_cut_at_the_cap(runtime):
    told, proposer = scripted(runtime)
    proposer.say([p + own("varied", row) for row, p in enumerate(prompts())])
    texts, stats = run(told, prompts(), max_new_tokens=1 + 2 * WIDTH + 2, do_sample=False)
    assert texts == [own("varied", row)[: 2 * WIDTH + 3] for row in range(5)]
    assert stats.acceptance_lengths == [[WIDTH, WIDTH, 2]] * 5
    assert stats.capped == [True] * 5 and stats.mean_acceptance_length == WIDTH


def test_an_adversarial_draft_costs_rounds_and_nothing_else(family):
    assert_refused(family, "eager")


def test_an_adversarial_draft_costs_rounds_and_nothing_else_on_xla():
    assert_refused("varied", "xla")


def assert_refused(family, runtime):
    """Drafts wrong tokens alone: the target's own text, every id one too high."""
    told, proposer = scripted(runtime, family)
    proposer.say([p + own(family, row) for row, p in enumerate(prompts())], shift=1, vocab=VOCAB)
    texts, stats = run(told, prompts(), max_new_tokens=9, do_sample=False)
    assert texts == [own(family, row)[:9] for row in range(5)]
    assert stats.acceptance_lengths == [[1] * 8] * 5 and stats.mean_acceptance_length == 1


def test_nothing_follows_a_stop_id_met_in_mid_block(runtime):
    told, proposer = scripted(runtime)
    proposer.say([p + own("varied", row) for row, p in enumerate(prompts())])
    # A different stop id per row, early and late in the text, among ids that no text holds.
    stops = [(own("varied", row)[3 + 2 * row], 200 + row) for row in range(5)]
    texts, stats = run(told, prompts(), max_new_tokens=NEW, eos_token_id=stops, pad_token_id=5)
    ends = []
    for row, text in enumerate(texts):
        wanted = own("varied", row, NEW, stops[row])
        ends.append(len(wanted))
        assert text == wanted + [5] * (len(text) - len(wanted))
        assert wanted[-1] == stops[row][0] and sum(stats.acceptance_lengths[row]) == len(wanted) - 1
    assert any((end - 1) % WIDTH for end in ends) and max(ends) < NEW
    assert stats.capped == [False] * 5


def test_a_first_token_that_stops_ends_the_row(runtime):
    stops = [[own("llama", 0)[0]], [], [], [], []]
    texts, stats = run(engine("llama", runtime), prompts(), max_new_tokens=4, eos_token_id=stops)
    assert texts == [own("llama", 0)[:1] + [0] * 3] + [own("llama", row)[:4] for row in range(1, 5)]
    assert stats.acceptance_lengths[0] == []


@pytest.mark.parametrize("filters", [{}, {"top_k": [0, 9, 30, 5, 2], "top_p": 0.8, "min_p": [0.05] * 5}])
def test_sampled_text_is_that_of_plain_decoding(runtime, filters):
    for family in ("qwen3", "gpt_oss") if runtime == "xla" else FAMILIES:
        become(family, "good")
        options = {"do_sample": True, "temperature": [0.0, 4.0, 8.0, 12.0, 30.0], "max_new_tokens": NEW}
        options |= {"top_k": 0, "seed": [5, -1, 2**40, 7, 7]} | filters
        plain, _ = run(engine(family, runtime, "plain"), prompts(), **options)
        drafted, stats = run(engine(family, runtime), prompts(), **options)
        assert drafted == plain
        assert plain[0] == own(family, 0)  # temperature 0 among sampled rows is greedy
        assert all(plain[row] != own(family, row) for row in (3, 4))
        assert max(map(max, stats.acceptance_lengths)) > 1
        other, _ = run(engine(family, runtime, "plain"), prompts(), **(options | {"seed": 99}))
        assert other[0] == plain[0] and other[4] != plain[4]


def test_a_row_samples_the_same_alone_and_in_a_batch(runtime):
    become("llama", "good")
    options = {"do_sample": True, "temperature": 0.8, "top_k": 0, "max_new_tokens": NEW}
    batch, _ = run(engine("llama", runtime), prompts(), seed=[3, 4, 5, 6, 7], **options)
    alone, _ = run(engine("llama", runtime), prompts()[3:4], seed=6, **options)
    assert alone[0] == batch[3]


def test_the_excuse_for_ties_holds_for_ties_alone(runtime):
    """`assert_same_text` refuses a wrong token, and excuses a swap of two equal logits."""
    target, _ = make_pair("llama")
    prompt = prompts()[2]
    at, favourite = 5, own_text(target, prompt, 6)[5]
    twin = favourite + 1 if favourite < VOCAB - 1 else 0
    with torch.no_grad():
        head = target.get_output_embeddings().weight
        head[twin] = head[favourite] * (1 + 1e-8)
    # Not plain: a block forward differs from a forward of one row only with several rows.
    block = td.compile(target, td.NGramProposer(width=WIDTH), runtime=runtime, **FIXED)
    text = own_text(target, prompt, 10)
    assert text[at] in (favourite, twin)
    swapped = [*text[:at], favourite + twin - text[at], *text[at + 1 :]]
    for accepted in ([1] * 9, [3, 6]):
        assert_same_text(block, prompt, text, swapped, accepted)
        for wrong in (at, 2, 0):
            other = [*text[:wrong], (text[wrong] + 3) % VOCAB, *text[wrong + 1 :]]
            with pytest.raises(AssertionError, match="no tie"):
                assert_same_text(block, prompt, text, other, accepted)


ROWS = 4
PAIRS = {"full": ("qwen3", SECOND), "rings": ("gpt_oss", SECOND | MIXED | {"is_causal": False})}
KEPT = {name: make_pair(family, agree=8.0, **fields) for name, (family, fields) in PAIRS.items()}


with_more_ids(KEPT["full"][0])  # than the codebooks have rows


SAMPLED = {"do_sample": True, "temperature": [9.0, 0.0, 4.0, 2.0], "top_k": 30, "seed": [5, 6, 7, 8]}


@pytest.mark.parametrize("runtime", ["eager", "xla"])
@pytest.mark.parametrize("cache", ["static", "paged"])
@pytest.mark.parametrize("name", PAIRS)
def test_text_is_plain_decodings(name, cache, runtime):
    target, drafter = KEPT[name]
    ids, mask = ragged_prompts(ROWS)
    engine = td.compile(target, drafter, runtime=runtime, cache=cache, max_length=64, batch_size=ROWS)
    plain = td.compile(target, None, runtime="eager", max_length=64, batch_size=ROWS)
    stop = int(plain.generate(ids, mask, max_new_tokens=NEW, do_sample=False, eos_token_id=None)[0, -9])
    for options in ({"do_sample": False}, SAMPLED, {"do_sample": False, "eos_token_id": stop}):
        options = {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0} | options
        out = engine.generate(ids, mask, return_dict_in_generate=True, **options)
        assert torch.equal(out.sequences, plain.generate(ids, mask, **options))
        assert options["eos_token_id"] is not None or max(sum(out.stats.acceptance_lengths, [])) > 1


@pytest.mark.parametrize(("here", "there"), [("eager", "xla"), ("xla", "eager")])
def test_a_saved_state_goes_on_in_the_other_runtime(here, there, tmp_path):
    target, drafter = KEPT["rings"]
    one, other = ends(target, drafter, here, there, tmp_path, NEW)
    assert one == other
