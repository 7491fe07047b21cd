"""A model with the generation config of a popular one decodes without options."""

import copy

import pytest
import torch
from support.generation_configs import CONFIGS
from support.tiny import VOCAB, make_pair
from transformers import GenerationConfig

import torch_dflash as td

XLA = ("Qwen2.5", "Llama 3.1 to 3.3", "LFM2", "suppress lists")
WIDTH = 5


@pytest.fixture(scope="module")
def prompts():
    ids = torch.randint(0, VOCAB - 20, (6, WIDTH), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.fixture
def pair(request, prompts):
    """A pair whose target has a config of `CONFIGS`, with ids that occur in its greedy texts."""
    target, drafter = make_pair("llama", agree=6.0)
    with torch.no_grad():
        target.lm_head.weight.mul_(0.3)  # so flat that every filter takes something away
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


def by_hand(target, drafter, prompts, **options):
    """The call with every option of the target's config written out."""
    bare = copy.deepcopy(target)
    bare.generation_config = GenerationConfig()
    given = target.generation_config.to_diff_dict()
    given = {name: value for name, value in given.items() if name != "transformers_version"}
    return td.generate(bare, drafter, **prompts, **(given | options), runtime="eager")


def probabilities(target, prompts, rows, patch):
    """transformers' own probabilities of the new tokens of ``rows``, as if transformers had drawn them."""
    told = []

    def draw(probs, num_samples):
        token = rows[:, WIDTH + len(told), None]
        told.append(probs.gather(1, token))
        return token

    with patch.context() as patched:
        patched.setattr(torch, "multinomial", draw)
        assert torch.equal(target.generate(**prompts), rows)
    return torch.cat(told, dim=1)


def check(target, ours, drafter, prompts, stops, runtime, patch):
    """Asserts that ``ours`` without options gives the text of transformers' ``generate`` with ``target``."""
    sampled = bool(target.generation_config.do_sample)
    greedy = target.generate(**prompts, do_sample=False)
    assert greedy.shape[1] > 8 and any(set(row[WIDTH:].tolist()) & {*stops} for row in greedy)
    wanted = by_hand(target, drafter, prompts, seed=5) if sampled else greedy
    for call in doors(ours, drafter, runtime):
        assert torch.equal(call(**prompts, do_sample=False), greedy)
        out = call(**prompts, **({"seed": 5} if sampled else {}))
        assert torch.equal(out, wanted)
        assert not sampled or not torch.equal(out, call(**prompts, seed=6))
    if sampled:
        assert wanted.shape[1] <= (target.generation_config.max_length or 25)
        found = probabilities(target, prompts, wanted, patch)
        for row, chances in zip(wanted[:, WIDTH:].tolist(), found, strict=True):
            end = min((row.index(stop) for stop in stops if stop in row), default=len(row))
            assert chances[: end + 1].all() and not any(row[end + 1 :])


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize(
    ("pair", "runtime"),
    [(name, "eager") for name in CONFIGS] + [(name, "xla") for name in XLA],
    indirect=["pair"],
)
def test_no_option_is_needed(pair, prompts, runtime, monkeypatch):
    target, drafter, stops = pair
    check(target, target, drafter, prompts, stops, runtime, monkeypatch)


LOST = [("Qwen2.5", "temperature"), ("Qwen2.5", "top_k"), ("Qwen2.5", "top_p")]
LOST += [("Qwen2.5", "repetition_penalty"), ("LFM2", "min_p"), ("Llama 3", "max_length")]
LOST += [("Llama 3", "do_sample"), ("suppress lists", "suppress_tokens")]
LOST += [("suppress lists", "begin_suppress_tokens"), ("Phi-3 and 3.5", "eos_token_id")]


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize(
    ("pair", "name"),
    [LOST[0], *(pytest.param(*one, marks=pytest.mark.heavy) for one in LOST[1:])],
    indirect=["pair"],
)
def test_a_lost_option_would_show(pair, prompts, name, monkeypatch):
    target, drafter, stops = pair
    ours = copy.deepcopy(target)
    # A mistake would keep the first of several stop ids alone.
    setattr(ours.generation_config, name, stops[0] if name == "eos_token_id" else None)
    with pytest.raises(AssertionError):
        check(target, ours, drafter, prompts, stops, "eager", monkeypatch)


def test_the_configs_are_of_twenty_families_and_ask_for_every_kind_of_option():
    real = [asked for name, asked in CONFIGS.items() if name != "suppress lists"]
    assert len(real) >= 20 and sum(asked["stops"] > 1 for asked in real) >= 5
    for name in ("repetition_penalty", "temperature", "top_k", "top_p", "min_p", "max_length"):
        assert any(name in asked for asked in real), name
    assert CONFIGS["suppress lists"]["suppress"] > 1
