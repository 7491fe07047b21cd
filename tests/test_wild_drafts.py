"""Drafts that are no tokens, and drafts that are no chain, from proposers of the user's own."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from models import VOCAB, make_target
from scripted import Scripted, own_text, run

import torch_dflash as td
from torch_dflash.decode import _known_chain
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
    draft = _known_chain(Draft(tokens, torch.tensor([3, 3, 2], dtype=torch.int32)), VOCAB)
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
