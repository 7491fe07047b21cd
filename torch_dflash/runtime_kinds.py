"""The kinds of runtimes: a row each, which every other module reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True)
class RuntimeKind:
    """One kind of runtime, by the name that users pass.

    Args:
        make: "module:function", imported when an engine is built; the arguments are those of
            `torch_dflash.engine.bridge.make_runtimes`.
        rounds_per_chunk: rounds between two reads of the host, where a user names no number.
        compiles: whether steps are programs of fixed shapes: batches are padded, a changed model compiles
            anew, and writes into views are lost.
        asks_host: whether a user's code may be asked in the middle of a step.
        follows_autocast: whether ``torch.autocast`` changes its steps.
        needs_jax: whether weights and states are JAX's, on its devices and meshes.
    """

    name: str
    make: str
    rounds_per_chunk: int
    compiles: bool
    asks_host: bool
    follows_autocast: bool
    needs_jax: bool

    def maker(self) -> Callable:
        """The function that makes runtimes of this kind."""
        module, _, name = self.make.partition(":")
        return getattr(import_module(module), name)


RUNTIMES: dict[str, RuntimeKind] = {
    kind.name: kind
    for kind in (
        RuntimeKind(
            "xla",
            "torch_dflash.engine.bridge:make_xla",
            rounds_per_chunk=16,  # a chunk ends in one host read: worth batching on a device
            compiles=True,
            asks_host=False,
            follows_autocast=False,
            needs_jax=True,
        ),
        RuntimeKind(
            "eager",
            "torch_dflash.eager:make_eager",
            rounds_per_chunk=1,
            compiles=False,
            asks_host=True,
            follows_autocast=True,
            needs_jax=False,
        ),
    )
}
