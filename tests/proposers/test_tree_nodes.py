"""The best scored nodes, joined and in preorder, are those of trees of paths by hand."""

import math
import random

import pytest
import torch
from support.authors import SECOND
from support.refusals import refuses
from support.tiny import VOCAB, make_drafter, make_pair

import torch_dflash as td
from torch_dflash.ops.trees import read_tree
from torch_dflash.proposers.base import Proposer
from torch_dflash.proposers.composed import States
from torch_dflash.proposers.dflash.vocabulary import Noise
from torch_dflash.proposers.ngram import NGramProposer, NGramState
from torch_dflash.proposers.trees import nodes as module
from torch_dflash.proposers.trees.nodes import Nodes, beam, best, children, in_preorder, join, unscored
from torch_dflash.proposers.trees.proposer import BestNodes
from torch_dflash.state import Draft, DraftRequest, Sampling

DEPTH = 5


def scored(nodes):
    tokens, parent, score = (rows[0].tolist() for rows in nodes)
    paths = []
    for token, above in zip(tokens, parent, strict=True):
        paths.append([*(paths[above] if above >= 0 else []), token])
    found = [(tuple(path), each) for path, each in zip(paths, score, strict=True) if each > -math.inf]
    assert len(dict(found)) == len(found), "a path stands there twice"
    return dict(found)


def some_tree(draw, count, ids=4):
    """Random nodes without equal siblings, some of them unused; no node is likelier than its parent."""
    tokens, parent, score, taken = [], [], [], set()
    while len(tokens) < count:
        above = draw.randint(-1, len(tokens) - 1)
        depth, at = 1, above
        while at >= 0:
            depth, at = depth + 1, parent[at]
        token = draw.randrange(ids)
        if depth > DEPTH or (above, token) in taken:
            continue
        taken.add((above, token))
        before = score[above] if above >= 0 else 0.0
        score.append(before + draw.choice([0.0, -0.5, -1.0, -draw.random(), -math.inf]))
        tokens.append(token)
        parent.append(above)
    ints = [torch.tensor([rows], dtype=torch.int32) for rows in (tokens, parent)]
    return Nodes(*ints, torch.tensor([score]))


def test_the_best_of_joined_nodes_are_those_by_hand():
    draw = random.Random(0)
    for _ in range(200):
        first, second = some_tree(draw, draw.randint(1, 12)), some_tree(draw, draw.randint(1, 12))
        most = draw.randint(1, 16)
        both = scored(first)
        for path, score in scored(second).items():
            both[path] = max(score, both.get(path, -math.inf))
        joined = best(join(first, second, DEPTH), most)
        found = scored(joined)
        assert len(found) == min(most, len(both)) and all(both[path] == found[path] for path in found)
        assert sorted(found.values()) == sorted(both.values())[-len(found) :]
        draft = in_preorder(joined, DEPTH)
        real = (torch.arange(draft.tokens.shape[1]) < draft.valid)[None]
        again = Nodes(draft.tokens, draft.parent, real.float().log())
        assert scored(again).keys() == found.keys()
        assert read_tree(draft.parent, draft.valid, DEPTH).valid.tolist() == [len(found)]


def test_a_joined_node_has_one_parent(monkeypatch):
    """Without a comparison of paths equal nodes stand twice in a join."""
    tokens, parent = (torch.tensor([row], dtype=torch.int32) for row in ([3, 4], [-1, 0]))
    same = Nodes(tokens, parent, torch.zeros(1, 2))
    assert scored(join(same, same, DEPTH)) == {(3,): 0, (3, 4): 0}
    monkeypatch.setattr(module, "paths", lambda nodes, _: torch.rand(1, 2, 1))
    with pytest.raises(AssertionError, match="a path stands there twice"):
        scored(join(same, same, DEPTH))


def test_nodes_that_are_not_drafted_take_no_score_of_others():
    """The padding of a part's draft may repeat an id that another part drafts."""
    nothing = unscored(Draft(torch.zeros(1, 3, dtype=torch.int32), torch.tensor([0])), DEPTH)
    tokens, parent = (torch.tensor([row], dtype=torch.int32) for row in ([0, 5, 6], [-1, 0, -1]))
    drafted = Nodes(tokens, parent, torch.tensor([[-0.1, -0.5, -0.9]]))
    for one, other in ((nothing, drafted), (drafted, nothing)):
        assert scored(best(join(one, other, DEPTH), 3)).keys() == {(0,), (0, 5), (6,)}


def test_a_beam_of_a_small_tree_finds_the_likeliest_paths():
    generator = torch.Generator().manual_seed(0)
    logs = torch.log_softmax(torch.randn(1, 5, 8, generator=generator) * 2, dim=-1)
    ids = torch.arange(8, dtype=torch.int32).expand(1, 1, 8)
    nodes = best(beam(lambda at, before: (ids, logs[:, at, None]), torch.zeros(1), 5, 8), 7)
    every = {(): 0.0}
    for at in range(5):
        longest = {path: score for path, score in every.items() if len(path) == at}
        every |= {
            (*path, token): score + float(logs[0, at, token])
            for path, score in longest.items()
            for token in range(8)
        }
    del every[()]
    wanted = sorted(every.values())[-7:]
    found = scored(nodes)
    assert sorted(found.values()) == pytest.approx(wanted)
    assert all(every[path] == pytest.approx(score) for path, score in found.items())


def test_scores_that_are_no_number_are_no_nodes():
    logs = torch.full((1, 1, 3), torch.nan)
    ids = torch.arange(3, dtype=torch.int32).expand(1, 1, 3)
    nodes = best(beam(lambda at, before: (ids, logs), torch.zeros(1), 4, 8), 7)
    assert in_preorder(nodes, 4).valid.tolist() == [0]


def test_a_tree_without_scores_is_taken_as_far_as_it_is_one():
    draft = Draft(torch.tensor([[5, 6, 7, 8]]), torch.tensor([4]), torch.tensor([[-1, 0, 2, 0]]))
    log = math.log(module.UNSCORED)
    assert scored(unscored(draft, 3)) == {(5,): pytest.approx(log), (5, 6): pytest.approx(2 * log)}
    chain = unscored(Draft(draft.tokens, draft.valid), 3)
    assert list(scored(chain)) == [(5,), (5, 6), (5, 6, 7)]


def test_lookup_is_as_likely_as_its_match_is_long():
    lookup = NGramProposer(4)
    history = torch.tensor(
        [[1, 2, 3, 9, 8, 7, 1, 2, 0, 0], [5, 6, 5, 0, 0, 0, 0, 0, 0, 0]], dtype=torch.int32
    )
    length, anchor = torch.tensor([8, 3], dtype=torch.int32), torch.tensor([3, 4], dtype=torch.int32)
    asked = DraftRequest(sampling(0.0, 0.0), 8)
    found, _ = lookup.nodes(NGramState(history, length), anchor, length, None, None, asked)
    assert found.tokens[0].tolist() == [9, 8, 7] and found.parent[0].tolist() == [-1, 0, 1]
    assert found.score[0].exp().tolist() == pytest.approx([0.7, 0.7 * 0.8, 0.7 * 0.64])
    assert found.score[1].tolist() == [-math.inf] * 3
    narrow, _ = lookup.nodes(NGramState(history, length), anchor, length, None, None, asked._replace(rows=2))
    assert narrow.tokens[0].tolist() == [9]


class Known(Proposer):  # A branch of three, and another first token that is likelier than the branch's second
    name, width = "known", 8

    def nodes(self, pstate, anchor, length, embed, head, request):
        tokens, parent = (torch.tensor([row], dtype=torch.int32) for row in ([5, 6, 7, 8], [-1, 0, 1, -1]))
        return Nodes(tokens, parent, torch.tensor([[-0.1, -0.5, -0.6, -0.3]])), pstate


def test_a_narrower_round_takes_the_best_nodes_not_the_first_of_the_preorder():
    proposer, zero = BestNodes(Known(), (), 8), torch.zeros(1, dtype=torch.int32)
    wide, narrow = (
        proposer.draft(States(((),)), zero, zero, None, None, DraftRequest(sampling(0.0), rows))[0]
        for rows in (8, 3)
    )
    assert (wide.tokens.tolist(), wide.parent.tolist()) == ([[5, 6, 7, 8]], [[-1, 0, 1, -1]])
    assert (narrow.tokens.tolist(), narrow.parent.tolist()) == ([[5, 8]], [[-1, -1]])


class Odd(Known):  # nodes with one thing wrong
    def __init__(self, **change):
        super().__init__()
        self.change = change

    def nodes(self, *given):
        nodes, pstate = super().nodes(*given)
        return nodes._replace(**self.change), pstate


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (
            {"score": torch.tensor([[-0.1, -0.5, -0.4, -0.3]])},
            ("score[0, 2] is -0.4", "node 1, is -0.5", "add"),
        ),
        ({"score": torch.tensor([[torch.nan, -0.5, -0.6, 0]])}, ("score[0, 1] is -0.5", "node 0, is -inf")),
        ({"score": torch.tensor([[-1, -2, -3, -1]])}, ("score is torch.int64 [1, 4]", "float32 [1, 4]")),
        ({"parent": torch.tensor([[-1, 2, 1, -1]])}, ("parent[0, 1] is 2", "-1, for the anchor", "below 1")),
        ({"parent": torch.tensor([[-1, 0, 1]])}, ("parent is torch.int64 [1, 3]", "int32 [1, 4]")),
        ({"tokens": [[5, 6, 7, 8]]}, ("tokens is list", "int32 [1, C]")),
    ],
)
def test_nodes_that_are_none_are_refused_by_name(change, parts):
    zero = torch.zeros(1, dtype=torch.int32)
    with refuses(ValueError, "Odd.nodes()", *parts):
        BestNodes(Odd(**change), (), 8).draft(
            States(((),)), zero, zero, None, None, DraftRequest(sampling(0.0), 8)
        )


def test_a_proposer_that_returns_other_things_than_nodes_is_told_what_to_return(monkeypatch):
    zero, given = torch.zeros(1, dtype=torch.int32), (States(((),)), None, DraftRequest(sampling(0.0), 8))
    for found, parts in (
        (5, ("Known.nodes() returned int", "a Nodes and the proposer's state")),
        ((Draft(zero[None], zero), ()), ("Known.nodes() returned Draft", "td.Nodes(tokens, parent, score)")),
    ):
        monkeypatch.setattr(Known, "nodes", lambda *_, found=found: found)
        with refuses(TypeError, *parts):
            BestNodes(Known(), (), 8).draft(given[0], zero, zero, None, None, given[2])


def test_nodes_that_break_the_rules_in_a_program_index_nothing_outside():
    """No check reads values in a program: `read_tree` cuts the results."""
    tokens, parent = (torch.tensor([row], dtype=torch.int32) for row in ([5, 6, 7, 8], [-1, 0, 1, 2]))
    for score in ([-4.0, -3.0, -2.0, -1.0], [-1.0, -9.0, -1.0, -1.0]):
        draft = in_preorder(best(Nodes(tokens, parent, torch.tensor([score])), 2), DEPTH)
        assert int(read_tree(draft.parent, draft.valid, DEPTH).valid) <= 2


def sampling(*temperatures):
    zeros = torch.zeros(len(temperatures), dtype=torch.int32)
    ones = torch.ones(len(temperatures))
    return Sampling(torch.tensor(temperatures), zeros, ones, ones * 0, zeros)


@pytest.mark.parametrize("kind", ["dflash", "narrow", "markov", "dflash2"])
def test_branches_of_a_drafter_hold_its_chain(kind):
    """The path of the likeliest nodes is the drafter's chain, without noise and with noise."""
    target, drafter = make_pair("llama", agree=6.0)
    if kind == "narrow":
        drafter = td.with_draft_vocabulary(drafter, target, list(range(0, 90, 3)))
    elif kind != "dflash":
        drafter = make_drafter(target, **({"markov_rank": 4} if kind == "markov" else SECOND))
        with torch.no_grad():  # otherwise the token before adds nothing
            for weight in (drafter.markov_head or drafter.candidate_selector).parameters():
                weight.normal_()
    torch.manual_seed(0)
    hidden, anchor = torch.randn(2, 5, 32), torch.tensor([3, 4], dtype=torch.int32)
    head, draws = target.get_output_embeddings(), torch.randn(2, 5, VOCAB)

    def added(logits, ids):
        return logits + 2.0 * draws[..., torch.arange(ids) if isinstance(ids, int) else ids.long()]

    for sampled in (False, True):
        noise = Noise(torch.tensor([sampled, sampled]), added, torch.tensor([1.0, 2.0]))
        with torch.no_grad():
            following = drafter.branches(hidden, head, noise, children(16))
            chain = drafter.choose(hidden, anchor, head, noise)
            before, likely = anchor[:, None], []
            for at in range(5):
                ids, logs = following(at, before)
                assert (logs <= 1e-5).all() and (logs.exp().sum(-1) < 1 + 1e-5).all()
                assert (logs[..., 1:] <= logs[..., :-1]).all()
                before = ids[:, :, 0]
                likely.append(before)
        assert torch.equal(torch.cat(likely, dim=1), chain)
