"""Layers read the window and the slots in use, and draft as with a dense buffer."""

import random
import runpy

import jax
import pytest
import torch
from support import ROOT
from support.scripted import own_text, pad
from support.tiny import make_pair, randomise

import jax_bridge as jb
import torch_dflash as td
from jax_bridge._torchax import call_torch
from jax_bridge.programs.lower import tracing
from torch_dflash.cache.dense import StaticLayer
from torch_dflash.cache.latent import LatentLayer
from torch_dflash.cache.ring import RingLayer, allocate_ring
from torch_dflash.ops import attention as dense_attention
from torch_dflash.ops import block_attention
from torch_dflash.ops.block_attention import Past
from torch_dflash.ops.windows import WHOLE, reach
from torch_dflash.proposers.dflash import proposer

WINDOW, ROWS, BATCH = 5, 4, 3


def lowered(ring, key, value, start, count):
    write = jax.jit(lambda *args: call_torch(RingLayer.write, *args))
    with tracing("highest"):
        ring = write(jb.state_to_jax(ring), *map(jb.to_jax, (key, value, start, count)))
    return jb.to_torch(ring)


TINY = [
    ("eager", seed, *sizes) for seed, sizes in enumerate([(7, 6), (4, 7), (3, 8), (1, 10), (2, 12), (1, 1)])
]


@pytest.mark.parametrize(
    ("how", "seed", "window", "rows"),
    [*((how, seed, WINDOW, ROWS) for how in ("eager", "xla") for seed in range(4)), *TINY, ("xla", 2, 3, 8)],
)
def test_every_visible_position_is_in_its_slot(how, seed, window, rows):
    draw = random.Random(seed)
    ring = allocate_ring(2, 3, BATCH, window, rows, torch.float32, "cpu")
    history = [torch.zeros(2, 0, 3) for _ in range(BATCH)]
    shape = ring.key.shape
    for step in range(12):
        height = rows if step % 4 else 16  # a prompt now and then, longer than the ring
        count = torch.tensor([draw.randint(0, height) for _ in range(BATCH)], dtype=torch.int32)
        start = torch.tensor([past.shape[1] for past in history], dtype=torch.int32)
        key = torch.randn(BATCH, 2, height, 3)
        ring = (RingLayer.write if how == "eager" else lowered)(ring, key, -key, start, count)
        history = [torch.cat([h, k[:, :n]], dim=1) for h, k, n in zip(history, key, count, strict=True)]
        assert ring.key.shape == shape and ring.position.shape[1] == window + rows - 1
        at = ring.positions(start + count)
        for b, past in enumerate(history):
            wanted = range(max(0, past.shape[1] - ring.position.shape[1]), past.shape[1])
            assert sorted(at[b][at[b] >= 0].tolist()) == list(wanted)
            for slot, position in enumerate(at[b].tolist()):
                if position >= 0:
                    assert torch.equal(ring.key[b, :, slot], past[:, position])
                    assert torch.equal(ring.value[b, :, slot], -past[:, position])


@pytest.mark.parametrize("runtime", ["eager", "xla"])
@pytest.mark.parametrize("causal", [None, False])
def test_a_ring_drafts_what_a_dense_buffer_drafts(runtime, causal, monkeypatch):
    switches = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": WINDOW}
    target, drafter = make_pair("llama", agree=8.0, is_causal=causal, **switches)
    prompts = [[5, 17, 80, 33, 2, 9, 41], [7] * 3, list(range(20, 61))]
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def run():
        engine = td.compile(target, drafter, runtime=runtime, max_length=128, batch_size=3)
        state = engine.start(*pad(prompts), **options)
        return engine.generate(*pad(prompts), return_dict_in_generate=True, **options), state.proposer.layers

    out, layers = run()
    full, ring = layers
    size = WINDOW + engine_rows(drafter) - 1
    assert full.key.shape[2] >= 128 and ring.key.shape[2] == size + engine_rows(drafter)
    monkeypatch.setattr(proposer, "allocate_ring", dense)
    wanted, layers = run()
    assert not isinstance(layers[1], RingLayer)
    assert torch.equal(out.sequences, wanted.sequences)
    assert out.stats.acceptance_lengths == wanted.stats.acceptance_lengths
    assert max(map(max, wanted.stats.acceptance_lengths)) > 1
    assert out.new_tokens == [own_text(target, prompt, 40) for prompt in prompts]


def engine_rows(drafter) -> int:
    return drafter.config.block_size


def dense(heads, dim, batch_size, window, rows, dtype, device):
    shape = batch_size, heads, 128 + 32, dim
    return StaticLayer(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)))


def test_memory_does_not_depend_on_the_context():
    switches = {"layer_types": ["sliding_attention"] * 2, "sliding_window": WINDOW}
    target, drafter = make_pair("llama", **switches)
    sizes = []
    for length in (128, 256):
        engine = td.compile(target, drafter, runtime="eager", max_length=length)
        layers = engine.start(torch.ones(1, 3, dtype=torch.long), max_new_tokens=4).proposer.layers
        sizes.append([layer.key.shape for layer in layers])
    assert sizes[0] == sizes[1]


FAMILY_CONFIGS = runpy.run_path(str(ROOT / "benchmarks/family_configs.py"))
PROMPTS = [[5, 17, 80, 33, 2, 9, 41], [3, 1, 4, 0, 0, 0, 0]]
MASK = [[1] * 7, [1, 1, 1, 0, 0, 0, 0]]


def test_reach_covers_every_row_that_sees():
    for first, width in ((0, 1), (3, 61), (3, 62), (130, 8)):
        end = reach(torch.tensor([first, 0]), width, 1000)
        assert first + width <= end < first + width + WHOLE and end % WHOLE == 0
    assert reach(torch.tensor([90]), 8, 100) == 100
    assert reach(torch.tensor([90], device="meta"), 8, 1000) == 1000


def test_the_past_of_a_draft_ends_at_the_last_slot_in_use():
    def past(position: list[list[int]]) -> Past:
        at = torch.tensor(position)
        rows = torch.arange(2 * at.numel() * 4.0).view(2, at.shape[0], 1, -1, 4)
        return Past(rows[0], rows[1], at)

    empty = past([[-1] * 200] * 2).used()
    assert [part.shape[-1 if part.ndim == 2 else 2] for part in empty] == [0, 0, 0]
    whole = past([[-1] * 200, [*[-1] * 70, 5, *[-1] * 129]])
    used = whole.used()
    assert used.key.shape == (2, 1, 2 * WHOLE, 4) and torch.equal(used.key, whole.key[:, :, : 2 * WHOLE])
    assert used.position.max() == 5


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "expanded"])
def test_slots_that_no_row_reaches_are_not_multiplied(family, monkeypatch):
    sizes = {}
    for module in (dense_attention, block_attention):

        def recorded(query, parts, *args, plain=module.grouped_attention, name=module.__name__, **named):
            sizes.setdefault(name, set()).add(parts[0].key.shape[2])
            return plain(query, parts, *args, **named)

        monkeypatch.setattr(module, "grouped_attention", recorded)
    handed = set()
    update = LatentLayer.update

    def noted(self, key, value, view):
        found = update(self, key, value, view)
        handed.add(found[0].shape[2])
        return found

    monkeypatch.setattr(LatentLayer, "update", noted)
    target, drafter = make_pair("llama", agree=6.0)
    if family != "llama":
        made = FAMILY_CONFIGS["build"]("deepseek_v3")
        for layer in made.model.layers if family == "expanded" else ():  # a hook reads what is expanded
            layer.self_attn.kv_b_proj.register_forward_hook(lambda module, args, out: out)
        target, drafter = randomise(made, 0), td.NGramProposer(6)
    texts = {}
    for length in (96, 480):
        engine = td.compile(target, drafter, runtime="eager", max_length=length, batch_size=2)
        asked = {"max_new_tokens": 80, "do_sample": False, "eos_token_id": None}
        texts[length] = engine.generate(torch.tensor(PROMPTS), torch.tensor(MASK), **asked)
    assert torch.equal(texts[96], texts[480])
    seen = set().union(*sizes.values(), handed)
    assert max(seen) == 2 * WHOLE and WHOLE in seen
    assert (len(sizes) == 2) == (family == "llama") and bool(handed) == (family == "expanded")
