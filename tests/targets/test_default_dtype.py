"""A skeleton is built under the default dtype that its model was built under."""

from __future__ import annotations

import functools
from collections import deque, namedtuple
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from support.scripted import own_text, run
from support.tiny import BASE, randomise

import torch_dflash as td

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def tiny(kind, **more) -> transformers.LlamaForCausalLM:
    return randomise(kind(transformers.LlamaConfig(**BASE, **more)), 0)


def text(target, **more) -> list[int]:
    engine = td.compile(target, None, runtime="eager", max_length=64, **more)
    return run(engine, [PROMPT], max_new_tokens=8)[0][0]


class Policy:
    """A type, held by an object."""

    def __init__(self, dtype):
        self.dtype = dtype

    def cast(self, rows):
        """To the type."""
        return rows.to(self.dtype)


Pair = namedtuple("Pair", "dtype eps")
HOLDERS = {
    "namedtuple": lambda kind: Pair(kind, 1e-6),
    "partial": lambda kind: functools.partial(torch.zeros, (1,), dtype=kind),
    "set": lambda kind: {kind},
    "closure": lambda kind: lambda x: x.to(kind),
    "deque": lambda kind: deque([kind]),
    "view": lambda kind: MappingProxyType({"dtype": kind}),
    "namespace": lambda kind: SimpleNamespace(dtype=kind),
    "method": lambda kind: Policy(kind).cast,
    "chain": lambda kind: functools.reduce(lambda held, _: Memo(held), range(2000), Memo(None)),
}


class Memo:
    """A link of a chain."""

    def __init__(self, inner):
        self.inner = inner


class Holds(transformers.LlamaForCausalLM):
    """Notes its type in a holder that its forward does not read."""

    def __init__(self, config):
        super().__init__(config)
        self.held = HOLDERS[config.holder](self.lm_head.weight.dtype)

    def forward(self, input_ids=None, position_ids=None, **more):
        return super().forward(input_ids, position_ids=position_ids, **more)


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_type_may_be_noted_anywhere(holder, tmp_path):
    tiny(Holds, holder=holder).save_pretrained(tmp_path)
    target = Holds.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert text(target) == own_text(target, PROMPT, 8)


class NotesNumbers(transformers.LlamaForCausalLM):
    """Notes numbers of the default dtype that it was built under; in bfloat16 there is no table of one."""

    def __init__(self, config):
        super().__init__(config)
        self.table = torch.linspace(0, 1, 4, device="cpu").numpy().tolist()
        self.third = torch.tensor(1 / 3, device="cpu").item()

    def forward(self, input_ids=None, position_ids=None, **more):
        return super().forward(input_ids, position_ids=position_ids, **more)


def test_a_model_that_was_cast_after_it_was_built():
    before = torch.get_default_dtype()
    target = tiny(NotesNumbers).bfloat16()
    assert text(target) == own_text(target, PROMPT, 8)
    assert torch.get_default_dtype() == before


class Probes(transformers.LlamaForCausalLM):
    """Doubles its embeddings if it was built under bfloat16, as ``config.probe`` tells it."""

    def __init__(self, config):
        super().__init__(config)
        self.held = PROBES[config.probe](self)

    def forward(self, input_ids=None, position_ids=None, **more):
        embeds = self.get_input_embeddings()(input_ids)
        embeds = 2 * embeds if ASKS[self.config.probe](self) else -embeds
        return super().forward(inputs_embeds=embeds, position_ids=position_ids, **more)


def _under_bfloat16() -> bool:
    return torch.get_default_dtype() == torch.bfloat16


def _cell() -> Any:
    tensor = torch.empty(1)
    return lambda: tensor.dtype


PROBES = {
    "dtype": lambda self: torch.empty(0),
    "values": lambda self: torch.tensor(1 / 3, device="cpu"),
    "cell": lambda self: _cell(),
    "limits": lambda self: torch.finfo(torch.get_default_dtype()),
    "module": lambda self: torch.nn.SiLU() if _under_bfloat16() else torch.nn.Tanh(),
    "buffer": lambda self: _under_bfloat16() and self.register_buffer("two", torch.ones(1), persistent=False),
}
ASKS = {
    "dtype": lambda self: self.held.dtype == torch.bfloat16,
    "values": lambda self: self.held.item() != torch.tensor(1 / 3, dtype=torch.float32).item(),
    "cell": lambda self: self.held() == torch.bfloat16,
    "limits": lambda self: self.held.bits == 16,
    "module": lambda self: isinstance(self.held, torch.nn.SiLU),
    "buffer": lambda self: hasattr(self, "two"),
}


@pytest.mark.parametrize("built", ["loaded in bfloat16", "cast to bfloat16"])
@pytest.mark.parametrize("probe", PROBES)
def test_a_skeleton_is_built_under_the_models_default_dtype(probe, built, tmp_path):
    target = tiny(Probes, probe=probe)
    if built == "cast to bfloat16":
        target.bfloat16()
    else:
        target.save_pretrained(tmp_path)
        target = Probes.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert ASKS[probe](target) == (built == "loaded in bfloat16")
    assert text(target, verify=False) == own_text(target, PROMPT, 8)


class LeavesDefault(transformers.LlamaForCausalLM):
    """Sets the process's default dtype and leaves it."""

    def __init__(self, config):
        super().__init__(config)
        torch.set_default_dtype(torch.float16)

    def forward(self, input_ids=None, position_ids=None, **more):
        return super().forward(input_ids, position_ids=position_ids, **more)


def test_a_constructor_that_sets_the_default_dtype_leaves_ours():
    before = torch.get_default_dtype()
    try:
        target = tiny(LeavesDefault)
        torch.set_default_dtype(before)
        text(target, verify=False)
        assert torch.get_default_dtype() == before
    finally:
        torch.set_default_dtype(before)
