"""The conventions that a pair may have mixed up, each with words for it and the fields that would say so."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from torch_dflash.doctor.convention import Convention, as_text
from torch_dflash.proposers.dflash.config import NESTED_FIELDS
from torch_dflash.proposers.dflash.model import DFlashDraftModel
from torch_dflash.storage.files import write_whole
from torch_dflash.targets.final_norm import final_norm

MOST_MASKS = 12
WINDOWS = (512, 1024, 2048, 4096)


@dataclass(frozen=True)
class Change:
    """Another convention.

    Attributes:
        kind: what is changed; two of one kind exclude each other.
        name: short, for tables.
        words: what is wrong if this is better.
        fix: what to do about it.
        apply: from a convention to the other one.
        fields: of config.json, with which the drafter is read so; None: no field says it.
    """

    kind: str
    name: str
    words: str
    fix: str
    apply: Callable[[Convention], Convention] = field(compare=False)
    fields: dict[str, Any] | None = None

    @classmethod
    def by_config(cls, kind: str, name: str, words: str, apply: Any, **fields: Any) -> Change:
        """One that config.json can say."""
        said = ", ".join(f"{field}={value!r}" for field, value in fields.items())
        return cls(kind, name, words, f"set {said} in the drafter's config.json.", apply, fields)


def changes(target: Any, drafter: DFlashDraftModel, longest: int, masks: Sequence[int] = ()) -> list[Change]:
    """All that are tried of a pair on texts of up to ``longest`` tokens; ``masks``: likely mask ids."""
    found = [*_taps(target, drafter), *_attention(target, drafter, longest), *_masks(drafter, masks)]
    return found + [*_embedding(target, drafter), *_reading(target, drafter), *_numbers(target, drafter)]


def _taps(target: Any, drafter: DFlashDraftModel) -> Iterator[Change]:
    taps, layers = drafter.config.target_layer_ids, target.config.get_text_config().num_hidden_layers
    for step in (-1, 1):
        moved = [tap + step for tap in taps]
        if min(moved) < -1 or max(moved) >= layers:
            continue
        words = (
            f"the taps are off by one: the drafter reads layers {taps}, and learned from {moved} (0-based "
            "outputs of blocks)"
        )

        def apply(now: Convention, moved: tuple[int, ...] = tuple(moved)) -> Convention:
            return replace(now, taps=moved)

        if min(moved) < 0:
            fix = "layer -1 is the embedding's output, which no config can name: train a drafter anew."
            yield Change("taps", f"taps {step:+d}", words, fix, apply)
        else:
            yield Change.by_config("taps", f"taps {step:+d}", words, apply, target_layer_ids=moved)
    if final_norm(target) is not None:
        words = "the drafter learned from features behind the target's final norm"
        fix = "features are read before it by every loader: train the drafter on the blocks' own outputs."
        yield Change("normed", "normed features", words, fix, lambda now: replace(now, normed=True))


def _attention(target: Any, drafter: DFlashDraftModel, longest: int) -> Iterator[Change]:
    own = Convention.of(drafter).layers
    count, config = len(own), drafter.config
    causal = not own[0][1]
    words = f"blocks are {'not ' if causal else ''}causal, and were {'' if causal else 'not '}in training"
    yield Change.by_config(
        "causal", f"causal {causal}", words, lambda now: replace(now, layers=_with(now, causal=causal)),
        is_causal=causal,
    )  # fmt: skip
    windows = {window for window, _ in own}
    if windows != {None}:
        words = f"the drafter's layers see windows of {max(w for w in windows if w)}, and saw all in training"
        yield Change.by_config(
            "window", "no window", words, lambda now: replace(now, layers=_with(now, window=None)),
            layer_types=["full_attention"] * count, sliding_window=None, is_causal=own[0][1],
        )  # fmt: skip
    theirs = getattr(target.config.get_text_config(), "sliding_window", None)
    likely = {config.sliding_window, theirs, *WINDOWS}
    for window in sorted(one for one in likely - windows if one and one < longest):
        words = f"the drafter's layers see all of the context, and saw windows of {window} in training"

        def apply(now: Convention, window: int = window) -> Convention:
            return replace(now, layers=_with(now, window=window))

        types = ["sliding_attention"] * count
        yield Change.by_config(
            "window", f"window {window}", words, apply,
            layer_types=types, sliding_window=window, is_causal=own[0][1],
        )  # fmt: skip


def _with(now: Convention, **said: Any) -> tuple[tuple[int | None, bool], ...]:
    return tuple((said.get("window", window), said.get("causal", causal)) for window, causal in now.layers)


def _masks(drafter: DFlashDraftModel, masks: Sequence[int]) -> Iterator[Change]:
    own = drafter.config.mask_token_id
    for mask in [one for one in dict.fromkeys(masks) if one != own][:MOST_MASKS]:
        words = f"the mask id is {own}, and was {mask} in training"

        def apply(now: Convention, mask: int = mask) -> Convention:
            return replace(now, mask_id=mask)

        yield Change.by_config("mask", f"mask {mask}", words, apply, mask_token_id=mask)


def _embedding(target: Any, drafter: DFlashDraftModel) -> Iterator[Change]:
    own, width = drafter.config.input_embedding_scale, drafter.config.hidden_size
    for scale in sorted({1.0, width**0.5} - {own}):
        words = (
            f"the target's embedding is scaled by {own:g} for the drafter, and was by {scale:g} in training"
        )

        def apply(now: Convention, scale: float = scale) -> Convention:
            return replace(now, scale=scale)

        yield Change.by_config("scale", f"scale {scale:.4g}", words, apply, input_embedding_scale=scale)
    head, embedding = target.get_output_embeddings().weight, target.get_input_embeddings().weight
    alike = head.data_ptr() == embedding.data_ptr() or drafter.config.own_head
    if not alike and head.shape == embedding.shape:
        words = "the drafter learned to be read by the target's embedding, and the target's head is another"
        fix = "every loader reads it by the head: train the drafter with that."
        yield Change("tied", "tied head", words, fix, lambda now: replace(now, tied=True))


def _reading(target: Any, drafter: DFlashDraftModel) -> Iterator[Change]:
    flag = drafter.config.sample_from_anchor
    says, read = ("of their own place", "after it") if flag else ("after their own place", "of it")
    words = f"rows say the token {says}, and are read as the one {read} (sample_from_anchor={flag})"
    yield Change.by_config(
        "row", f"row {flag:d}", words, lambda now: replace(now, first_row=int(flag)),
        sample_from_anchor=not flag,
    )  # fmt: skip
    for norm, what in (("hidden_norm", "features"), ("norm", "states before the head")):
        words = f"the drafter's {norm} on its {what} was left out in training"
        fix = f"train with {norm}, or set its weights so that it does nothing."

        def apply(now: Convention, norm: str = norm) -> Convention:
            return replace(now, skipped=now.skipped | {norm})

        yield Change(norm, f"no {norm}", words, fix, apply)


def _numbers(target: Any, drafter: DFlashDraftModel) -> Iterator[Change]:
    for dtype in (torch.float32, torch.bfloat16):
        if dtype != drafter.dtype:
            words = f"{drafter.dtype} costs drafts that {dtype} has"
            fix = f"load the drafter with dtype={dtype}."

            def apply(now: Convention, dtype: torch.dtype = dtype) -> Convention:
                return replace(now, dtype=dtype)

            yield Change("dtype", str(dtype).removeprefix("torch."), words, fix, apply)
    own: Any = drafter.config.rope_parameters
    base = target.config.get_text_config().rope_parameters
    if isinstance(base, dict) and "rope_theta" in base and as_text(base) != as_text(own):
        words = (
            "the drafter's positions turn by other parameters than the target's, with which it was trained"
        )
        parameters = dict(base)
        yield Change.by_config(
            "rope", "target's rope", words, lambda now: replace(now, rope=as_text(parameters)),
            rope_parameters=parameters,
        )  # fmt: skip


CONFIG, COPY = "config.json", "config.json.before"


def check_repairable(folder: Path) -> None:
    """Raise ``OSError`` if the config of ``folder`` could not be written, or the old one not be kept."""
    if (folder / COPY).exists():
        raise FileExistsError(f"{folder / COPY} is there from an earlier repair; move it away first.")
    with tempfile.TemporaryFile(dir=folder):  # what may be written by its mode can still be read-only
        pass


def repair(folder: Path, fields: dict[str, Any]) -> Path:
    """Write ``fields`` into the config of ``folder``; returns a copy of the old one.

    Raises:
        FileExistsError: the copy's name is taken. OSError: the files cannot be read or written.
    """
    check_repairable(folder)
    path, copy = folder / CONFIG, folder / COPY
    old = path.read_text()
    config = json.loads(old)
    for name, value in fields.items():
        inside = [config[block] for block in ("dflash_config", "dspark_config") if config.get(block)]
        holders = [block for block in inside if name in block or name in NESTED_FIELDS]
        for block in holders:
            block[name] = value
        if name in config or not holders:
            config[name] = value
    write_whole(copy, lambda part: part.write_text(old))
    write_whole(path, lambda part: part.write_text(json.dumps(config, indent=2) + "\n"))
    return copy
