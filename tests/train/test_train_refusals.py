"""Training refuses mixtures by name: other targets, other data, damaged files, two processes."""

import json
import os
import random
import signal
import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch
from filelock import FileLock
from safetensors.torch import save_file
from support.refusals import refuses
from support.stages import CACHED, SAID, cached
from support.tiny import make_target
from support.trained import CONTEXT, MASK, TAPS, VOCAB, options, student

from torch_dflash.storage.files import StageError, write_atomically
from torch_dflash.train.answers.data import read_answers, read_prompts, write_answers
from torch_dflash.train.answers.regenerate import regenerate
from torch_dflash.train.features.extract import FeatureExtractor, Sequence, cache_features
from torch_dflash.train.features.sequences import RARE, CachedSequences, OnlineSequences, check_mask
from torch_dflash.train.features.tensorfiles import TargetFingerprint, write_tensors
from torch_dflash.train.fit import loop
from torch_dflash.train.fit.checkpoint import load_latest
from torch_dflash.train.fit.torch_trainer import fit
from torch_dflash.train.options import Layers
from torch_dflash.train.stages import open_stage

SHORT = options(epochs=1)


def another(name="another", **changes):
    changes = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "seed": 9} | changes
    target = make_target("qwen3", eos_token_id=0, pad_token_id=0, **changes)
    target.config.name_or_path = name
    return target


def online(world, rows=None, dtype=torch.float32):
    extract = FeatureExtractor(world.target, TAPS, dtype, "eager")
    return OnlineSequences(world.sequences if rows is None else rows, extract)


STAGES = {
    "regenerate": lambda world, out: regenerate(world.target, world.tokenizer, world.prompts, out, SAID),
    "features": lambda world, out: cache_features(world.target, world.sequences, out, CACHED),
    "fit": lambda world, out: fit(student(world), world.cached(), out, SHORT),
}
MADE = {"regenerate": "answers-*", "features": "features-*", "fit": "checkpoints/step-*"}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_needs_its_manifest_and_its_directory_to_itself(world, tmp_path, stage):
    run = STAGES[stage]
    run(world, tmp_path)
    manifest = tmp_path / "stage.json"
    before = manifest.read_text()
    with open_stage(tmp_path, json.loads(before), ""):
        with refuses(StageError, f"another process (pid {os.getpid()} on", str(tmp_path), "wait for it"):
            run(world, tmp_path)
    for damage in ("{", "3", "[1]", '"x"'):
        manifest.write_text(damage)
        with refuses(StageError, f"{manifest} is damaged", "restore it", f"delete it and {MADE[stage]}"):
            run(world, tmp_path)
    manifest.write_text(json.dumps(json.loads(before) | {"was": 1}))
    with refuses(StageError, str(tmp_path), "another version", "was", "another directory"):
        run(world, tmp_path)
    manifest.unlink()
    with refuses(StageError, f"{tmp_path} holds", MADE[stage][:-1], "no stage.json", "restore", "another"):
        run(world, tmp_path)
    for path in tmp_path.glob(MADE[stage]):
        path.unlink()
    run(world, tmp_path)
    assert manifest.read_text() == before and not (tmp_path / ".lock.holder").exists()


HOLDS = """
import sys, time, pathlib
from torch_dflash.train.stages import open_stage
with open_stage(pathlib.Path(sys.argv[1]), {}, "x-*"):
    print("here", flush=True); time.sleep(60)
"""


def test_the_lock_of_a_killed_process_is_nobodys(tmp_path, monkeypatch):
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"here\n"
        with refuses(StageError, f"pid {process.pid} on", "at work"), open_stage(tmp_path, {}, "x-*"):
            pass
        os.kill(process.pid, signal.SIGKILL)
    with open_stage(tmp_path, {}, "x-*"):
        assert (tmp_path / ".lock.holder").read_text().startswith(f"pid {os.getpid()} on")


@pytest.mark.parametrize("error", [OSError(38, "Function not implemented"), NotImplementedError("no flock")])
def test_a_file_system_without_locks(tmp_path, monkeypatch, error):
    monkeypatch.setattr(FileLock, "_acquire", Mock(side_effect=error))
    with refuses(StageError, str(tmp_path), "cannot lock", "another"), open_stage(tmp_path, {}, "x-*"):
        pass


def test_the_half_files_of_live_processes_stay(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for number in (os.getppid(), ended.pid, "x"):
        (tmp_path / f".a.json.{number}.part").write_text("half")
    write_atomically(tmp_path / "a.json", lambda part: part.write_text("whole"))
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"a.json", f".a.json.{os.getppid()}.part", ".a.json.x.part"}


def test_files_may_be_read_by_those_who_may_read_others(world, tmp_path):
    for stage, run in STAGES.items():
        run(world, tmp_path / stage)
    (tmp_path / "plain").touch()
    mode = (tmp_path / "plain").stat().st_mode
    assert {path.stat().st_mode for path in tmp_path.rglob("*") if path.is_file()} == {mode}


def test_features_of_another_target_are_refused_naming_both(world, tmp_path):
    other = another()
    cache_features(other, world.sequences, tmp_path, CACHED)
    theirs = CachedSequences([tmp_path])
    assert theirs.target == TargetFingerprint.of(other) != TargetFingerprint.of(world.target)
    narrow = another("narrow", hidden_size=16)
    extract = FeatureExtractor(narrow, TAPS, torch.float32, "eager")
    for features in (theirs, OnlineSequences(world.sequences, extract)):
        with refuses(ValueError, str(features.target), f"is for {world.path} (hidden size 32, weights "):
            fit(student(world), features, tmp_path / "fit", SHORT)
    with refuses(StageError, "different targets", world.path, "another (hidden size 32", "train on one"):
        CachedSequences([tmp_path, world.features])
    (tmp_path / "features-00001-of-00003.safetensors").unlink()
    with refuses(StageError, "target='another', now target="):
        cache_features(world.target, world.sequences, tmp_path, CACHED)
    other.config.name_or_path = world.path
    cache_features(other, world.sequences, tmp_path / "named", CACHED)
    with refuses(StageError, "target_weights="):
        cache_features(world.target, world.sequences, tmp_path / "named", CACHED)
    assert not (tmp_path / "fit").exists()


def test_a_target_is_known_by_its_weights_alone(world):
    one = make_target("qwen3")
    fingerprint = TargetFingerprint.of(one)
    one.config.name_or_path = "elsewhere"
    assert TargetFingerprint.of(one) == TargetFingerprint.of(make_target("qwen3")) == fingerprint
    assert TargetFingerprint.of(one.to(torch.bfloat16)) == fingerprint
    with torch.no_grad():  # a fine-tune of one projection
        one.model.layers[2].self_attn.q_proj.weight += 0.01
    assert TargetFingerprint.of(one) != fingerprint


def test_a_fit_goes_on_with_the_data_and_the_weights_it_was_begun_with(world, tmp_path):
    begun, chosen = student(world), options(epochs=1, batch_size=4)
    fit(begun, online(world), tmp_path, chosen)
    turned = [Sequence(one.ids[::-1], one.start) for one in world.sequences]
    later = [Sequence(one.ids, one.start + 1) for one in world.sequences]
    for rows in (turned, later, world.sequences[::-1]):
        with refuses(StageError, str(tmp_path), "data_checksum="):
            fit(student(world), online(world, rows), tmp_path, chosen)
    with refuses(StageError, "feature_dtype='float32', now feature_dtype='bfloat16'"):
        fit(student(world), online(world, dtype=torch.bfloat16), tmp_path, chosen)
    with refuses(StageError, "start_weights="):
        fit(student(world, init_seed=1), online(world), tmp_path, chosen)
    two = loop.plan_fit(begun, online(world), chosen, processes=2)
    with refuses(StageError, "processes=1, now processes=2"), loop.open_fit(tmp_path, begun, two):
        pass
    fit(begun, world.cached(), tmp_path, chosen)  # trained by now, and still the drafter of the beginning


def test_a_mask_id_that_the_texts_hold_is_refused_with_its_count(world, tmp_path):
    held = world.sequences[0].ids[0]
    rows = [one.ids for one in world.sequences]
    count, tokens = sum(row.count(held) for row in rows), sum(map(len, rows))
    with refuses(ValueError, f"mask_token_id={held} occurs {count} times", f"{tokens} tokens", "choose"):
        fit(student(world, mask_token_id=held), world.cached(), tmp_path / "fit", SHORT)
    # One difference in so many tokens is an accident.
    rows = [*world.sequences, Sequence([MASK, *[1] * (RARE - 1)], 2)]
    check_mask(online(world, rows), MASK)
    with refuses(ValueError, f"mask_token_id={MASK} occurs 2 times"):
        check_mask(online(world, [*rows, Sequence([MASK, 1], 1)]), MASK)


def flips(content: bytes, header: int):
    """``content`` with one bit flipped: every byte of the header, and some of the data."""
    generator = random.Random(0)
    for at in [*range(header), *(generator.randrange(header, len(content)) for _ in range(200))]:
        damaged = bytearray(content)
        damaged[at] ^= 1 << generator.randrange(8)
        yield damaged


@pytest.mark.parametrize("kind", ["shard", "checkpoint"])
def test_a_flipped_bit_anywhere_is_refused(world, tmp_path, kind):
    if kind == "shard":
        cache_features(world.target, world.sequences[:1], tmp_path, cached(taps=Layers((1,))))
        read = lambda: CachedSequences([tmp_path])  # noqa: E731
    else:
        fit(student(world), world.cached(), tmp_path, SHORT)
        tmp_path /= "checkpoints"
        read = lambda: load_latest(tmp_path)  # noqa: E731
    (path,) = tmp_path.glob("*.safetensors")
    whole = path.read_bytes()
    for damaged in flips(whole, 8 + int.from_bytes(whole[:8], "little")):
        path.write_bytes(damaged)
        with refuses(StageError, f"{path} is damaged", "delete it and run"):
            read()
    save_file({"x": torch.zeros(1)}, path)  # without metadata
    with refuses(StageError, f"{path} is damaged (it holds no 'checksum')"):
        read()
    write_tensors(path, {"x": torch.zeros(1)}, {})
    with refuses(StageError, f"{path} is damaged"):
        read()
    path.write_bytes(whole)
    read()


def test_a_missing_shard_of_answers_is_noticed(world, tmp_path):
    for number, answers in enumerate((world.answers[:4], [], world.answers[4:])):
        write_answers(tmp_path / f"answers-{number:05}-of-00003.jsonl.gz", answers)
    assert read_answers([tmp_path]) == world.answers  # an empty one is whole
    path = tmp_path / "answers-00002-of-00003.jsonl.gz"
    path.rename(tmp_path / "answers-00002-of-00004.jsonl.gz")
    with refuses(StageError, f"{tmp_path} holds shards of 3 and of 4", "delete"):
        read_answers([tmp_path])
    (tmp_path / "answers-00002-of-00004.jsonl.gz").unlink()
    with refuses(StageError, f"{tmp_path} holds 2 of 3 shards", "run regenerate again", "the files"):
        read_answers([tmp_path])
    assert read_answers([tmp_path / "answers-00000-of-00003.jsonl.gz"]) == world.answers[:4]
    with refuses(StageError, "answers-00001-of-00003.jsonl.gz: no answers"):
        read_answers([tmp_path / "answers-00001-of-00003.jsonl.gz"])


def test_empty_files_of_prompts_and_no_sequences_are_refused(world, tmp_path):
    (tmp_path / "good.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with refuses(StageError, f"{tmp_path / 'empty.jsonl'} holds no prompts"):
        read_prompts([tmp_path / "good.jsonl", tmp_path / "empty.jsonl"])
    with refuses(StageError, "no answer has two tokens within max_length"):
        online(world, [])


def test_verifying_features_shows_how_far_it_is(world, capsys):
    world.cached()
    size = sum(path.stat().st_size for path in world.features.glob("features-*"))
    shown = capsys.readouterr().err
    assert "verify features: 100%" in shown and f"{size / 1000:.0f}k/{size / 1000:.0f}k" in shown
