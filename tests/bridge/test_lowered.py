"""The list of operations and the list of lowerings name the same operations."""

import inspect
from dataclasses import MISSING, fields

import torch

import torch_dflash as td
from jax_bridge.ops import LOWERED
from torch_dflash.cache import recurrent
from torch_dflash.ops import (
    attention,
    block_attention,
    control_flow,
    latents,
    paged_attention,
    spread,
    windows,
)
from torch_dflash.ops import attention as dense_attention
from torch_dflash.ops import control_flow as on_host
from torch_dflash.ops import spread as likeliest
from torch_dflash.ops import spread as stacked
from torch_dflash.ops.lowerable import OPERATIONS, lowerable
from torch_dflash.requests.options import OF_A_CALL, EngineOptions
from torch_dflash.targets import experts, scans


def test_every_operation_is_lowered():
    assert set(OPERATIONS) == set(LOWERED)
    names = {operation.__name__ for operation in OPERATIONS}
    modules = (attention, block_attention, control_flow, dense_attention, latents, on_host, paged_attention)
    modules += (experts, likeliest, recurrent, scans, spread, stacked, windows)
    assert names == {name for name in names if any(hasattr(module, name) for module in modules)}


def test_the_first_tensor_chooses():
    class Other(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return (
                "other" if func is operation else super().__torch_function__(func, types, args, kwargs or {})
            )

    operation = lowerable(lambda *args: "plain")
    OPERATIONS.remove(operation)
    other, plain = torch.ones(2).as_subclass(Other), torch.ones(2)
    assert operation(plain) == operation(len, plain) == operation.plain(other) == "plain"
    assert operation(other) == operation(len, (other, 2)) == "other"


def test_compile_names_every_option_with_its_default():
    given = inspect.signature(td.compile).parameters
    assert [name for name in given if name not in ("target", "drafter", "unknown")] == [
        f.name for f in fields(EngineOptions)
    ]
    for option in fields(EngineOptions):
        assert option.default is not MISSING and given[option.name].default == option.default, option.name
    assert {"runtime", "cache", "matmul_precision"} <= set(OF_A_CALL) and "batch_size" not in OF_A_CALL
