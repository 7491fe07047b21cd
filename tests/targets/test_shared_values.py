"""What a target holds together with others, and what only some of its passes do."""

import functools
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest
import torch
import transformers
from support.scripted import own_text, run
from support.tiny import BASE, randomise

import torch_dflash as td
from torch_dflash.cache.view import CACHE
from torch_dflash.verify import check

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def tiny(kind, **more) -> transformers.LlamaForCausalLM:
    return randomise(kind(transformers.LlamaConfig(**BASE, **more)), 0)


def compiled(target, **more) -> td.Engine:
    return td.compile(target, None, runtime="eager", max_length=64, **more)


def text(engine: td.Engine) -> list[int]:
    return run(engine, [PROMPT], max_new_tokens=8)[0][0]


@dataclass(frozen=True, eq=False)
class Policy:  # a type that models of it share
    dtype: torch.dtype

    def cast(self, rows):
        return rows.to(self.dtype)


@functools.cache
def policy_for(dtype: torch.dtype) -> Policy:
    return Policy(dtype)


class Interned(transformers.LlamaForCausalLM):
    """Rounds its embeddings to a type that it asked a global table for."""

    def __init__(self, config):
        super().__init__(config)
        self.policy = policy_for(self.lm_head.weight.dtype)

    def forward(self, input_ids=None, position_ids=None, **more):
        embeds = self.get_input_embeddings()(input_ids)
        embeds = ((embeds + 100).to(self.policy.dtype) - 100).to(embeds.dtype)
        return super().forward(inputs_embeds=embeds, position_ids=position_ids, **more)


def test_what_other_models_share_is_not_written(tmp_path):
    other = tiny(Interned)
    other.save_pretrained(tmp_path)
    before = own_text(other, PROMPT, 8)
    target = Interned.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert text(compiled(target)) == own_text(target, PROMPT, 8)
    assert policy_for(torch.float32).dtype == torch.float32
    assert own_text(other, PROMPT, 8) == before == own_text(tiny(Interned), PROMPT, 8)


class BuildsAnother(transformers.LlamaForCausalLM):  # compiles a helper as it is built
    helper: Any = None

    def __init__(self, config):
        super().__init__(config)
        if BuildsAnother.helper is not None:
            compiled(BuildsAnother.helper)

    def forward(self, input_ids=None, position_ids=None, **more):
        return super().forward(input_ids, position_ids=position_ids, **more)


def test_a_constructor_may_compile_a_pair():
    target = tiny(BuildsAnother)
    BuildsAnother.helper = tiny(RefusesDoubles)
    assert compiled(target, verify=False).plan.capacity == 64


class Grows(transformers.LlamaForCausalLM):
    """Scales from its longest pass on, as some do beyond the length that they were trained with."""

    def __init__(self, config):
        super().__init__(config)
        self.scale = 1.0

    def forward(self, input_ids=None, position_ids=None, **more):
        if input_ids.shape[1] > 60:
            self.scale = 3.0
        embeds = self.get_input_embeddings()(input_ids) + (self.scale - 1)
        return super().forward(inputs_embeds=embeds, position_ids=position_ids, **more)


@pytest.mark.parametrize("change", ["a long pass", "scale"])
def test_what_only_some_passes_write_is_followed(change):
    target = tiny(Grows)
    engine = compiled(target)
    assert text(engine) == text(compiled(target))
    if change == "a long pass":
        target(torch.zeros(1, 64, dtype=torch.long))
    else:
        target.scale = -3.0
    assert text(engine) == text(compiled(target)) == own_text(target, PROMPT, 8)


class NotesUncached(transformers.LlamaForCausalLM):  # passes without a cache leave an entry beside a setting
    def __init__(self, config):
        super().__init__(config)
        self.info = {"shift": 0.0}

    def forward(self, input_ids=None, position_ids=None, **more):
        if more.get(CACHE) is None:
            self.info["uncached"] = True
        embeds = self.get_input_embeddings()(input_ids) + self.info["shift"]
        return super().forward(inputs_embeds=embeds, position_ids=position_ids, **more)


def test_a_setting_is_not_hidden_by_an_entry_that_comes_beside_it():
    target = tiny(NotesUncached)
    engine = compiled(target, verify=False)
    target.info |= {"shift": -3.0, "uncached": True}
    assert text(engine) == own_text(target, PROMPT, 8)


class Mode(Enum):
    PLAIN = "plain"


class Counts(transformers.LlamaForCausalLM):
    """Keeps records of passes without a cache, and a counter in its class that begins in a later pass."""

    def __init__(self, config):
        super().__init__(config)
        self.counts, self.lengths = {Mode.PLAIN: 0}, []

    def forward(self, input_ids=None, position_ids=None, **more):
        past = more.get(CACHE)
        if past is None:
            self.counts[Mode.PLAIN] += 1
            self.lengths.append(len(self.lengths))
        elif past.get_seq_length() > 0:
            type(self).steps = getattr(type(self), "steps", 0) + 1
        return super().forward(input_ids, position_ids=position_ids, **more)


def test_records_of_some_passes_are_let_be():
    target = tiny(Counts)
    engine = compiled(target)
    for _ in range(2):
        assert text(engine) == own_text(target, PROMPT, 8)
        target(torch.tensor([PROMPT]), use_cache=False)
    assert text(compiled(target)) == own_text(target, PROMPT, 8)


class Longest(transformers.LlamaForCausalLM):
    longest = 0

    def forward(self, input_ids=None, position_ids=None, **more):
        Longest.longest = max(Longest.longest, input_ids.shape[1])
        return super().forward(input_ids, position_ids=position_ids, **more)


def test_an_engine_makes_no_pass_that_is_longer_than_its_twins():
    compiled(tiny(Longest), verify=False)
    assert Longest.longest < 16


class RefusesDoubles(transformers.LlamaForCausalLM):
    def to(self, *args, **named):
        if torch.float64 in args:
            raise TypeError("no double precision here")
        return super().to(*args, **named)

    def forward(self, input_ids=None, position_ids=None, **more):
        return super().forward(input_ids, position_ids=position_ids, **more)


def test_a_class_without_double_precision():
    target = tiny(RefusesDoubles)
    assert text(compiled(target)) == own_text(target, PROMPT, 8)


class LikesSingles(transformers.LlamaForCausalLM):  # computes something else where a pass has one row
    def forward(self, input_ids=None, position_ids=None, **more):
        embeds = self.get_input_embeddings()(input_ids) + 0.5 * (input_ids.shape[1] == 1)
        return super().forward(inputs_embeds=embeds, position_ids=position_ids, **more)


def test_a_trial_that_did_not_end_says_nothing(monkeypatch):
    target = tiny(LikesSingles)

    def stop(*args, **named):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(check, "compare", stop)
        compiled(target)
    with pytest.raises(ValueError, match="tiny random twin"):
        compiled(target)
