"""Every tensor of a checkpoint against the network that its config describes, before that is allocated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch


def check_tensors(found: Mapping[str, tuple[int, ...]], kind: Any, config: Any, source: Any) -> None:
    """Raise ``ValueError`` unless names and shapes are those of a ``kind`` drafter of ``config``.

    Args:
        found: shapes by the names that the network has. kind: its class. source: for the message.
    """
    with torch.device("meta"):
        own = {name: tuple(one.shape) for name, one in kind(config).state_dict().items() if name != "d2t"}
    others = [
        f"{name} {found[name]}, not {shape}"
        for name, shape in own.items()
        if name in found and found[name] != shape
    ]
    for problem, names in (
        ("missing_keys", own.keys() - found.keys()),
        ("mismatched_keys", others),
        ("unexpected_keys", {name for name in found.keys() - own.keys() if not name.endswith("inv_freq")}),
    ):
        if names:
            refuse_weights(problem, names, source, kind.kind)


def refuse_weights(problem: str, names: Iterable[Any], source: Any, kind: str) -> NoReturn:
    """Raise ``ValueError`` for weights that are not the config's; ``problem`` in transformers' words."""
    raise ValueError(
        f"{problem}={sorted(map(str, names))[:5]} in {source}: the weights are not those of a {kind} drafter "
        "with this config; check both files."
    )
