"""Progress bars: on a terminal unless they are asked for or refused."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm


def progress_bar(progress: bool | None, **options: Any) -> tqdm:
    """A tqdm bar on stderr. ``progress``: shown or not; None: shown where stderr is a terminal."""
    return tqdm(disable=None if progress is None else not progress, **options)
