"""The options, checks and errors that all stages of ``train`` have in common."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from torch_dflash.cli.arguments import DTYPES, target_option
from torch_dflash.cli.command import PATH, Check, Command, Run, command, option
from torch_dflash.cli.errors import INTERRUPTED, fail
from torch_dflash.cli.outputs import check_folder

TEMPLATE = "chat_template_kwargs"
TEMPLATE_HELP = "e.g. '{\"enable_thinking\": false}'; unset: what is recorded with the answers, else none."
DEMO = "SmolLM2-135M-Instruct"


def stage(
    name: str,
    params: list[click.Parameter],
    help: str,
    out: bool = True,
    template: bool = False,
    check: Check = None,
) -> Callable[[Run], Command]:
    """As `command`, with the target's options; ``out``: with ``--out``; ``template``: with the template's."""
    common: list[click.Parameter] = [
        target_option(),
        option("--target-dtype", type=click.Choice(DTYPES), default="auto"),
        option("--device", help="torch device, with --runtime eager."),
    ]
    if out:
        common.append(option("--out", type=PATH, required=True, metavar="DIR"))
    if template:
        common.append(option("--chat-template-kwargs", metavar="JSON", help=TEMPLATE_HELP))

    def checked(arguments: SimpleNamespace) -> None:
        if out:
            check_folder(arguments.out)
        if check is not None:
            check(arguments)

    return lambda run: command(name, [*common, *params], help, check=checked)(_resumable(name, run))


def _resumable(name: str, run: Run) -> Run:
    """``run``, whose errors end in one line, since the same command goes on where it stopped."""

    def guarded(arguments: SimpleNamespace) -> int:
        from torch_dflash.storage.files import StageError, Stopped

        try:
            return run(arguments)
        except BrokenPipeError:
            raise
        except Stopped as error:
            fail(f"train {name}", error)
            return INTERRUPTED
        except (StageError, ValueError, TypeError, OSError) as error:
            return fail(f"train {name}", error)
        except KeyboardInterrupt:
            fail(f"train {name}", "interrupted; run the same command again to go on from here.")
            return INTERRUPTED

    return guarded


def paths_option(name: str, help: str = "", required: bool = True, metavar: str = "PATH") -> click.Option:
    """An option of one or more paths."""
    return option(name, many=True, type=PATH, required=required, metavar=f"{metavar}...", help=help)


def load(arguments: SimpleNamespace, drafter: str = "none", device: str | None = None) -> Any:
    """Load the pair of a stage; ``device``: in place of ``--device``."""
    from torch_dflash.cli.loading import load_named

    place = arguments.device if device is None else device
    return load_named(arguments.target, drafter, dtype=arguments.target_dtype, device=place, offered=["demo"])


def longest_text(target: Any, max_length: int) -> int:
    """Length of the longest sequence, by ``max_length`` and the target's context."""
    from torch_dflash.checks import context_of

    return min(max_length, context_of(target))


def target_name(target: str) -> str:
    """A target as cards and figures name it: its id, or the name of its directory."""
    path = Path(target).expanduser()
    return DEMO if target == "demo" else path.resolve().name if path.is_dir() else target


def note_penalty(command: str, target: Any) -> None:
    """Print that the model's repetition penalty, if it has one, is not applied."""
    from torch_dflash.progress import print_status
    from torch_dflash.requests.row_values import penalty_of

    if penalty := penalty_of(target):
        print_status(f"torch-dflash {command}: the model's repetition_penalty={penalty} is not applied")
