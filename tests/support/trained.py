"""A tiny target on disk with prompts it answers, and a drafter trained on eight answers till it errs no more.

The fixtures are of the session: answers, features and the overfit drafter are made once for all tests.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from support.tiny import make_target
from support.tokenizers import TEMPLATE, byte_tokenizer
from torch_dflash.train.answers.data import Answer, Prompt, read_answers
from torch_dflash.train.answers.regenerate import regenerate
from torch_dflash.train.export import export_drafter
from torch_dflash.train.features.extract import Sequence, cache_features, encode_answers
from torch_dflash.train.features.sequences import CachedSequences, split_held_out
from torch_dflash.train.fit.architecture import new_drafter
from torch_dflash.train.fit.log import read_log
from torch_dflash.train.fit.options import DrafterShape, FitOptions, Objective
from torch_dflash.train.fit.student import Student
from torch_dflash.train.fit.torch_trainer import fit
from torch_dflash.train.options import FeatureOptions, Layers, RegenerateOptions

VOCAB = 260  # 257 ids of the tokenizer, and some more
MASK = 257  # an id that the target never picks
CONTEXT = 128
TAPS = (0, 2, 3)  # the last is the target's last layer, for the KL loss
NEW = 20
WIDTH = 6
TEXTS = ("alpha", "be", "gamma ray", "delta 4", "e", "zeta zeta", "eta?", "theta", "iota")


@dataclass(frozen=True)
class World:  # the saved target, and the results of the stages for its prompts
    folder: Path
    target: Any
    tokenizer: Any
    prompts: list[Prompt]
    answers: list[Answer]
    sequences: list[Sequence]

    @property
    def path(self) -> str:
        return str(self.folder / "target")

    @property
    def features(self) -> Path:
        return self.folder / "features"

    def cached(self) -> CachedSequences:
        return CachedSequences([self.features])

    def write_prompts(self, path: Path) -> Path:
        path.write_text("".join(json.dumps({"turns": prompt.turns}) + "\n" for prompt in self.prompts))
        return path


@dataclass(frozen=True)
class Overfit:  # the drafter trained on all but the held-out answer, and its fit's directory
    drafter: Any
    directory: Path
    exported: Path
    trained: list[list[int]]  # prompts of the training sequences
    log: list[dict]


def shape(**changes) -> DrafterShape:
    options = {"mask_token_id": MASK, "layers": 1, "block_size": WIDTH, "taps": Layers((0, 2))}
    return DrafterShape(**options | changes)


def options(**changes) -> FitOptions:
    """A short fit: one batch an epoch, no checkpoint before the end."""
    settings = {"epochs": 4, "batch_size": 8, "held_out": 1, "anchors": 32, "learning_rate": 5e-3}
    settings |= {"log_steps": 1, "evaluate_minutes": math.inf, "checkpoint_minutes": math.inf}
    return FitOptions(**settings | changes)


def student(world: World, objective: Objective | None = None, **changes) -> Student:
    return Student(new_drafter(world.target, shape(**changes)), world.target, objective or Objective())


def stop_at(tokenizer, target, folder: Path) -> None:
    """Ends one answer early: an id that stands late in this answer, and in no other, becomes a stop id."""
    prompts = [Prompt("texts", [text]) for text in TEXTS]
    said = RegenerateOptions(max_new_tokens=NEW, runtime="eager")
    regenerate(target, tokenizer, prompts, folder, said)
    rows = [answer.response_ids for answer in read_answers([folder])]
    for row in rows:
        late = [token for token in row[6:-4] if sum(token in other for other in rows) == 1]
        if late:
            target.generation_config.eos_token_id = [0, late[-1]]
            return
    raise AssertionError("no id is said by one answer alone")


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> World:
    folder = tmp_path_factory.mktemp("world")
    target = make_target(
        "qwen3", vocab_size=VOCAB, max_position_embeddings=CONTEXT, eos_token_id=0, pad_token_id=0
    )
    tokenizer = byte_tokenizer(TEMPLATE)
    target.config.name_or_path = str(folder / "target")
    stop_at(tokenizer, target, folder / "first")
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    prompts = [Prompt("texts", [text]) for text in TEXTS]
    said = RegenerateOptions(max_new_tokens=NEW, batch_size=4, shard_size=4, runtime="eager")
    regenerate(target, tokenizer, prompts, folder / "answers", said)
    answers = read_answers([folder / "answers"])
    sequences = encode_answers(tokenizer, answers, CONTEXT)
    cached = FeatureOptions(taps=Layers(TAPS), dtype="float32", shard_size=4, runtime="eager")
    cache_features(target, sequences, folder / "features", cached)
    return World(folder, target, tokenizer, prompts, answers, sequences)


@pytest.fixture(scope="session")
def overfit(world, tmp_path_factory) -> Overfit:
    directory = tmp_path_factory.mktemp("overfit") / "fit"
    trained, sequences = student(world), world.cached()
    fit(trained, sequences, directory, options(epochs=300, log_steps=25))
    exported = directory / "drafter"
    export_drafter(trained.drafter, exported, world.target, directory, torch.float32)
    rows = [sequences.sequence(index) for index in split_held_out(sequences, 1, 0)[0]]
    prompts = [row.ids[: row.start] for row in rows]
    return Overfit(trained.drafter.eval(), directory, exported, prompts, read_log(directory / "log.jsonl"))
