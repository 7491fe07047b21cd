"""The published pairs of ``pairs.json``, with the source of each field.

The fields quote their sources: no weights were loaded to fill them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

UNSOURCED = ("name", "model", "kind", "family", "note", "measured", "sources", "decoded", "refused_for")
"""Fields that need no source."""
KINDS = ("DFlash", "DFlash2", "DSpark")
"""Kinds of drafters that can be loaded."""
DSPARK_LAYOUTS = ("speculators", "DeepSpec", "SpecForge", "LiquidAI")
"""Layouts of readable DSpark drafters."""
PLAIN_FORMS = ("mxfp4", "fp8", "int8", "int4")
"""Quantised forms that ``jb.load`` dequantises."""


@dataclass(frozen=True)
class Checkpoint:
    """A published drafter and its target; None: unknown.

    Attributes:
        name: for `load_pair`.
        model: the target's name. target, drafter: hub ids.
        kind: "DFlash", "DFlash2", "DSpark", or another method, which cannot be loaded.
        layout: layout of the field and tensor names.
        family: transformers' type of the target, and the variant after a colon.
        num_hidden_layers: layers of the drafter.
        block_size: W, the anchor included.
        target_layer_ids: the taps, 0-based indices of blocks.
        num_target_layers: layers of the target. mask_token_id: id of the mask token.
        shape: further fields of the drafter's config.
        size: size of the weights, in the source's words.
        target_weights: the form of the target's weights, if quantised.
        license: the hub's name of the drafter's license.
        acceptance: mean acceptance length by set of prompts. measured: conditions of the measurement.
        note: further facts.
        decoded: whether such targets decode here (docs/families.md); None: not compared.
        refused_for: the reason if they do not.
        sources: the source of each field.
    """

    name: str
    model: str
    target: str | None = None
    drafter: str | None = None
    kind: str = "DFlash"
    layout: str | None = None
    family: str | None = None
    num_hidden_layers: int | None = None
    block_size: int | None = None
    target_layer_ids: tuple[int, ...] | None = None
    num_target_layers: int | None = None
    mask_token_id: int | None = None
    shape: dict[str, Any] | None = field(default=None, hash=False)
    size: str | None = None
    target_weights: str | None = None
    license: str | None = None
    acceptance: dict[str, float] | None = field(default=None, hash=False)
    measured: str | None = None
    note: str | None = None
    decoded: bool | None = None
    refused_for: str | None = None
    sources: dict[str, str] = field(default_factory=dict, hash=False)

    def mentions(self, text: str) -> bool:
        """Whether name, target or drafter contains ``text``, in any case, with ``_`` for ``-``."""
        names = (self.name, self.target or self.model, self.drafter or "")
        return self.is_of(text) or any(_plain(text) in _plain(name) for name in names)

    def is_of(self, target: str) -> bool:
        """Whether ``target``, a hub id or directory, ends in the name of this pair's target."""
        own, given = ((name.rstrip("/").rpartition("/")[2]) for name in (self.target or self.model, target))
        return _plain(own) == _plain(given)

    @property
    def unknown(self) -> tuple[str, ...]:
        """The fields without a known value."""
        return tuple(name for name in vars(self) if name not in UNSOURCED and getattr(self, name) is None)

    @property
    def foreign(self) -> str | None:
        """The drafter's kind and layout, if drafters of that kind and layout cannot be loaded."""
        if self.kind not in KINDS:
            return f"of kind {self.kind}"
        trained_as_dspark = self.kind == "DSpark" or str(self.layout).startswith("DeepSpec")
        if trained_as_dspark and self.layout not in DSPARK_LAYOUTS:
            unshown = "a layout that no public config shows"
            where = unshown if self.layout is None else f"the layout {self.layout}"
            return f"of kind {self.kind} in {where}"
        return None

    @property
    def verdict(self) -> tuple[bool | None, str | None]:
        """(Whether the pair decodes here; None: its family was not compared; the reason if not)."""
        if self.decoded is not False and self.foreign is not None:
            return False, f"a drafter {self.foreign}"
        return self.decoded, self.refused_for

    @property
    def loads(self) -> bool:
        """Whether the pair decodes here from the published weights, by ``jb.load``."""
        return self.verdict[0] is True and self.target_weights in (None, *PLAIN_FORMS)


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


def _read() -> tuple[Checkpoint, ...]:
    data = json.loads((files("torch_dflash.published") / "pairs.json").read_text(encoding="utf-8"))
    return tuple(
        _row(raw, data["families"].get(raw.get("family"), {}), data["sources"]) for raw in data["pairs"]
    )


def _row(raw: dict[str, Any], family: dict[str, Any], sources: dict[str, str]) -> Checkpoint:
    taps = raw.get("target_layer_ids")
    by_field = {name: sources[source] for source, names in raw["sources"].items() for name in names}
    made: dict[str, Any] = {"target_layer_ids": None if taps is None else tuple(taps), "sources": by_field}
    return Checkpoint(**raw | made, decoded=family.get("decoded"), refused_for=family.get("why"))


checkpoints: tuple[Checkpoint, ...] = _read()
"""Every known published pair, as `Checkpoint`."""


@dataclass(frozen=True)
class PublishedCounts:
    """Numbers of published drafters.

    Attributes:
        known: drafters of `KINDS` with published weights. decodes: those of them that decode here.
        loads: those that decode from the target's published weights.
    """

    known: int
    decodes: int
    loads: int

    def __str__(self) -> str:
        return (
            f"{self.known} published drafters are known: {self.decodes} decode here, {self.loads} of them "
            "from the target's weights as published"
        )


def share(rows: Iterable[Checkpoint] = checkpoints) -> PublishedCounts:
    """The counts for ``rows``, without SpecForge's sample configs, which have no published weights."""
    known = [row for row in rows if row.kind in KINDS and not row.name.endswith("-sample")]
    decodes = [row for row in known if row.verdict[0]]
    return PublishedCounts(len(known), len(decodes), sum(row.loads for row in decodes))
