"""``torch-dflash train``: answers of the target, features, a fitted drafter, its figures; stage by stage."""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from torch_dflash.checks import check_counts, context_of
from torch_dflash.checksums import checksum_of
from torch_dflash.cli.errors import UserError, fail, one_line
from torch_dflash.cli.loading import load_pair
from torch_dflash.cli.options import add_options, read_options
from torch_dflash.cli.provenance import provenance
from torch_dflash.drafter import DFlashDraftModel
from torch_dflash.train.architecture import DrafterShape, new_drafter
from torch_dflash.train.card import acceptance_table, add_figures
from torch_dflash.train.data import read_answers, read_prompts
from torch_dflash.train.evaluate import EvaluateOptions, evaluate
from torch_dflash.train.export import export_drafter
from torch_dflash.train.features import (
    FeatureExtractor,
    FeatureOptions,
    cache_features,
    encode_answers,
)
from torch_dflash.train.files import StageError, write_json
from torch_dflash.train.fit import fit
from torch_dflash.train.objective import Objective
from torch_dflash.train.options import FitOptions
from torch_dflash.train.regenerate import RegenerateOptions, regenerate
from torch_dflash.train.sequences import CachedSequences, OnlineSequences
from torch_dflash.train.student import Student


def add_parser(commands) -> None:
    """Declare the subcommand and its stages."""
    train = commands.add_parser(
        "train",
        help="make a drafter for a target",
        description="Each stage continues where it stopped when the same command is run again.",
    )
    stages = train.add_subparsers(dest="stage", required=True)

    stage = _stage(stages, "regenerate", "the target answers prompts", _regenerate)
    stage.add_argument("--prompts", nargs="+", required=True, type=Path, metavar="FILE")
    stage.add_argument("--limit", type=int, metavar="N", help="only N prompts, a fair sample")
    add_options(stage, RegenerateOptions)

    stage = _stage(stages, "features", "cache the target's tapped states", _features)
    stage.add_argument("--answers", nargs="+", required=True, type=Path, metavar="PATH")
    add_options(stage, FeatureOptions)

    stage = _stage(stages, "fit", "train a drafter", _fit)
    source = stage.add_mutually_exclusive_group(required=True)
    source.add_argument("--features", nargs="+", type=Path, metavar="DIR", help="from the features stage")
    source.add_argument(
        "--answers", nargs="+", type=Path, metavar="PATH", help="compute features as they are needed instead"
    )
    stage.add_argument("--max-length", type=int, default=3072, help="with --answers (default 3072)")
    stage.add_argument(
        "--runtime",
        choices=("xla", "eager"),
        default="eager",
        help="what takes the steps: XLA, on all of JAX's devices, or torch (eager, the default); a fit begun "
        "with one may go on with the other",
    )
    stage.add_argument("--start-from", metavar="D", help="a drafter to continue from; unset: a new one")
    add_options(stage, DrafterShape, optional=("mask_token_id",))
    for part in (Objective, FitOptions):
        add_options(stage, part)

    stage = _stage(stages, "evaluate", "acceptance on held-out prompts", _evaluate, out=False)
    stage.add_argument("--drafter", required=True, metavar="D")
    stage.add_argument("--prompts", nargs="+", required=True, type=Path, metavar="FILE")
    stage.add_argument(
        "--json", type=Path, metavar="FILE", help="one file; sets already in it are kept, not decoded again"
    )
    stage.add_argument(
        "--card", action="store_true", help="put the figures of --json into the drafter's card"
    )
    add_options(stage, EvaluateOptions)


def _stage(stages, name: str, what: str, run, out: bool = True) -> argparse.ArgumentParser:
    stage = stages.add_parser(name, help=what, description=what)
    stage.add_argument("--target", required=True, metavar="T", help="directory, hub id or demo")
    stage.add_argument("--target-dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    stage.add_argument("--device", metavar="DEVICE", help="torch device of the target (eager runtime)")
    if out:
        stage.add_argument("--out", required=True, type=Path, metavar="DIR")
    stage.set_defaults(run=lambda arguments: _guarded(run, arguments))
    return stage


def _guarded(run, arguments: argparse.Namespace) -> int:
    try:
        return run(arguments)
    except (UserError, StageError, ValueError, TypeError, OSError) as error:
        return fail(f"train {arguments.stage}", one_line(error))
    except KeyboardInterrupt:
        fail(f"train {arguments.stage}", "interrupted; run the same command again to go on from here.")
        return 130


def _load(arguments: argparse.Namespace, drafter: str = "none") -> Any:
    return load_pair(arguments.target, drafter, dtype=arguments.target_dtype, device=arguments.device)


def _regenerate(arguments: argparse.Namespace) -> int:
    options = read_options(RegenerateOptions, arguments)
    check_counts(limit=arguments.limit)
    prompts = read_prompts(arguments.prompts)
    if arguments.limit is not None:
        prompts = random.Random(options.seed).sample(prompts, min(arguments.limit, len(prompts)))
    loaded = _load(arguments)
    regenerate(loaded.target, loaded.tokenizer, prompts, arguments.out, options)
    return 0


def _features(arguments: argparse.Namespace) -> int:
    options = read_options(FeatureOptions, arguments)
    answers = read_answers(arguments.answers)
    loaded = _load(arguments)
    sequences = encode_answers(loaded.tokenizer, answers, _room(loaded.target, options.max_length))
    cache_features(loaded.target, sequences, arguments.out, options)
    return 0


def _fit(arguments: argparse.Namespace) -> int:
    options, objective = read_options(FitOptions, arguments), read_options(Objective, arguments)
    check_counts(max_length=arguments.max_length)
    loaded = _load(arguments, arguments.start_from or "none")
    drafter = _drafter(loaded, arguments).float()  # the trained weights; products may be in bfloat16
    taps = tuple(drafter.config.target_layer_ids)
    student = Student(
        drafter,
        loaded.target,
        objective,
        head_dtype=torch.bfloat16 if options.mixed_precision == "bf16" else None,
    )
    if arguments.features:
        sequences = CachedSequences(arguments.features)
    else:
        longest = _room(loaded.target, arguments.max_length)
        answers = encode_answers(loaded.tokenizer, read_answers(arguments.answers), longest)
        wanted = (*taps, student.last_layer) if objective.kl else taps
        dtype = torch.bfloat16 if options.mixed_precision == "bf16" else torch.float32
        sequences = OnlineSequences(answers, FeatureExtractor(loaded.target, wanted, dtype, "eager"))
    if arguments.runtime == "xla":
        from jax_bridge.train import fit_xla  # only when asked for: it loads JAX

        fit_xla(student, sequences, arguments.out, options)
    else:
        fit(student, sequences, arguments.out, options)
    if PartialState().is_main_process:  # the others have no log to make a card of
        export_drafter(drafter, arguments.out / "drafter", loaded.target, arguments.out)
        print(f"The drafter is in {arguments.out / 'drafter'}.")
    return 0


def _drafter(loaded: Any, arguments: argparse.Namespace) -> DFlashDraftModel:
    if arguments.start_from is None:
        if arguments.mask_token_id is None:
            raise UserError(
                "--mask-token-id: a new drafter needs one, an id that no text holds; --start-from takes that "
                "of the drafter."
            )
        return new_drafter(loaded.target, read_options(DrafterShape, arguments))
    if not isinstance(loaded.drafter, DFlashDraftModel):
        raise UserError(f"--start-from {arguments.start_from}: pass a DFlash drafter's directory or id.")
    for field in dataclasses.fields(DrafterShape):
        if getattr(arguments, field.name) not in (None, field.default):
            raise UserError(
                f"--{field.name.replace('_', '-')}: --start-from takes the drafter's own; leave one out."
            )
    return loaded.drafter


def _room(target: Any, max_length: int) -> int:
    """Longest sequence that both the user and the target's context allow."""
    return min(max_length, context_of(target))


def _evaluate(arguments: argparse.Namespace) -> int:
    options = read_options(EvaluateOptions, arguments)
    sets = {path.name.split(".")[0]: read_prompts([path]) for path in arguments.prompts}
    if arguments.card and not (arguments.json and Path(arguments.drafter).is_dir()):
        raise UserError("--card: needs --json, and a --drafter that is a directory.")
    if len(sets) < len(arguments.prompts):
        raise UserError(f"--prompts: two files would both be called one of {sorted(sets)}; rename one.")
    before, rows = _read_figures(arguments.json)
    loaded = _load(arguments, arguments.drafter)
    if not isinstance(loaded.drafter, DFlashDraftModel):
        raise UserError(f"--drafter {arguments.drafter}: pass a DFlash drafter's directory or id.")
    settings = vars(options) | {"drafter_checksum": checksum_of(loaded.drafter.state_dict())}
    _check_same(arguments.json, before, settings)
    for name, prompts in sets.items():
        if name not in rows:
            found = evaluate(loaded.target, loaded.drafter, loaded.tokenizer, prompts, options, name)
            rows[name] = found.row()
        figures = {"provenance": provenance(), "options": settings, "sets": rows}
        if arguments.json:
            write_json(arguments.json, figures)
        if arguments.card:
            add_figures(Path(arguments.drafter), figures)
    print(acceptance_table(rows))
    return 0


def _read_figures(path: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings and sets of the figures already in ``path``."""
    if path is None or not path.exists():
        return {}, {}
    try:
        content = json.loads(path.read_text())
        return dict(content["options"]), dict(content["sets"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"--json {path}: holds no figures of this command; name another file.") from error


def _check_same(path: Path | None, before: dict[str, Any], settings: dict[str, Any]) -> None:
    """Figures of other options or of another drafter must not stand in one file."""
    for name, value in settings.items():
        if before.get(name, value) != value:
            raise UserError(
                f"--json {path}: its figures are with {name}={before[name]!r}, now {name}={value!r}; name "
                "another file."
            )
