"""``torch-dflash doctor``: why few drafts of a pair are accepted."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from torch_dflash.cli.arguments import template_options
from torch_dflash.cli.errors import UserError, fail, one_line
from torch_dflash.cli.loading import DRAFTERS, DTYPES, TARGETS, load_pair
from torch_dflash.cli.provenance import write_json
from torch_dflash.cli.writable import check_outputs
from torch_dflash.doctor import Diagnosis, diagnose
from torch_dflash.doctor.picture import draw
from torch_dflash.doctor.repair import CONFIG, check_repairable, repair
from torch_dflash.proposers.dflash.model import DFlashDraftModel
from torch_dflash.storage.files import StageError
from torch_dflash.train.answers.data import read_prompts

MOST_PROMPTS = 8
BROKEN = 1


def add_parser(commands) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "doctor",
        help="tell why few drafts of a pair are accepted",
        description="Reads both configs, has the target answer a few prompts, and drafts its answers under "
        "other conventions: taps, masks, windows, norms. Exit status: 0 healthy, weak or too few blocks to "
        "tell, 1 a convention is wrong, 2 wrong usage.",
    )
    add = parser.add_argument
    add("--target", required=True, metavar="T", help=f"directory, hub id or {', '.join(TARGETS)}")
    add("--drafter", required=True, metavar="D", help="a DFlash drafter: directory, hub id or demo")
    add(
        "--prompts",
        metavar="FILE",
        help='JSON lines of {"prompt": ...} or {"turns": [...]}; unset: three questions',
    )
    add(
        "--limit", type=int, default=MOST_PROMPTS, metavar="N", help="prompts that are answered (%(default)s)"
    )
    add("--max-new-tokens", type=int, default=128, metavar="N", help="of each answer (%(default)s)")
    add("--blocks", type=int, default=256, metavar="N", help="drafted by each convention (%(default)s)")
    add("--chat-template-kwargs", metavar="JSON", help="e.g. '{\"enable_thinking\": false}'")
    add("--dtype", choices=DTYPES, default="auto")
    add("--device", help="torch device, such as cuda")
    add(
        "--fix",
        action="store_true",
        help=f"write what is wrong into the drafter's {CONFIG}; the old one stays",
    )
    add("--json", metavar="FILE", help="write everything there")
    add("--png", metavar="FILE", help="draw acceptance by convention there")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Examine the pair; returns the exit status."""
    try:
        check_outputs(json=arguments.json, png=arguments.png)
        options, prompts = template_options(arguments), _prompts(arguments)
        folder = _folder(arguments)
        loaded = load_pair(
            arguments.target, arguments.drafter, dtype=arguments.dtype, device=arguments.device
        )
        if not isinstance(loaded.drafter, DFlashDraftModel):
            raise UserError(
                f"--drafter {arguments.drafter}: has no conventions to be judged; name a DFlash drafter."
            )
        found = _diagnosis(loaded, prompts, options, arguments)
        print(found)
        if arguments.json is not None:
            write_json(arguments.json, _as_json(found))
        if arguments.png is not None:
            draw(found, Path(arguments.png))
        if folder is not None and found.verdict == "broken":
            _fix(found, folder)
        return BROKEN if found.verdict == "broken" else 0
    except UserError as error:
        return fail("doctor", error)


def _prompts(arguments: argparse.Namespace) -> list[str] | None:
    for name in ("limit", "max_new_tokens", "blocks"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: must be at least 1.")
    if arguments.prompts is None:
        return None
    try:
        return [prompt.turns[0] for prompt in read_prompts([arguments.prompts])][: arguments.limit]
    except (OSError, StageError) as error:
        raise UserError(f"--prompts {arguments.prompts}: {one_line(error)}") from None


def _folder(arguments: argparse.Namespace) -> Path | None:
    """The drafter's directory, if its config is to be corrected."""
    if not arguments.fix:
        return None
    folder = Path(arguments.drafter).expanduser()
    if arguments.drafter in DRAFTERS or not (folder / CONFIG).is_file():
        raise UserError(
            f"--fix with --drafter {arguments.drafter}: only a directory's {CONFIG} can be corrected."
        )
    try:
        check_repairable(folder)
    except OSError as error:
        raise UserError(f"--fix: {one_line(error)}") from None
    return folder


def _diagnosis(loaded: Any, prompts: Any, options: Any, arguments: argparse.Namespace) -> Diagnosis:
    try:
        return diagnose(
            loaded.target,
            loaded.drafter,
            loaded.tokenizer,
            prompts,
            template_options=options,
            max_new_tokens=arguments.max_new_tokens,
            blocks=arguments.blocks,
        )
    except (TypeError, ValueError) as error:
        raise UserError(one_line(error)) from None


def _fix(found: Diagnosis, folder: Path) -> None:
    if not found.fields:
        print(f"not fixed: no field of {CONFIG} says it.")
        return
    try:
        copy = repair(folder, found.fields)
    except OSError as error:
        raise UserError(f"--fix: {one_line(error)}") from None
    print(f"fixed: {', '.join(found.fields)} in {folder / CONFIG}; as it was: {copy}")


def _as_json(found: Diagnosis) -> dict[str, Any]:
    return {
        "verdict": found.verdict,
        "changes": [
            {"kind": one.kind, "name": one.name, "words": one.words, "fix": one.fix, "fields": one.fields}
            for one in found.changes
        ],
        "acceptance_length": found.length,
        "with_changes": found.better,
        "first_k_right": found.positions,
        "findings": [
            {"field": one.field, "value": str(one.value), "words": one.words} for one in found.findings
        ],
        "evidence": {
            "blocks": found.evidence.blocks,
            "answers": found.evidence.answers,
            "nats_a_block": found.evidence.of,
            "may_gain": found.evidence.gain,
            "doubts": found.evidence.doubts,
        },
        "tried": [
            {"name": one.name, "acceptance_length": one.length, "nats": one.nats} for one in found.tried
        ],
    }
