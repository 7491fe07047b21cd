"""``torch-dflash doctor``: why few drafts of a pair are accepted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch_dflash.cli.arguments import template_options
from torch_dflash.cli.errors import UserError, one_line
from torch_dflash.cli.loading import DRAFTERS, load_pair
from torch_dflash.cli.provenance import write_json
from torch_dflash.doctor import Diagnosis, diagnose
from torch_dflash.doctor.changes import CONFIG, check_repairable, repair
from torch_dflash.doctor.diagnosis import draw
from torch_dflash.proposers.dflash.model import DFlashDraftModel
from torch_dflash.storage.files import StageError
from torch_dflash.train.answers.data import read_prompts

BROKEN = 1


def run(arguments: SimpleNamespace) -> int:
    """Examine the pair; returns the exit status."""
    options, prompts = template_options(arguments), _prompts(arguments)
    folder = _folder(arguments)
    place = {"dtype": arguments.dtype, "device": arguments.device}
    loaded = load_pair(arguments.target, arguments.drafter, **place, offered=["demo"])
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


def _prompts(arguments: SimpleNamespace) -> list[str] | None:
    if arguments.prompts is None:
        return None
    try:
        return [prompt.turns[0] for prompt in read_prompts([arguments.prompts])][: arguments.limit]
    except (OSError, StageError) as error:
        raise UserError(f"--prompts {arguments.prompts}: {one_line(error)}") from None


def _folder(arguments: SimpleNamespace) -> Path | None:
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


def _diagnosis(loaded: Any, prompts: Any, options: Any, arguments: SimpleNamespace) -> Diagnosis:
    asked = {"max_new_tokens": arguments.max_new_tokens, "blocks": arguments.blocks}
    pair = loaded.target, loaded.drafter, loaded.tokenizer
    try:
        return diagnose(*pair, prompts, template_options=options, **asked)
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
