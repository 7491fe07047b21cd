"""Training steps per second: this library beside SpecForge and speculators, and beside this CPU's own peak.

Run on an idle machine, one thread::

    OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 python benchmarks/train_throughput.py --json figures.json

The peers take part where they can be imported (``PYTHONPATH``); without them ours is timed alone. A step is
forward with loss, backward, clipping and AdamW, from given hidden states of the target. All contenders start
from the same weights, draft from the same anchors of the same sequences and take turns, so that a machine
that slows down slows all of them. The clock is the process's CPU time over its threads, which other programs
disturb less; times on the wall are in the JSON, too. Before anything is timed, losses and gradients are
compared.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import math
import re
import statistics
import sys
import time
import types
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from torch_dflash.cli.provenance import write_json
from torch_dflash.train.architecture import DrafterShape, new_drafter
from torch_dflash.train.blocks import Batch, draw_anchors
from torch_dflash.train.features import Layers
from torch_dflash.train.objective import Objective, default_gamma, sample_vocabulary
from torch_dflash.train.student import Student

START = 32  # tokens of every prompt; anchors lie behind them
SAMPLED = 1024
CHUNK_BLOCKS = 128  # SpecForge's default: blocks whose logits exist at a time
AGREE = 1e-4


@dataclass(frozen=True)
class Size:
    """One shape of drafter and batch; heads are Qwen3's (queries / keys and values)."""

    name: str
    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    taps: int
    width: int
    sequences: int
    tokens: int
    anchors: int  # per sequence
    answer_ids: int  # different ids in all answers: what a sampled softmax always holds

    @property
    def blocks(self) -> int:
        """Blocks of one step."""
        return self.sequences * self.anchors


SIZES = [
    Size("small", 576, 2, 896, 9, 3, 64, 49152, 3, 8, 8, 320, 64, 8192),
    Size("middle", 1024, 3, 3072, 16, 8, 128, 32000, 5, 16, 2, 512, 32, 8192),
]


@dataclass
class Setting:
    """What all contenders of a size share."""

    size: Size
    target: Any
    drafter: Any
    batch: Batch


def make_setting(size: Size) -> Setting:
    """Random weights and tokens; hidden states under which a target would write exactly these tokens."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=size.hidden,
        num_hidden_layers=size.taps + 2,
        intermediate_size=8,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        vocab_size=size.vocabulary,
        tie_word_embeddings=True,
    )
    target: Any = Qwen3ForCausalLM(config).eval().requires_grad_(False)
    shape = DrafterShape(
        mask_token_id=size.vocabulary - 1,
        layers=size.layers,
        block_size=size.width,
        taps=Layers(range(size.taps)),
        intermediate_size=size.intermediate,
    )
    drafter = new_drafter(target, shape)
    generator = torch.Generator().manual_seed(1)
    tokens = (size.sequences, size.tokens)
    ids = torch.randint(0, size.answer_ids, tokens, generator=generator, dtype=torch.int32)
    # Only anchors whose whole block lies in the answer: the one kind that all contenders supervise alike.
    last_anchor = size.tokens - size.width + 1
    anchors = [draw_anchors(START, last_anchor, size.anchors, generator) for _ in range(size.sequences)]
    batch = Batch(
        ids=ids,
        length=torch.full((size.sequences,), size.tokens, dtype=torch.int32),
        features=torch.randn(*tokens, size.taps * size.hidden, generator=generator),
        anchors=torch.stack(anchors),
        # The head's own row for the next token scores that token highest.
        last=target.get_output_embeddings().weight[ids.long()].roll(-1, dims=1),
    )
    return Setting(size, target, drafter, batch)


def clock() -> float:
    """CPU seconds of this process per thread."""
    return time.process_time() / torch.get_num_threads()


def autocast(dtype: str) -> Any:
    """Products in ``dtype``, weights in float32."""
    return torch.autocast("cpu", torch.bfloat16) if dtype == "bf16" else nullcontext()


class Contender:
    """A trainer's step. ``run`` leaves gradients behind and returns the loss, per block as ours is.

    Args:
        name: as printed. trained: the module whose weights are. flops: of the matrix products of one step.
    """

    def __init__(self, name: str, trained: nn.Module, run: Callable[[], float], flops: float):
        self.name, self.trained, self.run, self.flops = name, trained, run, flops
        self.parameters = [value for value in trained.parameters() if value.requires_grad]
        self.optimizer: Any = torch.optim.AdamW(self.parameters, lr=1e-5, weight_decay=0.01)
        self.seconds: list[float] = []
        self.wall: list[float] = []
        self.bytes: list[int] = []

    def update(self) -> None:
        """Clip and step."""
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def timed(self) -> None:
        """One step, with its time and the rise of the resident memory above what lay there before."""
        before = _reset_peak()
        start, wall = clock(), time.perf_counter()
        self.run()
        self.update()
        self.seconds.append(clock() - start)
        self.wall.append(time.perf_counter() - wall)
        peak = _status("VmHWM")
        if before is not None and peak is not None:
            self.bytes.append(peak - before)


def ours(setting: Setting, dtype: str, chunk: int, sampled: bool) -> Contender:
    """`Student`, over the whole vocabulary or a sample of it."""
    size, batch = setting.size, setting.batch
    drafter = _copy(setting)
    head_dtype = torch.bfloat16 if dtype == "bf16" else None
    student = Student(drafter, setting.target, Objective(rows_per_chunk=chunk), head_dtype=head_dtype)
    always, generator = batch.ids.unique(), torch.Generator().manual_seed(2)

    def run() -> float:
        vocabulary = None
        if sampled:  # drawn anew in every step, as in a fit
            vocabulary = sample_vocabulary(student.head_weight, None, always, SAMPLED, generator)
        with autocast(dtype):
            losses = student(batch, vocabulary)
        loss = losses.loss / size.blocks
        loss.backward()
        return float(loss.detach())

    columns = min(len(always) + SAMPLED, size.vocabulary) if sampled else size.vocabulary
    # Three head products: forward, again in the backward, and the states' gradient; the head is frozen.
    head = 3 * product(size.blocks * (size.width - 1), size.hidden, columns)
    name = f"ours, {f'{columns} ids' if sampled else 'all ids'}, {chunk} rows at a time"
    return Contender(name, drafter, run, stack_flops(size, size.width) + head)


def specforge(setting: Setting, dtype: str, own: bool = False) -> Contender:
    """SpecForge's ``OnlineDFlashModel``; ``own``: its recipe for bf16, bf16 weights and float32 masters."""
    model = importlib.import_module("specforge.algorithms.common.dflash_family_model")
    draft = importlib.import_module("specforge.modeling.draft.dflash")
    size, batch = setting.size, setting.batch
    config = _layer_config(setting)
    config.block_size, config.num_target_layers = size.width, size.taps + 2
    config.dflash_config = {
        "target_layer_ids": list(range(size.taps)),
        "mask_token_id": setting.drafter.config.mask_token_id,
    }
    config._attn_implementation = "sdpa"
    drafter = draft.DFlashDraftModel(config)
    drafter.load_state_dict(setting.drafter.state_dict())
    online = model.OnlineDFlashModel(
        drafter,
        _frozen(nn.Linear(size.hidden, size.vocabulary, bias=False), setting),
        _frozen(nn.Embedding(size.vocabulary, size.hidden), setting),
        setting.drafter.config.mask_token_id,
        block_size=size.width,
        attention_backend="sdpa",
        num_anchors=size.anchors,
        loss_decay_gamma=default_gamma(size.width),
        objective_chunk_blocks=CHUNK_BLOCKS,
    )
    anchors = batch.anchors.long()
    keep = torch.ones_like(anchors, dtype=torch.bool)
    online._sample_anchor_positions = lambda *_: (anchors, keep)
    ids, mask = batch.ids.long(), torch.ones(batch.ids.shape)
    features = batch.features.bfloat16() if own else batch.features
    if own:
        online = online.to(torch.bfloat16)

    def run() -> float:
        with nullcontext() if own else autocast(dtype):
            loss, _, _ = online(ids, features, mask)
        loss.backward()
        return float(loss.detach())

    head = 3 * product(size.blocks * size.width, size.hidden, size.vocabulary)
    seen = size.anchors * size.width
    name = "SpecForge" + (", weights in bf16" if own else "")
    contender = Contender(name, drafter, run, stack_flops(size, seen) + head)
    if own:
        optimizer = importlib.import_module("specforge.optimizer").BF16Optimizer(
            drafter, lr=1e-5, weight_decay=0.01, max_grad_norm=1.0, total_steps=1000
        )
        contender.update = optimizer.step  # clips and clears by itself
    return contender


def speculators(setting: Setting, dtype: str, packed: bool) -> Contender:
    """speculators' ``DFlashDraftModel``, as its trainer packs, or sequence by sequence with summed gradients.

    Packed, a dense mask over all sequences is what its flex attention exists to avoid, and that has no
    backward on a CPU; one sequence at a time is the kinder comparison.
    """
    core: Any = importlib.import_module("speculators.models.dflash.core")
    losses = importlib.import_module("speculators.losses")
    size, batch = setting.size, setting.batch
    last: Any = batch.last
    config = _layer_config(setting)
    config._attn_implementation = "sdpa"
    model = core.DFlashDraftModel(
        core.DFlashSpeculatorConfig(
            transformer_layer_config=config,
            draft_vocab_size=size.vocabulary,
            block_size=size.width,
            aux_hidden_state_layer_ids=list(range(1, size.taps + 1)),
            mask_token_id=setting.drafter.config.mask_token_id,
        )
    )
    given = model.load_state_dict(setting.drafter.state_dict(), strict=False)
    expected = {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
    if given.unexpected_keys or set(given.missing_keys) != expected:
        raise RuntimeError(f"speculators has another layout of weights: {given}")
    weight = setting.target.get_output_embeddings().weight
    for module in (model.embed_tokens, model.lm_head, model.verifier_lm_head):
        module.weight = nn.Parameter(weight, requires_grad=False)
    nn.init.ones_(model.verifier_norm.weight)
    loss_config = losses.resolve_loss_config("ce", "eager")
    count = size.sequences if packed else 1  # in one call
    gamma = default_gamma(size.width)
    # Its loss is a mean over rows of decayed losses; ours divides by the decays' sum.
    decays = sum(math.exp(-step / gamma) for step in range(size.width - 1))
    scale = (size.width - 1) / decays
    pieces = []
    for start in range(0, size.sequences, count):
        rows = slice(start, start + count)
        offsets = torch.arange(count)[:, None] * size.tokens
        pieces.append(
            {
                "hidden_states": batch.features[rows].flatten(0, 1)[None],
                "input_ids": batch.ids[rows].long().reshape(1, -1),
                "loss_mask": torch.ones(1, count * size.tokens),
                "verifier_last_hidden_states": last[rows].flatten(0, 1)[None],
                "document_ids": torch.arange(count).repeat_interleave(size.tokens)[None],
                "position_ids": torch.arange(size.tokens).repeat(count)[None],
                "max_anchors": count * size.anchors,
                "anchors": (batch.anchors[rows].long() + offsets).flatten(),
            }
        )

    def run() -> float:
        total = 0.0
        for piece in pieces:
            given = dict(piece)
            anchors = given.pop("anchors")
            core.select_anchors = lambda *_, anchors=anchors: (anchors, anchors >= 0)
            with autocast(dtype):
                _, loss, _ = model(**given, loss_config=loss_config, gamma=gamma)
            (loss * scale / len(pieces)).backward()
            total += float(loss.detach()) * scale / len(pieces)
        return total

    rows = size.blocks * size.width
    # It scores the target's states at the blocks' rows, or at all tokens where those are fewer.
    scored = min(rows, size.sequences * size.tokens)
    head = product(2 * rows + scored, size.hidden, size.vocabulary)
    context, seen = count * size.tokens, count * size.anchors * size.width
    name = "speculators, " + ("packed" if packed else "one sequence at a time")
    return Contender(name, model, run, stack_flops(size, seen, context) + head)


def product(rows: int, inner: int, columns: int) -> float:
    """Floating-point operations of one matrix product."""
    return 2.0 * rows * inner * columns


def stack_flops(size: Size, seen: int, context: int | None = None) -> float:
    """The drafter's products of a step without the head: forward and twice that backward.

    Args:
        seen: keys of block rows that each query is multiplied with: its own block's, or with a dense mask
            those of all blocks. context: keys of context rows; unset: those of its sequence.
    """
    rows, tokens = size.blocks * size.width, size.sequences * size.tokens
    inner, kv = size.heads * size.head_dim, 2 * size.kv_heads * size.head_dim
    layer = product(rows, size.hidden, inner) + product(tokens + rows, size.hidden, kv)
    layer += product(rows, inner, size.hidden) + 3 * product(rows, size.hidden, size.intermediate)
    layer += 2 * product(rows, inner, (context or size.tokens) + seen)  # scores, then values
    features = product(tokens, size.taps * size.hidden, size.hidden)
    return 3 * size.layers * layer + 2 * features  # nothing flows back into the features


def _layer_config(setting: Setting) -> Qwen3Config:
    names = (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "vocab_size rms_norm_eps max_position_embeddings rope_parameters layer_types attention_bias"
    )
    return Qwen3Config(**{name: getattr(setting.drafter.config, name) for name in names.split()})


def _copy(setting: Setting) -> Any:
    drafter = type(setting.drafter)(setting.drafter.config)
    drafter.load_state_dict(setting.drafter.state_dict())
    return drafter


def _frozen(module: Any, setting: Setting) -> Any:
    module.weight = nn.Parameter(setting.target.get_output_embeddings().weight, requires_grad=False)
    return module


def contenders(setting: Setting, dtype: str, peers: dict[str, Any], packed: bool) -> list[Contender]:
    """All that can run here, ours first; ``packed``: speculators also with all sequences in one."""
    found = [
        ours(setting, dtype, 1024, sampled=False),
        ours(setting, dtype, 256, sampled=False),
        ours(setting, dtype, 1024, sampled=True),
    ]
    if "version" in peers["specforge"]:
        found.append(specforge(setting, dtype))
        if dtype == "bf16":
            found.append(specforge(setting, dtype, own=True))
    if "version" in peers["speculators"]:
        found.append(speculators(setting, dtype, packed=False))
        if packed:
            found.append(speculators(setting, dtype, packed=True))
    return found


def find_peers() -> dict[str, Any]:
    """Version of each peer and the modules replaced to import it, or why it is missing.

    What is replaced serves speculators' data generation and its readers of data sets; no step uses it.
    """
    peers: dict[str, Any] = {}
    for name, module in (
        ("specforge", "specforge.algorithms.common.dflash_family_model"),
        ("speculators", "speculators.models.dflash.core"),
    ):
        replaced: list[str] = []
        while True:
            try:
                importlib.import_module(module)
                peers[name] = {"version": _version(name), "replaced": replaced}
            except ModuleNotFoundError as error:
                missing = error.name or ""
                if missing.split(".")[0] in ("openai", "datasets") and len(replaced) < 9:
                    replaced.append(missing)
                    sys.modules[missing] = _Replaced(missing)
                    # What was imported halfway would be taken for whole.
                    for half in [key for key in sys.modules if key.split(".")[0] == name]:
                        del sys.modules[half]
                    continue
                peers[name] = {"missing": str(error)}
            except Exception as error:  # a peer may fail on other versions of its dependencies
                peers[name] = {"missing": f"{type(error).__name__}: {error}"}
            break
    return peers


class _Replaced(types.ModuleType):
    """A module of which only names are asked."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def agreement(runners: list[Contender]) -> dict[str, dict[str, float]]:
    """Loss and largest relative difference of gradients from the first contender's; the warm-up of all.

    Raises:
        RuntimeError: a contender over the whole vocabulary computes something else.
    """
    found, reference = {}, {}
    for runner in runners:
        loss = runner.run()
        worst = 0.0
        for name, value in runner.trained.named_parameters():
            if value.grad is None:
                continue
            gradient = value.grad.detach().float().clone()
            wanted = reference.setdefault(name, gradient)
            worst = max(worst, float((gradient - wanted).norm() / wanted.norm()))
        found[runner.name] = {"loss": loss, "gradient_difference": worst}
        runner.update()
    return found


def peak(dtype: str, size: int = 2048, repeats: int = 5) -> float:
    """Floating-point operations per second of one large matrix product: the best of several."""
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    left, right = torch.randn(size, size).to(kind), torch.randn(size, size).to(kind)
    torch.mm(left, right)
    best = math.inf
    for _ in range(repeats):
        start = clock()
        torch.mm(left, right)
        best = min(best, clock() - start)
    return product(size, size, size) / best


def _status(field: str) -> int | None:
    path = Path("/proc/self/status")
    found = re.search(rf"^{field}:\s+(\d+) kB", path.read_text(), re.MULTILINE) if path.exists() else None
    return int(found[1]) * 1024 if found else None


def _reset_peak() -> int | None:
    """Give freed memory back and forget the peak; resident bytes then, or None where Linux does not say."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (AttributeError, OSError):
        return None
    return _status("VmRSS")


def measure(
    setting: Setting, dtype: str, peers: dict[str, Any], repeats: int, packed: bool
) -> dict[str, Any]:
    """All contenders of one size and type, in turns."""
    runners = contenders(setting, dtype, peers, packed)
    agreed = agreement(runners)
    first = agreed[runners[0].name]["loss"]
    for runner in runners if dtype == "fp32" else ():
        found = agreed[runner.name]
        if "all ids" not in runner.name and runner.name.startswith("ours"):
            continue  # a sampled softmax is an estimate
        if abs(found["loss"] - first) > AGREE * abs(first) or found["gradient_difference"] > AGREE * 10:
            raise RuntimeError(f"{runner.name} does not compute what ours does: {found}, {first=}")
    peaks = []
    for turn in range(repeats):
        peaks.append(peak(dtype))
        for runner in runners if turn % 2 == 0 else runners[::-1]:
            runner.timed()
    best = max(peaks)
    rows = []
    for runner in runners:
        seconds = statistics.median(runner.seconds)
        rows.append(
            {
                "name": runner.name,
                "blocks_per_second": setting.size.blocks / seconds,
                "ms": seconds * 1e3,
                "all_ms": [value * 1e3 for value in runner.seconds],
                "wall_ms": [value * 1e3 for value in runner.wall],
                "gflop": runner.flops / 1e9,
                "gflops": runner.flops / seconds / 1e9,
                "share_of_peak": runner.flops / seconds / best,
                "peak_mib": max(runner.bytes) / 2**20 if runner.bytes else None,
                **agreed[runner.name],
            }
        )
    ceiling = setting.size.blocks * best / runners[0].flops
    return {"dtype": dtype, "peak_gflops": best / 1e9, "blocks_per_second_at_peak": ceiling, "rows": rows}


def show(size: Size, result: dict[str, Any]) -> None:
    """One table."""
    print(
        f"\n{size.name}, {result['dtype']}: {size.blocks} blocks of {size.width}, hidden {size.hidden}, "
        f"{size.layers} layers, {size.vocabulary} ids; peak {result['peak_gflops']:.0f} GFLOP/s, at which "
        f"ours (all ids) would make {result['blocks_per_second_at_peak']:.0f} blocks/s"
    )
    heads = ("", "blocks/s", "ms/step", "GFLOP", "GFLOP/s", "of peak", "memory", "loss", "grad diff")
    print(f"{heads[0]:36}" + "".join(f"{head:>10}" for head in heads[1:]))
    for row in result["rows"]:
        memory = "?" if row["peak_mib"] is None else f"{row['peak_mib']:.0f} MiB"
        print(
            f"{row['name']:36}{row['blocks_per_second']:10.1f}{row['ms']:10.0f}{row['gflop']:10.0f}"
            f"{row['gflops']:10.1f}{row['share_of_peak']:10.0%}{memory:>10}{row['loss']:10.4f}"
            f"{row['gradient_difference']:10.1e}"
        )
    sys.stdout.flush()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [size.name for size in SIZES]
    parser.add_argument("--sizes", nargs="+", choices=names, default=names)
    parser.add_argument("--dtypes", nargs="+", choices=("fp32", "bf16"), default=("fp32", "bf16"))
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each; the median counts")
    parser.add_argument("--packed", action="store_true", help="speculators also with a dense mask over all")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", help="write all figures to this file")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    peers = find_peers()
    for name, peer in peers.items():
        if "missing" in peer:
            print(f"{name}: not importable ({peer['missing']}); ours is timed without it")
        else:
            extra = f", with {', '.join(peer['replaced'])} replaced" if peer["replaced"] else ""
            print(f"{name} {peer['version']}{extra}")
    results = []
    for size in (size for size in SIZES if size.name in asked.sizes):
        setting = make_setting(size)
        for dtype in asked.dtypes:
            result = measure(setting, dtype, peers, asked.repeats, asked.packed)
            show(size, result)
            results.append({"size": {**vars(size), "blocks": size.blocks}, **result})
            if asked.json:  # after every table: an interrupted run keeps what it has
                written = {"threads": asked.threads, "repeats": asked.repeats, "peers": peers}
                write_json(asked.json, {**written, "results": results})


if __name__ == "__main__":
    main()
