"""The one door from torch_dflash to JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch

from torch_dflash.decode import Pair
from torch_dflash.eager import EagerRuntime
from torch_dflash.engine.hosts import Hosts
from torch_dflash.engine.width import Widths
from torch_dflash.guards.processes import check_process
from torch_dflash.progress import warn
from torch_dflash.requests.options import EngineOptions
from torch_dflash.runtime import Runtime

_told: WeakSet = WeakSet()
_ELSEWHERE = {
    "cuda": "Pass runtime='eager' to decode on the GPU.",
    "xla": "That is a device of torch_xla, which cannot share a TPU with JAX in one process: keep the target "
    "on the CPU (target.to('cpu')), or load it with jax_bridge.load (docs/tpu.md).",
}
"""By the type of a torch device, what to do for a model that is there."""


def hosts_of(runtime: str, mesh: Any, replicas: int) -> Hosts | None:
    """The processes of ``mesh``, as in `torch_dflash.compile`; None: they are this one alone.

    Raises:
        TypeError, ValueError: it is no mesh, or of some processes alone, or ``replicas`` cannot share it.
        RuntimeError: this process was forked after JAX had started.
    """
    check_process(runtime)
    if runtime != "xla" or mesh is None:
        return None
    from jax_bridge.hosts.hosts import spanning

    return spanning(mesh, replicas)


def tell_device(model: Any, runtime: str) -> None:
    """Say, once for a model, that XLA decodes on another device than the model's."""
    place = model.device
    if runtime != "xla" or place.type not in _ELSEWHERE or model in _told:
        return
    _told.add(model)
    warn(
        f"the target is on {place}; runtime='xla' copies its weights to JAX's default device and decodes "
        f"there. {_ELSEWHERE[place.type]}"
    )


def make_runtimes(
    options: EngineOptions, pair: Pair, widths: Widths, dtype: torch.dtype, mesh: Any, tensors: dict[str, Any]
) -> Sequence[Runtime]:
    """The steps of ``pair`` where ``options`` want them, for each replica; weights are of ``dtype``.

    Raises:
        ValueError: no such place; or a device has less memory than its part of ``tensors`` and a state take.
    """
    plan = pair.plan
    if options.runtime == "eager":
        return [EagerRuntime(pair, plan)]
    from jax_bridge.runtime import XlaRuntime

    as_it_is = options.quantize is None and options.compute in ("auto", str(dtype).removeprefix("torch."))
    fewest = 1 if as_it_is else 2
    arithmetic = options.compute, options.quantize
    first = XlaRuntime(pair, plan, *arithmetic, widths.widths, fewest, mesh, options.replicas)
    for runtime in (runtimes := first.replicas()):
        runtime.check_memory(tensors)
    return runtimes
