"""Weights of a target by the skeleton's names: live torch tensors, or arrays on the device."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn


@runtime_checkable
class LoadedTarget(Protocol):
    """A target without torch weights for `torch_dflash.compile` and `generate`, as of `jax_bridge.load`."""

    @property
    def model(self) -> Any:
        """The transformers causal LM on the meta device: class, config and generation config."""
        ...

    def arrays_for(
        self, runtime: str, compute: str = "auto", quantize: str | None = None
    ) -> Mapping[str, Any]:
        """Weights and buffers for ``runtime``, by the model's names, tied ones once.

        Raises:
            ValueError: this runtime cannot decode with them, or they have no such products.
        """
        ...

    def mesh_for(self, requested: Any, replicas: int = 1) -> Any:
        """The mesh to decode on; ``requested`` is a call's mesh or None, for ``replicas`` to share.

        Raises:
            ValueError: the weights are on other devices.
        """
        ...


def model_of(target: Any) -> Any:
    """The transformers model of ``target``: of a `PeftModel` the model with its adapters.

    Raises:
        ValueError: the active adapter is a learned prompt.
    """
    if hasattr(target, "peft_config") and hasattr(target, "get_base_model"):
        config = getattr(target, "active_peft_config", None)
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(
                f"target={type(target).__name__}: its adapter ({type(config).__name__}) puts learned tokens "
                "before the prompt, which is not decoded here; use its own generate."
            )
        return target.get_base_model()
    return target.model if isinstance(target, LoadedTarget) else target


def arrays_of(target: Any, *options: Any) -> Mapping[str, Any] | None:
    """The arrays of a target without torch weights; None for a live model.

    Arguments and errors are those of `LoadedTarget.arrays_for`.
    """
    return target.arrays_for(*options) if isinstance(target, LoadedTarget) else None


def mesh_of(target: Any, requested: Any, replicas: int = 1) -> Any:
    """The devices to decode on: ``requested``, else those of a loaded target.

    Raises:
        ValueError: the target is on other devices.
    """
    if not isinstance(target, LoadedTarget):
        return requested
    return target.mesh_for(requested, replicas)


def named_arrays(skeleton: nn.Module, arrays: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """``arrays`` under the skeleton's names.

    Raises:
        ValueError: names or shapes differ from those of the model's config.
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


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, tied ones by each name, in one walk where torch makes two."""
    found: dict[str, Tensor] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        own = {**part._parameters, **part._buffers}
        found |= {
            f"{prefix}.{name}" if prefix else name: leaf for name, leaf in own.items() if leaf is not None
        }
    return found


class Restructured(RuntimeError):
    """A live model's tensors differ from its skeleton's: a shape, a name, or a tie."""

    def __init__(self, kind: str):
        super().__init__(f"{kind}: its tensors were changed while an engine was built of it; call again.")


class LiveTensors:
    """The tensors of a live model by its skeleton's names, each tied one once.

    Keeps no model alive. `read` uses the places found at construction and walks over no module.

    Raises:
        Restructured: the two differ.
    """

    def __init__(self, skeleton: nn.Module, model: nn.Module, prefix: str = ""):
        self._kind, self._first, self._tied = type(model).__name__, [], []
        parts, first = dict(model.named_modules(remove_duplicate=False)), {}
        slots = named_tensors(skeleton)
        for name, slot in slots.items():
            where, _, key = name.rpartition(".")
            if where not in parts:
                raise Restructured(self._kind)
            place = weakref.ref(parts[where]), key, prefix + name
            if id(slot) in first:
                self._tied.append((*place, first[id(slot)]))
            else:
                first[id(slot)] = prefix + name
                self._first.append((*place, slot.shape))
        if named_tensors(model).keys() != slots.keys():
            raise Restructured(self._kind)

    def read(self) -> dict[str, Tensor]:
        """The current tensors.

        Raises:
            Restructured: they differ from the skeleton's. ValueError: one is on the meta device.
        """
        tensors = {}
        for module, key, name, shape in self._first:
            tensor = _held(module(), key)
            if tensor is None or tensor.shape != shape:
                raise Restructured(self._kind)
            if tensor.is_meta:
                raise ValueError(
                    f"{self._kind}: {name} is on the meta device; load the weights before decoding."
                )
            tensors[name] = tensor
        if any(_held(module(), key) is not tensors[first] for module, key, _, first in self._tied):
            raise Restructured(self._kind)
        return tensors


def _held(module: Any, key: str) -> Tensor | None:
    if module is None:
        return None
    own = module.__dict__
    found = own["_parameters"].get(key)
    return own["_buffers"].get(key) if found is None else found


def collect_tensors(skeleton: nn.Module, model: nn.Module, prefix: str) -> dict[str, Tensor]:
    """The live tensors of ``model`` by the names of ``skeleton``, its copy; each tied weight once."""
    return LiveTensors(skeleton, model, prefix).read()
