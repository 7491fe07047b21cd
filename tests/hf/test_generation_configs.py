"""A model with the generation config of a much used one decodes with no option given."""

from __future__ import annotations

import pytest
import torch
from support.generation_configs import CONFIGS
from support.tiny import VOCAB, make_pair
from transformers import GenerationConfig

import torch_dflash as td

XLA = ("Qwen2.5", "Llama 3.1 to 3.3", "LFM2", "suppress lists")


@pytest.fixture(scope="module")
def prompts():
    ids = torch.randint(0, VOCAB - 20, (6, 5), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.fixture
def pair(request, prompts):
    """A pair whose target has a config of `CONFIGS`, with ids that its greedy texts come to hold."""
    target, drafter = make_pair("llama", agree=6.0)
    asked = dict(CONFIGS[request.param])
    plain = target.generate(**prompts, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    common = plain[:, 7:].flatten().bincount(minlength=VOCAB).argsort(descending=True).tolist()
    stops, suppressed = asked.pop("stops"), asked.pop("suppress", 0)
    more = {"eos_token_id": common[2 : 2 + stops] if stops > 1 else common[2], "pad_token_id": 0}
    if suppressed:
        more |= {
            "suppress_tokens": common[8 : 8 + suppressed],
            "begin_suppress_tokens": [common[2], common[5]],
        }
    target.generation_config = GenerationConfig(**asked, **more)
    return target, drafter, common[2 : 2 + stops]


def doors(target, drafter, runtime):
    yield lambda **call: td.generate(target, drafter, **call, runtime=runtime)
    block = td.dflash(drafter, runtime=runtime)
    yield lambda **call: target.generate(**call, custom_generate=block)


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize(
    ("pair", "runtime"),
    [(name, "eager") for name in CONFIGS] + [(name, "xla") for name in XLA],
    indirect=["pair"],
)
def test_no_option_is_needed(pair, prompts, runtime):
    target, drafter, stops = pair
    sampled = bool(target.generation_config.do_sample)
    greedy = target.generate(**prompts, do_sample=False)
    assert greedy.shape[1] > 8 and any(set(row[5:].tolist()) & {*stops} for row in greedy)
    for call in doors(target, drafter, runtime):
        assert torch.equal(call(**prompts, do_sample=False), greedy)
        out = call(**prompts, **({"seed": 5} if sampled else {}))
        assert out.shape[1] <= (target.generation_config.max_length or 25)
        if not sampled:
            assert torch.equal(out, greedy)
            continue
        assert torch.equal(out, call(**prompts, seed=5)) and not torch.equal(out, call(**prompts, seed=6))
        banned = set(target.generation_config.suppress_tokens or ())
        for row in out[:, 5:].tolist():
            end = min((row.index(stop) for stop in stops if stop in row), default=len(row))
            assert not banned & set(row[: end + 1]) and not any(row[end + 1 :])
