"""XLA takes torch's training steps, on one device or several, and fits change runtimes."""

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from support import ROOT
from support.authors import SECOND
from support.tiny import VOCAB, make_pair, randomise

from jax_bridge._torchax import call_torch
from jax_bridge.arrays import to_jax, to_torch
from jax_bridge.compilations import compilations
from jax_bridge.ops import chunked_jax
from jax_bridge.programs.lower import tracing
from jax_bridge.train.step import optimizer
from jax_bridge.train.trainer import XlaTrainer, check_mesh, data_mesh, fit_xla
from torch_dflash.ops.control_flow import chunked
from torch_dflash.storage.files import StageError
from torch_dflash.train.features.extract import Sequence
from torch_dflash.train.fit.log import read_log
from torch_dflash.train.fit.loop import measures, plan_fit
from torch_dflash.train.fit.options import FitOptions, Objective
from torch_dflash.train.fit.student import Student
from torch_dflash.train.fit.torch_trainer import TorchTrainer, fit

# AdamW divides a gradient by its own size, so for a gradient of rounding alone the step's direction is
# rounding too. This clip brings such gradients below its eps.
OPTIONS = FitOptions(
    epochs=2, batch_size=2, anchors=4, learning_rate=1e-3, warmup=0.3, held_out=2, log_steps=1, clip=0.05
)


class RandomSequences:
    """Random ids and features of 20 to 50 tokens and of ``longest``, at the taps of drafter and loss."""

    taps, dtype = (0, 2, 3), torch.float32

    def __init__(self, longest=53, count=11):
        self.target = make_student().target
        generator = torch.Generator().manual_seed(5)
        lengths = [longest, *(20 + 3 * number for number in range(1, count))]
        draw = lambda length: torch.randint(0, VOCAB - 2, (length,), generator=generator).tolist()  # noqa: E731
        self.rows = [Sequence(draw(length), 6) for length in lengths]
        self.states = [torch.randn(length, 96, generator=generator) for length in lengths]

    def __len__(self):
        return len(self.rows)

    def sequence(self, index):
        return self.rows[index]

    def features(self, indices):
        return [self.states[index] for index in indices]


@pytest.fixture(autouse=True)
def forgotten():
    # accelerate holds that a process has one precision and one kind of device.
    AcceleratorState._reset_state(reset_partial_state=True)


def make_student(objective=None, seed=3, **overrides):
    target, drafter = make_pair("qwen3", seed=seed, num_hidden_layers=1, **overrides)
    if overrides:
        randomise(drafter, seed)  # its further parts begin as nothing
    return Student(drafter, target, objective or Objective(rows_per_chunk=7))


def trainers(objective=None, options=OPTIONS, longest=53, **overrides):
    """(torch trainer, XLA trainer, schedule) of students with the same weights."""
    first, second = make_student(objective, **overrides), make_student(objective, **overrides)
    schedule = plan_fit(first, RandomSequences(longest), options)
    AcceleratorState._reset_state(reset_partial_state=True)
    one = TorchTrainer(first, schedule, Accelerator(cpu=True, mixed_precision=options.mixed_precision))
    return one, XlaTrainer(second, schedule, data_mesh(jax.devices()[:1])), schedule


def take_steps(trainer, schedule, count):
    found = []
    for step in range(count):
        rate = schedule.options.rate(step, schedule.steps)
        losses, norm = trainer.read(trainer.step(step, rate, schedule.step_batches(step)))
        found.append(measures(losses) | {"norm": norm})
    return found


def gap(one, other):
    """The largest difference of any weight, and of any moment as a share of the largest."""
    worst = []
    for group in ("weights", "first", "second"):
        left, right = (flat(trainer, group) for trainer in (one, other))
        scale = 1 if group == "weights" else left.abs().max()
        worst.append(float((left - right).abs().max() / scale))
    return worst


def flat(trainer, group):
    named = getattr(trainer.checkpoint(0, 0.0), group)
    return torch.cat([value.detach().flatten() for _, value in sorted(named.items())])


@pytest.mark.parametrize("rows", [12, 13, 3])
def test_chunked_lowers_to_the_same_values_and_gradients(rows):
    generator = torch.Generator().manual_seed(0)
    given, weight = torch.randn(rows, 5, generator=generator), torch.randn(5, 9, generator=generator)
    labels = torch.randint(0, 9, (rows,), generator=generator, dtype=torch.int32)

    def run(given, weight, labels):
        def step(given, labels):
            scores = torch.log_softmax(given @ weight, dim=-1)
            return scores.gather(1, labels[:, None].long())[:, 0], scores.argmax(-1) == labels

        return chunked(step, 4, given, labels)

    scores, hits = run(given.requires_grad_(), weight, labels)
    gradient = torch.autograd.grad((scores * scores).sum(), given)[0]
    arrays = [jax.numpy.array(tensor.detach().numpy()) for tensor in (given, weight, labels)]

    def total(given):
        scores, hits = call_torch(run, given, *arrays[1:])
        return (scores * scores).sum(), (scores, hits)

    with tracing("highest"):
        lowered, (values, flags) = jax.grad(total, has_aux=True)(arrays[0])
    for ours, theirs in ((values, scores), (flags, hits), (lowered, gradient)):
        torch.testing.assert_close(to_torch(ours), theirs.detach())


def test_chunked_holds_no_more_than_a_chunk():
    def step(rows):
        return ((rows[:, None] * jax.numpy.arange(1000.0)).sum(-1),)

    given = jax.numpy.ones(64)
    program = jax.jit(lambda rows: chunked_jax(step, 8, rows)[0]).lower(given).as_text()
    assert "8x1000" in program and "64x1000" not in program


@pytest.mark.parametrize("clip", [0.5, 100.0])
def test_the_optimizer_is_that_of_torch(clip):
    generator = torch.Generator().manual_seed(0)
    weight, count = torch.nn.Parameter(torch.randn(50, generator=generator)), 4
    theirs = torch.optim.AdamW([weight], lr=1.0, weight_decay=0.1)
    options = FitOptions(clip=clip, weight_decay=0.1)
    ours = to_jax(weight.detach())
    state = optimizer(options, 0.0).init(ours)
    for step in range(count):
        weight.grad = torch.randn(50, generator=generator) * 2**step
        gradient, rate = to_jax(weight.grad), options.rate(step, count) * 100
        theirs.param_groups[0]["lr"] = rate
        torch.nn.utils.clip_grad_norm_([weight], clip)
        theirs.step()
        change, state = optimizer(options, rate).update(gradient, state, ours)
        ours = ours + change
    torch.testing.assert_close(to_torch(ours), weight.detach())


CASES = {
    "decay": ({}, {}),
    "dpace": ({"weighting": "dpace"}, {}),
    "kl": ({"kl": 0.5}, {"accumulation": 2}),
    "dpace, kl, sampled": ({"weighting": "dpace", "kl": 0.5}, {"sampled_vocabulary": 9}),
    "dflash2": ({"weighting": "dpace", "ce": 0.1, "tv": 0.9, "selector": 0.5}, {"sampled_vocabulary": 9}),
    "dspark": ({"weighting": "dpace", "ce": 0.1, "tv": 0.9}, {"sampled_vocabulary": 9}),
}
PARTS = {"dflash2": SECOND, "dspark": {"markov_rank": 5, "sample_from_anchor": True}}


@pytest.mark.parametrize("case", CASES)
def test_steps_agree_with_torch(case):
    with jax.enable_x64(case == "dpace, kl, sampled"):  # a possible setting of a process
        check_steps(case)


def check_steps(case):
    objective, options = CASES[case]
    objective = Objective(rows_per_chunk=7, **objective)
    # With accumulation a step has batches of two widths.
    longest = 70 if "accumulation" in options else 53
    parts = PARTS.get(case, {})
    one, other, schedule = trainers(objective, dataclasses.replace(OPTIONS, **options), longest, **parts)
    for count in (1, schedule.steps):
        for ours, theirs in zip(*(take_steps(each, schedule, count) for each in (one, other)), strict=True):
            for name in ("loss", "norm", "acceptance_length"):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-4), name
            assert ours["blocks"] == theirs["blocks"] and ours.get("recall") == theirs.get("recall")
            assert ours["cross_entropy"] == pytest.approx(theirs["cross_entropy"], abs=2e-3)
        assert max(gap(one, other)) < 1e-4, count
    if case == "decay":
        batch = schedule.held_out_batches()[0]
        losses = [measures(each.losses(batch))["loss"] for each in (one, other)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_bfloat16_products_are_those_of_autocast():
    one, other, schedule = trainers(options=dataclasses.replace(OPTIONS, mixed_precision="bf16"))
    exact, _, _ = trainers()
    one_norm, other_norm, _ = (take_steps(each, schedule, 1)[0]["norm"] for each in (one, other, exact))
    assert other_norm == pytest.approx(one_norm, rel=2e-2)
    torchs, ours, plain = (flat(each, "first") for each in (one, other, exact))
    rounding = (torchs - plain).norm()
    assert rounding / 4 < (ours - plain).norm() < 2 * rounding  # it rounds, about as much as torch does
    assert (ours - torchs).norm() < rounding
    assert flat(other, "weights").dtype == torch.float32


def test_weights_are_arguments_and_donated_ones_are_reused():
    _, trainer, schedule = trainers()
    batches = [schedule.step_batches(step) for step in range(schedule.steps)]
    assert min(len(batch.ids) for [batch] in batches) == 1  # a last batch that is not full
    get, asked = trainer.programs.get, []
    trainer.programs.get = lambda *args, **donate: asked.append((args, get(*args, **donate))) or asked[-1][1]
    before = measures(trainer.read(trainer.step(0, 0.0, batches[0]))[0])
    (_, step, args), program = asked[0]
    assert program.memory_analysis().alias_size_in_bytes == sum(
        leaf.nbytes for leaf in jax.tree.leaves(args[:2])
    )
    args = (trainer.params, trainer.state, *args[2:])
    with tracing("highest"):
        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(*args).as_text()
    constants = re.findall(r"stablehlo.constant dense<[^>]*> : tensor<([^>]*)>", lowered)
    small = re.compile(
        r"(\d{1,2}x)?(f32|i32|i1)"
    )  # scalars, and positions of a block in older versions of JAX
    assert len(constants) > 100 and all(small.fullmatch(one) for one in constants)
    compiled = compilations()
    trainer.frozen |= trainer._shared({"embedding": make_student(seed=8).embedding})
    after = measures(trainer.read(trainer.step(0, 0.0, batches[0]))[0])
    for batch in batches:
        trainer.step(0, 1e-3, batch)
    assert compilations() == compiled and len({id(program) for _, program in asked}) == 1
    assert abs(before["loss"] - after["loss"]) > 0.01


TWO_DEVICES = """
import dataclasses, jax, torch, test_train_xla as tests
from jax_bridge.train.trainer import XlaTrainer, data_mesh
options = dataclasses.replace(tests.OPTIONS, batch_size=4, sampled_vocabulary=9)
found, made = [], []
for devices in (1, 2):
    student = tests.make_student()
    schedule = tests.plan_fit(student, tests.RandomSequences(), options)
    made.append(XlaTrainer(student, schedule, data_mesh(jax.devices()[:devices])))
    found.append(tests.take_steps(made[-1], schedule, 3))
made[-1].write_back()
batch = schedule.held_out_batches()[0]
with torch.no_grad():
    found[0].append(tests.measures(student(batch)))
found[1].append(tests.measures(made[1].losses(batch)))
assert len(jax.devices()) == 2 and len(made[1].params["fc.weight"].devices()) == 2
print(*tests.gap(*made), *(abs(a["loss"] - b["loss"]) for a, b in zip(*found)))
"""


def test_two_devices_take_the_step_of_one():
    environment = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests/train"))),
    }
    options = {"capture_output": True, "text": True, "cwd": ROOT, "env": os.environ | environment}
    options |= {"timeout": 600}
    done = subprocess.run([sys.executable, "-W", "error", "-c", TWO_DEVICES], **options)
    assert done.returncode == 0, done.stderr[-4000:]
    gaps = [float(word) for word in done.stdout.split()]
    assert len(gaps) == 7 and max(gaps) < 1e-5, gaps


class Stopping(TorchTrainer):  # asks its process to stop in step 3
    def step(self, step, *args):
        if step == 2:
            signal.raise_signal(signal.SIGINT)
        return super().step(step, *args)


@pytest.mark.parametrize("parts", [{}, pytest.param(SECOND, marks=pytest.mark.heavy)], ids=["v1", "dflash2"])
def test_a_fit_goes_on_with_the_other_runtime(parts, tmp_path, monkeypatch):
    sequences = RandomSequences()
    options = dataclasses.replace(OPTIONS, sampled_vocabulary=9, checkpoint_minutes=0.0)
    monkeypatch.setattr("torch_dflash.train.fit.loop.draw_log", lambda directory: None)  # at every step
    whole, other, back = (make_student(**parts) for _ in range(3))
    fit(whole, sequences, tmp_path / "whole", options)
    with monkeypatch.context() as patch:
        patch.setattr("torch_dflash.train.fit.torch_trainer.TorchTrainer", Stopping)
        with pytest.raises(StageError, match="stopped after step 3 of 10"):
            fit(make_student(**parts), sequences, tmp_path / "parts", options)
    fit_xla(other, sequences, tmp_path / "parts", options, data_mesh(jax.devices()[:1]))
    # And back: from XLA's checkpoint after step 9, with torch.
    shutil.copytree(tmp_path / "parts", tmp_path / "back")
    (tmp_path / "back" / "checkpoints" / "step-00000010.safetensors").unlink()
    fit(back, sequences, tmp_path / "back", options)
    expected = read_log(tmp_path / "whole" / "log.jsonl")
    for ended, name in ((other, "parts"), (back, "back")):
        weights = ended.drafter.state_dict()
        for key, value in whole.drafter.state_dict().items():
            assert (weights[key] - value).abs().max() < 1e-4, (name, key)
        lines = read_log(tmp_path / name / "log.jsonl")
        lines = [line for line in lines if line["kind"] == "train" or line["step"] == 10]
        assert [line["step"] for line in lines] == [*range(1, 11), 10]
        for line, other in zip(lines, expected, strict=True):
            assert line.keys() == other.keys()
            assert line["loss"] == pytest.approx(other["loss"], rel=1e-4)


def test_a_mesh_that_does_not_fit_is_refused():
    mesh = data_mesh(jax.devices()[:1] * 2)
    with pytest.raises(
        ValueError, match="batch_size=3 does not divide over 2 devices; choose a multiple of 2"
    ):
        fit_xla(make_student(), RandomSequences(), Path("unused"), FitOptions(batch_size=3), mesh)
    assert not Path("unused").exists()
    other = jax.sharding.Mesh(jax.devices()[:1], ("model",))
    with pytest.raises(ValueError, match="must have the one axis 'data'"):
        check_mesh(other, 2)
