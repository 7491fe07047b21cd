"""A target whose weights are on the device already, so that no torch tensor holds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import nn


@runtime_checkable
class LoadedTarget(Protocol):
    """What stands for a target in `torch_dflash.compile` and `generate`; `jax_bridge.load` makes them."""

    @property
    def model(self) -> Any:
        """The transformers causal LM on the meta device: class, config and generation config."""
        ...

    def arrays_for(self, runtime: str) -> Mapping[str, Any]:
        """Weights and buffers for that runtime, by the model's names, tied ones once.

        Raises:
            ValueError: this runtime cannot decode with them.
        """
        ...


def model_of(target: Any) -> Any:
    """The transformers model that ``target`` is or stands for."""
    return target.model if isinstance(target, LoadedTarget) else target


def named_arrays(skeleton: nn.Module, arrays: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """``arrays`` under the skeleton's names.

    Raises:
        ValueError: they are not those of the skeleton, which the model's config describes.
    """
    slots = dict(skeleton.named_parameters()) | dict(skeleton.named_buffers())
    for name in [*slots, *arrays]:
        wanted, found = slots.get(name), arrays.get(name)
        if wanted is None or found is None or tuple(wanted.shape) != tuple(found.shape):
            shapes = ["absent" if leaf is None else str(tuple(leaf.shape)) for leaf in (wanted, found)]
            raise ValueError(
                f"{type(skeleton).__name__}: {name} should be {shapes[0]} by the model's config, the loaded "
                f"array is {shapes[1]}; load the checkpoint again."
            )
    return {prefix + name: array for name, array in arrays.items()}
