"""A fit learns its data, resumes as if never stopped, and names the reason if it cannot."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from support.refusals import refuses
from support.scripted import own_text, pad
from support.trained import NEW, WIDTH, options, shape, student

import torch_dflash as td
from torch_dflash.storage.files import StageError
from torch_dflash.train.fit import loop
from torch_dflash.train.fit.architecture import new_drafter
from torch_dflash.train.fit.checkpoint import load_latest
from torch_dflash.train.fit.log import TrainLog, read_log
from torch_dflash.train.fit.loop import Loop
from torch_dflash.train.fit.options import FitOptions, Objective
from torch_dflash.train.fit.schedule import Schedule
from torch_dflash.train.fit.student import Student
from torch_dflash.train.fit.torch_trainer import TorchTrainer, fit
from torch_dflash.train.options import Layers

# All parts that could depend on the step of a stop: D-PACE, sampled ids, two batches an epoch.
RESUMED = options(epochs=4, batch_size=4, sampled_vocabulary=16, evaluate_minutes=0.0)
STEPS = 8
DPACE = Objective(weighting="dpace")


def go(world, directory, chosen=RESUMED, objective=DPACE, **changes):
    trained = student(world, objective, **changes)
    fit(trained, world.cached(), directory, chosen)
    return trained.drafter


def shown(directory: Path) -> list[dict]:
    lines = read_log(directory / "log.jsonl")
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def assert_same(directory: Path, other: Path) -> None:
    assert shown(directory) == shown(other)
    one, two = (load_latest(path / "checkpoints") for path in (directory, other))
    assert one.step == two.step
    for group in ("weights", "first", "second"):
        mine, theirs = getattr(one, group), getattr(two, group)
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    go(world, directory)
    return directory


def before_step(monkeypatch, number: int, do) -> None:
    """Runs ``do`` before the 0-based step ``number``."""
    step = TorchTrainer.step

    def stepped(self, at, rate, batches):
        if at == number:
            do()
        return step(self, at, rate, batches)

    monkeypatch.setattr(TorchTrainer, "step", stepped)


def test_eight_answers_are_learnt_until_every_draft_is_accepted(world, overfit):
    first, last = [[line for line in overfit.log if line["kind"] == "train"][at] for at in (0, -1)]
    assert last["loss"] < 0.05 < 1 < first["loss"]
    assert max(last["cross_entropy"]) < 0.05 and set(last["accuracy"]) == {1.0}
    options = {"max_new_tokens": NEW, "runtime": "eager", "do_sample": False, "return_dict_in_generate": True}
    out = td.generate(world.target, overfit.drafter, *pad(overfit.trained), **options)
    assert len(overfit.trained) == 8
    width = max(map(len, overfit.trained))
    for row, prompt in enumerate(overfit.trained):
        rounds = out.stats.acceptance_lengths[row]
        text = own_text(world.target, prompt, NEW, world.target.generation_config.eos_token_id)
        assert out.sequences[row, width : width + 1 + sum(rounds)].tolist() == text
        assert rounds[:-1] == [WIDTH] * ((len(text) - 2) // WIDTH), rounds
    assert out.stats.mean_acceptance_length > 5.5


def test_a_fit_is_the_same_each_time_and_ends_with_its_files(world, whole, tmp_path):
    go(world, tmp_path)
    assert_same(tmp_path, whole)
    lines = shown(whole)
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, STEPS + 1))
    assert [line["kind"] for line in lines] == ["train", "held_out"] * STEPS
    assert (whole / "training.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    from matplotlib.image import imread

    image = imread(whole / "training.png")
    assert image.shape[:2] == (480, 1200) and image[..., :3].std() > 0.01
    assert list(whole.rglob(".*.part")) == []


def test_a_finished_fit_is_left_as_it_is(world, whole, monkeypatch):
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    before_step(monkeypatch, 0, lambda: pytest.fail("a step ran"))
    drafter = go(world, whole)
    assert before == {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    kept = load_latest(whole / "checkpoints").weights
    assert all(torch.equal(kept[name], value) for name, value in drafter.named_parameters())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_fit_goes_on_as_if_nothing_had_been(world, whole, tmp_path, monkeypatch, number):
    before_step(monkeypatch, 2, lambda: os.kill(os.getpid(), number))
    handlers = [signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGINT)]
    with refuses(StageError, "stopped after step 3 of 8", "run the same command again"):
        go(world, tmp_path)
    assert handlers == [signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGINT)]
    assert load_latest(tmp_path / "checkpoints").step == 3
    monkeypatch.undo()
    go(world, tmp_path)
    assert_same(tmp_path, whole)


def test_a_request_to_stop_during_validation_is_saved_too(world, tmp_path, monkeypatch):
    validate, asked = Loop._validate, []

    def validating(self):
        if self.done == 2 and not asked:
            asked.append(os.kill(os.getpid(), signal.SIGTERM))
        return validate(self)

    monkeypatch.setattr(Loop, "_validate", validating)
    with refuses(StageError, "stopped after step 3 of 8"):
        go(world, tmp_path)
    assert load_latest(tmp_path / "checkpoints").step == 3


KILLED = """
import os, pathlib, signal, sys
import torch
torch.set_num_threads(1)
from torch_dflash.cli import main
from torch_dflash.train.fit.torch_trainer import TorchTrainer
from torch_dflash.train.fit.loop import Loop
save, step = Loop._save, TorchTrainer.step
Loop._save = lambda self: save(self) if self.done == 2 else None
def stepped(self, at, rate, batches):
    if at == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, at, rate, batches)
TorchTrainer.step = stepped
main(sys.argv[1:])
"""


def flags(world, directory: Path, chosen: FitOptions, *more: str) -> list[str]:
    line = ["train", "fit", "--target", world.path, "--features", str(world.features), "--out"]
    line += [str(directory)]
    for part in (chosen, shape(), DPACE):
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if value is not None and value is not False:
                value = ",".join(map(str, value)) if isinstance(value, Layers) else value
                line += ["--" + field.name.replace("_", "-"), str(value)]
    return [*line, *more]


def test_a_killed_fit_goes_on_from_its_checkpoint(world, whole, tmp_path):
    chosen = dataclasses.replace(RESUMED, checkpoint_minutes=0.0)
    line = flags(world, tmp_path, chosen)
    run = subprocess.run([sys.executable, "-c", KILLED, *line], capture_output=True, text=True)
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert load_latest(tmp_path / "checkpoints").step == 2
    assert shown(tmp_path) == shown(whole)[:10]  # steps 3 to 5 will be taken again
    go(world, tmp_path, chosen)
    assert_same(tmp_path, whole)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_checkpoints_and_validations_go_by_the_clock(world, tmp_path, monkeypatch):
    clock, saved = [0.0], []
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(loop, "save_checkpoint", lambda _, checkpoint: saved.append(checkpoint.step))
    for number in range(STEPS):
        before_step(monkeypatch, number, lambda: clock.__setitem__(0, clock[0] + 60))
    go(world, tmp_path, dataclasses.replace(RESUMED, checkpoint_minutes=2.5, evaluate_minutes=3.5))
    assert saved == [3, 6, 8]
    assert [line["step"] for line in shown(tmp_path) if line["kind"] == "held_out"] == [4, 8]
    assert [line["seconds"] for line in read_log(tmp_path / "log.jsonl") if line["kind"] == "train"] == [
        60.0 * step for step in range(1, STEPS + 1)
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("log_steps", [1, 10])
def test_damaged_features_end_the_fit_with_the_last_checkpoint_kept(
    world, tmp_path, monkeypatch, value, log_steps
):
    made = Schedule.step_batches

    def poisoned(self, step, process=0):
        batches = made(self, step, process)
        if step == 3:
            batches[0].features[:, :9] = value
        return batches

    monkeypatch.setattr(Schedule, "step_batches", poisoned)
    chosen = options(batch_size=4, checkpoint_minutes=0.0, log_steps=log_steps)
    with refuses(StageError, "step 4", "diverged", "kept", "Lower", "new directory", "features"):
        go(world, tmp_path, chosen)
    kept = load_latest(tmp_path / "checkpoints")
    assert kept.step == 3 and all(weight.isfinite().all() for weight in kept.weights.values())
    monkeypatch.undo()
    go(world, tmp_path, chosen)
    assert load_latest(tmp_path / "checkpoints").step == STEPS


@pytest.mark.parametrize("content", [None, b""])
def test_a_damaged_checkpoint_is_named_and_the_one_before_goes_on(world, whole, tmp_path, content):
    go(world, tmp_path, dataclasses.replace(RESUMED, checkpoint_minutes=0.0))
    paths = sorted((tmp_path / "checkpoints").iterdir())
    assert [path.name for path in paths] == ["step-00000007.safetensors", "step-00000008.safetensors"]
    paths[1].write_bytes(paths[1].read_bytes()[:-50] if content is None else content)
    with refuses(StageError, str(paths[1]), "is damaged", "delete it", "the one before", paths[0].name):
        go(world, tmp_path, dataclasses.replace(RESUMED, checkpoint_minutes=0.0))
    paths[1].unlink()
    go(world, tmp_path, dataclasses.replace(RESUMED, checkpoint_minutes=0.0))
    assert_same(tmp_path, whole)
    paths[0].unlink()
    paths[1].write_bytes(b"x")
    with refuses(StageError, "from the beginning"):
        load_latest(tmp_path / "checkpoints")


def test_other_settings_and_data_that_do_not_fit_are_refused(world, whole, tmp_path):
    with refuses(StageError, "learning_rate=0.005, now learning_rate=0.0001", "another directory"):
        go(world, whole, dataclasses.replace(RESUMED, learning_rate=1e-4))
    with refuses(StageError, "weighting='dpace', now weighting='decay'"):
        go(world, whole, objective=Objective())
    with refuses(ValueError, "target_layer_ids=[1, 2]", "layers [1]", "[0, 2, 3]"):
        go(world, tmp_path, taps=Layers((1, 2)))
    with refuses(ValueError, "held_out=9", "9 sequences"):
        go(world, tmp_path, options(held_out=9))
    with refuses(ValueError, "batch_size=8 x accumulation=2", "8 training sequences"):
        go(world, tmp_path, options(accumulation=2))
    with refuses(ValueError, "mask_token_id", "missing"):
        go(world, tmp_path, mask_token_id=None)
    assert not list(tmp_path.iterdir())


def first_step(directory: Path) -> tuple[dict, dict]:
    """Gradient of the first step (its moment), and its line in the log."""
    kept = load_latest(directory / "checkpoints")
    assert kept.step == 1
    return kept.first, shown(directory)[0]


def assert_same_step(directory: Path, other: Path) -> None:
    (mine, line), (theirs, wanted) = first_step(directory), first_step(other)
    assert max(float((mine[name] - theirs[name]).abs().max()) for name in mine) < 1e-6
    assert max(float(value.abs().max()) for value in mine.values()) > 1e-3
    assert line["blocks"] == wanted["blocks"] > 8
    for name in ("loss", "gradient_norm", "acceptance_length"):
        assert math.isclose(line[name], wanted[name], rel_tol=1e-5), name


@pytest.mark.parametrize("batch_size", [4, 2])
def test_micro_batches_make_the_step_of_the_whole_batch(world, tmp_path, batch_size):
    for objective in (Objective(), DPACE):
        name = objective.weighting
        go(world, tmp_path / f"{name}-whole", options(epochs=1, clip=1e9), objective)
        cut = options(epochs=1, clip=1e9, batch_size=batch_size, accumulation=8 // batch_size)
        go(world, tmp_path / f"{name}-cut", cut, objective)
        assert_same_step(tmp_path / f"{name}-cut", tmp_path / f"{name}-whole")


@pytest.mark.slow
def test_two_processes_take_the_step_of_one_with_twice_the_batch(world, tmp_path):
    go(world, tmp_path / "one", options(epochs=1))
    script = tmp_path / "run.py"
    script.write_text(
        "import sys, torch\ntorch.set_num_threads(1)\nfrom torch_dflash.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    # `accelerate launch --cpu` starts several processes only through MPI.
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    line = flags(world, tmp_path / "two", options(epochs=1, batch_size=4))
    given = {"capture_output": True, "text": True, "env": os.environ | {"ACCELERATE_USE_CPU": "true"}}
    run = subprocess.run([*launch, str(script), *line], **given)
    assert run.returncode == 0, run.stderr[-3000:]
    assert_same_step(tmp_path / "two", tmp_path / "one")


def test_the_learning_rate_rises_and_falls_as_a_cosine():
    chosen = FitOptions(learning_rate=1.0, warmup=0.1, final_rate=0.2)
    rates = [chosen.rate(step, 100) for step in range(100)]
    assert rates[:10] == [pytest.approx((step + 1) / 10) for step in range(10)]
    assert rates[10] == 1.0 and rates[55] == pytest.approx(0.6)
    assert rates[99] == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * 89 / 90)))
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert FitOptions(warmup=0.0).rate(0, 5) == FitOptions().learning_rate  # one step of warmup at least
    assert FitOptions(warmup=1.0, learning_rate=1.0).rate(4, 5) == 1.0


def test_bad_options_are_refused_by_name():
    for changes, words in (
        ({"epochs": 0}, ["epochs=0", "at least 1"]),
        ({"accumulation": True}, ["accumulation=True"]),
        ({"held_out": 0}, ["held_out=0"]),
        ({"sampled_vocabulary": 0}, ["sampled_vocabulary=0"]),
        ({"learning_rate": -1.0}, ["learning_rate=-1.0", "above 0"]),
        ({"learning_rate": 0.0}, ["learning_rate=0.0", "above 0"]),
        ({"learning_rate": 2.0}, ["learning_rate=2.0", "between 0 and 1"]),
        ({"warmup": math.nan}, ["warmup=nan"]),
        ({"clip": -0.1}, ["clip=-0.1"]),
        ({"clip": 0.0}, ["clip=0.0"]),
        ({"clip": math.nan}, ["clip=nan"]),
        ({"mixed_precision": "fp16"}, ["mixed_precision='fp16'", "'bf16'"]),
    ):
        with refuses(ValueError, *words):
            FitOptions(**changes)


def test_lines_after_the_checkpoint_and_a_cut_one_are_dropped(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 6)) + '{"step": 6, "lo')
    assert [line["step"] for line in read_log(path)] == [1, 2, 3, 4, 5]
    log = TrainLog(tmp_path, 3)
    log.write(step=4, again=True)
    assert read_log(path) == [{"step": 1}, {"step": 2}, {"step": 3}, {"step": 4, "again": True}]


def test_kl_to_the_target_falls_when_it_is_trained(world, tmp_path):
    drafter = new_drafter(world.target, shape())
    trained = Student(drafter, world.target, Objective(kl=1.0))
    without = Student(drafter, world.target, Objective())
    batch = Schedule(world.cached(), options(), (0, 2), last=3).step_batches(0)[0]

    def kl():
        with torch.no_grad():
            return float(trained(batch).loss - without(batch).loss) / int((batch.anchors >= 0).sum())

    before = kl()
    fit(trained, world.cached(), tmp_path, options(epochs=60, log_steps=10))
    assert 0 < kl() < 0.5 * before


@pytest.fixture
def another_precision():
    """accelerate keeps one precision for the whole process."""
    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()


def test_mixed_precision_learns_and_keeps_its_weights_in_float32(world, tmp_path, another_precision):
    trained = Student(
        new_drafter(world.target, shape()), world.target, DPACE, head_dtype=torch.bfloat16
    )  # fmt: skip
    fit(trained, world.cached(), tmp_path, options(epochs=30, mixed_precision="bf16"))
    losses = [line["loss"] for line in shown(tmp_path) if line["kind"] == "train"]
    assert losses[-1] < 0.8 * losses[0]
    kept = load_latest(tmp_path / "checkpoints")
    assert {value.dtype for value in (*kept.weights.values(), *kept.first.values())} == {torch.float32}
