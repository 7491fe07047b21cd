"""``torch-dflash train vocabulary``: cuts a drafter's head to the target's most frequent ids."""

from __future__ import annotations

from types import SimpleNamespace

from torch_dflash.cli.arguments import DRAFTER
from torch_dflash.cli.command import COUNT, MODEL, option
from torch_dflash.cli.errors import UserError
from torch_dflash.cli.train.stage import load, paths_option, stage

ROWS = 8192
"""Ids that are kept."""


@stage(
    "vocabulary",
    [
        option(*DRAFTER, type=MODEL, required=True, metavar="D"),
        paths_option("--answers"),
        option("--rows", type=COUNT, default=ROWS, metavar="N",
               help="Ids that are drafted, the most frequent."),
    ],
    "Let a drafter draft frequent ids only.",
)  # fmt: skip
def run(arguments: SimpleNamespace) -> int:
    """Write the drafter with its own head, and print how much of the answers its ids cover."""
    from torch_dflash.proposers.dflash.model import DFlashDraftModel
    from torch_dflash.proposers.narrow import frequent_ids, with_draft_vocabulary
    from torch_dflash.storage.files import naming_a_full_disk
    from torch_dflash.train.answers.data import read_answers

    if (arguments.out / "config.json").exists():
        raise UserError(f"--out {arguments.out}: holds a model already; choose another directory.")
    texts = [answer.response_ids for answer in read_answers(arguments.answers)]
    ids = frequent_ids(texts, arguments.rows)
    loaded = load(arguments, arguments.drafter)
    if not isinstance(loaded.drafter, DFlashDraftModel):
        raise UserError(f"--drafter {arguments.drafter}: it has no head to cut; pass a DFlash drafter.")
    narrow = with_draft_vocabulary(loaded.drafter, loaded.target, ids)
    with naming_a_full_disk(arguments.out):
        narrow.save_pretrained(arguments.out)
    print(f"{len(ids):,} ids are {covered(texts, ids):.1%} of the answers' tokens.")
    print(f"The drafter is in {arguments.out}.")
    return 0


def covered(texts: list[list[int]], ids: list[int]) -> float:
    """The share of the tokens of ``texts`` that are among ``ids``."""
    from torch_dflash.proposers.narrow import count_ids

    counts = count_ids(texts)
    return sum(counts[token] for token in ids) / counts.total()
