"""A proposer takes in what its methods name, and the picks of all rows; old proposers go on."""

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from support.scripted import own_text, pad, run
from support.tabled import Tabled, with_path
from support.tiny import small_pair
from torch import Tensor

import jax_bridge as jb
import torch_dflash as td
from torch_dflash import decode
from torch_dflash.pytrees import register_state
from torch_dflash.state import Draft

PROMPTS = [[5, 17, 80, 33, 5, 17], [3, 1, 4]]
NEW = 10
SIZES = {"max_length": 64, "batch_size": 2}


@cache
def pair():
    return small_pair("llama", agree=6.0)


@cache
def own(row):
    return own_text(pair()[0], PROMPTS[row], NEW)


def made(drafter, runtime="eager", **options):
    return td.compile(pair()[0], drafter, runtime=runtime, **(SIZES | options))


def check(engine):
    texts, stats = run(engine, PROMPTS, max_new_tokens=NEW, do_sample=False)
    assert texts == [own(row) for row in range(2)]
    return stats


def begun(engine):
    return engine.start(*pad(PROMPTS), max_new_tokens=NEW, eos_token_id=None, do_sample=False)


@register_state
@dataclass(frozen=True)
class Last:
    committed: Int[Tensor, " B"]
    row: Float[Tensor, "B H"]  # the raw embedding of the token after the last one taken in


class Old(td.Proposer):  # knows neither `embed` nor `verified`
    name, width = "old", 3

    def start(self, plan, device):
        zeros = torch.zeros(plan.batch_size, dtype=torch.int32, device=device)
        return Last(zeros, torch.zeros(plan.batch_size, 32, device=device))

    def ingest(self, pstate, features, ids, next_ids, count):
        return super().ingest(pstate, features, ids, next_ids, count)

    def observe(self, pstate, features, ids, next_ids, count):
        return replace(pstate, committed=pstate.committed + count)

    def propose(self, pstate, anchor, length, embed, head):
        return Draft(anchor[:, None].expand(-1, 2), torch.full_like(length, 2)), pstate


class Embeds(Old):  # its `observe` names `embed`, and the default `ingest` hands it on
    name, ingest = "embeds", td.Proposer.ingest

    def observe(self, pstate, features, ids, next_ids, count, embed):
        last = (count - 1).clamp(min=0).long()[:, None]
        row = torch.where((count > 0)[:, None], embed(next_ids.gather(1, last))[:, 0], pstate.row)
        return Last(pstate.committed + count, row)


@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_the_embedding_of_the_next_token_is_there_in_prompts_and_rounds(runtime):
    engine = made(Embeds(), runtime)
    read = jb.state_to_torch if runtime == "xla" else lambda state: state
    table = pair()[0].get_input_embeddings().weight
    state, done = begun(engine), False
    while not done:
        now = read(state)
        assert torch.equal(now.proposer.row, F.embedding(now.anchor, table))
        texts, done = now.tokens.clone(), bool(now.done.all())
        state = engine.advance(state)
    for row, prompt in enumerate(PROMPTS):
        assert texts[row, len(prompt) : len(prompt) + NEW].tolist() == own(row)


def test_an_old_proposer_goes_on_alone_and_in_a_union():
    check(made(Old()))
    check(made(td.Union(td.NGramProposer(4), Old())))
    engine = made(td.Union(td.NGramProposer(4), Embeds(), rows=6))
    state = engine.advance(begun(engine))
    table = pair()[0].get_input_embeddings().weight
    assert torch.equal(state.proposer.parts[-1].row, F.embedding(state.anchor, table))


@register_state
@dataclass(frozen=True)
class Seen:
    ids: Int[Tensor, "B M"]
    picks: Int[Tensor, "B M"]
    path: Int[Tensor, "B M"]  # of what `observe` is handed


class Notes(Tabled):  # a tree of 8 rows, which keeps the rows of the last round
    name = "notes"

    def start(self, plan, device):
        zeros = torch.zeros(plan.batch_size, self.width, dtype=torch.int32, device=device)
        return Seen(zeros, zeros.clone(), zeros.clone())

    def verified(self, pstate, ids, picks):
        more = self.width - ids.shape[1]  # of a narrower round
        return replace(pstate, ids=F.pad(ids, (0, more)), picks=F.pad(picks, (0, more)))

    def observe(self, pstate, features, ids, next_ids, count):
        return replace(pstate, path=F.pad(ids, (0, self.width - ids.shape[1])))


def noting(right=True):
    notes = Notes(2, 80, 8, 3)
    notes.fill([p + own(row) for row, p in enumerate(PROMPTS)], with_path(7, 3, right))
    return notes


def all_rows_are_seen():
    notes = noting()
    engine = made(notes)
    before = begun(engine)
    start, anchor = before.length.clone(), before.anchor.clone()
    seen = engine.advance(before).proposer
    for row, prompt in enumerate(PROMPTS):
        tree = [table[row, start[row]].tolist() for table in (notes.tokens, notes.parent)]
        assert seen.ids[row].tolist() == [int(anchor[row]), *tree[0]]
        paths = [[*prompt, int(anchor[row])]]
        for token, above in zip(*tree, strict=True):
            paths.append([*paths[above + 1], token])
        logits = [pair()[0](torch.tensor([path])).logits[0, -1] for path in paths]
        assert seen.picks[row].tolist() == [int(one.argmax()) for one in logits]
    assert not torch.equal(seen.ids, seen.path)


@torch.no_grad()
def test_verified_gets_the_picks_of_all_rows_in_the_order_of_the_draft():
    all_rows_are_seen()


@torch.no_grad()
def test_the_picks_of_the_path_alone_would_be_seen(monkeypatch):
    commit = decode.take_in

    def of_the_path(method, pstate, features, ids, picks, *rest):
        pstate = method.__self__.verified(pstate, ids, picks)
        return commit(method, pstate, features, ids, picks, *rest)

    monkeypatch.setattr(decode, "take_in", of_the_path)
    with pytest.raises(AssertionError):
        all_rows_are_seen()


def test_a_narrower_round_hands_its_own_rows():
    engine = made(noting(), verify_width=4)
    seen = engine.advance(begun(engine)).proposer
    assert seen.ids[:, 1:4].any() and not seen.ids[:, 4:].any()


@pytest.mark.parametrize("rows", [None, 8])
def test_a_part_of_a_union_is_handed_no_rows(rows):
    """A union's rows are some of its parts' nodes."""
    notes = noting()
    if rows is None:
        notes.depth = None  # chains: the table's parents are left out
        notes.propose = lambda *given: (Draft(*_chain(notes, *given)), given[0])
    engine = made(td.Union(td.NGramProposer(4), notes, rows=rows))
    check(engine)
    seen = engine.advance(begun(engine)).proposer.parts[-1]
    assert not seen.ids.any() and not seen.picks.any() and seen.path.any()


def _chain(notes, pstate, anchor, length, embed, head):
    draft, _ = Tabled.propose(notes, pstate, anchor, length, embed, head)
    return draft.tokens, draft.valid
