"""The weights of a target by the skeleton's names: live torch tensors, or arrays on the device."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn


@runtime_checkable
class LoadedTarget(Protocol):
    """What stands for a target in `torch_dflash.compile` and `generate`; `jax_bridge.load` makes them."""

    @property
    def model(self) -> Any:
        """The transformers causal LM on the meta device: class, config and generation config."""
        ...

    def arrays_for(
        self, runtime: str, compute: str = "auto", quantize: str | None = None
    ) -> Mapping[str, Any]:
        """Weights and buffers for that runtime, by the model's names, tied ones once.

        Raises:
            ValueError: this runtime cannot decode with them, or they have no such products.
        """
        ...

    def mesh_for(self, asked: Any, replicas: int = 1) -> Any:
        """The mesh to decode on, where a call ``asked`` for one or for none (None), to be shared by replicas.

        Raises:
            ValueError: the weights lie elsewhere.
        """
        ...


def model_of(target: Any) -> Any:
    """The transformers model that ``target`` is or stands for; of a `PeftModel` the one with its adapters.

    Raises:
        ValueError: the active adapter is more than modules of the model, such as a learned prompt.
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


def arrays_of(target: Any, *asked: Any) -> Mapping[str, Any] | None:
    """The arrays of a target without torch weights; None for a live model.

    Arguments and errors are those of `LoadedTarget.arrays_for`.
    """
    return target.arrays_for(*asked) if isinstance(target, LoadedTarget) else None


def mesh_of(target: Any, asked: Any, replicas: int = 1) -> Any:
    """The devices to decode on: those that were ``asked`` for, else those on which a loaded target lies.

    Raises:
        ValueError: it lies on others than were asked for.
    """
    if not isinstance(target, LoadedTarget):
        return asked
    return target.mesh_for(asked, replicas)


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


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, tied ones by each of theirs: one walk, where torch makes two."""
    found: dict[str, Tensor] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        own = {**part._parameters, **part._buffers}
        found |= {
            f"{prefix}.{name}" if prefix else name: leaf for name, leaf in own.items() if leaf is not None
        }
    return found


class Restructured(RuntimeError):
    """A live model has other tensors than its skeleton: another shape, a new name, one that was untied."""

    def __init__(self, kind: str):
        super().__init__(f"{kind}: its tensors were changed while an engine was built of it; call again.")


class LiveTensors:
    """The tensors of a live model under the names of its skeleton, each tied one once; found in one walk.

    The model may be freed. `read` looks where the tensors lay, and walks over no module.

    Raises:
        Restructured: the two differ already.
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
        """The tensors as they are now.

        Raises:
            Restructured: they no longer are those of the skeleton. ValueError: one is on the meta device.
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
    """The live tensors of ``model`` under the names of ``skeleton``, a copy of it; each tied weight once."""
    return LiveTensors(skeleton, model, prefix).read()
