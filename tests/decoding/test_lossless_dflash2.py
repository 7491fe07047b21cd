"""DFlash2 in every place a drafter runs: the text is plain decoding's, and drafts are accepted."""

import pytest
import torch
from support.authors import MIXED, SECOND
from support.layouts import with_more_ids
from support.resumed import ends
from support.tiny import make_pair, ragged_prompts

import torch_dflash as td

ROWS, NEW = 4, 24
PAIRS = {"full": ("qwen3", SECOND), "rings": ("gpt_oss", SECOND | MIXED | {"is_causal": False})}
KEPT = {name: make_pair(family, agree=8.0, **fields) for name, (family, fields) in PAIRS.items()}
with_more_ids(KEPT["full"][0])  # than the codebooks have rows
SAMPLED = {"do_sample": True, "temperature": [9.0, 0.0, 4.0, 2.0], "top_k": 30, "seed": [5, 6, 7, 8]}


@pytest.mark.parametrize("runtime", ["eager", "xla"])
@pytest.mark.parametrize("cache", ["static", "paged"])
@pytest.mark.parametrize("name", PAIRS)
def test_text_is_plain_decodings(name, cache, runtime):
    target, drafter = KEPT[name]
    ids, mask = ragged_prompts(ROWS)
    engine = td.compile(target, drafter, runtime=runtime, cache=cache, max_length=64, batch_size=ROWS)
    plain = td.compile(target, None, runtime="eager", max_length=64, batch_size=ROWS)
    stop = int(plain.generate(ids, mask, max_new_tokens=NEW, do_sample=False, eos_token_id=None)[0, -9])
    for options in ({"do_sample": False}, SAMPLED, {"do_sample": False, "eos_token_id": stop}):
        options = {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0} | options
        out = engine.generate(ids, mask, return_dict_in_generate=True, **options)
        assert torch.equal(out.sequences, plain.generate(ids, mask, **options))
        assert options["eos_token_id"] is not None or max(sum(out.stats.acceptance_lengths, [])) > 1


@pytest.mark.parametrize(("here", "there"), [("eager", "xla"), ("xla", "eager")])
def test_a_saved_state_goes_on_in_the_other_runtime(here, there, tmp_path):
    target, drafter = KEPT["rings"]
    one, other = ends(target, drafter, here, there, tmp_path, NEW)
    assert one == other
