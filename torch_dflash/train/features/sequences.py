"""Training sequences and batches, from cached feature shards or from the target in the loop."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from torch_dflash.progress import progress_bar
from torch_dflash.storage.files import StageError
from torch_dflash.train.features.extract import FeatureExtractor, Sequence, check_any
from torch_dflash.train.features.tensorfiles import TargetFingerprint, reading_tensors
from torch_dflash.train.fit.blocks import AnchorBatch, draw_anchors
from torch_dflash.train.stages import check_shards

# A mask id once in so many tokens is harmless; more often, it was chosen wrongly.
RARE = 10_000


@runtime_checkable
class Sequences(Protocol):
    """Training sequences by number, with the tapped states of their tokens.

    Attributes:
        taps: layers whose outputs are joined in the features, in this order.
        target: whose layers these are. dtype: of the features.
    """

    taps: tuple[int, ...]
    target: TargetFingerprint
    dtype: torch.dtype

    def __len__(self) -> int: ...

    def sequence(self, index: int) -> Sequence: ...

    def features(self, indices: list[int]) -> list[Tensor]:
        """Features [tokens, n*H] of each sequence."""
        ...


class _Listed:
    _sequences: list[Sequence]

    def __len__(self) -> int:
        return len(self._sequences)

    def sequence(self, index: int) -> Sequence:
        return self._sequences[index]


class CachedSequences(_Listed):
    """Sequences in the shards of `cache_features`, read from memory-mapped files.

    Raises:
        StageError: a shard is missing or damaged, or shards are of different targets, taps or types.
    """

    def __init__(self, directories: list[Path]):
        files = [file for path in directories for file in _shards(path)]
        places = ", ".join(map(str, directories))
        self._sequences: list[Sequence] = []
        self._places: list[tuple[Any, int]] = []
        kinds, size = [], sum(path.stat().st_size for path in files)
        with progress_bar(True, total=size, desc="verify features", unit="B", unit_scale=True) as bar:
            for path in files:
                kinds.append(self._open(path))
                bar.update(path.stat().st_size)
        targets, taps, types = zip(*kinds, strict=True)
        self.target: TargetFingerprint = _one("targets", targets, places)
        self.taps: tuple[int, ...] = _one("taps", taps, places)
        self.dtype: torch.dtype = _one("types", types, places)

    def _open(self, path: Path) -> tuple[TargetFingerprint, tuple[int, ...], torch.dtype]:
        remedy = "delete it and run the features stage again: only this shard is computed anew."
        with reading_tensors(path, remedy) as (file, metadata):
            rows, offset = file.get_slice("features"), 0
            ids, lengths, starts = (file.get_tensor(name).tolist() for name in ("ids", "lengths", "starts"))
            for length, start in zip(lengths, starts, strict=True):
                self._sequences.append(Sequence(ids[offset : offset + length], start))
                self._places.append((rows, offset))
                offset += length
            taps = tuple(int(tap) for tap in metadata["taps"].split(","))
            hidden, weights = int(metadata["hidden_size"]), metadata["target_weights"]
            target = TargetFingerprint(metadata["target"], hidden, weights)
            return target, taps, rows[:0].dtype

    def features(self, indices: list[int]) -> list[Tensor]:
        found = []
        for index in indices:
            rows, offset = self._places[index]
            found.append(rows[offset : offset + len(self._sequences[index].ids)])
        return found


def _shards(directory: Path) -> list[Path]:
    files = sorted(directory.glob("features-*-of-*.safetensors"))
    if not files:
        raise StageError(f"{directory}: no features-*.safetensors; run the features stage first.")
    check_shards(directory, files, "run the features stage again, which makes those that are missing.")
    return files


def _one(what: str, kinds: Iterable[Any], places: str) -> Any:
    found = set(kinds)
    if len(found) > 1:
        named = " and ".join(sorted(map(str, found)))
        raise StageError(f"{places} hold features of different {what}, {named}; train on one kind.")
    return found.pop()


class OnlineSequences(_Listed):
    """Sequences whose features the target computes on demand: no disk, a forward per batch."""

    def __init__(self, sequences: list[Sequence], extract: FeatureExtractor):
        check_any(sequences)
        self._sequences, self._extract = sequences, extract
        self.taps, self.dtype = extract.taps, extract.dtype
        self.target = TargetFingerprint.of(extract.target)

    def features(self, indices: list[int]) -> list[Tensor]:
        rows = [self._sequences[index].ids for index in indices]
        return [row[: len(ids)] for row, ids in zip(self._extract(rows), rows, strict=True)]


def split_held_out(sequences: Sequences, held_out: int, seed: int) -> tuple[list[int], list[int]]:
    """(training, held-out) sequence numbers; the same for the same seed and data."""
    order = random.Random(seed).sample(range(len(sequences)), len(sequences))
    return sorted(order[held_out:]), sorted(order[:held_out])


def epoch_batches(
    sequences: Sequences, indices: list[int], batch_size: int, seed: int, epoch: int
) -> list[list[int]]:
    """The batches of an epoch, in an order of ``seed`` and ``epoch`` alone.

    Similar lengths share a batch, to pad little; windows of 64 batches keep the mixture random.
    """
    shuffle = random.Random(f"{seed}/{epoch}")
    order = shuffle.sample(indices, len(indices))
    window = 64 * batch_size
    batches = []
    for start in range(0, len(order), window):
        near = sorted(order[start : start + window], key=lambda item: len(sequences.sequence(item).ids))
        batches += [near[at : at + batch_size] for at in range(0, len(near), batch_size)]
    shuffle.shuffle(batches)
    return batches


def make_batch(
    sequences: Sequences, indices: list[int], taps: tuple[int, ...], anchors: int, seed: str, last: int | None
) -> AnchorBatch:
    """A padded batch with anchors drawn by ``seed``; widths are multiples of 64, so few shapes occur.

    Args:
        taps: the drafter's, among those of ``sequences``. last: the target's last layer, if needed.
    """
    rows = [sequences.sequence(index) for index in indices]
    width = -(-max(len(row.ids) for row in rows) // 64) * 64
    ids = torch.zeros(len(rows), width, dtype=torch.int32)
    drawn = []
    for number, row in enumerate(rows):
        ids[number, : len(row.ids)] = torch.tensor(row.ids, dtype=torch.int32)
        generator = torch.Generator().manual_seed(seed_of(f"{seed}/{indices[number]}"))
        drawn.append(draw_anchors(row.start, len(row.ids), anchors, generator))
    found = sequences.features(indices)
    hidden = found[0].shape[1] // len(sequences.taps)

    def joined(layers: tuple[int, ...]) -> Tensor:
        padded = found[0].new_zeros(len(rows), width, len(layers) * hidden)
        for number, features in enumerate(found):
            for place, layer in enumerate(layers):
                at = sequences.taps.index(layer) * hidden
                padded[number, : len(features), place * hidden : (place + 1) * hidden] = features[
                    :, at : at + hidden
                ]
        return padded

    return AnchorBatch(
        ids=ids,
        length=torch.tensor([len(row.ids) for row in rows], dtype=torch.int32),
        features=joined(taps),
        anchors=torch.stack(drawn),
        last=None if last is None else joined((last,)),
    )


def seed_of(text: str) -> int:
    """A 63-bit seed from a text."""
    return random.Random(text).getrandbits(63)


def check_taps(sequences: Sequences, wanted: tuple[int, ...]) -> None:
    """Raise ``ValueError`` unless every wanted layer is among the features."""
    missing = [tap for tap in wanted if tap not in sequences.taps]
    if missing:
        raise ValueError(
            f"target_layer_ids={list(wanted)}: layers {missing} are not among the features' "
            f"{list(sequences.taps)}; choose among these, or compute features with them."
        )


def check_source(sequences: Sequences, target: TargetFingerprint) -> None:
    """Raise ``ValueError`` unless the features are those of ``target``."""
    if sequences.target != target:
        raise ValueError(
            f"the features are of {sequences.target}, the drafter is for {target}; run the features stage "
            "with this target, or name the other one."
        )


def check_mask(sequences: Sequences, mask: int) -> None:
    """Raise ``ValueError`` for a mask id that occurs in the texts."""
    rows = [sequences.sequence(index).ids for index in range(len(sequences))]
    found, tokens = sum(row.count(mask) for row in rows), sum(map(len, rows))
    if found * RARE > tokens:
        raise ValueError(f"mask_token_id={mask} occurs {found} times in {tokens} tokens; choose another.")
