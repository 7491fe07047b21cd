"""Whether a live model still is what its class and config describe: what runs is built from those alone."""

from __future__ import annotations

import copy
import weakref
from typing import Any, NamedTuple

from torch import nn

# No text depends on these, of a module or a config: modes, names, what only gradients or a loss read,
# defaults of `generate`, which outputs a forward returns. What a vocabulary's size decides are shapes.
IGNORED = frozenset(
    "training gradient_checkpointing vocab_size padding_idx problem_type output_router_logits "
    "name_or_path architectures auto_map tokenizer_class transformers_version id2label label2id dtype "
    "torch_dtype bos_token_id eos_token_id pad_token_id use_cache output_attentions output_hidden_states "
    "return_dict".split()
)
_PLAIN = (int, float, str, type(None))  # bool is an int
_ABSENT = object()


class _Described(NamedTuple):
    """What a skeleton's modules say of themselves, and the model's config when its engine was built."""

    modules: dict[str, tuple[nn.Module, list[tuple[str, Any]]]]
    config: dict[str, Any]


_described: weakref.WeakKeyDictionary[nn.Module, _Described] = weakref.WeakKeyDictionary()


def settings(config: Any) -> dict[str, Any]:
    """The fields of a config (or None) that may decide what text comes, nested configs as dicts."""
    found = {}
    for name, value in getattr(config, "__dict__", {}).items():
        if name in IGNORED or name.startswith("_"):
            continue
        if _is_plain(value) or isinstance(value, dict):
            found[name] = value
        elif hasattr(value, "to_dict"):
            found[name] = settings(value)
    return found


def check_unmodified(skeleton: nn.Module, model: nn.Module) -> None:
    """Refuse a model whose modules are not those that its class and config describe.

    The skeleton runs instead of the model, so what a hook, a replaced module, an attribute or a config field
    changed after loading does to the model would silently not happen. Compared are the types of all modules,
    their plain attributes (numbers, strings, None, and lists of those) and the config's fields.

    Raises:
        ValueError: naming the first such module, attribute or field.
    """
    known = _described.get(skeleton)
    if known is None:
        known = _described[skeleton] = _describe_all(skeleton, model)
    if settings(getattr(model, "config", None)) != known.config:
        _refuse_config(known.config, model)
    seen = 0
    for name, module in model.named_modules():
        twin, attributes = known.modules.get(name, (None, []))
        if twin is None or type(twin) is not type(module):
            _refuse(_where(model, name), _describe(module), _describe(twin))
        seen += 1
        own = vars(module)
        for key, value in attributes:
            found = own.get(key, _ABSENT)
            if found is not value and not _same(found, value):
                said = "absent" if found is _ABSENT else repr(found)
                _refuse(f"{_where(model, name)}.{key}", said, repr(value))
        if own["_forward_pre_hooks"] or own["_forward_hooks"] or "forward" in own:
            _refuse_hooks(_where(model, name), module)
    if seen < len(known.modules):
        name = min(known.modules.keys() - dict(model.named_modules()).keys())
        _refuse(_where(model, name), "absent", _describe(known.modules[name][0]))


def _describe_all(skeleton: nn.Module, model: nn.Module) -> _Described:
    modules = {name: (module, _attributes(module)) for name, module in skeleton.named_modules()}
    return _Described(modules, copy.deepcopy(settings(getattr(model, "config", None))))


def _attributes(module: nn.Module) -> list[tuple[str, Any]]:
    own = vars(module).items()
    kept = [(name, value) for name, value in own if name not in IGNORED and not name.startswith("_")]
    return [(name, copy.copy(value)) for name, value in kept if _is_plain(value)]


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN) and value == value  # NaN equals nothing


def _same(found: Any, value: Any) -> bool:
    return _is_plain(found) and found == value


def _refuse(where: str, found: str, wanted: str) -> None:
    raise ValueError(
        f"{where} is {found}, by the model's config it should be {wanted}. Undo the change, or merge "
        "adapters and dequantise, before passing the model."
    )


def _refuse_config(before: dict[str, Any], model: Any) -> None:
    now, kind = settings(model.config), type(model).__name__
    name = next(name for name in before | now if before.get(name, _ABSENT) != now.get(name, _ABSENT))
    raise ValueError(
        f"{kind}.config.{name} is {now.get(name)!r}, it was {before.get(name)!r} when this engine was built. "
        "Set it back, or build another engine for the changed model."
    )


def _refuse_hooks(where: str, module: nn.Module) -> None:
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    foreign = [hook for hook in hooks if not _of_transformers(hook)]
    if foreign or "forward" in vars(module):
        what = getattr(foreign[0], "__qualname__", foreign[0]) if foreign else "a replaced forward"
        raise ValueError(f"{where} carries {what}, which would not run; remove it before passing the model.")


def _of_transformers(hook: Any) -> bool:
    """transformers leaves its own hooks for ``output_hidden_states``; they change nothing."""
    return str(getattr(hook, "__module__", "")).startswith("transformers.")


def _where(model: nn.Module, name: str) -> str:
    return f"{type(model).__name__}.{name}" if name else type(model).__name__


def _describe(module: nn.Module | None) -> str:
    return "absent" if module is None else f"{type(module).__name__}({module.extra_repr()})"
