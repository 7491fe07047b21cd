"""``torch-dflash train fit``: trains a drafter."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch_dflash.cli.arguments import check_device, runtime, template_options
from torch_dflash.cli.command import COUNT, option, options_of, read_options
from torch_dflash.cli.errors import UserError
from torch_dflash.cli.train.stage import TEMPLATE, load, longest_text, paths_option, stage, target_name
from torch_dflash.runtime_kinds import RUNTIMES
from torch_dflash.train.fit.options import LACKS, SIZES_OF_HEADS, DrafterShape, FitOptions, Objective

if TYPE_CHECKING:
    from accelerate.state import AcceleratorState

    from torch_dflash.train.answers.data import Answer

MAX_LENGTH = 3072
"""Tokens of a sequence that is read from answers."""
GROWN = ("head", *SIZES_OF_HEADS)
"""Fields of `DrafterShape` that go with --start-from: they are of parts that the drafter lacks."""
OF_THE_MACHINE = ("device", "runtime", "quiet")
"""Options that change no figure of a fit."""
RUNTIME = (
    "What takes the steps: XLA, on all of JAX's devices, or torch (eager); a fit begun with one "
    "may go on with the other."
)


def _check(arguments: SimpleNamespace) -> None:
    if (arguments.features is None) == (arguments.answers is None):
        given = "both were given" if arguments.features else "neither was given"
        raise UserError(f"--features, --answers: {given}; pass one of them.")


@stage(
    "fit",
    [
        paths_option("--features", "From the features stage.", False, "DIR"),
        paths_option("--answers", "Compute features as they are needed instead.", False),
        option("--max-length", type=COUNT, default=MAX_LENGTH, metavar="N", help="With --answers."),
        runtime("eager", help=RUNTIME),
        option("--start-from", metavar="D", help="A drafter to continue from; unset: a new one."),
        *options_of(DrafterShape),
        *options_of(Objective),
        *options_of(FitOptions),
    ],
    "Train a drafter.",
    template=True,
    check=_check,
)
def run(arguments: SimpleNamespace) -> int:
    """Fit a drafter and export it; returns the exit status."""
    import torch

    from torch_dflash.train.export import export_drafter
    from torch_dflash.train.features.extract import FeatureExtractor, encode_answers
    from torch_dflash.train.features.sequences import CachedSequences, OnlineSequences
    from torch_dflash.train.fit.student import Student

    options, objective = read_options(FitOptions, arguments), read_options(Objective, arguments)
    check_device(arguments)
    answers, data = _data(arguments)
    in_jax = RUNTIMES[arguments.runtime].needs_jax
    process = _process(arguments.device) if not in_jax else None
    # Of the target, a fit on cached features needs embedding and head alone, which the student takes along.
    place = str(process.device) if process and not arguments.features else None
    loaded = load(arguments, arguments.start_from or "none", place)
    drafter = drafter_to_fit(loaded, arguments).float()  # the trained weights; products may be in bfloat16
    taps, half = tuple(drafter.config.target_layer_ids), options.mixed_precision == "bf16"
    head_dtype = torch.bfloat16 if half else None
    student = Student(drafter, loaded.target, objective, head_dtype=head_dtype)
    if arguments.features:
        sequences = CachedSequences(arguments.features)
    else:
        encoded = encode_answers(loaded.tokenizer, answers, longest_text(loaded.target, arguments.max_length))
        wanted = (*taps, student.last_layer) if objective.distils else taps
        dtype = torch.bfloat16 if half else torch.float32
        sequences = OnlineSequences(encoded, FeatureExtractor(loaded.target, wanted, dtype, "eager"))
    if in_jax:
        from jax_bridge.train.trainer import fit_xla as fit
    else:
        from torch_dflash.train.fit.torch_trainer import fit
    fit(student, sequences, arguments.out, options)
    if process is None or process.is_main_process:  # the others have no log to make a card of
        name, folder = target_name(arguments.target), arguments.out / "drafter"
        command = fit_command(arguments, process.num_processes if process else 1)
        export_drafter(drafter, folder, loaded.target, arguments.out, data=data, name=name, command=command)
        print(f"The drafter is in {folder}.")
    return 0


def _data(arguments: SimpleNamespace) -> tuple[list[Answer], dict[str, Any] | None]:
    """The answers of --answers, and the record of those that the features were made of."""
    from torch_dflash.train.answers import provenance
    from torch_dflash.train.answers.data import read_answers

    given = template_options(arguments)
    if arguments.features:
        data = provenance.read_data(arguments.features)
        provenance.agree(given, data[TEMPLATE] if data else [], "the features are of answers made")
        if given is not None and not (data and data[TEMPLATE]):
            raise UserError(
                "--chat-template-kwargs: cached features are of texts that are encoded already; pass it to "
                "the features stage."
            )
        return [], data
    answers = provenance.with_template(read_answers(arguments.answers), given)
    return answers, provenance.describe(answers, arguments.answers)


def _process(device: str | None) -> AcceleratorState:
    """The place of this process: ``device``, or as accelerate finds and its launcher says."""
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from torch_dflash.cli.loading import place_of

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


def fit_command(arguments: SimpleNamespace, processes: int = 1) -> str:
    """The command that repeats a fit, for its card: every option that is not a default.

    Of a path only its last part, since a card names nobody's home.
    """
    launched = ["accelerate", "launch", "--num_processes", str(processes), "--no_python"]
    words = [*(launched if processes > 1 else ()), "torch-dflash", "train", "fit"]
    for one in run.params:
        value: Any = getattr(arguments, one.name or "")
        if value in (None, one.default) or value is False or one.name in OF_THE_MACHINE:
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        words += [one.opts[-1], *map(_word, values)]
    return shlex.join(words)


def _word(value: Any) -> str:
    if isinstance(value, tuple):  # layers
        return ",".join(map(str, value))
    if isinstance(value, Path) or (isinstance(value, str) and Path(value).is_dir()):
        return Path(value).expanduser().resolve().name
    return str(value)


def drafter_to_fit(loaded: Any, arguments: SimpleNamespace) -> Any:
    """A new drafter for ``loaded.target``, or ``loaded.drafter`` with the parts of ``--head``."""
    from torch_dflash.proposers.dflash.vocabulary import DraftVocabulary
    from torch_dflash.train.fit.architecture import new_drafter
    from torch_dflash.train.fit.heads import with_head

    if arguments.start_from is None:
        if arguments.mask_token_id is None and arguments.head not in LACKS:
            raise UserError(
                "--mask-token-id: a new drafter needs one, an id that no text holds; --start-from takes that "
                "of the drafter."
            )
        if arguments.freeze:
            raise UserError("--freeze: a new drafter has no part to keep; pass --start-from, too.")
        return new_drafter(loaded.target, read_options(DrafterShape, arguments))
    if not isinstance(loaded.drafter, DraftVocabulary):
        named = f"--start-from {arguments.start_from}"
        raise UserError(f"{named}: pass a DFlash drafter's directory or id, or another kind's.")
    for field in dataclasses.fields(DrafterShape):
        if field.name not in GROWN and getattr(arguments, field.name) not in (None, field.default):
            raise UserError(
                f"--{field.name.replace('_', '-')}: --start-from takes the drafter's own; leave one out."
            )
    sizes = {name: getattr(arguments, name) for name in GROWN[1:]}
    return with_head(loaded.drafter, arguments.head, freeze=arguments.freeze, **sizes)
