"""Drafters of other kinds than DFlash: their states and steps, their fit, and the written files."""

import dataclasses
import json

import jax
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from support.refusals import refuses
from support.stages import train
from support.trained import NEW, options
from test_train_fit import DPACE, assert_same, before_step
from test_train_xla import flat, gap, take_steps

import torch_dflash as td
from jax_bridge.train.trainer import XlaTrainer, data_mesh
from torch_dflash.decode import draft
from torch_dflash.proposers.medusa.model import MedusaDraftModel
from torch_dflash.train.answers.provenance import TEMPLATE, describe
from torch_dflash.train.evaluate import evaluate
from torch_dflash.train.export import export_drafter, trained_template
from torch_dflash.train.fit import loop
from torch_dflash.train.fit.architecture import new_drafter
from torch_dflash.train.fit.blocks import gather_rows
from torch_dflash.train.fit.checkpoint import load_latest
from torch_dflash.train.fit.heads import with_head
from torch_dflash.train.fit.kinds import Medusa, kind_of
from torch_dflash.train.fit.log import read_log
from torch_dflash.train.fit.loop import plan_fit
from torch_dflash.train.fit.options import DrafterShape, Objective
from torch_dflash.train.fit.student import Student
from torch_dflash.train.fit.torch_trainer import TorchTrainer, fit
from torch_dflash.train.options import EvaluateOptions, Layers

WIDTH = 5
SHAPES = {"medusa": {"layers": 3}, "eagle3": {"taps": Layers((0, 2, 3))}}
TITLES = {"medusa": "Medusa", "eagle3": "EAGLE-3"}
HEADS = pytest.mark.parametrize("head", SHAPES)


def made(world, head, objective=DPACE, width=WIDTH):
    shape = DrafterShape(head=head, block_size=width, **SHAPES[head])
    return Student(new_drafter(world.target, shape), world.target, objective)


def randomised(student):
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in student.drafter.parameters():
            weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
    return student


def text_of(world, drafter, row=1):
    ids = torch.tensor([world.sequences[row].ids[: world.sequences[row].start]])
    given = {"max_new_tokens": NEW, "do_sample": False, "runtime": "eager", "return_dict_in_generate": True}
    return td.generate(world.target, drafter, ids, **given)


@torch.no_grad()
def drafts_are_those_of_the_engine(world, head):
    """With the engine's drafts as the text behind an anchor, the trained rows say the same drafts."""
    student = randomised(made(world, head)).eval()
    batch = plan_fit(student, world.cached(), options(batch_size=2)).step_batches(0)[0]
    engine = td.compile(world.target, student.drafter, runtime="eager", max_length=64, batch_size=1)
    params = engine.runtime.refresh(engine.tensors())
    for number in (0, 3, 7):
        anchor = int(batch.anchors[0, number])
        ids = batch.ids[:1, :anchor]
        state = engine.start(ids, torch.ones_like(ids), max_new_tokens=8, eos_token_id=None, do_sample=False)
        assert int(state.anchor[0]) == batch.ids[0, anchor]
        drafts = engine.pair.run(draft, params, state)[0].tokens[0]
        said = batch.ids.clone()
        said[0, anchor + 1 : anchor + WIDTH] = drafts
        given = student.drafter, dataclasses.replace(batch, ids=said), student.embedding, WIDTH - 1
        hidden = student.kind.states(*given)
        assert hidden.shape == (2, batch.anchors.shape[1], WIDTH - 1, student.embedding.shape[1])
        rows = student.drafter.logits(hidden, world.target.lm_head)[0, number].argmax(-1)
        assert drafts.tolist() == rows.tolist()


@HEADS
def test_what_it_learns_from_is_what_it_drafts_from(world, head):
    drafts_are_those_of_the_engine(world, head)


@HEADS
def test_steps_agree_with_xla_and_reach_every_weight(world, head):
    chosen = options(batch_size=3, anchors=4, clip=0.05, sampled_vocabulary=20, learning_rate=1e-3)
    AcceleratorState._reset_state(reset_partial_state=True)
    one, other = (randomised(made(world, head, Objective(rows_per_chunk=7), 3)) for _ in range(2))
    schedule = plan_fit(one, world.cached(), chosen)
    both = [TorchTrainer(one, schedule, Accelerator(cpu=True))]
    both.append(XlaTrainer(other, schedule, data_mesh(jax.devices()[:1])))
    for ours, theirs in zip(*(take_steps(each, schedule, 2) for each in both), strict=True):
        for name in ("loss", "norm", "acceptance_length"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4), name
    assert max(gap(*both)) < 1e-4
    for each in both:
        assert all(value.any() for value in each.checkpoint(2, 0.0).first.values())
    assert flat(both[0], "weights").isfinite().all()


CHOSEN = options(epochs=4, batch_size=4, sampled_vocabulary=16, evaluate_minutes=0.0)


@HEADS
def test_a_stopped_fit_goes_on_as_if_never_stopped(world, tmp_path, monkeypatch, head):
    def stop():
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "draw_log", lambda directory: None)
    fit(made(world, head), world.cached(), tmp_path / "whole", CHOSEN)
    before_step(monkeypatch, 5, stop)
    often = dataclasses.replace(CHOSEN, checkpoint_minutes=0.0)
    with pytest.raises(KeyboardInterrupt):
        fit(made(world, head), world.cached(), tmp_path / "cut", often)
    monkeypatch.undo()
    monkeypatch.setattr(loop, "draw_log", lambda directory: None)
    assert load_latest(tmp_path / "cut" / "checkpoints").step == 5
    fit(made(world, head), world.cached(), tmp_path / "cut", often)
    assert_same(tmp_path / "cut", tmp_path / "whole")
    settings = json.loads((tmp_path / "cut" / "stage.json").read_text())
    assert settings["head"] == head and settings["width"] == WIDTH


@HEADS
def test_it_learns_comes_back_and_decodes_to_the_targets_text(world, tmp_path, head):
    trained = made(world, head)
    fit(trained, world.cached(), tmp_path, options(epochs=120, log_steps=40, learning_rate=1e-2))
    lines = [line for line in read_log(tmp_path / "log.jsonl") if line["kind"] == "train"]
    assert lines[-1]["loss"] < 0.3 * lines[0]["loss"] and lines[-1]["acceptance_length"] > 4
    data = describe(world.answers, []) | {TEMPLATE: [{"terse": True}]}
    export_drafter(trained.drafter, tmp_path / "drafter", world.target, tmp_path, torch.float32, data=data)
    drafter = td.load_drafter(tmp_path / "drafter", world.target).eval()
    assert type(drafter) is type(trained.drafter) and trained_template(drafter) == [{"terse": True}]
    assert trained_template(trained.drafter) == []
    written = trained.drafter.state_dict()
    assert all(torch.equal(weight, written[name]) for name, weight in drafter.state_dict().items())
    card = (tmp_path / "drafter" / "README.md").read_text()
    assert f"`--head {head}`" in card and f"# {TITLES[head]} drafter" in card
    assert f"Drafts {WIDTH - 1} tokens" in card
    out = text_of(world, drafter)
    assert torch.equal(out.sequences, text_of(world, None).sequences)
    assert out.stats.mean_acceptance_length > 2.5
    with refuses(ValueError, "shuffled=True", "of DFlash drafters"):
        evaluate(world.target, drafter, world.tokenizer, [], EvaluateOptions(shuffled=True))


@HEADS
def test_the_commands_fit_go_on_from_it_and_judge_it(world, tmp_path, capsys, head):
    shape = [f"--{name}={str(value).strip('()')}" for name, value in SHAPES[head].items()]
    common = ["--features", world.features, "--batch-size", 4, "--held-out", 1, "--anchors", 8]
    begun = [*common, "--head", head, "--block-size", WIDTH, *shape, "--epochs", 80]
    assert train(world, "fit", "--out", tmp_path / "fit", *begun, "--learning-rate", 1e-2) == 0
    first = tmp_path / "fit/drafter"
    more = [*common, "--head", head, "--start-from", first, "--epochs", 1]
    assert train(world, "fit", "--out", tmp_path / "more", *more, "--learning-rate", 1e-6) == 0
    old, new = (
        td.load_drafter(path / "drafter").state_dict() for path in (tmp_path / "fit", tmp_path / "more")
    )
    assert all((old[name].float() - new[name].float()).abs().max() < 1e-2 for name in old)
    prompts = world.write_prompts(tmp_path / "texts.jsonl")
    judged = [
        "--prompts",
        prompts,
        "--json",
        tmp_path / "f.json",
        "--runtime",
        "eager",
        "--max-new-tokens",
        8,
    ]
    assert train(world, "evaluate", "--drafter", tmp_path / "more/drafter", *judged, "--card") == 0
    assert json.loads((tmp_path / "f.json").read_text())["sets"]["texts"]["acceptance_length"] > 1.2
    capsys.readouterr()
    assert (
        train(world, "fit", "--out", tmp_path / "no", *common, "--head", "dflash2", "--start-from", first)
        == 2
    )
    assert f"head='dflash2': the drafter's is '{head}'" in capsys.readouterr().err


def test_a_weight_that_no_loss_reaches_is_an_error_by_name(world, tmp_path, monkeypatch):
    def unnormed(self, features, heads):
        return torch.stack([self._head(at)(features) for at in range(heads)], dim=-2)

    monkeypatch.setattr(MedusaDraftModel, "states", unnormed)
    monkeypatch.setattr(MedusaDraftModel, "logits", lambda self, hidden, head: head(self.norm(hidden)))
    with refuses(ValueError, "norm.weight of the drafter gets no gradient"):
        fit(made(world, "medusa"), world.cached(), tmp_path, options())
    assert not (tmp_path / "checkpoints").exists()
    monkeypatch.undo()
    narrow = Student(made(world, "medusa").drafter, world.target, DPACE, width=3)
    with refuses(ValueError, "medusa_head.2.0.linear.weight of the drafter gets no gradient"):
        fit(narrow, world.cached(), tmp_path, options())


def feature_of_the_anchor(self, drafter, batch, embedding, drafts):
    features = gather_rows(batch.features, batch.anchors.clamp(min=0)[..., None])[:, :, 0]
    return drafter.states(features, drafts)


def test_the_anchors_own_feature_would_show(world, monkeypatch):
    monkeypatch.setattr(Medusa, "states", feature_of_the_anchor)
    with pytest.raises(AssertionError, match="At index"):
        drafts_are_those_of_the_engine(world, "medusa")


def test_parts_that_a_kind_lacks_are_refused(world):
    for fields, words in (
        ({"mask_token_id": 3}, ["mask_token_id=3 with head='medusa'", "leave it out"]),
        ({"sliding_window": 8}, ["sliding_window=8 with head='medusa'"]),
        ({"markov_rank": 8}, ["markov_rank=8 with head='medusa'"]),
        ({"layers": 2, "head": "eagle3"}, ["layers=2 with head='eagle3'"]),
    ):
        with refuses(ValueError, *words):
            DrafterShape(**{"head": "medusa"} | fields)
    medusa = made(world, "medusa").drafter
    with refuses(ValueError, "head='medusa': the drafter's is 'dflash'"):
        with_head(new_drafter(world.target, DrafterShape(mask_token_id=257, layers=1)), "medusa")
    own = MedusaDraftModel(type(medusa.config)(**medusa.config.to_dict() | {"original_lm_head": False}))
    with refuses(ValueError, "original_lm_head=False of the drafter", "the target's head"):
        Student(own, world.target, DPACE)
    with refuses(TypeError, "not the config of a drafter"):
        kind_of(world.target.config)
    with refuses(ValueError, "target_layer_ids=[0, 2]", "Medusa taps one layer"):
        new_drafter(world.target, DrafterShape(head="medusa", taps=Layers((0, 2))))
