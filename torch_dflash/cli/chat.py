"""``torch-dflash chat``: a streamed conversation with any pair, drafted tokens in colour."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch_dflash.checks import context_of
from torch_dflash.cli.arguments import check_call_options, decoding, template_options
from torch_dflash.cli.command import command, option
from torch_dflash.cli.errors import UserError, fail, hang_up, one_line, refusing
from torch_dflash.progress import coloured, print_status
from torch_dflash.runtime_kinds import RUNTIMES
from torch_dflash.storage.json_text import parse_json

if TYPE_CHECKING:
    from torch_dflash.chat import Chat, Message
    from torch_dflash.cli.job import Job

LONGEST = 4096
HELP = """/stats       what the last answer cost, and the conversation
/save FILE   write the conversation, as a line for torch-dflash generate --jsonl
/load FILE   go on with such a conversation
/reset       begin anew
/help        this list
/exit        leave, as Ctrl-D does; Ctrl-C stops an answer"""
LENGTH = "Positions of the whole conversation (4096, or the target's context)."


@command(
    "chat",
    [*decoding(), option("--max-length", type=int, metavar="N", help=LENGTH)],
    "Talk to a target and a drafter.",
    "Each line of stdin is a message, or a command: /help lists them. A turn reads only what is new. "
    "Answers go to stdout, statistics and errors to stderr. Exit status: 0 done, 1 some messages failed, "
    "2 wrong usage.",
    check=check_call_options,
)
def run(arguments: SimpleNamespace) -> int:
    """Talk until the input ends; returns the exit status."""
    from torch_dflash.chat import Chat
    from torch_dflash.cli.job import Job

    job = Job.load(arguments)
    requested = arguments.max_length
    length = min(LONGEST, context_of(job.loaded.target)) if requested is None else requested
    if length <= arguments.max_new_tokens:
        raise UserError(
            f"--max-length {length} leaves no room beside --max-tokens {arguments.max_new_tokens}; raise the "
            "one or lower the other."
        )
    engine = job.engine(length - arguments.max_new_tokens, 1, job.streamed_rounds)
    template = template_options(arguments)
    with refusing(ValueError, before=f"--model {arguments.target}: "):
        chat = Chat(engine, job.loaded.tokenizer, template_options=template, **job.options)
    if RUNTIMES[arguments.runtime].compiles:
        engine.warmup()
    return Conversation(chat, job).talk()


class Conversation:
    """The messages, and the commands that change them."""

    def __init__(self, chat: Chat, job: Job):
        self.chat, self.job, self.turns = chat, job, 0
        self.read = self.drafted = self.new = 0  # tokens of all turns
        self.reset()

    def talk(self) -> int:
        """Take lines until there are no more; returns the exit status."""
        person = sys.stdin.isatty()
        if person:
            with contextlib.suppress(ImportError):  # a system without it has no history of lines
                import readline  # noqa: F401 - `input` uses it
            print_status("/help lists commands, Ctrl-D leaves.")
        failed = False
        while True:
            try:
                line = input("> " if person else "").strip()
                if line in ("/exit", "/quit"):
                    break
                self.take(line)
            except EOFError:
                break
            except KeyboardInterrupt:
                print(file=sys.stderr)
            except BrokenPipeError:
                return hang_up()
            except (UserError, ValueError) as error:
                failed = True
                fail("chat", error)
        return int(failed and not person)

    def take(self, line: str) -> None:
        """Answer a message, or obey a command.

        Raises:
            UserError, ValueError: the line is refused; nothing has changed.
        """
        word, _, rest = line.partition(" ")
        commands: dict[str, Any] = {"/stats": self.report, "/reset": self.reset}
        commands |= {"/help": lambda: print(HELP, file=sys.stderr)}
        if word in ("/save", "/load"):
            if not rest.strip():
                raise UserError(f"{word}: name a file.")
            try:
                path = Path(rest.strip()).expanduser()
                self.save(path) if word == "/save" else self.load(path)
            except (OSError, RuntimeError) as error:  # the latter of a home that nobody has
                why = getattr(error, "strerror", None) or one_line(error)
                raise UserError(f"{line}: {why}; name another file.") from None
        elif line in commands:
            commands[line]()
        elif line.startswith("/"):
            raise UserError(f"{word}: no such command; /help lists them.")
        elif line:
            self.answer(line)

    def answer(self, text: str) -> None:
        """Stream the answer to a message; both stay, after Ctrl-C with a part of the answer."""
        from torch_dflash.cli.text import Printer

        messages = [*self.messages, {"role": "user", "content": text}]
        seed = self.job.arguments.seed + self.turns
        try:
            pieces = self.chat.stream(messages, seed=seed)
        except ValueError as error:
            more = "/reset begins anew, and --max-length has more room"
            raise UserError(f"{one_line(error)} ({more}.)") from None
        printer = Printer(self.job.loaded.tokenizer, colour=coloured(sys.stdout))
        new_tokens = 0
        with stoppable() as stop, contextlib.suppress(KeyboardInterrupt):
            for piece in pieces:
                printer(piece.tokens, piece.drafted)
                new_tokens += len(piece.tokens)
                self.drafted += sum(piece.drafted)
                if stop.is_set():
                    break
        printer.end()
        self.new, self.turns = self.new + new_tokens, self.turns + 1
        if new_tokens:
            assert self.chat.message is not None and self.chat.stats is not None
            self.messages = [*messages, self.chat.message]
            self.read += self.chat.stats.prefilled

    def reset(self) -> None:
        """Drop all messages but the system message."""
        system = self.job.arguments.system
        self.messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]

    def report(self) -> None:
        """Print statistics in two lines on stderr."""
        stats = self.chat.stats
        if stats is None:
            raise UserError("/stats: nothing was said yet.")
        tpot = stats.time_per_output_token
        print(
            f"last answer: {stats.prefilled} prompt tokens read, {stats.new_tokens} new | acceptance length "
            f"{stats.mean_acceptance_length:.2f} | TTFT {stats.time_to_first_token * 1e3:.1f} ms | TPOT "
            f"{float('nan') if tpot is None else tpot * 1e3:.2f} ms\n"
            f"all {self.turns}: {self.read} prompt tokens read, {self.new} new, {self.drafted} drafted",
            file=sys.stderr,
        )

    def save(self, path: Path) -> None:
        """Write the messages as one line of JSON, all or nothing."""
        from torch_dflash.storage.files import write_whole

        line = json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n"
        write_whole(path, lambda part: part.write_text(line, encoding="utf-8"))

    def load(self, path: Path) -> None:
        """Take the messages of a file of `save` in place of these."""
        try:
            found = parse_json(path.read_text(encoding="utf-8"))["messages"]
            good = isinstance(found, list) and all({"role", "content"} <= one.keys() for one in found)
        except (ValueError, TypeError, KeyError, AttributeError):
            good = False
        if not good:
            raise UserError(
                f'/load {path}: must hold {{"messages": [{{"role": ..., "content": ...}}, ...]}}.'
            )
        self.messages = found


@contextlib.contextmanager
def stoppable() -> Iterator[threading.Event]:
    """A flag that Ctrl-C sets, for the next piece to see; a second Ctrl-C does not wait for one."""
    flag = threading.Event()

    def stop(*_: Any) -> None:
        if flag.is_set():
            raise KeyboardInterrupt
        flag.set()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, before)
