"""Proposers of users may draft ids that are no tokens, and drafts that are no chain."""

from functools import cache

import pytest
import torch
from support.scripted import Scripted, own_text, run
from support.tiny import VOCAB, make_target

import torch_dflash as td
from torch_dflash.accept import known_draft
from torch_dflash.state import Draft

PROMPT, NEW, WIDTH = [11, 23, 5, 80, 41], 12, 4
SIZES = {"max_length": 48, "prefill_chunk_size": 16}


@cache
def target():
    model = make_target()
    return model, own_text(model, PROMPT, NEW)


@pytest.fixture(scope="module", params=["eager", "xla"])
def scripted(request):
    drafter = Scripted(1, 80, WIDTH)
    return td.compile(target()[0], drafter, runtime=request.param, **SIZES), drafter


@pytest.mark.parametrize("token", [VOCAB, 10**6, -1, -(10**6)])
def test_an_id_outside_the_vocabulary_is_a_rejected_draft(scripted, token):
    engine, drafter = scripted
    text = target()[1]
    drafter.say([PROMPT + [token if at % 4 == 3 else right for at, right in enumerate(text)]])
    got, stats = run(engine, [PROMPT], max_new_tokens=NEW)
    assert got == [text]
    assert stats.acceptance_lengths == [[3, 4, 4]]


def test_what_stands_for_an_id_outside_is_never_accepted():
    tokens = torch.tensor([[4, VOCAB, 5], [-1, 2, 3], [1, 2, 3]], dtype=torch.int32)
    plan = td.DecodePlan(batch_size=3, capacity=16, block_size=4, verify_width=4)
    draft = known_draft(Draft(tokens, torch.tensor([3, 3, 2], dtype=torch.int32)), plan, VOCAB)
    assert draft.valid.tolist() == [1, 0, 2]
    assert draft.tokens.tolist() == [[4, VOCAB - 1, 5], [0, 2, 3], [1, 2, 3]]


class Tree(Scripted):
    def propose(self, *args):
        draft, state = super().propose(*args)
        return Draft(draft.tokens, draft.valid, torch.zeros_like(draft.tokens)), state


@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_a_tree_is_refused(runtime):
    drafter = Tree(1, 80, WIDTH)
    engine = td.compile(target()[0], drafter, runtime=runtime, **SIZES)
    with pytest.raises(ValueError, match=r"Draft\.parent is set: a tree .* leave parent None"):
        run(engine, [PROMPT], max_new_tokens=NEW)


def test_a_proposer_without_a_name_is_refused():
    drafter = Scripted(1, 80, WIDTH)
    drafter.name = None
    with pytest.raises(TypeError, match="drafter=Scripted: it has no name, .*name = 'mine'"):
        td.compile(target()[0], drafter, runtime="eager", **SIZES)


class Meddler(Scripted):  # writes into all its arguments
    def propose(self, pstate, anchor, length, embed, head):
        draft, state = super().propose(pstate, anchor, length, embed, head)
        anchor.fill_(5)
        length.add_(1)
        return draft, state

    def observe(self, pstate, features, ids, next_ids, count):
        for given in (ids, next_ids, count):
            given.fill_(3)
        return pstate


@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_a_proposer_that_writes_into_what_it_is_handed_changes_no_text(runtime):
    model, text = target()
    drafter = Meddler(1, 80, WIDTH)
    engine = td.compile(model, drafter, runtime=runtime, **SIZES)
    drafter.say([PROMPT + text])
    got, _ = run(engine, [PROMPT], max_new_tokens=NEW)
    assert got == [text]


JUNK = {
    "floats": (lambda d: (Draft(d.tokens.float(), d.valid), ()), r"Draft\.tokens is torch\.float32 \[1, 3\]"),
    "short": (
        lambda d: (Draft(d.tokens[:, :1], d.valid), ()),
        r"Draft\.tokens is torch\.int32 \[1, 1\].*\[1, 3\]",
    ),
    "numpy": (lambda d: (Draft(d.tokens.numpy(), d.valid), ()), r"Draft\.tokens is int32 \[1, 3\]"),
    "valid": (lambda d: (Draft(d.tokens, None), ()), r"Draft\.valid is NoneType"),
    "tokens alone": (lambda d: (d.tokens, ()), "propose.. drafted Tensor: return a Draft"),
    "nothing": (lambda d: None, r"Scripted\.propose\(\) returned NoneType: return two values, a Draft"),
    "a draft alone": (lambda d: d, r"Scripted\.propose\(\) returned Draft: return two values"),
    "three": (lambda d: (d, (), 0), r"propose\(\) returned tuple of 3: .*the proposer's state"),
    "a tuple of one": (lambda d: (d,), r"propose\(\) returned tuple of 1: "),
    "a tensor": (lambda d: d.tokens, r"propose\(\) returned Tensor: "),
}


@pytest.mark.parametrize("junk", JUNK)
def test_what_is_no_draft_is_named(junk):
    make, words = JUNK[junk]
    drafter = Scripted(1, 80, WIDTH)
    whole = drafter.propose
    engine = td.compile(target()[0], drafter, runtime="eager", **SIZES)
    engine.pair.proposer.propose = lambda *given: make(whole(*given)[0])
    with pytest.raises((TypeError, ValueError), match=words):
        run(engine, [PROMPT], max_new_tokens=NEW)


NO_LAYERS = r"taps=\(.*no layers of the target, which has 0 to 3"
NO_TUPLE = "must be a tuple of layers, 0 to 3; .. for none"


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        *(("taps", taps, NO_LAYERS) for taps in ((7,), (-1,), ("a",), (1.5,))),
        *(("taps", taps, f"taps={taps}: {NO_TUPLE}") for taps in (None, 2)),
        *(("width", width, "width=") for width in (2.5, "4", 0, True)),
    ],
)
def test_taps_and_widths_that_are_none_are_named(field, value, words):
    drafter = Scripted(1, 80, WIDTH)
    setattr(drafter, field, value)
    with pytest.raises(ValueError, match=words):
        td.compile(target()[0], drafter, runtime="eager", **SIZES)


@pytest.mark.parametrize("key", [[1], {"width": 4}, (1, [2])])
def test_a_key_without_a_hash_is_named(key):
    drafter = Scripted(1, 80, WIDTH)
    drafter.key = key
    for call in (
        lambda: td.compile(target()[0], drafter, runtime="eager", **SIZES),
        lambda: td.generate(target()[0], drafter, torch.tensor([PROMPT]), runtime="eager", max_new_tokens=2),
        lambda: td.dflash(drafter),
    ):
        with pytest.raises(TypeError, match=r"drafter=Scripted: key=.* must be hashable .*make it a tuple"):
            call()


def test_a_round_that_skips_a_wrong_proposal_names_it():
    """Without a draft the state alone is committed."""
    drafter = Scripted(1, 80, WIDTH)
    drafter.propose = lambda *given: None
    with pytest.raises(TypeError, match=r"Scripted\.propose\(\) returned NoneType"):
        drafter.skip((), None, None, None, None)
