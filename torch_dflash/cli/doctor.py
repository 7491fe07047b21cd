"""``torch-dflash doctor``: explains why few drafts of a pair are accepted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from torch_dflash.cli.arguments import DRAFTER, DTYPES, NEW, TEMPLATE, target_option, template_options
from torch_dflash.cli.command import COUNT, FILE, MODEL, command, flag, option
from torch_dflash.cli.errors import UserError, refusing
from torch_dflash.cli.outputs import check_writable, write_results

if TYPE_CHECKING:
    from torch_dflash.doctor import Diagnosis

BROKEN = 1


@command(
    "doctor",
    [
        target_option(),
        option(*DRAFTER, type=MODEL, required=True, metavar="D",
               help="A DFlash drafter: directory, hub id or demo."),
        option("--prompts", type=FILE, metavar="FILE",
               help='JSON lines of {"prompt": ...} or {"turns": [...]}; unset: three questions.'),
        option("--limit", type=COUNT, default=8, metavar="N", help="Prompts that are answered."),
        option(*NEW, type=COUNT, default=128, metavar="N", help="Of each answer."),
        option("--blocks", type=COUNT, default=256, metavar="N", help="Drafted by each convention."),
        TEMPLATE,
        option("--dtype", type=click.Choice(DTYPES), default="auto"),
        option("--device", help="torch device, such as cuda."),
        flag("--fix", help="Write what is wrong into the drafter's config.json; the old one stays."),
        option("--json", type=FILE, metavar="FILE", help="Write everything there."),
        option("--png", type=FILE, metavar="FILE", help="Draw acceptance by convention there."),
    ],
    "Tell why few drafts of a pair are accepted.",
    "Reads both configs, has the target answer a few prompts, and drafts its answers under other "
    "conventions: taps, masks, windows, norms. Exit status: 0 healthy, weak or too few blocks to tell, 1 a "
    "convention is wrong, 2 wrong usage.",
    check=lambda arguments: check_writable(json=arguments.json, png=arguments.png),
)  # fmt: skip
def run(arguments: SimpleNamespace) -> int:
    """Examine the pair; returns the exit status."""
    from torch_dflash.cli.loading import load_named
    from torch_dflash.doctor import diagnose
    from torch_dflash.doctor.diagnosis import draw_bars
    from torch_dflash.proposers.dflash.model import DFlashDraftModel

    options, prompts = template_options(arguments), _prompts(arguments)
    folder = _folder(arguments)
    place = {"dtype": arguments.dtype, "device": arguments.device}
    loaded = load_named(arguments.target, arguments.drafter, **place, offered=["demo"])
    if not isinstance(loaded.drafter, DFlashDraftModel):
        raise UserError(
            f"--drafter {arguments.drafter}: has no conventions to be judged; name a DFlash drafter."
        )
    pair, most = (loaded.target, loaded.drafter, loaded.tokenizer), arguments.max_new_tokens
    with refusing(TypeError, ValueError):
        found = diagnose(
            *pair, prompts, template_options=options, max_new_tokens=most, blocks=arguments.blocks
        )
    print(found)
    if arguments.json is not None:
        write_results(arguments.json, _as_json(found))
    if arguments.png is not None:
        draw_bars(found, Path(arguments.png))
    if folder is not None and found.verdict == "broken":
        _fix(found, folder)
    return BROKEN if found.verdict == "broken" else 0


def _prompts(arguments: SimpleNamespace) -> list[str] | None:
    from torch_dflash.storage.files import StageError
    from torch_dflash.train.answers.data import read_prompts

    if arguments.prompts is None:
        return None
    with refusing(OSError, StageError, before=f"--prompts {arguments.prompts}: "):
        return [prompt.turns[0] for prompt in read_prompts([arguments.prompts])][: arguments.limit]


def _folder(arguments: SimpleNamespace) -> Path | None:
    """The drafter's directory, with ``--fix``."""
    from torch_dflash.cli.loading import DRAFTERS
    from torch_dflash.doctor.changes import CONFIG, check_repairable

    if not arguments.fix:
        return None
    folder = Path(arguments.drafter).expanduser()
    if arguments.drafter in DRAFTERS or not (folder / CONFIG).is_file():
        raise UserError(
            f"--fix with --drafter {arguments.drafter}: only a directory's {CONFIG} can be corrected."
        )
    with refusing(OSError, before="--fix: "):
        check_repairable(folder)
    return folder


def _fix(found: Diagnosis, folder: Path) -> None:
    from torch_dflash.doctor.changes import CONFIG, repair

    if not found.fields:
        print(f"not fixed: no field of {CONFIG} says it.")
        return
    with refusing(OSError, before="--fix: "):
        copy = repair(folder, found.fields)
    print(f"fixed: {', '.join(found.fields)} in {folder / CONFIG}; as it was: {copy}")


def _as_json(found: Diagnosis) -> dict[str, Any]:
    return {
        "verdict": found.verdict,
        "changes": [
            {name: getattr(one, name) for name in ("kind", "name", "words", "fix", "fields")}
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
