"""Conventions that a pair may have mixed up: the changes, their words and their config fields."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import init_empty_weights

from torch_dflash.proposers.dflash.config import NESTED_FIELDS
from torch_dflash.proposers.dflash.model import DFlashDraftModel
from torch_dflash.storage.files import write_whole
from torch_dflash.targets.final_norm import final_norm

MOST_MASKS = 12
WINDOWS = (512, 1024, 2048, 4096)


@dataclass(frozen=True)
class Convention:
    """All facts about a drafter's numbers on which a config, a loader and a trainer may differ.

    Attributes:
        taps: 0-based blocks of the target whose outputs the drafter reads; -1: the embedding's output.
        normed: whether the outputs pass the target's final norm.
        mask_id: the id whose embedding stands for a token to be drafted.
        scale: factor on the target's raw embedding.
        windows, causal: the window of each draft layer (None: no window), and whether its block is causal.
        rope: the rotary parameters, as JSON.
        hidden_norm, norm: whether the drafter applies the norm of that name.
        first_row: 1 if a row predicts the token at its own place, 0 if the token after it.
        tied: whether the target's embedding gives the logits instead of its head.
        dtype: dtype of the drafter's arithmetic.
    """

    taps: tuple[int, ...]
    mask_id: int
    scale: float
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    rope: str
    dtype: torch.dtype
    normed: bool = False
    hidden_norm: bool = True
    norm: bool = True
    first_row: int = 1
    tied: bool = False

    @classmethod
    def of(cls, drafter: DFlashDraftModel) -> Convention:
        """The convention of the drafter's own config."""
        config, blocks = drafter.config, cast(Any, drafter.layers)
        return cls(
            taps=tuple(config.target_layer_ids),
            mask_id=config.mask_token_id,
            scale=config.input_embedding_scale,
            windows=tuple(layer.self_attn.window for layer in blocks),
            causal=tuple(layer.self_attn.causal for layer in blocks),
            rope=as_text(config.rope_parameters),
            dtype=drafter.dtype,
            first_row=int(not config.sample_from_anchor),
        )

    def applied(self, drafter: DFlashDraftModel) -> Any:
        """A drafter of this convention with the weights of ``drafter``, which does not change."""
        config = copy.deepcopy(drafter.config)
        config.mask_token_id, config.input_embedding_scale = self.mask_id, self.scale
        config.rope_parameters = json.loads(self.rope)
        with init_empty_weights(include_buffers=False):
            twin: Any = type(drafter)(config)
        twin.load_state_dict(drafter.state_dict(), assign=True)
        twin.lm_head = None  # the judge passes a head
        for layer, window, causal in zip(twin.layers, self.windows, self.causal, strict=True):
            layer.self_attn.window, layer.self_attn.causal = window, causal
        for name in ("hidden_norm", "norm"):
            if not getattr(self, name):
                setattr(twin, name, torch.nn.Identity())
        return twin.to(drafter.device, self.dtype).train(drafter.training)


def as_text(parameters: dict[str, Any]) -> str:
    """JSON text of ``parameters``, equal for equal ones."""
    return json.dumps(parameters, sort_keys=True)


@dataclass(frozen=True)
class Change:
    """A change of a convention.

    Attributes:
        kind: the changed part; two changes of one kind exclude each other.
        name: short name, for tables.
        words: the fault, if this change is better.
        fix: the cure; if empty, made of ``fields``.
        sets: new values of fields of `Convention`.
        fields: values of config.json that make this change; None: no field can.
    """

    kind: str
    name: str
    words: str
    fix: str = ""
    sets: dict[str, Any] = field(default_factory=dict, compare=False)
    fields: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if not self.fix:
            shown = ", ".join(f"{name}={value!r}" for name, value in (self.fields or {}).items())
            object.__setattr__(self, "fix", f"set {shown} in the drafter's config.json.")

    def apply(self, convention: Convention) -> Convention:
        """``convention`` with this change."""
        return replace(convention, **self.sets)


def changes(target: Any, drafter: DFlashDraftModel, longest: int, masks: Sequence[int] = ()) -> list[Change]:
    """All changes to try on a pair, on texts of up to ``longest`` tokens; ``masks``: likely mask ids."""
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
        fix, fields = "", {"target_layer_ids": moved}
        if min(moved) < 0:
            fix = "layer -1 is the embedding's output, which no config can name: train a drafter anew."
        yield Change("taps", f"taps {step:+d}", words, fix, {"taps": tuple(moved)}, None if fix else fields)
    if final_norm(target) is not None:
        words = "the drafter learned from features behind the target's final norm"
        fix = "features are read before it by every loader: train the drafter on the blocks' own outputs."
        yield Change("normed", "normed features", words, fix, {"normed": True})


def _attention(target: Any, drafter: DFlashDraftModel, longest: int) -> Iterator[Change]:
    own, config = Convention.of(drafter), drafter.config
    count, causal = len(own.windows), not own.causal[0]
    words = f"blocks are {'not ' if causal else ''}causal, and were {'' if causal else 'not '}in training"
    yield Change(
        "causal", f"causal {causal}", words, "", {"causal": (causal,) * count}, {"is_causal": causal}
    )

    def windows(window: int | None, words: str, kind: str) -> Change:
        fields = {"layer_types": [kind] * count, "sliding_window": window, "is_causal": own.causal[0]}
        name = "no window" if window is None else f"window {window}"
        return Change("window", name, words, "", {"windows": (window,) * count}, fields)

    seen = {*own.windows}
    if seen != {None}:
        words = f"the drafter's layers see windows of {max(w for w in seen if w)}, and saw all in training"
        yield windows(None, words, "full_attention")
    theirs = getattr(target.config.get_text_config(), "sliding_window", None)
    likely = {config.sliding_window, theirs, *WINDOWS}
    for window in sorted(one for one in likely - seen if one and one < longest):
        words = f"the drafter's layers see all of the context, and saw windows of {window} in training"
        yield windows(window, words, "sliding_attention")


def _masks(drafter: DFlashDraftModel, masks: Sequence[int]) -> Iterator[Change]:
    own = drafter.config.mask_token_id
    for mask in [one for one in dict.fromkeys(masks) if one != own][:MOST_MASKS]:
        words = f"the mask id is {own}, and was {mask} in training"
        yield Change("mask", f"mask {mask}", words, "", {"mask_id": mask}, {"mask_token_id": mask})


def _embedding(target: Any, drafter: DFlashDraftModel) -> Iterator[Change]:
    own, width = drafter.config.input_embedding_scale, drafter.config.hidden_size
    for scale in sorted({1.0, width**0.5} - {own}):
        words = (
            f"the target's embedding is scaled by {own:g} for the drafter, and was by {scale:g} in training"
        )
        fields = {"input_embedding_scale": scale}
        yield Change("scale", f"scale {scale:.4g}", words, "", {"scale": scale}, fields)
    head, embedding = target.get_output_embeddings().weight, target.get_input_embeddings().weight
    shared = head.data_ptr() == embedding.data_ptr() or drafter.config.own_head
    if not shared and head.shape == embedding.shape:
        words = "the drafter learned to be read by the target's embedding, and the target's head is another"
        fix = "every loader reads it by the head: train the drafter with that."
        yield Change("tied", "tied head", words, fix, {"tied": True})


def _reading(target: Any, drafter: DFlashDraftModel) -> Iterator[Change]:
    flag = drafter.config.sample_from_anchor
    says, read = ("of their own place", "after it") if flag else ("after their own place", "of it")
    words = f"rows say the token {says}, and are read as the one {read} (sample_from_anchor={flag})"
    yield Change(
        "row", f"row {flag:d}", words, "", {"first_row": int(flag)}, {"sample_from_anchor": not flag}
    )
    for norm, what in (("hidden_norm", "features"), ("norm", "states before the head")):
        words = f"the drafter's {norm} on its {what} was left out in training"
        fix = f"train with {norm}, or set its weights so that it does nothing."
        yield Change(norm, f"no {norm}", words, fix, {norm: False})


def _numbers(target: Any, drafter: DFlashDraftModel) -> Iterator[Change]:
    for dtype in (torch.float32, torch.bfloat16):
        if dtype != drafter.dtype:
            words, fix = (
                f"{drafter.dtype} costs drafts that {dtype} has",
                f"load the drafter with dtype={dtype}.",
            )
            yield Change("dtype", str(dtype).removeprefix("torch."), words, fix, {"dtype": dtype})
    own: Any = drafter.config.rope_parameters
    base = target.config.get_text_config().rope_parameters
    if isinstance(base, dict) and "rope_theta" in base and as_text(base) != as_text(own):
        words = (
            "the drafter's positions turn by other parameters than the target's, with which it was trained"
        )
        fields = {"rope_parameters": dict(base)}
        yield Change("rope", "target's rope", words, "", {"rope": as_text(base)}, fields)


CONFIG, COPY = "config.json", "config.json.before"


def check_repairable(folder: Path) -> None:
    """Raise ``OSError`` if the config of ``folder`` cannot be written, or the old config cannot be kept."""
    if (folder / COPY).exists():
        raise FileExistsError(f"{folder / COPY} is there from an earlier repair; move it away first.")
    with tempfile.TemporaryFile(dir=folder):  # a folder that its mode lets us write may still be read-only
        pass


def repair(folder: Path, fields: dict[str, Any]) -> Path:
    """Write ``fields`` into the config of ``folder``; returns a copy of the old one.

    Raises:
        FileExistsError: a file has the copy's name. OSError: the files cannot be read or written.
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
