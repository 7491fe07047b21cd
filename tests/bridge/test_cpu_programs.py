"""What a compiled chunk of rounds copies on the CPU: nothing the size of a cache or a weight."""

from __future__ import annotations

import re
from math import prod

import jax
import pytest
import torch
from support.tiny import make_pair

import torch_dflash as td
from jax_bridge import angles, lower, ops
from jax_bridge.forms import StoredWeight

MOVES = ("copy", "transpose", "convert", "fusion", "concatenate", "pad", "gather", "slice", "bitcast-convert")
SMALLEST = 1000  # entries; the caches and the matrices have more
LENGTH = 480  # 496 slots, which no other dimension has


def compiled(dtype: torch.dtype, drafts: bool, **options):
    """The rounds of a tiny pair: (the program's text, the shapes of its weights and caches)."""
    target, drafter = (model.to(dtype) for model in make_pair("llama"))
    engine = td.compile(target, drafter if drafts else None, max_length=LENGTH, filters=False, **options)
    runtime = engine.runtime
    params = runtime.refresh(engine.tensors())
    state = engine.start(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False)
    state, rounds = runtime.take_in(params, state), runtime._rounds[engine.plan.verify_width]
    with lower.tracing("highest"):
        text = jax.jit(rounds, donate_argnums=1).lower(params, state).compile().as_text()
    leaves = jax.tree.leaves((params, state), is_leaf=lambda leaf: isinstance(leaf, StoredWeight))
    return text, {dims(leaf.shape) for leaf in leaves if prod(leaf.shape) >= SMALLEST and len(leaf.shape) > 1}


def dims(shape) -> tuple[int, ...]:
    """A shape without its ones, in any order: a transpose has the same."""
    return tuple(sorted(size for size in shape if size != 1))


def moves(text: str, shapes: set) -> dict[str, list[str]]:
    """What each computation outside of fusions makes of one of ``shapes``, updates in place apart."""
    bodies, name = {}, ""
    for line in text.splitlines():
        if found := re.match(r"(ENTRY )?%([\w.\-]+) \(", line):
            name = "ENTRY" if found[1] else found[2]
        bodies.setdefault(name, []).append(line)
    found: dict[str, list[str]] = {}
    for name in bodies.keys() - set(re.findall(r"calls=%([\w.\-]+)", text)):
        for line in bodies[name]:
            made = re.match(r"\s+(?:ROOT )?%[\w.\-]+ = \w+\[([\d,]+)\]\S* ([\w\-]+)\(", line)
            if made and made[2] in MOVES and dims(map(int, made[1].split(","))) in shapes:
                inner = re.search(r"calls=%([\w.\-]+)", line)
                root = next(x for x in bodies[inner[1]] if "ROOT" in x) if inner else line
                if "dynamic-update-slice(" not in root:
                    found.setdefault(name, []).append(line.strip())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("drafts", [False, True])
def test_a_chunk_copies_nothing(drafts, dtype):
    assert moves(*compiled(dtype, drafts)) == {}


@pytest.mark.parametrize("function", ["cosine", "sine"])
def test_angles_are_computed_once_a_pass(function, monkeypatch):
    text, _ = compiled(torch.float32, False)
    assert text.count(f" {function}(") == 1
    monkeypatch.setattr(angles, "_once_a_pass", lambda function, array: function(array))
    text, _ = compiled(torch.float32, False)
    assert text.count(f" {function}(") > 2  # each layer's queries and keys


def test_a_form_that_reads_every_slot_shows(monkeypatch):
    def plain(inputs, key, value):
        return ops.call_torch(ops.dense_attention.plain, inputs, key, value, _all(inputs, key))

    def _all(inputs, key):
        return torch.ones(1, 1, inputs.query.shape[2], key.shape[2], dtype=torch.bool)

    monkeypatch.setattr(ops, "stream_dense", plain)
    assert moves(*compiled(torch.float32, False))
