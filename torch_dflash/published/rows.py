"""The published pairs: what is known of each, from where, and what is not.

``pairs.json`` holds them. Nobody here has loaded their weights: a field says what its source says.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

UNSOURCED = ("name", "model", "kind", "family", "note", "measured", "sources", "decoded", "refused_for")
"""Fields that say what the others are about, or how they come out here."""
KINDS = ("DFlash", "DFlash2", "DSpark")
"""The kinds of drafter that draft here."""
DSPARK_LAYOUTS = ("speculators", "DeepSpec", "SpecForge", "LiquidAI")
"""Layouts whose DSpark drafters are read."""
PLAIN_FORMS = ("mxfp4", "fp8", "int8")
"""Forms of quantised weights that ``jb.load`` dequantises."""


@dataclass(frozen=True)
class Checkpoint:
    """A published drafter and its target. None is unknown.

    Attributes:
        name: what `load_pair` takes.
        model: the target's name. target, drafter: hub ids.
        kind: "DFlash", "DFlash2", "DSpark", or another method's name, which does not draft here.
        layout: whose field and tensor names its files have.
        family: transformers' type of the target, with the variant behind a colon.
        num_hidden_layers: of the drafter.
        block_size: W, the anchor included.
        target_layer_ids: the taps, 0-based block indices.
        num_target_layers: layers of the target. mask_token_id: id of the mask.
        shape: further fields of the drafter's config.
        size: of its weights, in the words of the source.
        target_weights: the form that the target's weights are published in, if they are quantised.
        license: of the drafter, by the hub's name for it.
        acceptance: mean acceptance length by set of prompts. measured: under which conditions.
        note: what else has to be known.
        decoded: whether such targets decode here (docs/families.md); None: not compared.
        refused_for: why not.
        sources: where each field is from.
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
        """Whether the name, the target or the drafter has ``text`` in it; ``_`` is ``-``, any case."""
        names = (self.name, self.target or self.model, self.drafter or "")
        return self.is_of(text) or any(_plain(text) in _plain(name) for name in names)

    def is_of(self, target: str) -> bool:
        """Whether ``target``, a hub id or a directory, ends with the name of this pair's target."""
        own, given = ((name.rstrip("/").rpartition("/")[2]) for name in (self.target or self.model, target))
        return _plain(own) == _plain(given)

    @property
    def unknown(self) -> tuple[str, ...]:
        """The fields of which no source is known."""
        return tuple(name for name in vars(self) if name not in UNSOURCED and getattr(self, name) is None)

    @property
    def foreign(self) -> str | None:
        """The drafter's method or layout, if that is not read here."""
        if self.kind not in KINDS:
            return f"of kind {self.kind}"
        trained_as_dspark = self.kind == "DSpark" or str(self.layout).startswith("DeepSpec")
        if trained_as_dspark and self.layout not in DSPARK_LAYOUTS:
            where = (
                "a layout that no public config shows" if self.layout is None else f"the layout {self.layout}"
            )
            return f"of kind {self.kind} in {where}"
        return None

    @property
    def verdict(self) -> tuple[bool | None, str | None]:
        """Whether the pair decodes here (None: its family was not compared), and why not."""
        if self.decoded is not False and self.foreign is not None:
            return False, f"a drafter {self.foreign}"
        return self.decoded, self.refused_for

    @property
    def loads(self) -> bool:
        """Whether the pair decodes here from the target's published weights, by ``jb.load``."""
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
    said = {name: sources[source] for source, names in raw["sources"].items() for name in names}
    made: dict[str, Any] = {"target_layer_ids": None if taps is None else tuple(taps), "sources": said}
    return Checkpoint(**raw | made, decoded=family.get("decoded"), refused_for=family.get("why"))


checkpoints: tuple[Checkpoint, ...] = _read()
"""Every published pair that is known here, as `Checkpoint`."""


@dataclass(frozen=True)
class PublishedCounts:
    """How many published drafters are of use here.

    Attributes:
        known: drafters of `KINDS` with published weights. decodes: those that decode here.
        loads: those that also load from the target's published weights.
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
    """The three figures for ``rows``, without SpecForge's sample configs: those have no published weights."""
    known = [row for row in rows if row.kind in KINDS and not row.name.endswith("-sample")]
    decodes = [row for row in known if row.verdict[0]]
    return PublishedCounts(len(known), len(decodes), sum(row.loads for row in decodes))
