"""The weights of a target by the skeleton's names: live torch tensors, or arrays on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from torch_dflash.targets.unmodified import check_unmodified


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

    def mesh_for(self, asked: Any, replicas: int = 1) -> Any:
        """The mesh to decode on, where a call ``asked`` for one or for none (None), to be shared by replicas.

        Raises:
            ValueError: the weights lie elsewhere.
        """
        ...


def model_of(target: Any) -> Any:
    """The transformers model that ``target`` is or stands for."""
    return target.model if isinstance(target, LoadedTarget) else target


def arrays_of(target: Any, runtime: str) -> Mapping[str, Any] | None:
    """The arrays of a target without torch weights; None for a live model.

    Raises:
        ValueError: ``runtime`` cannot decode with them.
    """
    return target.arrays_for(runtime) if isinstance(target, LoadedTarget) else None


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


_slots_of: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()


def _slots(skeleton: nn.Module) -> dict[str, Tensor]:
    """`named_tensors` of a skeleton, which has the same for good."""
    if skeleton not in _slots_of:
        _slots_of[skeleton] = named_tensors(skeleton)
    return _slots_of[skeleton]


def collect_tensors(skeleton: nn.Module, model: nn.Module, prefix: str) -> dict[str, Tensor]:
    """The live tensors of ``model`` under the skeleton's names, each tied weight once.

    Raises:
        ValueError: the model's tensors are not those its config describes (an adapter, a quantiser or
            surgery changed them), so running the skeleton would not be running the model.
    """
    live, slots = named_tensors(model), _slots(skeleton)
    extra = live.keys() - slots.keys()
    if extra:
        raise ValueError(
            f"{type(model).__name__}: unknown parameters or buffers {sorted(extra)[:3]}; merge adapters "
            "(merge_and_unload()) before passing the model."
        )
    check_unmodified(skeleton, model)
    taken: dict[int, Tensor] = {}
    tensors = {}
    for name, slot in slots.items():
        tensor = live.get(name)
        if tensor is None or tensor.shape != slot.shape:
            found = "no such tensor" if tensor is None else f"shape {tuple(tensor.shape)}"
            raise ValueError(
                f"{type(model).__name__}: {name} should have shape {tuple(slot.shape)} by the model's "
                f"config, found {found}. Merge adapters and dequantise before passing the model."
            )
        if tensor.device.type == "meta":
            raise ValueError(
                f"{type(model).__name__}: {name} is on the meta device; load the weights before decoding."
            )
        if id(slot) not in taken:
            taken[id(slot)] = tensors[prefix + name] = tensor
        elif taken[id(slot)].data_ptr() != tensor.data_ptr():
            equal = torch.equal(taken[id(slot)], tensor)
            raise ValueError(
                f"{type(model).__name__}: {name} is tied by the config (tie_word_embeddings=True) but holds "
                + (
                    "a copy of the same values (load_state_dict(assign=True) leaves that); call "
                    "model.tie_weights()."
                    if equal
                    else "its own weight; set tie_word_embeddings=False on the config, or tie the weights."
                )
            )
    return tensors
