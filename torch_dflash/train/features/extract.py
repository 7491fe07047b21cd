"""Stage 2, features: the target's tapped states for every token of prompt and answer, cached in shards.

On XLA they come from the engine's own prefill; eagerly, from a plain forward in the target's own attention.
"""

from __future__ import annotations

import threading
import zlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from torch_dflash.checks import check_runtime, check_target, context_of
from torch_dflash.engine.engine import Engine
from torch_dflash.ops.windows import write_rows
from torch_dflash.plan import DecodePlan
from torch_dflash.progress import progress_bar
from torch_dflash.proposers import PlainProposer
from torch_dflash.proposers.dflash.config import default_target_layer_ids
from torch_dflash.pytrees import register_state
from torch_dflash.requests.options import EngineOptions
from torch_dflash.requests.prompts import bucket, pad_rows
from torch_dflash.runtime_kinds import RUNTIMES
from torch_dflash.storage.files import StageError
from torch_dflash.targets.blocks import check_tappable, tapped
from torch_dflash.targets.skeleton import build_skeleton
from torch_dflash.targets.trace import blocks_of
from torch_dflash.targets.weights import collect_tensors
from torch_dflash.train.answers.data import Answer, encode_conversation
from torch_dflash.train.features.tensorfiles import TargetFingerprint, write_tensors
from torch_dflash.train.options import FeatureOptions, check_layers
from torch_dflash.train.stages import open_stage


@dataclass(frozen=True)
class Sequence:
    """Ids of one conversation; the answer begins at ``start``."""

    ids: list[int]
    start: int


def data_checksum(sequences: Iterable[Sequence]) -> int:
    """CRC-32 over ids and starts, in order."""
    value = 0
    for item in sequences:
        value = zlib.crc32(array("q", [item.start, len(item.ids), *item.ids]), value)
    return value


def check_any(sequences: list[Sequence]) -> None:
    """Raise ``StageError`` for no sequences."""
    if not sequences:
        raise StageError("no answer has two tokens within max_length; raise it, or make longer answers.")


@register_state
@dataclass(frozen=True)
class RecorderState:
    """Features of the tokens seen so far: ``features[b, :length[b]]``."""

    features: Float[Tensor, "B S nH"]
    length: Int[Tensor, " B"]


class FeatureRecorder(PlainProposer):
    """A proposer that drafts nothing and stores the features of observed tokens."""

    name = "recorder"

    def __init__(self, taps: tuple[int, ...], hidden_size: int, dtype: torch.dtype):
        super().__init__()
        self.taps = taps
        self.hidden_size = hidden_size
        self.dtype = dtype

    @property
    def key(self) -> tuple:
        """Equal for recorders that may share engines."""
        return type(self), self.taps, self.hidden_size, self.dtype

    def start(self, plan: DecodePlan, device) -> RecorderState:
        shape = plan.batch_size, plan.slots, len(self.taps) * self.hidden_size
        length = torch.zeros(plan.batch_size, dtype=torch.int32, device=device)
        return RecorderState(torch.zeros(shape, dtype=self.dtype, device=device), length)

    def observe(self, pstate, features, ids, next_ids, count) -> RecorderState:
        return RecorderState(
            write_rows(pstate.features, features, pstate.length, dim=1), pstate.length + count
        )


class FeatureExtractor:
    """The target's tapped states for ragged batches.

    "xla" takes them from the engine's prefill. "eager" is a plain forward of the decoder in the attention
    implementation of the target (flash or SDPA; the engine's is exact and slower). Threads may share an
    extractor: a fit prepares its next batch during validation.

    Args:
        target: a live causal LM. taps: 0-based block indices, outputs before the final norm.
        dtype: type of the features. runtime: "xla" or "eager".
    """

    def __init__(self, target, taps: tuple[int, ...], dtype=torch.bfloat16, runtime: str = "xla"):
        check_runtime(runtime)
        check_target(target)
        check_layers(taps)
        layers = target.config.get_text_config().num_hidden_layers
        outside = [tap for tap in taps if not 0 <= tap < layers]
        if outside:
            known = f"the target's {layers} layers, 0 to {layers - 1}"
            raise ValueError(f"taps={list(taps)}: {outside} lie outside {known}; choose among these.")
        self.target, self.taps, self.dtype, self.runtime = target, tuple(taps), dtype, runtime
        self._recorder = FeatureRecorder(self.taps, target.get_input_embeddings().weight.shape[1], dtype)
        self._engines: dict[tuple[int, int], Engine] = {}
        self._skeleton = None
        self._lock = threading.Lock()  # a forward binds weights and hooks to the skeleton
        if not RUNTIMES[runtime].compiles:
            self._blocks = blocks_of(target)
            check_tappable(target, self._blocks)
            self._skeleton = build_skeleton(target, target.config._attn_implementation)

    def __call__(self, rows: list[list[int]]) -> Float[Tensor, "B T nH"]:
        """Features of ``rows``, padded at the end to the longest."""
        with self._lock:
            return self._extract(rows)

    def _extract(self, rows: list[list[int]]) -> Float[Tensor, "B T nH"]:
        ids, mask = pad_rows(rows)
        width = ids.shape[1]
        if self._skeleton is not None:
            return self._forward(ids)
        engine = self._engine(len(rows), width)
        # The engine needs room for one more token. Where the context has none, the last token is left out and
        # gets features of padding; no training block reads the last token's features.
        capacity = engine.plan.capacity - 1
        state = engine.start(ids[:, :capacity], mask[:, :capacity], max_new_tokens=1, do_sample=False)
        return engine.runtime.fetch(state.proposer.features)[: len(rows), :width]

    def _forward(self, ids: Tensor) -> Tensor:
        # No mask: padding stands at the end, where no causal row sees it.
        skeleton: Any = self._skeleton
        tensors = collect_tensors(skeleton, self.target, "")
        outputs: dict[int, Tensor] = {}
        with torch.no_grad(), tapped(skeleton, self._blocks, self.taps, outputs):
            step = {"input_ids": ids.to(self.target.device), "use_cache": False, "logits_to_keep": 1}
            torch.func.functional_call(skeleton, tensors, (), step)
        return torch.cat([outputs[tap].to(self.dtype) for tap in self.taps], dim=-1)

    def _engine(self, rows: int, width: int) -> Engine:
        size, longest = 1 << (rows - 1).bit_length(), max(64, bucket(width))
        if (size, longest) not in self._engines:
            capacity = min(longest + 1, context_of(self.target))
            options = EngineOptions(max_length=capacity, batch_size=size, filters=False, runtime=self.runtime)
            self._engines[size, longest] = Engine(self.target, self._recorder, options)
        return self._engines[size, longest]


def encode_answers(tokenizer, answers: list[Answer], max_length: int) -> list[Sequence]:
    """Conversation and answer as ids; answers cut to fewer than two tokens are left out."""
    sequences = []
    for answer in answers:
        prompt = encode_conversation(tokenizer, answer.messages, answer.chat_template_kwargs)
        ids = [*prompt, *answer.response_ids][:max_length]
        if len(ids) >= len(prompt) + 2:
            sequences.append(Sequence(ids, len(prompt)))
    return sequences


def cache_features(target, sequences: list[Sequence], directory: Path, options: FeatureOptions) -> None:
    """Write the features of ``sequences`` into the missing shards under ``directory``."""
    check_any(sequences)
    taps = options.taps or default_target_layer_ids(target.config.get_text_config().num_hidden_layers)
    extract = FeatureExtractor(target, tuple(taps), getattr(torch, options.dtype), options.runtime)
    fingerprint = TargetFingerprint.of(target)
    settings = {"stage": "features", "target": fingerprint.name, "target_weights": fingerprint.weights}
    settings |= {"sequences": len(sequences), "data_checksum": data_checksum(sequences)} | vars(options)
    settings |= {"taps": extract.taps}
    starts = range(0, len(sequences), options.shard_size)
    tokens = sum(len(item.ids) for item in sequences)
    with (
        open_stage(directory, settings, "features-*"),
        progress_bar(True, total=tokens, desc="features", unit="token") as bar,
    ):
        for index, start in enumerate(starts):
            shard = sequences[start : start + options.shard_size]
            path = directory / f"features-{index:05}-of-{len(starts):05}.safetensors"
            if not path.exists():
                _write_shard(path, shard, extract, fingerprint, options)
            bar.update(sum(len(item.ids) for item in shard))


def _write_shard(
    path: Path,
    shard: list[Sequence],
    extract: FeatureExtractor,
    fingerprint: TargetFingerprint,
    options: FeatureOptions,
) -> None:
    rows: dict[int, Tensor] = {}
    by_length = sorted(range(len(shard)), key=lambda item: len(shard[item].ids))
    for start in range(0, len(shard), options.batch_size):
        batch = by_length[start : start + options.batch_size]
        features = extract([shard[item].ids for item in batch]).cpu()
        rows |= {item: features[row, : len(shard[item].ids)].clone() for row, item in enumerate(batch)}
    tensors = {
        "ids": torch.tensor([token for item in shard for token in item.ids], dtype=torch.int32),
        "lengths": torch.tensor([len(item.ids) for item in shard], dtype=torch.int32),
        "starts": torch.tensor([item.start for item in shard], dtype=torch.int32),
        "features": torch.cat([rows[item] for item in range(len(shard))]),
    }
    metadata = {"taps": ",".join(map(str, extract.taps)), "target": fingerprint.name}
    metadata |= {"hidden_size": str(fingerprint.hidden_size), "target_weights": fingerprint.weights}
    write_tensors(path, tensors, metadata)
