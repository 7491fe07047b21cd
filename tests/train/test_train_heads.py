"""Drafters with convolutions and a candidate selector: their loss, their fit, and the written files."""

import dataclasses
import json
import math

import dflash.model as authors
import pytest
import torch
import torch.nn.functional as F
from support.authors import SECOND
from support.blocks import make_batch
from support.refusals import refuses
from support.tiny import make_pair, randomise
from support.trained import NEW, options, student
from test_train_fit import DPACE, assert_same, before_step, go

import torch_dflash as td
from torch_dflash.storage.files import StageError
from torch_dflash.train.export import export_drafter
from torch_dflash.train.fit.architecture import new_drafter
from torch_dflash.train.fit.blocks import block_targets, draft_blocks, previous_tokens
from torch_dflash.train.fit.checkpoint import load_latest
from torch_dflash.train.fit.heads import head_of, with_head
from torch_dflash.train.fit.log import read_log
from torch_dflash.train.fit.objective import sample_vocabulary, weights_of
from torch_dflash.train.fit.options import DrafterShape, Objective
from torch_dflash.train.fit.student import Student
from torch_dflash.train.fit.torch_trainer import fit

DFLASH2 = {"head": "dflash2", "selector_rank": 8, "selector_top_k": 4}
ROWS = 5


def case():
    """(Target, a drafter whose every part has an effect, blocks of random tokens)."""
    target, drafter = make_pair("qwen3", seed=3, block_size=ROWS + 1, **SECOND | {"selector_top_k": 30})
    randomise(drafter, 5)
    with torch.no_grad():
        drafter.candidate_selector.successor_codebook *= 20
    return target, drafter, make_batch(drafter)


def states(target, drafter, batch):
    return draft_blocks(drafter, batch, target.get_input_embeddings().weight, ROWS + 1)[:, :, 1:]


def plain_losses(target, drafter, batch, head=None, ids=None):
    """[B, A, N] (selector's cross-entropy or 0, choice, whether the truth is listed), by loops over rows."""
    selector, weight = drafter.candidate_selector, target.lm_head.weight if head is None else head
    hidden = states(target, drafter, batch)
    logits = hidden @ weight.T
    ids = torch.arange(len(weight)) if ids is None else ids
    targets, _ = block_targets(batch, ROWS + 1)
    loss, right, listed = (torch.zeros(targets.shape) for _ in range(3))
    for place in torch.cartesian_prod(*map(torch.arange, targets.shape)):
        row, block, k = place.tolist()
        anchor = max(int(batch.anchors[row, block]), 0)
        before = batch.ids[row, min(anchor + k, batch.ids.shape[1] - 1)]
        unary, places = logits[row, block, k].topk(selector.candidates)
        found = ids[places]
        key = selector.predecessor_codebook[before] * selector.hidden_projection(hidden[row, block, k])
        scores = unary + selector.successor_codebook[found] @ key
        true = (found == targets[row, block, k]).nonzero()
        if len(true):
            listed[row, block, k] = 1
            loss[row, block, k] = F.cross_entropy(scores, true[0, 0])
            right[row, block, k] = scores.argmax() == true[0, 0]
    return loss, right, listed


def objective(**changes):
    return Objective(**{"rows_per_chunk": 7, "weighting": "dpace", "selector": 0.3} | changes)


@pytest.mark.parametrize("sampled", [False, True])
def test_the_selectors_loss_is_its_definition_with_its_gradients(sampled):
    target, drafter, batch = case()
    vocabulary = head = ids = None
    if sampled:
        generator, always = torch.Generator().manual_seed(1), batch.ids.unique()
        head = target.lm_head.weight.detach()
        vocabulary = sample_vocabulary(head, None, always, 5, generator)
        head, ids = vocabulary.weight, vocabulary.ids
    chosen = objective()
    found = Student(drafter, target, chosen)(batch, vocabulary)
    without = Student(drafter, target, dataclasses.replace(chosen, selector=0.0))(batch, vocabulary)
    parameters = [weight for _, weight in drafter.named_parameters()]
    gradient = torch.autograd.grad(found.loss - without.loss, parameters)
    extra, right, listed = plain_losses(target, drafter, batch, head, ids)
    targets, known = block_targets(batch, ROWS + 1)
    rows = states(target, drafter, batch) @ (target.lm_head.weight if head is None else head).T
    labels = targets.long()
    if vocabulary is not None:
        rows, labels = rows + vocabulary.shift, vocabulary.index[labels].long()
    ce = F.cross_entropy(rows.flatten(0, 2), labels.flatten(), reduction="none").view(labels.shape)
    wanted = 0.3 * (weights_of(chosen, ce, known) * known * extra).sum()
    assert float(wanted.detach()) > 0.05
    assert torch.allclose(found.loss - without.loss, wanted, rtol=1e-4)
    for name, mine, theirs in zip(
        dict(drafter.named_parameters()),
        gradient,
        torch.autograd.grad(wanted, parameters, allow_unused=True),
        strict=True,
    ):
        assert theirs is not None, name
        assert (mine - theirs).abs().max() <= 1e-4 * theirs.abs().max(), name
    for value, counted in ((found.hits, right), (found.listed, listed)):
        assert torch.equal(value, (counted * known).sum((0, 1)))
    assert 0 < found.hits.sum() < found.listed.sum() < found.known.sum()


def test_a_truth_that_is_not_listed_costs_nothing():
    target, drafter, batch = case()
    _, _, listed = plain_losses(target, drafter, batch)
    _, known = block_targets(batch, ROWS + 1)
    missed = (listed == 0) & known
    assert missed.any()
    hidden = states(target, drafter, batch)
    chosen = Student(drafter, target, objective())
    selection, targets = chosen._selection(batch), block_targets(batch, ROWS + 1)[0]
    best = (hidden @ target.lm_head.weight.T).topk(selection.count).indices.flatten(0, 2).int()
    vocabulary = dataclasses.replace(
        sample_vocabulary(target.lm_head.weight, None, torch.arange(3), 1, torch.Generator()),
        weight=target.lm_head.weight, shift=None, index=None, ids=None,
    )  # fmt: skip
    loss, hit, seen = selection.losses(
        hidden.flatten(0, 2), best, targets.flatten(), vocabulary, drafter.logits, 7
    )
    assert torch.equal(seen.view(listed.shape), listed.bool())
    assert not loss.view(listed.shape)[missed].any() and not hit.view(listed.shape)[missed].any()


def test_what_it_chooses_in_training_is_what_it_drafts():
    """With the drafts as the truth every choice is right; the anchor stands before the first draft."""
    target, drafter, batch = case()
    with torch.no_grad():
        hidden = states(target, drafter, batch)
        row, block = 1, 2
        anchor = int(batch.anchors[row, block])
        drafts = drafter.choose(hidden[row, block][None], batch.ids[row, anchor][None], target.lm_head)[0]
        likeliest = (hidden[row, block] @ target.lm_head.weight.T).argmax(-1)
        assert not torch.equal(drafts.long(), likeliest)
        ids = batch.ids.clone()
        room = min(ROWS, ids.shape[1] - anchor - 1)
        ids[row, anchor + 1 : anchor + 1 + room] = drafts[:room]
        only = torch.full_like(batch.anchors, -1)
        only[row, 0] = anchor
        found = Student(drafter, target, objective())(dataclasses.replace(batch, ids=ids, anchors=only))
    assert found.blocks == 1 and found.known.sum() >= 3
    assert torch.equal(found.hits, found.known) and torch.equal(found.prefix, found.known)
    assert previous_tokens(batch, ROWS + 1)[row, block, 0] == batch.ids[row, anchor]


def test_every_head_begins_as_v1_does_and_is_called_by_its_name():
    target, _ = make_pair("qwen3")
    plain = {"mask_token_id": 90, "layers": 1, "block_size": ROWS + 1, "taps": (0, 2)}
    first = new_drafter(target, DrafterShape(**plain))
    for head, candidates in (("convolutions", 1), ("dflash2", 16)):
        drafter = new_drafter(target, DrafterShape(**plain, head=head))
        assert head_of(drafter.config) == head and drafter.config.selector_top_k == candidates
        batch = make_batch(first)
        assert torch.equal(states(target, drafter, batch), states(target, first, batch))
        own = drafter.state_dict()
        assert all(torch.equal(own[name], weight) for name, weight in first.state_dict().items())
        assert own.keys() - first.state_dict().keys()


def test_parts_are_added_with_the_weights_kept():
    target, first = make_pair("qwen3", seed=3)
    convolved = with_head(first, "convolutions", conv_group_size=8)
    with torch.no_grad():
        for weight in convolved.layers.parameters():
            weight.normal_(generator=torch.Generator().manual_seed(1))
    second = with_head(convolved, "dflash2", **{"selector_rank": 8, "selector_top_k": None})
    config = second.config
    assert (config.conv_group_size, config.selector_rank, config.selector_top_k) == (8, 8, 16)
    assert config.dflash_config["selector_rank"] == 8
    own = second.state_dict()
    for name, weight in convolved.state_dict().items():
        assert "selector" in name or torch.equal(own[name], weight), name
    assert with_head(second, None) is second and with_head(second, "dflash2") is second
    for drafter, head, sizes, words in (
        (second, "dflash", {}, ["head='dflash'", "'dflash2'", "no part is removed"]),
        (second, None, {"selector_rank": 4}, ["selector_rank=4", "head=None"]),
        (second, "dflash2", {"selector_rank": 4}, ["selector_rank=4", "the drafter's own"]),
        (convolved, "dflash2", {"conv_group_size": 16}, ["conv_group_size=16", "the drafter's own"]),
        (first, "convolutions", {"selector_top_k": 4}, ["selector_top_k=4", "which has none"]),
        (first, "dflash2", {"selector_top_k": 1}, ["selector_top_k=1", "head='convolutions'"]),
        (second, "dflash2", {"freeze": True}, ["freeze=True", "a head that adds parts"]),
        (first, "markov", {}, ["head='markov'", "dflash, convolutions, dflash2"]),
    ):
        with refuses(ValueError, *words):
            with_head(drafter, head, **sizes)


CHOSEN = options(epochs=4, batch_size=4, sampled_vocabulary=16, evaluate_minutes=0.0)


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    return directory, go(world, directory, CHOSEN, **DFLASH2)


def test_a_stopped_fit_goes_on_with_the_selectors_moments(world, whole, tmp_path, monkeypatch):
    def stop():
        raise KeyboardInterrupt

    before_step(monkeypatch, 5, stop)
    often = dataclasses.replace(CHOSEN, checkpoint_minutes=0.0)
    with pytest.raises(KeyboardInterrupt):
        go(world, tmp_path, often, **DFLASH2)
    monkeypatch.undo()
    kept = load_latest(tmp_path / "checkpoints")
    assert kept.step == 5
    for name in ("predecessor_codebook", "successor_codebook", "hidden_projection.weight"):
        for group in (kept.first, kept.second):
            assert group[f"candidate_selector.{name}"].abs().max() > 0, name
    go(world, tmp_path, often, **DFLASH2)
    assert_same(tmp_path, whole[0])


def test_all_weights_are_trained_and_the_log_tells_the_recall(whole):
    directory, drafter = whole
    kept = load_latest(directory / "checkpoints")
    untrained = [name for name, moment in kept.second.items() if not moment.abs().max() > 0]
    assert not untrained and kept.second.keys() == dict(drafter.named_parameters()).keys()
    for line in read_log(directory / "log.jsonl"):
        assert all(
            right <= listed <= 1 for right, listed in zip(line["accuracy"], line["recall"], strict=True)
        )
    settings = json.loads((directory / "stage.json").read_text())
    assert settings["head"] == "dflash2" and settings["selector_rank"] == 8 and settings["selector"] == 0.1


@pytest.mark.parametrize("on", ["torch", "XLA"])
def test_a_frozen_drafter_keeps_its_weights_and_its_new_parts_learn(world, tmp_path, on):
    from jax_bridge.train.trainer import fit_xla

    sizes = {"selector_rank": 8, "selector_top_k": 4}
    frozen = with_head(student(world).drafter, "dflash2", freeze=True, **sizes)
    before = {name: weight.clone() for name, weight in frozen.state_dict().items()}
    asked = dataclasses.replace(CHOSEN, epochs=2, freeze=True)
    (fit if on == "torch" else fit_xla)(Student(frozen, world.target, DPACE), world.cached(), tmp_path, asked)
    moved = {name for name, weight in frozen.state_dict().items() if not torch.equal(weight, before[name])}
    added = frozen.state_dict().keys() - student(world).drafter.state_dict().keys()
    assert moved == added == load_latest(tmp_path / "checkpoints").second.keys()


def test_another_head_or_weight_does_not_go_on_from_it(world, whole):
    for given, chosen, words in (
        (DFLASH2, Objective(weighting="dpace", selector=0.2), "selector=0.1, now selector=0.2"),
        ({"head": "convolutions"}, DPACE, "head='dflash2', now head='convolutions'"),
        (DFLASH2 | {"selector_top_k": 5}, DPACE, "selector_top_k=4, now selector_top_k=5"),
    ):
        with refuses(StageError, words):
            go(world, whole[0], CHOSEN, chosen, **given)


def test_steps_end_a_fit_and_its_learning_rate(world, tmp_path):
    go(world, tmp_path, options(batch_size=4, steps=5))
    lines = [line for line in read_log(tmp_path / "log.jsonl") if line["kind"] == "train"]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[-1]["rate"] == pytest.approx(5e-3 * 0.5 * (1 + math.cos(math.pi * 3 / 4)))


@pytest.fixture(scope="module", params=["convolutions", "dflash2"])
def taught(request, world, tmp_path_factory):
    """(drafter, its fit's directory): trained on one batch until most of it is right."""
    directory = tmp_path_factory.mktemp(request.param)
    given = DFLASH2 if request.param == "dflash2" else {"head": request.param}
    trained = student(world, DPACE, **given)
    fit(trained, world.cached(), directory, options(epochs=120, log_steps=20))
    export_drafter(trained.drafter, directory / "drafter", world.target, directory, torch.float32)
    return trained.drafter.eval(), directory


def test_it_learns_and_decodes_to_the_targets_text(world, taught):
    drafter, directory = taught
    first, last = [
        [line for line in read_log(directory / "log.jsonl") if line["kind"] == "train"][at] for at in (0, -1)
    ]
    assert last["acceptance_length"] > first["acceptance_length"] + 2
    ids = torch.tensor([world.sequences[1].ids[: world.sequences[1].start]])
    given = {"max_new_tokens": NEW, "do_sample": False, "runtime": "eager"}
    assert torch.equal(
        td.generate(world.target, drafter, ids, **given), td.generate(world.target, None, ids, **given)
    )


@torch.no_grad()
def test_the_authors_loader_drafts_the_same(world, taught):
    drafter, directory = taught
    config = json.loads((directory / "drafter" / "config.json").read_text())
    assert config["architectures"] == ["DFlash2DraftModel"]
    assert f"`--head {head_of(drafter.config)}`" in (directory / "drafter" / "README.md").read_text()
    mine = td.load_drafter(directory / "drafter", dtype=torch.float32).eval()
    theirs = authors.DFlash2DraftModel.from_pretrained(directory / "drafter").eval()
    assert all(torch.equal(weight, drafter.state_dict()[name]) for name, weight in mine.state_dict().items())
    sequences, head, embedding = world.cached(), world.target.lm_head, world.target.get_input_embeddings()
    width, mask = drafter.config.block_size, drafter.config.mask_token_id
    for index in range(3):
        features = sequences.features([index])[0][None, :, : drafter.fc.in_features]
        anchor = torch.tensor([sequences.sequence(index).ids[9]])
        noise = embedding(torch.tensor([[int(anchor), *[mask] * (width - 1)]]))
        position = torch.arange(9 + width)[None]
        hidden = mine(noise, features[:, :9], position).last_hidden_state
        other = theirs(noise_embedding=noise, target_hidden=features[:, :9], position_ids=position)
        assert (hidden - other).abs().max() < 1e-4
        ours = mine.choose(hidden[:, 1:], anchor, head)
        logits = theirs.compute_logits(other[:, 1:], head)
        assert torch.equal(ours.long(), theirs.candidate_selector.select(other[:, 1:], logits, anchor, 0)[0])
