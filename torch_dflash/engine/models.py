"""`Models`: weak references to the user's models, and their live weights; checks before every call."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Mapping
from contextlib import closing
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel

from torch_dflash.checks import check_autocast
from torch_dflash.decode import Pair
from torch_dflash.guards.processes import check_process
from torch_dflash.guards.reentry import entering
from torch_dflash.proposers.base import Proposer
from torch_dflash.proposers.composed import Composed, inner_of
from torch_dflash.targets.guard import Guard
from torch_dflash.targets.weights import LiveTensors, named_arrays


class Models:
    """The live weights of a target and a drafter by the names of ``pair``, which has none of its own.

    Args:
        pair: the skeletons.
        target: a transformers causal LM; kept as a weak reference, like ``drafter``.
        arrays: of a target without torch weights; they lead back to none of the user's objects.
        guard: of the target, as it was when the skeleton was copied.
    """

    def __init__(self, pair: Pair, target: Any, drafter: Any, arrays: Mapping[str, Any] | None, guard: Guard):
        self._target = weakref.ref(target)
        # A proposer without tensors was copied whole; nothing of the user's need live on.
        weightless = not [*pair.proposer.parameters(), *pair.proposer.buffers()]
        self._composed = drafter.around(None) if isinstance(drafter, Composed) else None
        drafter = inner_of(drafter)
        self._drafter = None if drafter is None or weightless else weakref.ref(drafter)
        self._guards = [guard]
        self._arrays, self._live = {}, []
        if arrays is None:
            self._live.append(LiveTensors(pair.target.model, target, "target.model."))
        else:
            self._arrays = named_arrays(pair.target.model, arrays, "target.model.")
        if drafter is not None and self._drafter is not None:
            # Of a model, the proposer that was made for it holds the skeleton.
            parts = [
                *(["inner"] if self._composed else []),
                *([] if isinstance(drafter, Proposer) else ["drafter"]),
            ]
            skeleton: nn.Module = pair.proposer.get_submodule(".".join(parts))
            self._live.append(LiveTensors(skeleton, drafter, ".".join(["proposer", *parts, ""])))
            self._guards.append(Guard(drafter))

    @property
    def target(self) -> PreTrainedModel:
        """The live target.

        Raises:
            RuntimeError: it was deleted.
        """
        target = self._target()
        if target is None:
            raise RuntimeError("the engine's target was deleted; keep a reference to the model.")
        return target

    @property
    def drafter(self) -> Any:
        """The live drafter, composed as it was given; None where the proposer needs nothing of it.

        Raises:
            RuntimeError: it was deleted.
        """
        if self._drafter is None:
            return None
        drafter = self._drafter()
        if drafter is None:
            raise RuntimeError("the engine's drafter was deleted; keep a reference to it.")
        return self._composed.around(drafter) if self._composed else drafter

    def hold(self) -> bool:
        """Whether both models are still what the skeletons are copies of."""
        return all(guard.holds() for guard in self._guards)

    def tensors(self) -> dict[str, Any]:
        """The live weights, or a loaded target's arrays. Changes are seen.

        Raises:
            Restructured: a model has other tensors than its skeleton. RuntimeError: it is gone.
        """
        # Strong references first: a model that is freed meanwhile would look like a missing weight.
        alive = self.target, self.drafter
        tensors = dict(self._arrays)
        for live in self._live:
            tensors |= live.read()
        del alive
        return tensors


T = TypeVar("T")


def check_entry(pair: Pair, runtime: str) -> None:
    """Raise where ``pair`` cannot run.

    Raises:
        ValueError: torch casts what ``runtime`` does not.
        RuntimeError: this process was forked after JAX had started, or this thread is inside of a step of
            ``pair``.
    """
    check_process(runtime)
    pair.check_free()
    check_autocast(runtime)


def marked(pair: Pair, steps: Generator[T, None, None]) -> Generator[T, None, None]:
    """``steps``, each of which user code cannot call ``pair`` from; whoever reads them may."""
    with closing(steps):
        while True:
            pair.check_free()
            with entering(pair):
                step = next(steps, None)
            if step is None:
                return
            yield step
