"""Checks that a target is of a tested class and runs the code of that class."""

from __future__ import annotations

import copy
import os
import sys
import sysconfig
from collections.abc import Iterator
from functools import partial, partialmethod
from importlib.resources import files
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import accelerate
import torch
import transformers
from packaging.version import Version
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as torch_module
from transformers.generation import GenerationMixin
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from torch_dflash.targets.guard import classes_of, function_of, globals_read
from torch_dflash.targets.hooks import hooks_of
from torch_dflash.targets.weights import model_of

TRANSFORMERS = str(Path(transformers.__file__).parent) + os.sep
_HOMES = (
    TRANSFORMERS,
    *(str(Path(file or "").parent) + os.sep for file in (torch.__file__, accelerate.__file__)),
    str(Path(__file__).parents[1]) + os.sep,
)
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_NOT_STANDARD = ("-packages" + os.sep, os.sep + "unittest" + os.sep)  # a mock runs a user's function
QUANTISERS = ("bitsandbytes", "quanto", "torchao")
"""Quantisation methods whose live layers were tested; transformers' others are refused."""


def _listed(kind: str) -> frozenset[str]:
    """The names of one kind in the list of `benchmarks/families.py`."""
    lines = (files("torch_dflash") / "assets" / "tested.txt").read_text(encoding="utf-8").splitlines()
    return frozenset(name for word, name in map(str.split, lines) if word == kind)


TESTED = _listed("attention")
"""Classes of transformers whose text was compared with their own `generate` (`docs/families.md`)."""
TESTED_RECURRENT = _listed("recurrent")
"""Classes tested with recurrent layers; some classes build models with and without them."""
(WITH,) = _listed("transformers")
"""The newest transformers that these classes were tested with."""


def is_tested(model: nn.Module, recurrent: bool = False) -> bool:
    """Whether ``model`` is of a tested class, without patches or replaced modules.

    ``recurrent``: whether the model has recurrent layers.
    """
    kind = type(model)
    if kind.__name__ not in (TESTED_RECURRENT if recurrent else TESTED) or not kind.__module__.startswith(
        "transformers.models."
    ):
        return False
    if Version(transformers.__version__).release[:2] > Version(WITH).release:
        return False
    return runs_own_code(model) and is_as_built(model)


def runs_own_code(model: nn.Module) -> bool:
    """Whether classes and modelling files of ``model`` are transformers' and torch's, unpatched."""
    kinds = classes_of(model)
    values = [value for kind in kinds for value in vars(kind).values()]
    values += [space[name] for space, names in globals_read(kinds) for name in names]
    return all(map(at_home, kinds)) and all(at_home(value) for value in values if _may_run(value))


def is_as_built(model: Any) -> bool:
    """Whether ``model`` has the modules of its class, without hooks, adapters or replaced methods."""
    for module in model.modules():
        own = [value for name, value in vars(module).items() if name != "generate" and _may_run(value)]
        if not all(map(at_home, (*hooks_of(module), *own))):
            return False
    everywhere = torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks
    if not all(at_home(hook) for one in everywhere for hook in one.values()):
        return False
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            built = type(model)(copy.deepcopy(model.config))
    except Exception:  # an unknown class may do anything
        return False
    return _kinds(built) == _kinds(model)


def at_home(value: Any) -> bool:
    """Whether a callable's code is transformers', torch's, accelerate's, this package's or Python's."""
    if isinstance(value, BuiltinFunctionType):
        return True
    if isinstance(value, type):
        root = value.__module__.partition(".")[0]
        standard = root in sys.stdlib_module_names and root not in ("__main__", "unittest")
        return root in ("torch", "transformers", "torch_dflash") or standard
    found = list(_functions(value))
    return (bool(found) or at_home(type(value))) and all(
        _is_home(function.__code__.co_filename) for function in found
    )


def check_implementations(model: Any) -> None:
    """Raise ``ValueError`` for attention or experts of a user, which would not run."""
    kinds = (
        ("attn", "_attn_implementation", ALL_ATTENTION_FUNCTIONS),
        ("attn", "_attn_implementation", ALL_MASK_ATTENTION_FUNCTIONS),
        ("experts", "_experts_implementation", ALL_EXPERTS_FUNCTIONS),
    )
    config = model.config.get_text_config()
    for module in {kind.__module__ for kind in classes_of(model)}:
        own = vars(sys.modules[module]).get("eager_attention_forward")
        if module.startswith("transformers.models.") and own is not None and not at_home(own):
            raise ValueError(
                f"{module}.eager_attention_forward is {own!r}, not transformers' own, and would not run; "
                "put transformers' own back, or use the target's own generate."
            )
    for kind, field, registry in kinds:
        name = getattr(config, field, None)
        if name in registry and not at_home(registry[name]):
            raise ValueError(
                f"{kind}_implementation={name!r} ({registry[name]!r}) is not transformers' own, and would "
                f"not run; call set_{kind}_implementation('eager') on the target, if that says the same."
            )
    scaled, softmax = functional.scaled_dot_product_attention, functional.softmax
    for name, value in (("scaled_dot_product_attention", scaled), ("softmax", softmax)):
        if not at_home(value):
            text = f"torch.nn.functional.{name} is {value!r}, not torch's own, and would not run"
            raise ValueError(f"{text}; put torch's own back before passing the target.")


def check_instance(model: nn.Module) -> None:
    """Raise ``ValueError`` for parts of ``model`` that cannot be decoded, naming the module and the fix.

    These are modules that cannot be copied or bound, hooks that move weights, aLoRA, and replaced parts of
    `generate`.
    """
    method = getattr(model, "quantization_method", "torchao")  # transformers sets it, until it dequantises
    if method not in QUANTISERS:
        kind = type(getattr(model.config, "quantization_config", None)).__name__
        raise ValueError(
            f"{type(model).__name__} has layers of {getattr(method, 'value', method)}, not decoded here; "
            f"load it with quantization_config={kind}(dequantize=True), or load plain weights."
        )
    for name, module in model.named_modules():
        fault = _fault_of_module(module, next(iter(module.parameters()), torch.empty(0)).is_cpu)
        if fault is not None:
            raise ValueError(f"{'.'.join(filter(None, (type(model).__name__, name)))}{fault}.")
    for kind in ("input", "output"):
        part = getattr(model, f"get_{kind}_embeddings")()
        if part is not None and not isinstance(getattr(part, "weight", None), torch.Tensor):
            raise ValueError(
                f"{type(model).__name__}.get_{kind}_embeddings() is a {type(part).__name__} without a "
                "weight, which is read; give it a property weight that returns the inner layer's."
            )
    for name, config in (vars(model).get("peft_config") or {}).items():
        if getattr(config, "alora_invocation_tokens", None):
            raise ValueError(
                f"{type(model).__name__} has the adapter {name!r}, an aLoRA, which acts behind its "
                "alora_invocation_tokens alone: PEFT looks for them in a whole prompt, which is not decoded "
                "here; use the PeftModel's own generate, or delete the adapter."
            )
    for name, value in vars(model).items():
        own = name == "generate" and isinstance(value, partial) and value.keywords.get("model") is model
        if callable(getattr(GenerationMixin, name, None)) and not own and not at_home(value):
            model_of(getattr(value, "__self__", None))  # raises for PEFT's learned prompts
            raise ValueError(
                f"{type(model).__name__} carries a replaced {name}, which only its own generate would call; "
                f"delete it (`del model.{name}`) before passing the model."
            )


def _fault_of_module(module: nn.Module, on_cpu: bool) -> str | None:
    """The fault of a module that cannot be copied or bound, and the fix: the rest of a sentence."""
    kind, own = type(module).__name__, module._parameters
    if (hook := vars(module).get("_hf_hook")) is not None:
        return (
            f" carries accelerate's {type(hook).__name__}, which moves weights as it runs; call "
            "accelerate.hooks.remove_hook_from_module(model, recurse=True), or load the model without "
            "offloading, before passing it"
        )
    if isinstance(module, torch.jit.ScriptModule):
        return " is a TorchScript module, which cannot be copied; put back the module that it was made of"
    if kind == "Linear8bitLt":
        return (
            " is bitsandbytes' Linear8bitLt, with more state than its weight; load it with load_in_4bit=True"
        )
    if getattr(module, "support_avx512bf16_for_cpu", False) and on_cpu:
        return (
            f" is a {kind} of bitsandbytes, which packs its weight for this CPU in its first forward, and "
            "packed weights are not decoded here; load the model anew and set "
            "support_avx512bf16_for_cpu=False of such modules before any forward"
        )
    if type(module).__module__.startswith("torch.ao.nn.quantized"):
        return f" is a {kind} of quantize_dynamic, which is not decoded here; pass the model as it was before"
    if not isinstance(own, dict):
        return f" keeps its weights in a {type(own).__name__}, which is not read; load the model dequantised"
    if parts := [key for key, leaf in own.items() if hasattr(leaf, "full_tensor")]:
        return (
            f".{parts[0]} is a DTensor, part of a weight; load the full_tensor() of each into a whole model"
        )
    return None


def _may_run(value: Any) -> bool:
    wrapped = isinstance(value, property | staticmethod | classmethod | partialmethod)
    return wrapped or callable(value) and not isinstance(value, type | nn.Module)


def _functions(value: Any) -> Iterator[FunctionType]:
    """The function of a callable, and those that it wraps."""
    while (function := function_of(value)) is not None:
        yield function
        value = vars(function).get("__wrapped__")


def _is_home(file: str) -> bool:
    standard = file.startswith((_STANDARD, "<frozen "))
    return file.startswith(_HOMES) or standard and not any(part in file for part in _NOT_STANDARD)


def _kinds(model: nn.Module) -> dict[str, type]:
    return {name: type(module) for name, module in model.named_modules()}
