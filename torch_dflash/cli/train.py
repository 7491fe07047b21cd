"""``torch-dflash train``: answers of the target, features, a fitted drafter, its figures; stage by stage."""

from __future__ import annotations

import random
import shlex
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from torch_dflash.checks import context_of
from torch_dflash.cli import parse, train_evaluate, train_vocabulary
from torch_dflash.cli.arguments import check_device, template_options
from torch_dflash.cli.call import Invocation
from torch_dflash.cli.errors import INTERRUPTED, UserError, fail
from torch_dflash.cli.job import tell_penalty
from torch_dflash.cli.loading import load_pair, place_of
from torch_dflash.cli.options import read_options
from torch_dflash.cli.train_fit import drafter_to_fit, fit_command, target_name
from torch_dflash.progress import print_status
from torch_dflash.storage.files import StageError, Stopped
from torch_dflash.train.answers import provenance
from torch_dflash.train.answers.data import Answer, read_answers, read_prompts
from torch_dflash.train.answers.regenerate import regenerate
from torch_dflash.train.export import export_drafter
from torch_dflash.train.features.extract import FeatureExtractor, cache_features, encode_answers
from torch_dflash.train.features.sequences import CachedSequences, OnlineSequences
from torch_dflash.train.fit.options import FitOptions, Objective
from torch_dflash.train.fit.student import Student
from torch_dflash.train.fit.torch_trainer import fit
from torch_dflash.train.options import FeatureOptions, RegenerateOptions


def _all(arguments: SimpleNamespace) -> int:
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
    stages = []
    for name, line in lines.items():
        common = ["--target", arguments.target, "--target-dtype", arguments.target_dtype]
        common += ["--device", arguments.device] if arguments.device else []
        further = shlex.split(getattr(arguments, name))
        stage = parse(["train", name, *map(str, [*common, *line]), *further])
        if not isinstance(stage, Invocation):
            return stage or 0
        stages.append(stage)
    for stage in stages:
        print_status(f"torch-dflash {stage.name}")
        if status := stage():
            return status
    return 0


def run(arguments: SimpleNamespace) -> int:
    """Run the stage ``arguments.command``; returns the exit status."""
    name = f"train {arguments.command}"
    try:
        return STAGES[arguments.command](arguments)
    except BrokenPipeError:
        raise
    except Stopped as error:
        fail(name, error)
        return INTERRUPTED
    except (UserError, StageError, ValueError, TypeError, OSError) as error:
        return fail(name, error)
    except KeyboardInterrupt:
        fail(name, "interrupted; run the same command again to go on from here.")
        return INTERRUPTED


def _load(arguments: SimpleNamespace, drafter: str = "none", device: str | None = None) -> Any:
    device = arguments.device if device is None else device
    place = {"dtype": arguments.target_dtype, "device": device}
    return load_pair(arguments.target, drafter, **place, offered=["demo"])


def _regenerate(arguments: SimpleNamespace) -> int:
    options = read_options(RegenerateOptions, arguments, **{provenance.TEMPLATE: template_options(arguments)})
    check_device(arguments)
    prompts = read_prompts(arguments.prompts)
    if arguments.limit is not None:
        prompts = random.Random(options.seed).sample(prompts, min(arguments.limit, len(prompts)))
    loaded = _load(arguments)
    if not options.sampled:
        tell_penalty("train regenerate", loaded.target)
    regenerate(loaded.target, loaded.tokenizer, prompts, arguments.out, options)
    return 0


def _features(arguments: SimpleNamespace) -> int:
    options = read_options(FeatureOptions, arguments)
    check_device(arguments)
    answers = provenance.with_template(read_answers(arguments.answers), template_options(arguments))
    loaded = _load(arguments)
    sequences = encode_answers(loaded.tokenizer, answers, _room(loaded.target, options.max_length))
    cache_features(loaded.target, sequences, arguments.out, options)
    provenance.write_data(arguments.out, provenance.describe(answers, arguments.answers))
    return 0


def _fit(arguments: SimpleNamespace) -> int:
    options, objective = read_options(FitOptions, arguments), read_options(Objective, arguments)
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


def _data(arguments: SimpleNamespace) -> tuple[list[Answer], dict[str, Any] | None]:
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


STAGES = {
    "regenerate": _regenerate,
    "features": _features,
    "fit": _fit,
    "evaluate": train_evaluate.run,
    "vocabulary": train_vocabulary.run,
    "all": _all,
}
