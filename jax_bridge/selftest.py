"""The XLA backend of ``torch-dflash selftest``, with the checks that exist only there."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers.utils import logging

from jax_bridge._torchax import call_torch
from jax_bridge.arrays import to_jax, to_torch
from jax_bridge.programs.lower import lower, tracing
from jax_bridge.reference import forward, load_drafter, noise_embeddings
from jax_bridge.runtime import XlaRuntime
from torch_dflash.engine.engine import Engine
from torch_dflash.runtime import Rounds
from torch_dflash.selftest.backend import READ, Reads, best_speed


class XlaBackend:
    """JAX's default device (`torch_dflash.selftest.backend.Backend`)."""

    runtime = "xla"

    def __init__(self):
        self.device = jax.devices()[0]
        self.accelerated = self.device.platform != "cpu"

    def describe(self) -> str:
        return f"{jax.device_count()} x {self.device.device_kind} ({self.device.platform})"

    def place(self, model: Any) -> Any:
        return model  # the runtime copies the weights

    def run(self, engine: Engine, step: Callable, state: Any) -> Any:
        lowered = lower(partial(step, engine.pair))
        return to_torch(_runtime(engine)._run(step.__name__, lowered, (_params(engine), state)))

    def repeat(self, engine: Engine, step: Callable, times: int) -> Callable[[Any, Any], Any]:
        lowered = lower(partial(step, engine.pair))

        def loop(params, state):
            return jax.lax.fori_loop(0, times, lambda _, state: lowered(params, state), state)

        def repeated(params, state):
            return _runtime(engine)._run(f"{times} x {step.__name__}", loop, (params, state), donate=(1,))

        return repeated

    def apply(self, function: Callable, tensors: tuple, consumed: tuple[int, ...] = ()) -> Any:
        """On a TPU attention is a Pallas kernel."""

        def step(*arrays):
            return call_torch(function, *arrays)

        with tracing("highest"):
            return to_torch(jax.jit(step, donate_argnums=consumed)(*to_jax(tensors)))

    def wait(self, tree: Any) -> None:
        jax.block_until_ready(tree)

    @contextmanager
    def watch_reads(self) -> Iterator[Reads]:
        guarded = "jax.device_get calls"
        guarded += ", any other read refused" if self.accelerated else "; JAX cannot refuse others on a CPU"
        reads, get = Reads(0, guarded), jax.device_get

        def counted(tree):
            reads.count = (reads.count or 0) + 1
            return get(tree)

        jax.device_get = counted
        try:
            # Implicit reads raise; device_get is an explicit one.
            with jax.transfer_guard_device_to_host("disallow"):
                yield reads
        finally:
            jax.device_get = get

    def reuse(self, engine: Engine, state: Any) -> tuple[bool | None, str]:
        """By the compiled program's aliases, and by addresses where the platform has them."""
        old = jax.tree.leaves(state)
        size, places = sum(leaf.nbytes for leaf in old), _addresses(old)
        runtime = _runtime(engine)
        new = jax.block_until_ready(runtime.advance(_params(engine), state))
        program: Any = runtime._programs.get(*runtime._chunk(_params(engine), new, Rounds.of(engine.plan)))
        memory = program.memory_analysis()
        aliased = memory.alias_size_in_bytes if memory is not None else None
        freed = all(leaf.is_deleted() for leaf in old)
        after = _addresses(jax.tree.leaves(new))
        stayed = sum(a == b for a, b in zip(places, after, strict=True)) if places and after else None
        words = [
            "no memory analysis here" if aliased is None else f"{aliased} of {size} bytes aliased",
            "no addresses here" if stayed is None else f"{stayed} of {len(old)} buffers at their address",
            "given away" if freed else "NOT given away",
        ]
        held = (aliased is None or aliased >= size) and (stayed is None or stayed == len(old)) and freed
        return held and (aliased is not None or stayed is not None), ", ".join(words)

    def read_speed(self) -> float:
        array = jnp.ones(READ << 18, jnp.float32)
        return best_speed(partial(jax.jit(jnp.sum), array), self.wait, array.nbytes)


def reference_hidden(drafter, embedding, anchor: int, features: torch.Tensor, width: int) -> torch.Tensor:
    """Hidden states [W-1, H] of the independent pure-JAX drafter, from a saved ``drafter``.

    Args:
        drafter: a live fp32 `DFlashDraftModel`; goes through ``save_pretrained``.
        embedding: the target's embedding weight [V, H].
        anchor: the last committed token.
        features: tapped target features [1, R, n*H] of everything before the anchor.
        width: rows W of the block.
    """
    with tempfile.TemporaryDirectory() as folder, _quiet():
        drafter.save_pretrained(folder)
        params, config = load_drafter(folder)
    weight = jnp.asarray(embedding.detach().cpu().numpy())
    noise = noise_embeddings(config, weight, jnp.asarray([anchor]), width)
    position = np.arange(features.shape[1] + width)[None]
    step = jax.jit(lambda params, *arrays: forward(params, config, *arrays)[0])
    with jax.default_matmul_precision("highest"):
        hidden = step(params, noise, jnp.asarray(features.numpy()), jnp.asarray(position))
    return torch.from_numpy(np.array(hidden[0, 1:]))


@contextmanager
def _quiet() -> Iterator[None]:
    # No progress bar between the lines of a table.
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _runtime(engine: Engine) -> XlaRuntime:
    assert isinstance(engine.runtime, XlaRuntime)
    return engine.runtime


def _params(engine: Engine) -> Any:
    return engine.runtime.refresh(engine.tensors())


def _addresses(leaves: list[jax.Array]) -> list[int] | None:
    # `unsafe_buffer_pointer` waits with the interpreter's lock; XLA's threads need it to free tensors.
    jax.block_until_ready(leaves)
    try:
        return [leaf.unsafe_buffer_pointer() for leaf in leaves]
    except Exception:  # not every platform has addresses; the program's aliases then suffice
        return None
