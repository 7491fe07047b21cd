"""``torch-dflash train evaluate``: figures of several sets in one file, each with its provenance."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch_dflash.cli.arguments import DRAFTER, check_device, template_options
from torch_dflash.cli.command import MODEL, PATH, flag, option, options_of, read_options
from torch_dflash.cli.errors import UserError
from torch_dflash.cli.outputs import check_writable, provenance
from torch_dflash.cli.train.stage import TEMPLATE, load, note_penalty, paths_option, stage, target_name
from torch_dflash.train.options import EvaluateOptions

if TYPE_CHECKING:
    from torch_dflash.cli.loading import Loaded
    from torch_dflash.train.answers.data import Prompt


@stage(
    "evaluate",
    [
        option(*DRAFTER, type=MODEL, required=True, metavar="D"),
        paths_option("--prompts", metavar="FILE"),
        option("--json", type=PATH, metavar="FILE", help="Sets already in it are kept, not decoded again."),
        flag("--card", help="Put the figures of --json into the drafter's card."),
        *options_of(EvaluateOptions, without=(TEMPLATE,)),
    ],
    "Acceptance on held-out prompts.",
    out=False,
    template=True,
)
def run(arguments: SimpleNamespace) -> int:
    """Decode the sets that --json lacks, and print the table of all; returns the exit status."""
    from torch_dflash.proposers.dflash.vocabulary import DraftVocabulary
    from torch_dflash.storage.files import write_json
    from torch_dflash.train.answers.data import read_prompts
    from torch_dflash.train.evaluate import evaluate
    from torch_dflash.train.export import acceptance_table, add_figures

    given = template_options(arguments)
    options = read_options(EvaluateOptions, arguments, **{TEMPLATE: given})
    check_device(arguments)
    check_writable(json=arguments.json)
    if arguments.card and not (arguments.json and Path(arguments.drafter).is_dir()):
        raise UserError("--card: needs --json, and a --drafter that is a directory.")
    if arguments.card and options.shuffled:
        raise UserError("--card with --shuffled: the figures are a control's, not the drafter's; drop one.")
    sets = {path.name.split(".")[0]: read_prompts([path]) for path in arguments.prompts}
    if len(sets) < len(arguments.prompts):
        raise UserError(f"--prompts: two files would both be called one of {sorted(sets)}; rename one.")
    before, rows = read_figures(arguments.json)
    _check_same(
        arguments.json, before, {key: value for key, value in vars(options).items() if key != TEMPLATE}
    )
    _check_prompts(arguments.json, rows, sets, options.limit)
    loaded = load(arguments, arguments.drafter)
    if not isinstance(loaded.drafter, DraftVocabulary):
        raise UserError(
            f"--drafter {arguments.drafter}: pass a DFlash drafter's directory or id, or another kind's."
        )
    options = read_options(EvaluateOptions, arguments, **{TEMPLATE: _template(given, loaded.drafter)})
    note_penalty("train evaluate", loaded.target)
    settings = vars(options) | identity(arguments.target, loaded)
    _check_same(arguments.json, before, settings)
    for name, prompts in sets.items():
        if name not in rows:
            found = evaluate(loaded.target, loaded.drafter, loaded.tokenizer, prompts, options, name)
            checksum = prompts_checksum(prompts, options.limit)
            rows[name] = found.row() | {"prompts_checksum": checksum, "provenance": provenance()}
        figures = {"options": settings, "sets": rows}
        if arguments.json:
            write_json(arguments.json, figures)
        if arguments.card:
            add_figures(Path(arguments.drafter), figures)
    print(acceptance_table(rows))
    return 0


def identity(target: str, loaded: Loaded) -> dict[str, Any]:
    """The names and checksums that figures of one pair have in common."""
    from torch_dflash.storage.files import checksum_of

    embedding, weights = loaded.target.get_input_embeddings().weight, loaded.drafter.state_dict()
    return {
        "target": target_name(target),
        "target_dtype": str(loaded.target.dtype).removeprefix("torch."),
        "target_checksum": checksum_of({"embedding": embedding.detach().cpu()}),
        "drafter_checksum": checksum_of({name: value.cpu() for name, value in weights.items()}),
    }


def prompts_checksum(prompts: list[Prompt], limit: int) -> int:
    """Checksum of the texts that are decoded, in their order."""
    return zlib.crc32(repr([prompt.turns for prompt in prompts[:limit]]).encode())


def read_figures(path: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings and sets of the figures already in ``path``, each set with its provenance."""
    if path is None or not path.exists():
        return {}, {}
    try:
        content = json.loads(path.read_text())
        sets = {name: dict(row) for name, row in content["sets"].items()}
        for row in sets.values():
            row.setdefault("provenance", content.get("provenance"))  # once there was one for all
            if not {"command", "hardware"} <= row["provenance"].keys():
                raise KeyError("provenance")
        return dict(content["options"]), sets
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"--json {path}: holds no figures of this command; name another file.") from error


def _template(given: dict[str, Any] | None, drafter: Any) -> dict[str, Any] | None:
    """The template's variables: those given, or else those of the answers that the drafter learned from."""
    from torch_dflash.train.answers.provenance import agree
    from torch_dflash.train.export import trained_template

    recorded = trained_template(drafter)
    agree(given, recorded, "the drafter was trained on answers made")
    if given is None and len(recorded) > 1:
        raise UserError(
            f"--chat-template-kwargs: the drafter was trained with any of {json.dumps(recorded)}; give one."
        )
    return recorded[0] if given is None and recorded else given


def _check_prompts(
    path: Path | None, rows: dict[str, Any], sets: dict[str, list[Prompt]], limit: int
) -> None:
    """Raise `UserError` if a set in the file is of other prompts."""
    for name, prompts in sets.items():
        now = prompts_checksum(prompts, limit)
        if rows.get(name, {}).get("prompts_checksum", now) != now:
            raise UserError(
                f"--json {path}: its figures of {name} are of other prompts or another limit; name another "
                "file, or rename the set's."
            )


def _check_same(path: Path | None, before: dict[str, Any], settings: dict[str, Any]) -> None:
    """Raise `UserError` if the figures in the file are of other options or another pair."""
    for name, value in settings.items():
        if before.get(name, value) != value:
            raise UserError(
                f"--json {path}: its figures are with {name}={before[name]!r}, now {name}={value!r}; name "
                "another file."
            )
