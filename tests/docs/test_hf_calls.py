"""docs/hf.md: no call of transformers' ``generate`` gives another text here, and the table is true."""

import json
import sys

import pytest
from support import ROOT
from support.versions import COUNTS_PADDING

# transformers' warnings about calls that it advises against.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
BENCHMARKS = str(ROOT / "benchmarks")


@pytest.fixture(scope="module")
def module():
    sys.path.insert(0, BENCHMARKS)
    try:
        import hf_calls
    finally:
        sys.path.remove(BENCHMARKS)
    return hf_calls


def test_every_call_gives_the_same_text_or_is_refused(module):
    known = json.loads((ROOT / "docs/results/hf_calls.json").read_text())["calls"]
    found = module.run()
    assert found.keys() == known.keys()
    for name, doors in found.items():
        for door, said in doors.items():
            assert said != module.OTHER, (name, door)
            # transformers' own words, and the calls that it refuses itself, differ between versions.
            assert said.partition(":")[0] == known[name][door].partition(":")[0], (name, door, said)


# Options that change no text by nature, or on these prompts by intent.
SILENT = """
nothing but lengths|`max_length` with `max_new_tokens`|`max_time`|`eos_token_id=-1`|`eos_token_id=None`
the model's own, an option over it|`temperature` without `do_sample`|empty lists
`forced_bos_token_id`, a longer prompt|`renormalize_logits`|`remove_invalid_values`|`tokenizer` alone
`logits_processor`: a warper|`logits_processor`, `stopping_criteria`: empty|`streamer`|`streamer`, two rows
`return_dict_in_generate`|`output_scores`|`output_logits`|`output_hidden_states`|`output_attentions`
`cache_implementation`|`cache_implementation='dynamic'`|a cache of transformers', empty|a static cache, empty
`use_cache=False`|`disable_compile`|`prefill_chunk_size`|`length_penalty`, `early_stopping`
`logits_to_keep=0`|`trust_remote_code`|`assistant_model`|`synced_gpus=False`|`pad_token_id=None`
`position_ids`, the usual|padding to the right|no `attention_mask`|`attention_mask` of bool
`attention_mask` of float|`attention_mask` of int32|`inputs_embeds` alone
no `attention_mask`, `pad_token_id` in a prompt
"""


@pytest.mark.heavy
def test_every_other_call_changes_transformers_own_text(module):
    silent = SILENT.strip().replace("\n", "|").split("|")
    assert not {*silent} - module.CALLS.keys()
    for name, call in module.CALLS.items():
        asked = module.asked(call, call.inputs)
        if name in silent or asked["do_sample"] or call.model:
            continue
        try:
            text = module.tokens(module.PAIR[0].generate(**asked))
        except Exception:  # noqa: BLE001, S112 - transformers raises of its own; there is no text
            continue
        plain = module.PAIR[0].generate(**call.inputs, **module.COMMON)
        assert not module.torch.equal(text, plain), name


def test_another_text_would_show(module, monkeypatch):
    monkeypatch.setattr(module, "CALLS", {name: module.CALLS[name] for name in ["`repetition_penalty`"]})
    penalty = module.td.processors.RepetitionPenalty
    monkeypatch.setattr(penalty, "__call__", lambda self, memory, text, logits: logits)
    found = module.run()["`repetition_penalty`"].values()
    assert {said for said in found if not (COUNTS_PADDING and said.startswith("refused"))} == {module.OTHER}
