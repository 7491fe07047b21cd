"""The user's models behind an engine: held weakly, read as they are now."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from torch_dflash.decode import Pair
from torch_dflash.proposers.base import Proposer
from torch_dflash.targets.code import code_of, written_by
from torch_dflash.targets.weights import collect_tensors, named_arrays


class Models:
    """The live weights of a target and a drafter by the names of ``pair``, which has none of its own.

    Args:
        pair: the skeletons.
        target: a transformers causal LM; kept as a weak reference, like ``drafter``.
        arrays: of a target without torch weights; they lead back to none of the user's objects.
    """

    def __init__(self, pair: Pair, target: Any, drafter: Any, arrays: Mapping[str, Any] | None):
        self._pair, self._arrays = pair, arrays
        self._target = weakref.ref(target)
        # A proposer without tensors was copied whole; nothing of the user's need live on.
        weightless = not [*pair.proposer.parameters(), *pair.proposer.buffers()]
        self._drafter = None if drafter is None or weightless else weakref.ref(drafter)
        self._written = written_by(target)
        self._code = code_of(target, self._written)
        self.tensors()  # refuses a model that its config does not describe

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

    def check_code(self) -> None:
        """Raise ``ValueError`` if what the target runs is no longer what the engine was built of."""
        if code_of(self.target, self._written) != self._code:
            raise ValueError(
                f"target={type(self.target).__name__}: its code, or a value that its code reads, was changed "
                "after this engine was built. Undo the change, or build another engine."
            )

    def tensors(self) -> dict[str, Any]:
        """The live weights, or a loaded target's arrays. Changes are seen.

        Raises:
            ValueError: a model is no longer what its class and config describe. RuntimeError: it is gone.
        """
        target, skeleton, proposer = self.target, self._pair.target.model, self._pair.proposer
        if self._arrays is None:
            tensors = collect_tensors(skeleton, target, "target.model.")
        else:
            tensors = named_arrays(skeleton, self._arrays, "target.model.")
        if self._drafter is not None:
            drafter = self._drafter()
            if drafter is None:
                raise RuntimeError("the engine's drafter was deleted; keep a reference to it.")
            if isinstance(drafter, Proposer):
                tensors |= collect_tensors(proposer, drafter, "proposer.")
            else:  # a model, of which the proposer made for it holds a skeleton
                tensors |= collect_tensors(proposer.drafter, drafter, "proposer.drafter.")
        return tensors
