"""Recurrent layers stay right after random acceptance, chunks, padding and a change of occupant.

The comparison is with forwards without a cache, and sees each fault on purpose: a text alone may stay right.
"""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from support.hybrids import KINDS, make_hybrid, walk_gap

from torch_dflash.cache import recurrent
from torch_dflash.cache.recurrent import BothLayer, FreshState, RecurrentLayer
from torch_dflash.cache.view import CacheView
from torch_dflash.ops import recurrence
from torch_dflash.ops.recurrence import ScanRows

RIGHT, SEEN = 1e-4, 1e-3


@cache
def sound_gap(kind, **options):
    return walk_gap(make_hybrid(kind), **options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_walk_is_an_uncached_forward(kind):
    assert sound_gap(kind) < RIGHT
    assert sound_gap(kind, width=1) < RIGHT
    assert sound_gap(kind, cache="paged") < RIGHT


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_rejected_rows_and_padding_may_be_nan(kind, poison):
    assert sound_gap(kind, poison=poison) < RIGHT


def around(owner, name, change):
    """Mutation: ``owner.name`` becomes ``change(original, *its arguments)``."""

    def mutate(patch):
        patch.setattr(owner, name, partial(change, getattr(owner, name)))

    return mutate


def method(owner, name, change):
    def mutate(patch):
        original = getattr(owner, name)
        patch.setattr(owner, name, lambda self, *args, **more: change(original, self, *args, **more))

    return mutate


def counted(step):
    def commit(original, self, count, path):
        most = (self.rows if self.rows is not None else self.kept.key).shape[2]
        return original(self, (count + step).clamp(0, most), path)

    return method(FreshState, "commit", commit)


def tail_of_all_rows(original, tail, rows, count, path=None):
    return original(tail, rows, torch.full_like(count, rows.shape[2]), path)


def padding_decays(original, self, real):
    return original(self, real)._replace(decay=self.decay)


def rounded(original, self, count, path):
    layer = original(self, count, path)
    return replace(layer, state=layer.state.bfloat16().float())


def shown(original, self, layer_idx, state_idx=0):
    """The state of a layer in transformers' layout, for transformers' path of one row."""
    original(self, layer_idx)
    layer = self.states[layer_idx]
    both = isinstance(layer, BothLayer)
    layer = layer.recurrent if both else layer
    state = getattr(layer, "layer", layer).state
    return state.mT if both else state


def multiplied(original, rows):
    return rows * torch.isfinite(rows)


BROKEN = {
    "one row too many": (counted(1), {}),
    "one row too few": (counted(-1), {}),
    "the tail of rejected rows": (around(recurrent, "next_tail", tail_of_all_rows), {}),
    "padding that decays": (method(ScanRows, "only", padding_decays), {}),
    "the former occupant's state": (method(RecurrentLayer, "reset", lambda _, self, rows: self), {}),
    "a state rounded to bfloat16": (method(FreshState, "commit", rounded), {"rounds": 24}),
    "one row by transformers' own path": (method(CacheView, "get_recurrent_state", shown), {"width": 1}),
    "multiplication in the place of where": (
        around(recurrence, "finite", multiplied),
        {"poison": float("nan")},
    ),
}


@pytest.mark.parametrize("kind", ["qwen3_5", "falcon_h1"])
@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_on_purpose_is_seen(kind, name, monkeypatch):
    mutate, options = BROKEN[name]
    assert sound_gap(kind, **options) < RIGHT
    mutate(monkeypatch)
    assert walk_gap(make_hybrid(kind), **options) > SEEN
