"""The runtime under test on its device, and a random pair that decodes on the device."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils import _pytree as pytree

from torch_dflash.engine.engine import Engine
from torch_dflash.generation import compile as compile_pair
from torch_dflash.proposers import NGramProposer
from torch_dflash.selftest.pairs import make_drafter, make_pair, rope_of

WIDTH = 6
CAPACITY = 96
READ = 512
"""Megabytes of an array to read: more than the caches of a CPU hold."""
CHUNK = 3  # rounds between host reads: a short text, too, has several reads


@dataclass
class Reads:
    """``count``: host reads so far, or None if they cannot be counted. ``how``: the counter, in words."""

    count: int | None
    how: str


@runtime_checkable
class Backend(Protocol):
    """The runtime under test. A step is ``(pair, params, state) -> result``, as in `decode`."""

    runtime: str
    accelerated: bool

    def describe(self) -> str:
        """The device in words."""
        ...

    def place(self, model: Any) -> Any:
        """``model`` on the device of this runtime."""
        ...

    def run(self, engine: Engine, step: Callable, state: Any) -> Any:
        """Run ``step`` on the device; returns its result as CPU tensors and consumes ``state``."""
        ...

    def repeat(self, engine: Engine, step: Callable, times: int) -> Callable[[Any, Any], Any]:
        """A function ``(params, state) -> state`` that runs ``step`` ``times`` times; consumes the state."""
        ...

    def apply(self, function: Callable, tensors: tuple, consumed: tuple[int, ...] = ()) -> Any:
        """``function(*tensors)`` on the device, as CPU tensors; it may reuse the tensors ``consumed``."""
        ...

    def wait(self, tree: Any) -> None:
        """Wait until ``tree`` has been computed."""
        ...

    def watch_reads(self) -> AbstractContextManager[Reads]:
        """Count host reads of the ``with`` block."""
        ...

    def reuse(self, engine: Engine, state: Any) -> tuple[bool | None, str]:
        """(Whether a chunk of rounds keeps every buffer in place; None: does not apply), and the reason."""
        ...

    def read_speed(self) -> float:
        """GB/s at which the device reads `READ` megabytes of float32 for their sum."""
        ...


class EagerBackend:
    """PyTorch on one of its devices, by a runtime without JAX."""

    def __init__(self, device: str | None = None, runtime: str = "eager"):
        self.runtime = runtime
        self.device = torch.device(device or "cpu")
        torch.empty(0, device=self.device)  # raises for a missing device
        self.accelerated = self.device.type != "cpu"

    def describe(self) -> str:
        if self.device.type == "cuda":
            return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(self.device)}"
        return f"{self.device}, {torch.get_num_threads()} threads"

    def place(self, model: Any) -> Any:
        return model.to(self.device)

    def run(self, engine: Engine, step: Callable, state: Any) -> Any:
        result = step(engine.pair, engine.tensors(), state)
        return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), result)

    def repeat(self, engine: Engine, step: Callable, times: int) -> Callable[[Any, Any], Any]:
        def repeated(params, state):
            for _ in range(times):
                state = step(engine.pair, params, state)
            return state

        return repeated

    def apply(self, function: Callable, tensors: tuple, consumed: tuple[int, ...] = ()) -> Any:
        result = function(*(tensor.to(self.device, copy=True) for tensor in tensors))
        return pytree.tree_map(lambda tensor: tensor.cpu(), result)

    def wait(self, tree: Any) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @contextmanager
    def watch_reads(self) -> Iterator[Reads]:
        yield Reads(None, "as the engine counts; eager rounds also test flags")

    def reuse(self, engine: Engine, state: Any) -> tuple[bool | None, str]:
        return None, "eager PyTorch writes its cache in place and donates nothing"

    def read_speed(self) -> float:
        array = torch.ones(READ << 18, device=self.device)
        return best_speed(array.sum, self.wait, array.nbytes)


def best_speed(read_once: Callable[[], Any], wait: Callable[[Any], None], count: int) -> float:
    """GB/s at which ``read_once`` reads ``count`` bytes: the best of eight runs after a discarded run."""
    times = []
    for _ in range(9):
        started = time.perf_counter()
        wait(read_once())
        times.append(time.perf_counter() - started)
    return count / min(times[1:]) / 1e9


class Case:
    """A random fp32 pair: ``target`` and ``drafter`` on the CPU as the reference, engines on ``backend``."""

    def __init__(self, backend: Backend, family: str):
        self.backend, self.family = backend, family
        self.target, self.drafter = make_pair(family, agree=8.0, **rope_of(family))
        self._live = backend.place(copy.deepcopy(self.target)), backend.place(copy.deepcopy(self.drafter))
        self._engines: dict[tuple[str, int], Engine] = {}
        self._random = make_drafter(self.target, seed=77).state_dict()

    def engine(self, kind: str, batch_size: int) -> Engine:
        """The engine of a ``kind`` of drafter: "plain", "agreeing", "random", "n-gram" or "paged".

        The agreeing and the random drafter share an engine: weights are data, so nothing compiles again.
        "paged" is the agreeing drafter on a paged cache with too few pages for all rows at once.
        """
        target, drafter = self._live
        options: dict[str, Any] = {}
        if kind == "paged":
            drafter.load_state_dict(self.drafter.state_dict())
            options = {"cache": "paged", "page_size": 16, "pool_pages": 7 + 2 * (batch_size - 1)}
        if kind in ("agreeing", "random"):
            drafter.load_state_dict(self._random if kind == "random" else self.drafter.state_dict())
            kind = "DFlash"
        if (kind, batch_size) not in self._engines:
            own = {"plain": None, "n-gram": NGramProposer(WIDTH, max_ngram=2)}
            options |= {"max_length": CAPACITY, "batch_size": batch_size, "rounds_per_chunk": CHUNK}
            options |= {"runtime": self.backend.runtime, "prefill_chunk_size": 16}
            self._engines[kind, batch_size] = compile_pair(target, own.get(kind, drafter), **options)
        return self._engines[kind, batch_size]

    def plain_on_cpu(self) -> Callable[..., Any]:
        """Plain eager decoding of the reference target, to compare samples with."""
        return compile_pair(self.target, None, runtime="eager", max_length=CAPACITY).generate


def prompts() -> list[list[int]]:
    """Three rows of one to three prompt chunks; the last repeats itself, so prompt lookup finds drafts."""
    generator = torch.Generator().manual_seed(11)
    rows = [torch.randint(0, 96, (length,), generator=generator).tolist() for length in (40, 9, 7)]
    return [rows[0], rows[1], rows[2] * 3]
