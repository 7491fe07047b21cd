"""README.md as a package index shows it: links and pictures with the repository's address before them."""

from __future__ import annotations

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#)([^)]+)\)")


def absolute(text: str, repository: str) -> str:
    """``text`` with each link to a file as an address under ``repository``."""

    def link(match: re.Match[str]) -> str:
        picture, label, path = match.groups()
        return f"{picture}[{label}]({repository}/{'raw' if picture else 'blob'}/main/{path})"

    return LINK.sub(link, text)


class ReadmeHook(MetadataHookInterface):
    """Sets the project's readme while it is built."""

    def update(self, metadata: dict) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = absolute(text, metadata["urls"]["Repository"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
