"""Eager attention multiplies the slots that are in use, not all that the cache has room for."""

import runpy

import pytest
import torch
from support import ROOT
from support.tiny import make_pair, randomise

import torch_dflash as td
from torch_dflash.cache.latent import LatentLayer
from torch_dflash.ops import attention as dense_attention
from torch_dflash.ops import block_attention
from torch_dflash.ops.block_attention import Past
from torch_dflash.ops.windows import WHOLE, reach

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


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
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
        made = FAMILY_CONFIGS["build"](family)
        target, drafter = randomise(made, 0), td.NGramProposer(6)
    texts = {}
    for length in (96, 480):
        engine = td.compile(target, drafter, runtime="eager", max_length=length, batch_size=2)
        asked = {"max_new_tokens": 80, "do_sample": False, "eos_token_id": None}
        texts[length] = engine.generate(torch.tensor(PROMPTS), torch.tensor(MASK), **asked)
    assert torch.equal(texts[96], texts[480])
    seen = set().union(*sizes.values(), handed)
    assert max(seen) == 2 * WHOLE and WHOLE in seen
    assert (len(sizes) == 2) == (family == "llama") == (not handed)
