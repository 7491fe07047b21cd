"""Latent attention in transformers' modules: W_k moves from cached keys to the queries, W_v to the result.

transformers caches latents c and rotated keys k_rot, and computes every head's keys and values from all of
them in each pass (``expand_kv``). A key is ``[W_k c | k_rot]`` and a value ``W_v c``. So q (W_k c) is
(q W_k) c, and a sum of values is W_v times a sum of latents: attention of one head with the keys
``[c | k_rot]`` and the values c.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import skip_init

from torch_dflash.ops.attention import AttentionInputs
from torch_dflash.ops.latents import Widths, absorbed, halves, pays_to_expand, valued
from torch_dflash.targets.hooks import hooks_of

EXPAND, WEIGHT = "expand_kv", "kv_b_proj"
FIELDS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""The attributes of an attention module that are its `Widths`."""

Latents = dict[str, Widths]
"""Attention modules whose expansion is one plain product, by path."""


def find_latents(model: nn.Module) -> Latents:
    """The modules of ``model``, a live one, whose ``expand_kv`` is W_k and W_v of a plain linear layer.

    All others keep expanding: with an adapter, a quantised layer, a bias, a hook, a replaced method.
    """
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return {}
    found, known = {}, {}
    for path, module in model.named_modules():
        kind = type(module)
        if not hasattr(kind, EXPAND) or EXPAND in vars(module) or not _is_plain(module):
            continue
        if kind not in known:
            known[kind] = _expands(kind)
        if known[kind]:
            found[path] = Widths(*(getattr(module, name) for name in FIELDS))
    return found


def weights_of(latents: Latents, prefix: str = "") -> dict[str, Widths]:
    """``latents`` by the names of their weights, behind the ``prefix`` of the model's."""
    return {f"{prefix}{path}.{WEIGHT}.weight": widths for path, widths in latents.items()}


def _is_plain(module: nn.Module) -> bool:
    """Whether the module's weight is multiplied by rows and nothing else is done."""
    layer: Any = getattr(module, WEIGHT, None)
    if type(layer) is not nn.Linear or layer.bias is not None or "forward" in vars(layer) or hooks_of(layer):
        return False
    weight = layer._parameters.get("weight")
    sizes: list[Any] = [getattr(module, name, None) for name in FIELDS]
    if type(weight) is not nn.Parameter or not all(type(size) is int for size in sizes):
        return False
    rank, nope, _, value = sizes
    return weight.is_floating_point() and weight.shape[1] == rank and weight.shape[0] % (nope + value) == 0


def _expands(kind: Any) -> bool:
    """Whether the class's ``expand_kv`` gives ``[W_k c | k_rot]`` and ``W_v c``, tried on small numbers."""
    widths, heads, rows = Widths(5, 3, 4, 2), 2, 3

    def numbers(*shape: int) -> Tensor:
        count = torch.Size(shape).numel()
        line = torch.linspace(1, count, count, dtype=torch.float64, device="cpu")
        return torch.sin(line * line).view(shape)

    with torch.inference_mode(False), torch.no_grad():
        size = heads * (widths.nope + widths.value)
        layer: Any = skip_init(nn.Linear, widths.rank, size, bias=False, device="cpu", dtype=torch.float64)
        layer.weight.copy_(numbers(size, widths.rank))
        latent, turned = numbers(1, 1, rows, widths.rank), numbers(1, 1, rows, widths.rope) + 2
        stand_in = SimpleNamespace(**{WEIGHT: layer}, **dict(zip(FIELDS, widths, strict=True)))
        try:
            key, value = getattr(kind, EXPAND)(stand_in, latent, turned)
            up, down = halves(layer.weight, widths)
            wanted = torch.cat([latent @ up.transpose(1, 2), turned.expand(-1, heads, -1, -1)], dim=-1)
            return torch.allclose(key, wanted) and torch.allclose(value, latent @ down.transpose(1, 2))
        except Exception:  # the method reads more of its module, so it is another one
            return False


class Handed(Widths):
    """In the place of ``expand_kv``: the rows' latents and rotated keys, as they are cached."""

    def __call__(self, latent: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
        return latent, turned


@contextmanager
def absorbing(model: nn.Module, latents: Latents) -> Iterator[None]:
    """While open, these modules of ``model``, one of our copies, hand latents to their attention."""
    modules = [(vars(model.get_submodule(path)), widths) for path, widths in latents.items()]
    for own, widths in modules:
        own[EXPAND] = Handed(*widths)
    try:
        yield
    finally:
        for own, _ in modules:
            own.pop(EXPAND, None)


def attend_latents(module: Any, inputs: AttentionInputs, attend: Any, expands: Any = None) -> Tensor | None:
    """Attention [B, M, Q, Dv] of rows to latents; None for a module that does not hand them (`absorbing`).

    Args:
        module: the attention module.
        inputs: queries as the module made them; as key and value what its ``expand_kv`` gave.
        attend: the cache's attention of other inputs.
        expands: () -> whether the cache attends to keys and values that ``inputs.expand`` makes of latents.
    """
    widths = vars(module).get(EXPAND)
    if not isinstance(widths, Handed):
        return None
    handed = inputs._replace(key=inputs.value, value=inputs.key, shared=True)
    if expands and expands() and pays_to_expand(inputs.query, widths):
        return attend(handed._replace(expand=partial(getattr(type(module), EXPAND), module)))
    up, down = halves(getattr(module, WEIGHT).weight, Widths(*widths))
    return valued(attend(handed._replace(query=absorbed(inputs.query, up))), down)
