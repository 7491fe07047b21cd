"""``torch-dflash train``: answers of the target, features, a fitted drafter, its figures; stage by stage."""

from __future__ import annotations

import argparse
import random
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from torch_dflash.checks import check_counts, context_of
from torch_dflash.cli import train_evaluate as judge
from torch_dflash.cli import train_vocabulary
from torch_dflash.cli.arguments import check_device, tell_penalty, template_options
from torch_dflash.cli.dataclass_options import add_options, read_options
from torch_dflash.cli.errors import INTERRUPTED, UserError, fail, one_line
from torch_dflash.cli.fit_command import MAX_LENGTH, fit_command, target_name
from torch_dflash.cli.fit_drafter import drafter_to_fit
from torch_dflash.cli.loading import load_pair, place_of
from torch_dflash.cli.writable import check_folder
from torch_dflash.storage.files import StageError, Stopped
from torch_dflash.train.answers import provenance
from torch_dflash.train.answers.data import Answer, read_answers, read_prompts
from torch_dflash.train.answers.options import RegenerateOptions
from torch_dflash.train.answers.regenerate import regenerate
from torch_dflash.train.export.drafter import export_drafter
from torch_dflash.train.features.extract import FeatureExtractor, cache_features, encode_answers
from torch_dflash.train.features.options import FeatureOptions
from torch_dflash.train.features.sequences import CachedSequences, OnlineSequences
from torch_dflash.train.fit.options import DrafterShape, FitOptions, Objective
from torch_dflash.train.fit.student import Student
from torch_dflash.train.fit.torch_trainer import fit


def add_parser(commands) -> None:
    """Declare the subcommand and its stages."""
    train = commands.add_parser(
        "train",
        help="make a drafter for a target",
        description="Each stage continues where it stopped when the same command is run again.",
    )
    stages = train.add_subparsers(dest="stage", required=True)

    stage = _stage(stages, "regenerate", "the target answers prompts", _regenerate, template=True)
    stage.add_argument("--prompts", nargs="+", required=True, type=Path, metavar="FILE")
    stage.add_argument("--limit", type=int, metavar="N", help="only N prompts, a fair sample")
    add_options(stage, RegenerateOptions, without=(provenance.TEMPLATE,))

    stage = _stage(stages, "features", "cache the target's tapped states", _features, template=True)
    stage.add_argument("--answers", nargs="+", required=True, type=Path, metavar="PATH")
    add_options(stage, FeatureOptions)

    stage = _stage(stages, "fit", "train a drafter", _fit, template=True)
    source = stage.add_mutually_exclusive_group(required=True)
    source.add_argument("--features", nargs="+", type=Path, metavar="DIR", help="from the features stage")
    source.add_argument(
        "--answers", nargs="+", type=Path, metavar="PATH", help="compute features as they are needed instead"
    )
    stage.add_argument(
        "--max-length", type=int, default=MAX_LENGTH, help=f"with --answers (default {MAX_LENGTH})"
    )
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

    judge.add_arguments(
        _stage(stages, "evaluate", "acceptance on held-out prompts", judge.run, out=False, template=True)
    )
    stage = _stage(stages, "vocabulary", "let a drafter draft frequent ids only", train_vocabulary.run)
    train_vocabulary.add_arguments(stage)
    _add_all(stages)


def _add_all(stages) -> None:
    """The stages in one command; their own options are passed on to their own parsers."""
    stage = _stage(stages, "all", "every stage in order", lambda arguments: _all(arguments, stages.choices))
    for name, what in (("prompts", "answered"), ("eval-prompts", "decoded to judge the drafter")):
        stage.add_argument(
            f"--{name}", nargs="+", required=True, metavar="FILE", help=f"prompts that are {what}"
        )
    stage.add_argument("--taps", metavar="LAYERS", help="for features and fit; unset with --online: z-lab's")
    stage.add_argument("--online", action="store_true", help="no features on disk: the target is in the loop")
    for name in ("regenerate", "features", "fit", "evaluate"):
        text = f'further options of the stage in one text, as --{name}="--batch-size 8"'
        stage.add_argument(f"--{name}", default="", metavar="TEXT", help=text)


def _all(arguments: argparse.Namespace, parsers: dict[str, argparse.ArgumentParser]) -> int:
    """Every stage, each going on where it stopped; all their options are checked before the first one."""
    out, taps = arguments.out, ["--taps", arguments.taps] if arguments.taps else []
    learnt = ["--answers", out / "answers"] if arguments.online else ["--features", out / "features"]
    lines = {
        "regenerate": ["--prompts", *arguments.prompts, "--out", out / "answers"],
        "features": ["--answers", out / "answers", "--out", out / "features", *taps],
        "fit": [*learnt, "--out", out / "fit", *taps],
        "evaluate": ["--drafter", out / "fit" / "drafter", "--prompts", *arguments.eval_prompts]
        + ["--json", out / "figures.json", "--card"],
    }
    if arguments.online:
        if arguments.features:
            raise UserError(f"--features {arguments.features!r} with --online: there is no such stage.")
        del lines["features"]
    parsed = []
    for name, line in lines.items():
        common = ["--target", arguments.target, "--target-dtype", arguments.target_dtype]
        common += ["--device", arguments.device] if arguments.device else []
        given = map(str, [*common, *line, *shlex.split(getattr(arguments, name))])
        parsed.append(parsers[name].parse_args(list(given), argparse.Namespace(stage=name)))
    for stage in parsed:
        print(f"torch-dflash train {stage.stage}", file=sys.stderr, flush=True)
        status = stage.run(stage)
        if status:
            return status
    return 0


def _stage(
    stages, name: str, what: str, run, out: bool = True, template: bool = False
) -> argparse.ArgumentParser:
    stage = stages.add_parser(name, help=what, description=what)
    stage.add_argument("--target", required=True, metavar="T", help="directory, hub id or demo")
    stage.add_argument("--target-dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    stage.add_argument("--device", metavar="DEVICE", help="torch device, with --runtime eager")
    if out:
        stage.add_argument("--out", required=True, type=Path, metavar="DIR")
    if template:
        stage.add_argument(
            "--chat-template-kwargs",
            metavar="JSON",
            help="e.g. '{\"enable_thinking\": false}'; unset: what is recorded with the answers, else none",
        )
    stage.set_defaults(run=lambda arguments: _guarded(run, arguments))
    return stage


def _guarded(run, arguments: argparse.Namespace) -> int:
    try:
        if "out" in arguments:
            check_folder(arguments.out)
        return run(arguments)
    except Stopped as error:
        fail(f"train {arguments.stage}", one_line(error))
        return INTERRUPTED
    except (UserError, StageError, ValueError, TypeError, OSError) as error:
        return fail(f"train {arguments.stage}", one_line(error))
    except KeyboardInterrupt:
        fail(f"train {arguments.stage}", "interrupted; run the same command again to go on from here.")
        return INTERRUPTED


def _load(arguments: argparse.Namespace, drafter: str = "none", device: str | None = None) -> Any:
    device = arguments.device if device is None else device
    return load_pair(arguments.target, drafter, dtype=arguments.target_dtype, device=device)


def _regenerate(arguments: argparse.Namespace) -> int:
    options = read_options(RegenerateOptions, arguments, **{provenance.TEMPLATE: template_options(arguments)})
    check_device(arguments)
    check_counts(limit=arguments.limit)
    prompts = read_prompts(arguments.prompts)
    if arguments.limit is not None:
        prompts = random.Random(options.seed).sample(prompts, min(arguments.limit, len(prompts)))
    loaded = _load(arguments)
    if not options.sampled:
        tell_penalty("train regenerate", loaded.target)
    regenerate(loaded.target, loaded.tokenizer, prompts, arguments.out, options)
    return 0


def _features(arguments: argparse.Namespace) -> int:
    options = read_options(FeatureOptions, arguments)
    check_device(arguments)
    answers = provenance.with_template(read_answers(arguments.answers), template_options(arguments))
    loaded = _load(arguments)
    sequences = encode_answers(loaded.tokenizer, answers, _room(loaded.target, options.max_length))
    cache_features(loaded.target, sequences, arguments.out, options)
    provenance.write_data(arguments.out, provenance.describe(answers, arguments.answers))
    return 0


def _fit(arguments: argparse.Namespace) -> int:
    options, objective = read_options(FitOptions, arguments), read_options(Objective, arguments)
    check_counts(max_length=arguments.max_length)
    check_device(arguments)
    answers, data = _data(arguments)
    process = _process(arguments.device) if arguments.runtime == "eager" else None
    # Of the target, a fit on cached features needs embedding and head alone, which the student takes along.
    place = str(process.device) if process and not arguments.features else None
    loaded = _load(arguments, arguments.start_from or "none", place)
    drafter = drafter_to_fit(loaded, arguments).float()  # the trained weights; products may be in bfloat16
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
        encoded = encode_answers(loaded.tokenizer, answers, _room(loaded.target, arguments.max_length))
        wanted = (*taps, student.last_layer) if objective.distils else taps
        dtype = torch.bfloat16 if options.mixed_precision == "bf16" else torch.float32
        sequences = OnlineSequences(encoded, FeatureExtractor(loaded.target, wanted, dtype, "eager"))
    if arguments.runtime == "xla":
        from jax_bridge.train.trainer import fit_xla  # only when asked for: it loads JAX

        fit_xla(student, sequences, arguments.out, options)
    else:
        fit(student, sequences, arguments.out, options)
    if process is None or process.is_main_process:  # the others have no log to make a card of
        export_drafter(
            drafter,
            arguments.out / "drafter",
            loaded.target,
            arguments.out,
            data=data,
            name=target_name(arguments.target),
            command=fit_command(arguments, process.num_processes if process else 1),
        )
        print(f"The drafter is in {arguments.out / 'drafter'}.")
    return 0


def _data(arguments: argparse.Namespace) -> tuple[list[Answer], dict[str, Any] | None]:
    """The answers of --answers, and what is known of those that the features were made of."""
    given = template_options(arguments)
    if arguments.features:
        data = provenance.read_data(arguments.features)
        provenance.agree(given, data[provenance.TEMPLATE] if data else [], "the features are of answers made")
        if given is not None and not (data and data[provenance.TEMPLATE]):
            raise UserError(
                "--chat-template-kwargs: cached features are of texts that are encoded already; pass it to "
                "the features stage."
            )
        return [], data
    answers = provenance.with_template(read_answers(arguments.answers), given)
    return answers, provenance.describe(answers, arguments.answers)


def _process(device: str | None) -> AcceleratorState:
    """Where this process trains: on ``device``, or as accelerate finds and its launcher says."""
    place = place_of(device)
    # Not what an earlier fit of this process was on; a group of processes stays.
    AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
    process = Accelerator(cpu=device is not None and place.type == "cpu").state
    if device is None:
        return process
    if place.type != process.device.type or (place.index is not None and process.num_processes > 1):
        raise UserError(
            f"--device {device}: accelerate places this process on {process.device}; leave --device out, or "
            "start one process alone."
        )
    if place.index is not None:
        torch.accelerator.set_device_index(place.index)
    return process


def _room(target: Any, max_length: int) -> int:
    """Longest sequence that both the user and the target's context allow."""
    return min(max_length, context_of(target))
