"""A compiled chunk of rounds copies nothing of the size of a cache or a weight on the CPU."""

import re
from functools import cache
from math import prod

import jax
import pytest
import torch
from support.tiny import make_drafter, make_target

import torch_dflash as td
from jax_bridge import ops
from jax_bridge.kernels import row_reductions as angles
from jax_bridge.programs import lower
from jax_bridge.weights.formats import StoredWeight

MOVES = ("copy", "transpose", "convert", "fusion", "concatenate", "pad", "gather", "slice", "bitcast-convert")
SMALLEST = 1000  # entries; the caches and the matrices have more
LENGTH = 480  # 496 slots, which no other dimension has


def compiled(dtype: torch.dtype, drafts: bool, **options):
    program, leaves = built(dtype, drafts, LENGTH, **options)
    shapes = {dims(leaf.shape) for leaf in leaves if prod(leaf.shape) >= SMALLEST and len(leaf.shape) > 1}
    return program.as_text(), shapes


@cache
def built(dtype: torch.dtype, drafts: bool, max_length: int, width: int = 0, **options):
    """The rounds of a tiny pair, of ``width`` or the plan's: (the program, its weights and caches)."""
    target = make_target("llama", num_hidden_layers=2, max_position_embeddings=16 * LENGTH)
    drafter = make_drafter(target, target_layer_ids=[0, 1], max_position_embeddings=16 * LENGTH)
    target, drafter = target.to(dtype), drafter.to(dtype)
    engine = td.compile(target, drafter if drafts else None, max_length=max_length, filters=False, **options)
    runtime = engine.runtime
    params = runtime.refresh(engine.tensors())
    state = engine.start(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False)
    state, rounds = runtime.import_state(params, state), runtime._rounds[width or engine.plan.verify_width]
    with lower.tracing("highest"):
        program = jax.jit(rounds, donate_argnums=1).lower(params, state).compile()
    return program, jax.tree.leaves((params, state), is_leaf=lambda leaf: isinstance(leaf, StoredWeight))


@pytest.fixture
def anew():
    """Drops programs that were built from other code: to be called when a patch is in place."""
    yield built.cache_clear
    built.cache_clear()


def dims(shape) -> tuple[int, ...]:
    """A shape without its ones, in any order: a transpose has the same."""
    return tuple(sorted(size for size in shape if size != 1))


def moves(text: str, shapes: set) -> dict[str, list[str]]:
    """Lists results of one of ``shapes`` by computation, without fusions' insides and updates in place."""
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
@pytest.mark.parametrize(
    ("drafts", "options"),
    [(False, {}), (True, {}), (True, {"verify_width": "auto", "width": 1})],
    ids=["plain", "drafting", "no draft"],
)
def test_a_chunk_copies_nothing(drafts, options, dtype):
    assert moves(*compiled(dtype, drafts, **options)) == {}


@pytest.mark.parametrize("function", ["cosine", "sine"])
def test_angles_are_computed_once_a_pass(function, monkeypatch, anew):
    text, _ = compiled(torch.float32, False)
    assert text.count(f" {function}(") == 1
    monkeypatch.setattr(angles, "_once_a_pass", lambda function, array: function(array))
    anew()
    text, _ = compiled(torch.float32, False)
    assert text.count(f" {function}(") > 2  # each layer's queries and keys


def read_by_slot(drafts: bool, **options) -> float:
    """Bytes that a round moves more for each slot that the caches have more; a loop's body counts once."""
    short, long = (
        built(torch.float32, drafts, times * LENGTH, **options)[0].cost_analysis()["bytes accessed"]
        for times in (1, 16)
    )
    return (long - short) / (15 * LENGTH)


@pytest.mark.parametrize(
    ("drafts", "options", "most"),
    [
        (False, {}, 0),
        (True, {}, 48),  # positions of the drafter's slots, an int32 each, some times over
        (False, {"cache": "paged"}, 1),  # the page table
    ],
)
def test_what_a_round_moves_follows_the_context_and_not_the_capacity(drafts, options, most):
    assert read_by_slot(drafts, **options) <= most  # a layer's keys and values would be 128


def test_a_form_that_reads_every_slot_shows(monkeypatch, anew):
    def plain(inputs, key, value):
        return ops.call_torch(ops.dense_attention.plain, inputs, key, value, _all(inputs, key))

    def _all(inputs, key):
        return torch.ones(1, 1, inputs.query.shape[2], key.shape[2], dtype=torch.bool)

    monkeypatch.setattr(ops, "stream_dense", plain)
    anew()
    assert moves(*compiled(torch.float32, False))
    assert read_by_slot(False) > 128
