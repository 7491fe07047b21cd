"""Times a plain step, a verify pass, a draft pass and a whole round on this device, with their floors.

Every program runs all its rounds, then waits for the result. After a discarded run, programs are timed in
turn. Each run has a new state, made before the time starts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch

from torch_dflash import decode as steps
from torch_dflash.decode import Pair, Params, decode_round
from torch_dflash.engine.engine import Engine
from torch_dflash.generation import compile as compile_pair
from torch_dflash.ops.windows import write_rows
from torch_dflash.proposers.base import Proposer, take_in
from torch_dflash.runtime_kinds import RUNTIMES
from torch_dflash.selftest.backend import Backend
from torch_dflash.selftest.pairs import make_drafter, make_target
from torch_dflash.state import DecodeState, Draft

ROUNDS = 8
REPEATS = 5
PROMPT = 64
VERIFY_WIDTHS = (2, 4, 8, 16)
NARROW: dict[str, tuple[dict[str, Any], int]] = {
    "bfloat16": ({"compute": "bfloat16"}, 2),
    "int8": ({"quantize": "int8"}, 1),
}
"""Narrower types of products: the options of `torch_dflash.compile`, and the bytes of a weight."""
FLAT = 1.1
"""Plain steps that a pass may cost and still count as one plain step."""
BLOCK = 16


@dataclass(frozen=True)
class Size:
    """A random Qwen3-shaped pair: ``target`` and ``drafter`` config fields, and the weights' type."""

    target: dict[str, Any]
    drafter: dict[str, Any]
    dtype: torch.dtype


SHAPE = "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"


def _size(layers: int, vocab: int, draft_layers: int, dtype: torch.dtype, *shape: int) -> Size:
    """A pair in which both models have ``shape``; taps spread over the target."""
    taps = [1 + index * (layers - 2) // draft_layers for index in range(draft_layers)]
    common = dict(zip(SHAPE, shape, strict=True)) | {"max_position_embeddings": 4096}
    target = common | {"num_hidden_layers": layers, "vocab_size": vocab, "tie_word_embeddings": True}
    own = {"num_hidden_layers": draft_layers, "target_layer_ids": taps, "block_size": BLOCK}
    return Size(target, common | own | {"mask_token_id": vocab - 1}, dtype)


SIZES = {
    "tiny": _size(4, 97, 2, torch.float32, 32, 48, 4, 2, 16),
    "small": _size(8, 8192, 2, torch.float32, 512, 1536, 8, 4, 64),
    "base": _size(24, 65536, 5, torch.bfloat16, 2048, 6144, 16, 8, 128),
}


def flat_rows(rows: list[dict[str, Any]]) -> dict[str, int]:
    """The most rows, by arithmetic, up to which no verify pass costs more than `FLAT` plain steps.

    1: a pass of two rows costs more.
    """
    costs: dict[str, dict[str, float]] = {}
    for row in rows:
        costs.setdefault(row["arithmetic"], {})[row["pass"]] = row["plain_steps"]
    return {name: _flat(steps) for name, steps in costs.items()}


def _flat(steps: dict[str, float]) -> int:
    return max([1, *takewhile(lambda width: steps[f"verify, M={width}"] <= FLAT, VERIFY_WIDTHS)])


class Unaccepted(Proposer):
    """Drafts that cost nothing and are never accepted: a round is a verify pass of ``width`` rows."""

    name = "unaccepted"

    def __init__(self, width: int):
        super().__init__()
        self.width = width

    def propose(self, pstate, anchor, length, embed, head) -> tuple[Draft, tuple]:
        return Draft(anchor[:, None].expand(-1, self.width - 1), length * 0), pstate


def draft_pass(pair: Pair, params: Params, state: DecodeState) -> DecodeState:
    """A round without its verify pass: propose, commit one draft, project its features."""
    return pair.run(_draft_pass, params, state)


def _draft_pass(pair: Pair, state: DecodeState) -> DecodeState:
    drafted, pstate = steps.draft(pair, state)
    ids = torch.cat([state.anchor[:, None], drafted.tokens[:, : pair.plan.verify_width - 1]], dim=1)
    # The features depend on the drafts: a compiler could move a projection of constants out of the loop.
    features = pair.target.embed(ids).repeat(1, 1, len(pair.proposer.taps))
    count = torch.ones_like(state.length)
    return replace(
        state,
        tokens=write_rows(state.tokens, drafted.tokens, state.committed, dim=1),
        length=state.length + count,
        proposer=take_in(
            pair.proposer.observe, pstate, features, ids, drafted.tokens, count, pair.target.embed
        ),
    )


def measure(backend: Backend, size: str) -> Iterator[dict[str, Any]]:
    """Time every pass of a pair of ``size`` (a key of `SIZES`) on ``backend``; yields figures by pass.

    All passes are timed in the weights' own arithmetic; then, if products can be narrower, the verify passes
    in each type of `NARROW`.
    """
    chosen = SIZES[size]
    target = make_target("qwen3", **chosen.target)
    drafter = make_drafter(target, **chosen.drafter)
    target, drafter = (backend.place(model.to(chosen.dtype)) for model in (target, drafter))
    engines = _verifying(backend, target, chosen)
    paged = f"verify, M={BLOCK}, paged"
    engines[paged] = _engine(backend, target, Unaccepted(BLOCK), chosen, cache="paged")
    block = _engine(backend, target, drafter, chosen)
    engines |= {f"draft, W={BLOCK}": block, f"whole round, W=M={BLOCK}": block}
    about = {"size": size, "dtype": str(chosen.dtype), "read_gb_per_s": backend.read_speed()}
    own = str(chosen.dtype).removeprefix("torch.")
    yield from _turns(backend, engines, chosen.dtype.itemsize, about | {"arithmetic": own})
    narrows = RUNTIMES[backend.runtime].needs_jax and not backend.accelerated
    for name, (options, item) in NARROW.items() if narrows else ():
        engines = _verifying(backend, target, chosen, **options)
        yield from _turns(backend, engines, item, about | {"arithmetic": name})


def _verifying(backend: Backend, target: Any, size: Size, **options: Any) -> dict[str, Engine]:
    """Engines of a plain step, and of a verify pass of each width."""
    engines = {"plain step, M=1": _engine(backend, target, None, size, **options)}
    for width in VERIFY_WIDTHS:
        engines[f"verify, M={width}"] = _engine(backend, target, Unaccepted(width), size, **options)
    return engines


def _turns(backend: Backend, engines: dict[str, Engine], item: int, about: Any) -> Iterator[dict[str, Any]]:
    """Time the engines in turn; yields the figures of each as data.

    ``item``: bytes of a weight that a product reads; ``about``: figures that all passes share.
    """
    programs = {
        name: backend.repeat(engine, draft_pass if name.startswith("draft") else decode_round, ROUNDS)
        for name, engine in engines.items()
    }
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(REPEATS + 1):
        for name, engine in engines.items():
            times[name].append(_timed(backend, engine, programs[name]))
    plain = None
    for name, engine in engines.items():
        kept = sorted(seconds / ROUNDS * 1e3 for seconds in times[name][1:])
        took, read = statistics.median(kept), _bytes(name, engine, item)
        plain = plain or took
        yield {
            "pass": name,
            "ms": took,
            "fastest_ms": kept[0],
            "slowest_ms": kept[-1],
            "plain_steps": took / plain,
            "bytes_read": read,
            "gb_per_s": read / took / 1e6,
            "floor_ms": read / about["read_gb_per_s"] / 1e6,
        } | about


def _engine(backend: Backend, target: Any, drafter: Any, size: Size, **options: Any) -> Engine:
    return compile_pair(
        target,
        drafter,
        runtime=backend.runtime,
        max_length=PROMPT + (ROUNDS + 1) * BLOCK,  # a round may commit a whole block
        prefill_chunk_size=PROMPT,
        filters=False,
        # In fp32 the exact product, as everywhere; narrower types have only their own.
        matmul_precision="highest" if size.dtype == torch.float32 else "default",
        **options,
    )


def _timed(backend: Backend, engine: Engine, program: Callable[[Any, Any], Any]) -> float:
    prompt = torch.arange(PROMPT)[None] % 89 + 1
    new = engine.plan.capacity - PROMPT
    state = engine.start(prompt, max_new_tokens=new, do_sample=False, eos_token_id=None)
    params = engine.runtime.refresh(engine.tensors())
    backend.wait(state)
    started = time.perf_counter()
    backend.wait(program(params, state))
    return time.perf_counter() - started


def _bytes(name: str, engine: Engine, item: int) -> int:
    """The fewest bytes that a pass reads: its weights once, ``item`` bytes each, and its K/V once."""
    tensors, pair, plan = engine.tensors(), engine.pair, engine.plan
    kept = next(iter(tensors.values())).element_size()

    def weights(prefix: str) -> int:
        return item * sum(tensor.numel() for key, tensor in tensors.items() if key.startswith(prefix))

    cached = sum(spec.width for spec in pair.target.specs) * plan.slots
    # These pairs tie embedding and head: the head reads the rows that the lookup reads.
    target = weights("target.") + plan.batch_size * cached * kept
    if not name.startswith(("draft", "whole")):
        return target
    head = pair.target.vocab_size * pair.target.hidden_size
    read = plan.batch_size * pair.proposer.cost(plan, plan.slots).cached * kept + head * item
    draft = weights("proposer.") + read
    return draft + target if name.startswith("whole") else draft
