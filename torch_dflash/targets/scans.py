"""transformers' recurrent layers with our scans: their own forwards, with other globals.

A layer's projections, gates and norms run unchanged. Its scan functions, whose names are the same in every
family, are replaced: transformers' own return no state between rows, and the state of a rejected row must be
dropped.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from torch_dflash.ops.lowerable import lowerable
from torch_dflash.ops.recurrence import ScanRows, at_least_float32
from torch_dflash.targets.skeleton import current_cache

Scans = dict[str, FunctionType]
"""Forwards of a model's recurrent layers with our scans, by the layer's path."""


def find_scans(model: nn.Module) -> Scans:
    """The forwards of ``model`` that call a function of `OURS`, with our functions.

    Raises:
        ValueError: a forward was replaced on its instance.
    """
    found = {}
    for path, module in model.named_modules():
        forward: Any = inspect.unwrap(type(module).forward)
        code: Any = getattr(forward, "__code__", None)
        if not isinstance(code, CodeType):
            continue
        if ours := {name: OURS[name] for name in OURS.keys() & set(code.co_names)}:
            if "forward" in vars(module):
                raise ValueError(
                    f"the forward of its recurrent layer {path} was replaced, and only that of "
                    f"{type(module).__name__} can drop rejected drafts; put the class's own forward back."
                )
            space = {**forward.__globals__, **ours}
            own = FunctionType(code, space, forward.__name__, forward.__defaults__, forward.__closure__)
            own.__kwdefaults__ = forward.__kwdefaults__
            found[path] = own
    return found


@contextmanager
def scanning(model: nn.Module, scans: Scans) -> Iterator[None]:
    """While open, the recurrent layers of ``model``, one of our copies, scan with the current cache."""
    layers = [(model.get_submodule(path), forward) for path, forward in scans.items()]
    for module, forward in layers:
        vars(module)["forward"] = partial(_run, module, forward)
    try:
        yield
    finally:
        for module, _ in layers:
            vars(module).pop("forward", None)


@lowerable
def run_mixer(
    tensors: tuple[Tensor, ...], module: nn.Module, forward: FunctionType, args: tuple, kwargs: dict[str, Any]
) -> Tensor:
    """A recurrent layer's ``forward`` with our scans; ``tensors`` are those among its arguments."""
    return forward(module, *args, **kwargs)


def _run(module: nn.Module, forward: FunctionType, *args: Any, **kwargs: Any) -> Tensor:
    tensors = tuple(one for one in (*args, *kwargs.values()) if isinstance(one, Tensor))
    return run_mixer(tensors, module, forward, args, kwargs)


def _conv(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    """``causal_conv1d_fn`` of the rows [B, C, M] after the cached ones."""
    out = current_cache().convolve(hidden_states, weight, bias)
    out = out if activation is None else ACT2FN[activation](out)
    return out.to(hidden_states.dtype)


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule and Kimi delta attention of [B, M, heads, d]; the shape of ``g`` tells which."""
    _check_unpacked(more)
    kind, shared = query.dtype, value.shape[2] // key.shape[2]
    query, key, value, decay, beta = (_by_head(one) for one in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = _normed(query), _normed(key)
    query = query * query.shape[-1] ** -0.5
    if shared > 1:
        query, key = (one.repeat_interleave(shared, dim=1) for one in (query, key))
    out = current_cache().scan(ScanRows(query, key, value, decay, beta)).transpose(1, 2)
    return out.contiguous().to(kind), out


def _mamba2(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int = 0,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **more: Any,
) -> Any:
    """``mamba2_chunk_scan`` of [B, M, heads, P], with B and C [B, M, groups, N]."""
    _check_unpacked(more)
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = F.softplus(dt) if dt_softplus else dt
    dt = _wide(dt.clamp(*dt_limit))
    rows, shared = _wide(hidden_states), hidden_states.shape[2] // B.shape[2]
    query, key = (_by_head(one).repeat_interleave(shared, dim=1) for one in (C, B))
    value, decay = _by_head(rows * dt[..., None]), _by_head(_wide(A) * dt)
    out = current_cache().scan(ScanRows(query, key, value, decay)).transpose(1, 2)
    out = (out if D is None else out + D[:, None] * rows).contiguous()
    return (out, out) if return_final_states else out


def _check_unpacked(more: dict[str, Any]) -> None:
    given = [name for name in ("cu_seqlens", "seq_idx", "z") if more.get(name) is not None]
    if given:
        raise ValueError(f"a recurrent layer passes {given[0]} to its scan, which would be ignored.")


def _by_head(rows: Tensor) -> Tensor:
    return _wide(rows.transpose(1, 2))


def _wide(rows: Tensor) -> Tensor:
    return rows.to(at_least_float32(rows.dtype))


def _normed(rows: Tensor) -> Tensor:
    return rows * torch.rsqrt((rows * rows).sum(dim=-1, keepdim=True) + 1e-6)


OURS: dict[str, Any] = {
    "causal_conv1d_fn": _conv,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
}
"""Replacements of transformers' functions for several rows, by name.

Functions for one row are not replaced: no forward calls them while the cache reports no state.
"""
