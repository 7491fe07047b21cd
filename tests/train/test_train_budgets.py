"""Drafters of every method get one budget: `benchmarks/compare.py fit`."""

import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from support import ROOT
from support.refusals import refuses
from support.trained import MASK
from test_train_fit import before_step

import torch_dflash as td
from torch_dflash.storage.files import StageError
from torch_dflash.train.fit import loop
from torch_dflash.train.fit.torch_trainer import TorchTrainer

METHODS = ("eagle3", "medusa", "dflash2")
TOKENS = 500


def program():
    spec = importlib.util.spec_from_file_location("compare", ROOT / "benchmarks/compare.py")
    sys.modules["compare"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


compare = program()


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    monkeypatch.setattr(loop, "draw_log", lambda directory: None)


def arguments(world, out, *more):
    line = ["fit", "--target", world.path, "--features", world.features, "--tokens", TOKENS, "--out", out]
    line += ["--json", out / "fit.json", "--methods", *METHODS, "--width", 4, "--judged", 3, "--taps", "0,2"]
    line += ["--mask-token-id", MASK, "--layers", 1, "--selector-rank", 4, "--batch-size", 3, "--anchors", 5]
    line += ["--held-out", 2, "--sampled-vocabulary", 9, "--mixed-precision", "no", "--rates", 1e-3, 5e-3]
    return compare.parser().parse_args([*map(str, line), *map(str, more)])


def go(world, out, *more):
    out.mkdir(exist_ok=True)
    given = arguments(world, out, *more)
    given.run(given)
    return json.loads((out / "fit.json").read_text())


def unhurried(found):
    return {name: row | {"minutes": 0} for name, row in found["fits"].items()}


def watched(monkeypatch):
    """For each fit the steps taken, each with the texts, anchors and ids of the loss."""
    seen, step = {}, TorchTrainer.step

    def stepped(self, at, rate, batches):
        fit = seen.setdefault(
            (type(self.bare.drafter).__name__, self.bare.width, self.options.learning_rate), {}
        )
        assert at not in fit
        ids = self._vocabulary(at).ids.tolist()
        fit[at] = [ids, *([batch.ids.tolist(), batch.anchors.tolist()] for batch in batches)]
        return step(self, at, rate, batches)

    monkeypatch.setattr(TorchTrainer, "step", stepped)
    return seen


def test_every_method_sees_the_same_and_a_run_goes_on(world, tmp_path, monkeypatch):
    seen = watched(monkeypatch)
    found = go(world, tmp_path / "whole", "--block-size", "6")
    assert list(found["fits"]) == [*METHODS, "dflash-6"]
    steps, tenth = found["steps"], compare.tenth(found["steps"])
    assert len(seen) == 8 and steps > 10 > tenth
    whole = [fit for fit in seen.values() if len(fit) == steps]
    assert len(whole) == 4 and all(fit == whole[0] for fit in whole)
    for fit in seen.values():
        assert fit == {at: whole[0][at] for at in range(len(fit))} and len(fit) in (tenth, steps)
    assert found["tokens"]["asked"] == TOKENS <= found["tokens"]["seen"]
    starts = {tuple(item.ids): item.start for item in world.sequences}
    answers = [
        len(ids) - start
        for at in range(steps)
        for padded in whole[0][at][1][0]
        for ids, start in starts.items()
        if list(ids) == padded[: len(ids)] and not any(padded[len(ids) :])
    ]
    assert sum(answers) == found["tokens"]["seen"] < TOKENS + 100
    assert (
        found["converged"] is False and "ranking" not in found and found["title"].startswith("not converged")
    )
    for row in found["fits"].values():
        tried = row["rates_tried"]
        assert set(tried) == {"0.001", "0.005"} and row["checkpoints_judged"] == len(row["curve"]) >= 3
        assert row["curve"][-1]["tokens"] == found["tokens"]["seen"]
        assert row["curve"][0] | {"tokens": 0} == tried[f"{row['learning_rate']:g}"] | {"tokens": 0}
        top = max(tried.values(), key=lambda one: (one["acceptance_length"], -one["loss"]))
        assert tried[f"{row['learning_rate']:g}"] == top and row["training_flops"] > 0
    taken = [row["taps"] for row in found["fits"].values()]
    assert taken == [[0, 2], [3], [0, 2], [0, 2]] and found["provenance"]["command"]
    drafts = td.load_drafter(tmp_path / "whole/dflash-6/drafter", world.target)
    assert drafts.config.block_size == 6 and found["fits"]["dflash-6"]["drafts"] == 5

    def stop():
        raise KeyboardInterrupt

    monkeypatch.undo()
    monkeypatch.setattr(loop, "draw_log", lambda directory: None)
    before_step(monkeypatch, 6, stop)
    with pytest.raises(KeyboardInterrupt):
        go(world, tmp_path / "cut", "--methods", "medusa")
    monkeypatch.undo()
    cut = go(world, tmp_path / "cut", "--methods", "medusa")
    assert unhurried(cut)["medusa"] == unhurried(found)["medusa"]


def test_a_drafter_that_sees_one_more_epoch_is_refused(world, tmp_path, monkeypatch):
    right = compare.Fits.train

    def longer(self, name, shape, rate, mark):
        epoch = -(-(len(self.sequences) - self.options.held_out) // self.options.batch_size)
        before = self.options
        if name == "dflash":
            self.options = compare.replace(before, steps=before.steps + epoch)
            mark = self.options.steps if mark == before.steps else mark
        right(self, name, shape, rate, mark)
        self.options = before

    monkeypatch.setattr(compare.Fits, "train", longer)
    with refuses(StageError, "medusa has steps=", "dflash steps=", "budgets are not equal"):
        go(world, tmp_path, "--methods", "medusa", "dflash", "--rates", "1e-3", "--judged", "1")
    assert list(json.loads((tmp_path / "fit.json").read_text())["fits"]) == ["medusa"]


@pytest.mark.parametrize(
    ("change", "words"),
    [({"seed": 1}, "dflash seed=1"), ({"anchors": 4}, "anchors=4"), ({"sampled_vocabulary": 8}, "=8")],
)
def test_fits_that_differ_otherwise_are_refused(world, tmp_path, change, words):
    given = arguments(world, tmp_path)
    fits = compare.Fits(given, world.target, world.cached())
    shapes = compare.shapes_of(arguments(world, tmp_path, "--methods", "medusa", "dflash"))
    for name in ("medusa", "dflash"):
        fits.train(name, shapes[name], 1e-3, fits.budget.marks[0])
        fits.options = compare.replace(fits.options, **change)
    with refuses(StageError, words):
        compare.check_equal({name: fits.home(name, 1e-3) for name in ("medusa", "dflash")})


def test_the_best_checkpoint_is_exported_and_enough_tokens_give_a_ranking(world, tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "CONVERGED", TOKENS)
    measures, lengths = loop.measures, []

    def scripted(losses):
        found = measures(losses)
        if int(losses.blocks) == 10:  # the held-out anchors
            lengths.append(1.0 + len(lengths) % 7 * (3 - len(lengths) % 7))  # the second is best
            found["acceptance_length"] = lengths[-1]
        return found

    monkeypatch.setattr(loop, "measures", scripted)
    found = go(world, tmp_path, "--methods", "medusa", "--rates", "1e-3")
    row = found["fits"]["medusa"]
    curve = [point["acceptance_length"] for point in row["curve"]]
    assert curve[:3] == [1.0, 3.0, 3.0] and row["best"]["tokens"] == row["curve"][1]["tokens"]
    with safe_open(tmp_path / "medusa/rate-0.001/best.safetensors", "pt") as file:
        assert int(file.metadata()["step"]) == row["best"]["step"] < found["steps"]
        stored = file.get_tensor("weights/norm.weight")
    exported = td.load_drafter(tmp_path / "medusa/drafter").norm.weight
    assert torch.equal(exported, stored.to(exported.dtype))
    assert found["converged"] is True and found["ranking"] == ["medusa"]
    rows = {"one": row, "two": row | {"best": row["best"] | {"acceptance_length": 9.0}}}
    fits = SimpleNamespace(**vars(compare.Fits(arguments(world, tmp_path), world.target, world.cached())))
    assert compare.results_of(fits, rows, TOKENS)["ranking"] == ["two", "one"]


def test_features_without_a_methods_taps_are_refused_before_any_fit(world, tmp_path):
    with refuses(ValueError, "target_layer_ids=[1]", "layers [1]", "[0, 2, 3]"):
        go(world, tmp_path, "--taps", "1")
    assert not (tmp_path / "medusa").exists()
