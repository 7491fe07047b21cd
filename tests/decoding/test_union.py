"""Lookup with a drafter, and drafts with the noise of their row, give the same text in fewer rounds."""

from functools import cache

import pytest
import torch
from support.authors import SECOND
from support.scripted import Scripted, own_text, run
from support.tabled import Tabled
from support.tiny import VOCAB, make_drafter, make_pair
from support.widths import mix

import torch_dflash as td
from torch_dflash.decode import draft
from torch_dflash.engine.registry import cached_engine
from torch_dflash.ops.windows import positions
from torch_dflash.proposers.dflash.proposer import DFlashProposer
from torch_dflash.proposers.dflash.vocabulary import Noise
from torch_dflash.proposers.trees.proposer import BestNodes
from torch_dflash.proposers.union import UnionProposer
from torch_dflash.requests.options import EngineOptions
from torch_dflash.sampling import noisy_logits, pick_tokens
from torch_dflash.state import Sampling

PROMPTS = [[5, 17, 80, 33] * 3, [3, 1, 4], [9, 2, 6, 40, 41, 42, 9, 2, 6]]
NEW = 40
SAMPLED = {"do_sample": True, "temperature": [0.0, 1.0, 4.0], "top_k": 0, "seed": 3}
SIZES = {"max_length": 96, "batch_size": 3}


@cache
def pair():
    return make_pair("llama", agree=6.0)


def union(drafter=None, width=16, rows=None):
    return td.Union(td.NGramProposer(width), pair()[1] if drafter is None else drafter, rows=rows)


@cache
def engine(runtime, **options):
    return td.compile(pair()[0], union(), runtime=runtime, **(SIZES | options))


@cache
def plain(runtime):
    return td.compile(pair()[0], None, runtime=runtime, **SIZES)


@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_text_is_the_targets_own(runtime):
    own = [own_text(pair()[0], prompt, NEW) for prompt in PROMPTS]
    texts, both = run(engine(runtime), PROMPTS, max_new_tokens=NEW, do_sample=False)
    assert texts == own
    said = run(engine(runtime), PROMPTS, max_new_tokens=NEW, **SAMPLED)[0]
    assert said == run(plain(runtime), PROMPTS, max_new_tokens=NEW, **SAMPLED)[0]
    assert said[0] == own[0] and said[2] != own[2]
    _, stats = run(engine("eager"), PROMPTS, max_new_tokens=NEW, do_sample=False)
    assert both.acceptance_lengths == stats.acceptance_lengths


@pytest.mark.parametrize(
    ("runtime", "cache", "rows"),
    [("eager", "static", None), ("eager", "paged", None), ("eager", "paged", 8), ("xla", "static", 8)],
)
def test_rounds_of_all_widths_say_the_same(runtime, cache, rows):
    wide = td.compile(pair()[0], union(rows=rows), runtime=runtime, verify_width="auto", cache=cache, **SIZES)
    most = rows or 6
    narrow = 4 if runtime == "eager" else 1  # one program fewer
    mix(wide, (most, 1, 1, narrow, most, 1, most, most, narrow, narrow, 1))
    for options in ({"do_sample": False}, SAMPLED):
        said = run(wide, PROMPTS, max_new_tokens=NEW, **options)[0]
        assert said == run(plain("eager"), PROMPTS, max_new_tokens=NEW, **options)[0]


def drafted(drafter, prompts):
    """The draft of an engine's first round, the engine and the state before the round."""
    made = td.compile(pair()[0], drafter, runtime="eager", max_length=96, batch_size=len(prompts))
    ids = torch.nn.utils.rnn.pad_sequence(list(map(torch.tensor, prompts)), batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor(list(map(len, prompts)))[:, None]
    state = made.start(ids, mask.long(), max_new_tokens=8, eos_token_id=None, do_sample=False)
    # The target's first token does not matter here: row 0 continues its period, row 1 matches nothing.
    state.tokens[0, len(prompts[0])] = prompts[0][0]
    state.tokens[1:, 3] = 11
    return made.pair.run(lambda pair, at: draft(pair, at)[0], made.tensors(), state), made, state


def test_a_row_with_a_long_match_drafts_it_and_the_others_the_drafters():
    ours, _, _ = drafted(union(), PROMPTS[:2])
    theirs, _, _ = drafted(pair()[1], PROMPTS[:2])
    assert ours.tokens[0].tolist() == [17, 80, 33, 5, 17] and ours.valid.tolist() == [5, 5]
    assert torch.equal(ours.tokens[1], theirs.tokens[1]) and not torch.equal(ours.tokens[0], theirs.tokens[0])


def test_lookups_own_width_is_the_most_it_drafts():
    ours, _, _ = drafted(union(width=3), PROMPTS[:2])
    assert ours.valid.tolist() == [2, 5]


def test_no_row_needs_the_drafter_and_its_pass_is_left_out(monkeypatch):
    passes, own = [], DFlashProposer.propose
    monkeypatch.setattr(DFlashProposer, "propose", lambda *args: passes.append(1) or own(*args))
    drafted(union(), PROMPTS[:1])
    assert not passes
    drafted(union(), PROMPTS[:2])
    assert passes == [1]


@pytest.mark.parametrize("rows", [None, 8])
def test_a_saved_state_goes_on(tmp_path, rows):
    options = {"max_new_tokens": NEW, "eos_token_id": None, "do_sample": False}
    ids = torch.tensor(PROMPTS[:1])
    alone = td.compile(pair()[0], union(rows=rows), runtime="eager", max_length=96)
    state = alone.start(ids, **options)
    state = alone.advance(alone.advance(state))
    td.save_state(state, tmp_path / "a.safetensors", alone)
    state = td.load_state(tmp_path / "a.safetensors", alone)
    while not state.done.all():
        state = alone.advance(state)
    assert state.tokens[0, 12 : 12 + NEW].tolist() == own_text(pair()[0], PROMPTS[0], NEW)
    other = td.compile(pair()[0], pair()[1], runtime="eager", max_length=96)
    with pytest.raises(ValueError, match="proposer is '?ngram or dflash|state has block_size=8"):
        td.load_state(tmp_path / "a.safetensors", other)


@pytest.mark.parametrize("rows", [None, 8])
def test_a_chat_goes_on_with_it(rows):
    session = td.compile(pair()[0], union(rows=rows), runtime="eager", max_length=96).session()
    text = PROMPTS[0]
    for _ in range(3):
        gains = session.gains(text, max_new_tokens=8, do_sample=False, eos_token_id=None)
        said = [token for gain in gains for token in gain.tokens]
        assert said == own_text(pair()[0], text, 8)
        text = [*text, *said, 7, 7]


def test_unions_made_anew_share_an_engine():
    options = EngineOptions(runtime="eager", max_length=64)
    first = cached_engine(pair()[0], union(), options)
    assert cached_engine(pair()[0], union(), options) is first
    assert cached_engine(pair()[0], union(width=4), options) is not first
    tree = cached_engine(pair()[0], union(rows=8), options)
    assert cached_engine(pair()[0], union(rows=8), options) is tree is not first
    assert cached_engine(pair()[0], union(rows=16), options) is not tree
    assert cached_engine(pair()[0], union(width=4, rows=8), options) is not tree
    assert cached_engine(pair()[0], pair()[1], options) is not first


@pytest.mark.parametrize("rows", [None, 8])
def test_new_weights_of_the_drafter_are_seen(rows):
    target, drafter = make_pair("llama", agree=6.0)
    made = td.compile(target, union(drafter, rows=rows), runtime="eager", max_length=96)
    before = run(made, PROMPTS[1:2], max_new_tokens=NEW, do_sample=False)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.fill_(torch.nan)
    after = run(made, PROMPTS[1:2], max_new_tokens=NEW, do_sample=False)
    assert before[0] == after[0]
    assert before[1].mean_acceptance_length > after[1].mean_acceptance_length


@pytest.mark.parametrize("rows", [None, 8])
def test_a_proposer_of_ones_own_may_stand_in_it(rows):
    told = Scripted(1, 112, 6)
    told.say([PROMPTS[1] + own_text(pair()[0], PROMPTS[1], NEW)])
    made = td.compile(pair()[0], union(told, rows=rows), runtime="eager", max_length=96)
    texts, stats = run(made, PROMPTS[1:2], max_new_tokens=NEW, do_sample=False)
    assert texts == [own_text(pair()[0], PROMPTS[1], NEW)] and isinstance(
        made.pair.proposer, BestNodes if rows else UnionProposer
    )
    assert stats.mean_acceptance_length > 3


@pytest.mark.parametrize("rows", [None, 8])
@pytest.mark.parametrize(
    ("parts", "names"),
    [
        ((td.NGramProposer(),), "td.Union of 1"),
        ((None, td.NGramProposer()), "NoneType before the drafter"),
        ((Scripted(1, 64, 6), td.NGramProposer()), "Scripted before the drafter"),
        ((td.NGramProposer(), None), "drafter=None"),
        ((td.NGramProposer(), td.Union(td.NGramProposer(), td.NGramProposer())), "drafter=Union"),
    ],
)
def test_other_parts_are_refused(parts, names, rows):
    with pytest.raises(TypeError, match=names):
        td.Union(*parts, rows=rows)


def test_several_lookups_are_a_tree_alone():
    with pytest.raises(TypeError, match="NGramProposer, NGramProposer before the drafter: pass one"):
        td.Union(td.NGramProposer(), td.NGramProposer(max_ngram=6), pair()[1])


@pytest.mark.parametrize("rows", [0, 1, 65, 2.0, True])
def test_rows_that_no_tree_has_are_refused(rows):
    with pytest.raises(ValueError, match="must be an integer from 2 to 64"):
        union(rows=rows)
    with pytest.raises(ValueError, match="must be an integer from 2 to 64"):
        td.TreeProposer(pair()[1], rows=rows)


def test_a_union_without_rows_takes_no_tree_for_a_chain():
    proposer = Tabled(1, 112, 8, 4)
    with pytest.raises(ValueError, match="Tabled drafts trees, and a union without rows verifies chains"):
        union(proposer)
    proposer.depth = None  # and still sets Draft.parent
    made = td.compile(pair()[0], union(proposer), runtime="eager", max_length=96)
    with pytest.raises(ValueError, match="Tabled drafts trees, and a union without rows"):
        run(made, PROMPTS[1:2], max_new_tokens=4)


@pytest.mark.parametrize(
    "drafter", [None, td.NGramProposer(), td.Union(td.NGramProposer(), td.NGramProposer())]
)
def test_a_tree_is_made_of_a_drafters_block(drafter):
    with pytest.raises(TypeError, match="a tree is made of a drafter's block"):
        td.TreeProposer(drafter)


def test_a_name_in_it_is_refused():
    with pytest.raises(TypeError, match=r"drafter='x': a name or a path"):
        td.compile(pair()[0], td.Union(td.NGramProposer(), "x"), runtime="eager")


def test_noise_is_the_rows_own():
    """With the target's logits a sampled row drafts the target's picks."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 50, generator=generator) * 3
    zeros, ones = torch.zeros(2, dtype=torch.int32), torch.ones(2)
    sampling = Sampling(
        torch.tensor([0.0, 0.7]), zeros, ones, ones * 0, torch.tensor([4, 9], dtype=torch.int32)
    )
    at = positions(torch.tensor([7, 30], dtype=torch.int32), 5)
    picks = pick_tokens(logits, at, sampling, filters=False)
    assert torch.equal(noisy_logits(logits, at, sampling, 50).argmax(-1).to(torch.int32), picks)
    assert not torch.equal(logits.argmax(-1).to(torch.int32)[1], picks[1])
    some = torch.tensor([3, 17, 40], dtype=torch.int32)  # of a smaller vocabulary
    assert torch.equal(
        noisy_logits(logits[..., some], at, sampling, some), noisy_logits(logits, at, sampling, 50)[..., some]
    )


@pytest.mark.parametrize("kind", ["dflash", "narrow", "markov", "dflash2"])
def test_noise_is_added_by_the_targets_ids(kind):
    target, drafter = pair()
    if kind == "narrow":
        drafter = td.with_draft_vocabulary(drafter, target, list(range(0, 90, 3)))
    elif kind != "dflash":
        drafter = make_drafter(target, **({"markov_rank": 4} if kind == "markov" else SECOND))
    hidden, anchor = torch.randn(2, 5, 32), torch.tensor([3, 4], dtype=torch.int32)
    head, loud = target.get_output_embeddings(), torch.zeros(VOCAB).index_fill(0, torch.tensor(42), 1e4)
    added = lambda logits, ids: logits + loud[:ids] if isinstance(ids, int) else logits + loud[ids]  # noqa: E731
    with torch.no_grad():
        found = drafter.choose(hidden, anchor, head, Noise(torch.tensor([False, True]), added, torch.ones(2)))
        silent = drafter.choose(
            hidden, anchor, head, Noise(torch.tensor([False, False]), added, torch.ones(2))
        )
        assert (found == 42).all()
        assert torch.equal(silent, drafter.choose(hidden, anchor, head)) and not (silent == 42).all()
