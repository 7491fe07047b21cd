"""The one door from torch_dflash to JAX."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable
from weakref import WeakSet

import torch

from torch_dflash.decode import Pair
from torch_dflash.engine.width import Widths
from torch_dflash.guards.processes import check_process
from torch_dflash.progress import warn
from torch_dflash.requests.options import EngineOptions
from torch_dflash.runtime import Runtime
from torch_dflash.runtime_kinds import RUNTIMES

_warned: WeakSet = WeakSet()
_ELSEWHERE = {
    "cuda": "Pass runtime='eager' to decode on the GPU.",
    "xla": "That is a device of torch_xla, which cannot share a TPU with JAX in one process: keep the target "
    "on the CPU (target.to('cpu')), or load it with jax_bridge.load (docs/tpu.md).",
}
"""By the type of a torch device, what to do for a model that is there."""


@runtime_checkable
class Hosts(Protocol):
    """This process among the others of a mesh."""

    @property
    def first(self) -> bool:
        """Whether what this process is given counts."""
        ...

    def order(self, mesh: Any) -> str:
        """The devices of ``mesh`` in their order."""
        ...

    def agree(self, what: str, facts: dict[str, str], given: bytes | None = None) -> bytes:
        """Meet the others in the call ``what``, and return what process 0 was ``given``.

        Raises:
            RuntimeError: raised in all processes if ``facts`` differ, or if one process did not come.
        """
        ...

    def collective(self, what: str) -> AbstractContextManager[None]:
        """While open, the others end if this process fails."""
        ...

    def leave(self, what: str, error: BaseException) -> None:
        """Have the others end, for this process will not do its part of ``what``."""
        ...

    def paused(self, what: str) -> AbstractContextManager[None]:
        """While open, a user's code runs in ``what``; no process waits for this one."""
        ...

    def step(self) -> None:
        """Begin what all have to take part in: one that does not is missed."""
        ...

    def lead(self) -> Any:
        """The leader of a stream, which decides its end by ``go()`` and ``stop()``."""
        ...


def hosts_of(runtime: str, mesh: Any, replicas: int) -> Hosts | None:
    """The processes of ``mesh``, as in `torch_dflash.compile`; None: they are this one alone.

    Raises:
        TypeError, ValueError: it is no mesh, or of some processes alone, or ``replicas`` cannot share it.
        RuntimeError: this process was forked after JAX had started.
    """
    check_process(runtime)
    if mesh is None or not RUNTIMES[runtime].needs_jax:
        return None
    from jax_bridge.hosts.hosts import spanning

    return spanning(mesh, replicas)


def warn_of_device(model: Any, runtime: str) -> None:
    """Say, once for a model, that XLA decodes on another device than the model's."""
    place = model.device
    if not RUNTIMES[runtime].needs_jax or place.type not in _ELSEWHERE or model in _warned:
        return
    _warned.add(model)
    warn(
        f"the target is on {place}; runtime={runtime!r} copies its weights to JAX's default device and "
        f"decodes there. {_ELSEWHERE[place.type]}"
    )


def make_runtimes(
    options: EngineOptions, pair: Pair, widths: Widths, dtype: torch.dtype, mesh: Any, tensors: dict[str, Any]
) -> Sequence[Runtime]:
    """The steps of ``pair`` where ``options`` want them, for each replica; weights are of ``dtype``.

    Raises:
        ValueError: no such place; or a device has less memory than its part of ``tensors`` and a state take.
    """
    return RUNTIMES[options.runtime].maker()(options, pair, widths, dtype, mesh, tensors)


def make_xla(
    options: EngineOptions, pair: Pair, widths: Widths, dtype: torch.dtype, mesh: Any, tensors: dict[str, Any]
) -> Sequence[Runtime]:
    """`make_runtimes` of XLA."""
    from jax_bridge.runtime import XlaRuntime

    plan = pair.plan
    as_it_is = options.quantize is None and options.compute in ("auto", str(dtype).removeprefix("torch."))
    fewest = 1 if as_it_is else 2
    arithmetic = options.compute, options.quantize, options.drafter_quantize
    first = XlaRuntime(pair, plan, *arithmetic, widths.widths, fewest, mesh, options.replicas)
    for runtime in (runtimes := first.replicas()):
        runtime.check_memory(tensors)
    return runtimes
