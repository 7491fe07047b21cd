"""Declares commands and their options for click, and runs a parsed command.

Nothing here imports torch: ``--help`` and wrong usage are answered at once.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import click

from torch_dflash.cli.errors import UserError, fail, one_line, status_of
from torch_dflash.progress import quiet

T = TypeVar("T")
Run = Callable[[SimpleNamespace], int]
"""The body of a command: takes the parsed arguments, returns the exit status."""
Check = Callable[[SimpleNamespace], Any] | None
PROGRAM = "torch-dflash"
LIGHT = ("env", "list")
"""Commands that import no transformers, unless they are asked to."""
COUNT = click.IntRange(min=1)
PATH = click.Path(path_type=Path)
FILE = click.Path(readable=False)
"""A path as text; shells complete it, and the command refuses a file that it cannot read."""


def option(*names: str, many: bool = False, **more: Any) -> click.Option:
    """An option; ``names`` are its spellings, and the last one without dashes names its attribute.

    Args:
        many: it takes one or more words, as in ``--prompts a.jsonl b.jsonl``; its value is a list, or None.
        **more: as in `click.Option`.
    """
    return (_Many if many else click.Option)(names, show_default=more.pop("show_default", True), **more)


def flag(*names: str, help: str, **more: Any) -> click.Option:
    """An option without a value."""
    return click.Option(names, is_flag=True, help=help, show_default=False, **more)


def quiet_flag() -> click.Option:
    """``--quiet``, of each command and of each group before one."""
    return flag("-q", "--quiet", help="Only errors on stderr: no bars, notes or statistics.")


class _Model(click.Path):
    """A directory, hub id or word; shells complete it as a path."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not value.strip():
            self.fail(f"{value!r} is empty; name a directory or a hub id.", param, ctx)
        return value


MODEL = _Model()


class _Many(click.Option):
    """An option of one or more words. `Command` repeats its name before each of them."""

    def __init__(self, names: Sequence[str], **more: Any):
        super().__init__(names, multiple=True, callback=lambda ctx, one, words: list(words) or None, **more)


class Command(click.Command):
    """A command whose options may take several words."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        many = {name for one in self.params if isinstance(one, _Many) for name in one.opts}
        try:
            return super().parse_args(ctx, _repeated(many, args, ctx.token_normalize_func or str))
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # click leaves it out where an option's value is missing
            raise


def _repeated(many: set[str], words: list[str], spelling: Callable[[str], str]) -> list[str]:
    """``--prompts a b`` as ``--prompts a --prompts b``, for the options named in ``many``."""
    found: list[str] = []
    name, count = None, 0
    for word in words:
        if word.startswith("-") and word != "-":
            name, _, value = word.partition("=")
            name = spelling(name)
            name, count = name if name in many else None, bool(value)
        elif name is not None:
            count += 1
            if count > 1:
                found.append(name)
        found.append(word)
    return found


@dataclasses.dataclass(frozen=True)
class Invocation:
    """A command line that was parsed: the command's ``name``, its body, and the arguments."""

    name: str
    run: Run
    arguments: SimpleNamespace

    def __call__(self) -> int:
        """Run it; returns the exit status."""
        return status_of(self.name, self._run)

    def _run(self) -> int:
        with quiet(self.arguments.quiet):
            warnings.showwarning = print_warning
            if self.arguments.quiet and self.name not in LIGHT:
                silence()
            status = self.run(self.arguments)
        sys.stdout.flush()  # a reader that has left is noticed here, not when the interpreter ends
        return status


def command(
    name: str, params: list[click.Parameter], help: str, more: str = "", check: Check = None
) -> Callable[[Run], Command]:
    """Decorator: a body becomes a command that makes an `Invocation` of it.

    The body imports what it needs when it runs: ``--help`` must not wait for torch.

    Args:
        params: the options, besides ``--quiet``.
        help: one sentence, in the list of commands too. more: the rest of the command's own help.
        check: called with the arguments; raises `UserError` for those that need no model to be refused.
    """

    def declared(run: Run) -> Command:
        def parsed(**values: Any) -> Invocation | int:
            context = click.get_current_context()
            path = context.command_path.removeprefix(PROGRAM).strip()
            arguments = SimpleNamespace(command=name, **values)
            while context := context.parent:
                arguments.quiet |= context.params["quiet"]
            try:
                if check is not None:
                    check(arguments)
            except UserError as error:
                return fail(path, error)
            return Invocation(path, run, arguments)

        text = f"{help}\n\n{more}" if more else help
        return Command(name, params=[*params, quiet_flag()], help=text, short_help=help, callback=parsed)

    return declared


def print_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning as a line of a command, above its bars."""
    from tqdm import tqdm

    tqdm.write(f"{PROGRAM}: {one_line(str(message))}", file=sys.stderr)


def silence() -> None:
    """Silence warnings, and the bars and notes of transformers and the hub."""
    from huggingface_hub.utils import disable_progress_bars
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging

    warnings.simplefilter("ignore")
    for library in (logging, hub):
        library.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()


def options_of(cls: type, without: tuple[str, ...] = ()) -> list[click.Option]:
    """One option for each field of ``cls``: its default, its choices, its help from the ``Args:`` of ``cls``.

    A field without a default makes a required option.
    """
    helps, made = _helps(cls), []
    for field in dataclasses.fields(cls):
        if field.name in without:
            continue
        kind, text = _kind(cls, field), helps.get(field.name)
        name = "--" + field.name.replace("_", "-")
        if kind is bool:
            made.append(flag(name, help=text or ""))
            continue
        lacks = field.default is dataclasses.MISSING
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        more: dict[str, Any] = {"type": click.Choice(choices)} if choices else {"type": kind}
        more |= {} if choices else {"metavar": kind.__name__.upper()}
        more |= {} if lacks else {"default": field.default}
        made.append(option(name, required=lacks, help=text, **more))
    return made


def read_options(cls: type[T], arguments: SimpleNamespace, **more: Any) -> T:
    """A ``cls`` from parsed ``arguments``; ``more`` gives the fields that were left out."""
    names = [field.name for field in dataclasses.fields(cls) if field.name not in more]  # pyright: ignore
    return cls(**{name: getattr(arguments, name) for name in names}, **more)


def _kind(cls: type, field: dataclasses.Field) -> Any:
    """A field's type, without its ``| None``."""
    hint = eval(str(field.type), vars(sys.modules[cls.__module__]))  # the other fields may need torch
    if get_origin(hint) in (types.UnionType, Union):
        return next(arm for arm in get_args(hint) if arm is not type(None))
    return hint


def _helps(cls: type) -> dict[str, str]:
    """Sentences of the docstring's ``Args:``, by field; several fields may share a line."""
    section = (inspect.getdoc(cls) or "").partition("Args:")[2].partition("\n\n")[0]
    text = " ".join(section.split())
    names = [field.name for field in dataclasses.fields(cls)]  # pyright: ignore
    found = list(re.finditer(rf"(?:^|(?<=\. ))({'|'.join(names)}): ", text))
    ends = [match.start() for match in found[1:]] + [len(text)]
    return {
        match[1]: text[match.end() : end].strip().rstrip(".") for match, end in zip(found, ends, strict=True)
    }


def number_or_word(text: str) -> int | str:
    """The value of ``--verify-width`` or ``--mesh``: a number, or a word such as "auto"."""
    return int(text) if text.lstrip("-").isdecimal() else text
