"""Drafters with a Markov head: their loss, their fit from the anchor's row on, and the written config."""

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from support.blocks import make_batch
from support.refusals import refuses
from support.tiny import make_pair, randomise
from support.trained import NEW, options, student
from test_train_fit import DPACE, assert_same, before_step, go

import torch_dflash as td
from torch_dflash.train.export import export_drafter
from torch_dflash.train.fit import student as student_module
from torch_dflash.train.fit.architecture import new_drafter
from torch_dflash.train.fit.blocks import draft_blocks, previous_tokens
from torch_dflash.train.fit.checkpoint import load_latest
from torch_dflash.train.fit.heads import head_of, with_head
from torch_dflash.train.fit.objective import sample_vocabulary, weights_of
from torch_dflash.train.fit.options import DrafterShape, Objective
from torch_dflash.train.fit.student import Student
from torch_dflash.train.fit.torch_trainer import fit

DSPARK = {"head": "dspark", "markov_rank": 8}
BLOCK = 6
OBJECTIVE = Objective(rows_per_chunk=7, weighting="dpace")


def case(anchored):
    """(Target, a drafter whose head counts as much as its network, blocks of random tokens)."""
    given = {"block_size": BLOCK, "markov_rank": 5, "sample_from_anchor": anchored}
    target, drafter = make_pair("qwen3", seed=3, **given)
    randomise(drafter, 5)
    with torch.no_grad():
        drafter.markov_head.markov_w2.weight.mul_(30)
    return target, drafter, make_batch(drafter)


def plain_loss(target, drafter, batch, vocabulary=None):
    """(loss, share of right rows) row by row, from the config's words alone."""
    anchored = drafter.config.sample_from_anchor
    count = BLOCK if anchored else BLOCK - 1
    hidden = draft_blocks(drafter, batch, target.get_input_embeddings().weight, BLOCK)
    head, first = target.lm_head.weight, drafter.markov_head.markov_w1.weight
    second, ids = drafter.markov_head.markov_w2.weight, torch.arange(len(head))
    ids = ids if vocabulary is None else vocabulary.ids.long()
    ce, known, right = (torch.zeros(*batch.anchors.shape, count) for _ in range(3))
    for row, anchors in enumerate(batch.anchors.tolist()):
        for block, anchor in enumerate(anchors):
            for k in range(count):
                at = anchor + 1 + k  # of the token that is drafted
                if anchor < 0 or at >= batch.length[row]:
                    continue
                state = hidden[row, block, k if anchored else k + 1]
                scores = head[ids] @ state + second[ids] @ first[batch.ids[row, at - 1]]
                label = (ids == batch.ids[row, at]).nonzero()[0, 0]
                right[row, block, k], known[row, block, k] = scores.argmax() == label, 1
                shift = 0 if vocabulary is None else vocabulary.shift
                ce[row, block, k] = F.cross_entropy(scores + shift, label)
    weight = weights_of(OBJECTIVE, ce, known.bool()) * known
    return (weight * ce).sum(), right.sum((0, 1))


def sampled_ids(target, batch):
    generator, head = torch.Generator().manual_seed(1), target.lm_head.weight.detach()
    return sample_vocabulary(head, None, batch.ids.unique(), 5, generator)


@pytest.mark.parametrize(("anchored", "sampled"), [(True, False), (True, True), (False, False)])
def test_the_loss_is_its_definition_with_its_gradients(anchored, sampled):
    target, drafter, batch = case(anchored)
    vocabulary = sampled_ids(target, batch) if sampled else None
    found = Student(drafter, target, OBJECTIVE)(batch, vocabulary)
    wanted, right = plain_loss(target, drafter, batch, vocabulary)
    assert torch.allclose(found.loss, wanted, rtol=1e-4)
    assert torch.equal(found.hits, right)
    named = dict(drafter.named_parameters())
    both = (torch.autograd.grad(loss, list(named.values())) for loss in (found.loss, wanted))
    for name, mine, theirs in zip(named, *both, strict=True):
        assert theirs.abs().max() > 0, name
        assert (mine - theirs).abs().max() <= 1e-4 * theirs.abs().max(), name


def late(batch, width):
    return previous_tokens(batch, width).roll(1, -1)


def own(batch, width):
    return previous_tokens(batch, width).roll(-1, -1)


@pytest.mark.parametrize("broken", [late, own])
def test_a_token_before_of_another_row_shows(broken, monkeypatch):
    target, drafter, batch = case(True)
    wanted, _ = plain_loss(target, drafter, batch)
    monkeypatch.setattr(student_module, "previous_tokens", broken)
    found = Student(drafter, target, OBJECTIVE)(batch)
    assert not torch.allclose(found.loss, wanted, rtol=1e-3)


def test_a_row_that_says_another_place_shows():
    target, drafter, batch = case(True)
    wanted, _ = plain_loss(target, drafter, batch)
    broken = Student(drafter, target, OBJECTIVE)
    drafter.config.sample_from_anchor, broken.width = False, BLOCK
    assert not torch.allclose(broken(batch).loss, wanted, rtol=1e-3)


@pytest.mark.parametrize("anchored", [True, False])
@torch.no_grad()
def test_what_it_chooses_in_training_is_what_it_drafts(anchored):
    """With the drafts as the truth every choice is right; without the head the drafts would be others."""
    target, drafter, batch = case(anchored)
    row, block = 1, 2
    anchor = int(batch.anchors[row, block])
    hidden = draft_blocks(drafter, batch, target.get_input_embeddings().weight, BLOCK)
    states = hidden[row, block, 0 if anchored else 1 :]
    drafts = drafter.choose(states[None], batch.ids[row, anchor][None], target.lm_head)[0]
    assert not torch.equal(drafts.long(), (states @ target.lm_head.weight.T).argmax(-1))
    ids = batch.ids.clone()
    room = min(len(drafts), ids.shape[1] - anchor - 1)
    ids[row, anchor + 1 : anchor + 1 + room] = drafts[:room]
    only = torch.full_like(batch.anchors, -1)
    only[row, 0] = anchor
    found = Student(drafter, target, OBJECTIVE)(dataclasses.replace(batch, ids=ids, anchors=only))
    assert found.blocks == 1 and found.known.sum() >= 3 and len(found.known) == len(drafts)
    assert torch.equal(found.hits, found.known) and torch.equal(found.prefix, found.known)


def test_it_begins_as_v1_does_and_keeps_its_weights():
    target, first = make_pair("qwen3", seed=3)
    grown = with_head(first, **DSPARK)
    assert head_of(grown.config) == "dspark" and grown.config.markov_rank == 8
    assert not grown.config.sample_from_anchor  # its rows give the same logits
    own = grown.state_dict()
    assert all(torch.equal(own[name], weight) for name, weight in first.state_dict().items())
    assert not own["markov_head.markov_w2.weight"].any() and own["markov_head.markov_w1.weight"].any()
    batch = make_batch(first)
    losses = [Student(drafter, target, OBJECTIVE)(batch).loss for drafter in (first, grown)]
    assert torch.allclose(*losses, rtol=1e-6)
    assert with_head(grown, "dspark") is grown
    made = new_drafter(target, DrafterShape(mask_token_id=90, layers=1, taps=(0, 2), head="dspark"))
    assert made.config.sample_from_anchor and made.config.markov_rank == 256
    second = with_head(first, "dflash2")
    for drafter, head, sizes, words in (
        (grown, "dflash2", {}, ["head='dflash2'", "'dspark'", "no part is removed"]),
        (grown, "dspark", {"markov_rank": 4}, ["markov_rank=4", "the drafter's own"]),
        (second, "dspark", {}, ["head='dspark'", "'dflash2'", "no part is removed"]),
        (first, "dflash2", {"markov_rank": 4}, ["markov_rank=4", "which has none"]),
        (first, "dspark", {"selector_rank": 4}, ["selector_rank=4", "which has none"]),
    ):
        with refuses(ValueError, *words):
            with_head(drafter, head, **sizes)


CHOSEN = options(epochs=4, batch_size=4, sampled_vocabulary=16, evaluate_minutes=0.0)


def test_a_stopped_fit_goes_on_with_the_heads_moments(world, tmp_path, monkeypatch):
    def stop():
        raise KeyboardInterrupt

    go(world, tmp_path / "whole", CHOSEN, **DSPARK)
    before_step(monkeypatch, 5, stop)
    often = dataclasses.replace(CHOSEN, checkpoint_minutes=0.0)
    with pytest.raises(KeyboardInterrupt):
        go(world, tmp_path / "cut", often, **DSPARK)
    monkeypatch.undo()
    kept = load_latest(tmp_path / "cut" / "checkpoints")
    assert kept.step == 5
    assert all(group["markov_head.markov_w1.weight"].any() for group in (kept.first, kept.second))
    go(world, tmp_path / "cut", often, **DSPARK)
    assert_same(tmp_path / "cut", tmp_path / "whole")
    settings = json.loads((tmp_path / "whole" / "stage.json").read_text())
    said = [settings[name] for name in ("head", "markov_rank", "sample_from_anchor", "width")]
    assert said == ["dspark", 8, True, BLOCK + 1]


def test_it_learns_comes_back_and_decodes_to_the_targets_text(world, tmp_path):
    trained = student(world, DPACE, **DSPARK)
    fit(trained, world.cached(), tmp_path, options(epochs=120, log_steps=20))
    export_drafter(trained.drafter, tmp_path / "drafter", world.target, tmp_path, torch.float32)
    drafter = td.load_drafter(tmp_path / "drafter", world.target).eval()
    written = trained.drafter.state_dict()
    assert all(torch.equal(weight, written[name]) for name, weight in drafter.state_dict().items())
    assert drafter.config.sample_from_anchor and drafter.config.markov_rank == 8
    card = (tmp_path / "drafter" / "README.md").read_text()
    assert "`--head dspark`" in card and f"blocks of {BLOCK} rows ({BLOCK} drafts)" in card
    ids = torch.tensor([world.sequences[1].ids[: world.sequences[1].start]])
    given = {"max_new_tokens": NEW, "do_sample": False, "runtime": "eager", "return_dict_in_generate": True}
    out = td.generate(world.target, drafter, ids, **given)
    assert torch.equal(out.sequences, td.generate(world.target, None, ids, **given).sequences)
    assert out.stats.mean_acceptance_length > 3
