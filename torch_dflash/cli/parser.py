"""A parser that names a mistyped option, where argparse would blame the word behind it."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

_OPTION = re.compile(r"--?[A-Za-z]\S*")


class Parser(argparse.ArgumentParser):
    """`argparse.ArgumentParser`; parsers of its subcommands are of this class, too."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else list(args)
        self._check_options(words)
        return super().parse_known_args(words, namespace)

    def _check_options(self, words: Sequence[str]) -> None:
        known, value = self._option_string_actions, False
        for word in words:
            if word == "--" or (self._subparsers is not None and not word.startswith("-")):
                return  # the rest are no options, or a subcommand's
            name = word.partition("=")[0]
            meant = [known[option] for option in known if option.startswith(name)]
            if _OPTION.fullmatch(name) and not meant and not value:
                near = get_close_matches(name.lower(), known, 1, cutoff=0.8)
                self.error(
                    f"unknown option {name}; "
                    + (f"did you mean {near[0]}?" if near else f"see {self.prog} --help.")
                )
            value = bool(meant) and meant[0].nargs is None and "=" not in word  # argparse asks for its value
