"""A drafter with a smaller vocabulary drafts as the whole one with these rows of the head alone."""

import pytest
import torch
from support.layouts import SECOND, said_ids
from support.refusals import refuses
from support.tiny import VOCAB, correlate, make_drafter, make_target, ragged_prompts

import torch_dflash as td

KINDS = {"v1": {}, "dflash2": SECOND, "dspark": {"markov_rank": 8}, "own head": {"own_head": True}}


def made(kind):
    target = make_target("qwen3")
    drafter = make_drafter(target, vocab_size=VOCAB, **KINDS[kind])
    correlate(target, drafter, 4.0)
    with torch.no_grad():
        if drafter.lm_head is not None:
            drafter.lm_head.weight.copy_(target.get_output_embeddings().weight.flip(0))
        if drafter.markov_head is not None:
            drafter.markov_head.markov_w2.weight.normal_()
        if kind == "dflash2":  # enough to change drafts
            drafter.candidate_selector.successor_codebook.normal_(std=3)
    ids = said_ids(target.get_output_embeddings().weight)
    return target, drafter, ids, td.with_draft_vocabulary(drafter, target, ids.flip(0).tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_the_best_of_the_ids_given(kind):
    target, drafter, ids, narrow = made(kind)
    hidden, anchor = torch.randn(3, 5, drafter.config.hidden_size), torch.tensor([5, 60, 96])
    head = target.get_output_embeddings()
    others = torch.full((VOCAB,), float("-inf")).index_fill_(0, ids, 0.0)
    whole = drafter.logits
    drafter.logits = lambda *given: whole(*given) + others
    assert torch.equal(narrow.choose(hidden, anchor, head), drafter.choose(hidden, anchor, head))
    assert (
        narrow.lm_head.weight.shape[0] == len(ids)
        and narrow.fc.weight.data_ptr() == drafter.fc.weight.data_ptr()
    )
    assert drafter.config.draft_vocab_size is None


@pytest.mark.parametrize(("kind", "runtime"), [("v1", "xla"), ("dflash2", "eager"), ("dspark", "eager")])
def test_text_is_plain_decodings_and_files_hold_it(kind, runtime, tmp_path):
    target, drafter, ids, narrow = made(kind)
    narrow.save_pretrained(tmp_path)
    loaded = td.load_drafter(tmp_path, target=target)
    assert torch.equal(loaded.lm_head.weight, narrow.lm_head.weight) and torch.equal(loaded.d2t, narrow.d2t)
    asked = {"max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True}
    plain = td.generate(target, None, *ragged_prompts(3), do_sample=False, runtime="eager", **asked)
    out = td.generate(target, loaded, *ragged_prompts(3), do_sample=False, runtime=runtime, **asked)
    same = td.generate(target, narrow, *ragged_prompts(3), do_sample=False, runtime="eager", **asked)
    assert torch.equal(out.sequences, plain.sequences)
    assert out.stats.acceptance_lengths == same.stats.acceptance_lengths
    assert max(sum(out.stats.acceptance_lengths, [])) > 1


def test_what_cannot_be_cut_is_named():
    target, drafter, ids, narrow = made("dflash2")
    for wrong, words in (
        ([], "at least 4 (the selector's candidates"),
        ([*ids.tolist(), VOCAB], f"ids: {VOCAB} has no row in the target's head of {VOCAB} rows"),
        ([-1, *ids.tolist()], "ids: -1 has no row"),
        ([*ids.tolist(), int(ids[3])], f"ids: {int(ids[3])} stands there twice"),
        (ids.tolist()[:3], "ids: 3 given"),
        ([1.7, 2], "ids: 1.7 is no id"),
        (range(VOCAB), f"ids: {VOCAB} given"),
    ):
        with refuses(ValueError, words):
            td.with_draft_vocabulary(drafter, target, wrong)
    with refuses(ValueError, f"draft_vocab_size={len(ids)} of the drafter"):
        td.with_draft_vocabulary(narrow, target, ids.tolist())
    target.lm_head = torch.nn.Linear(32, VOCAB)
    with refuses(ValueError, "its head is no plain linear layer without bias"):
        td.with_draft_vocabulary(drafter, target, ids.tolist())


def test_frequent_ids():
    assert td.frequent_ids([[5, 5, 3], [3, 9, 5]], 2) == [3, 5]
    assert td.frequent_ids([[5], [3]], 9) == [3, 5]
    assert td.frequent_ids(torch.tensor([[5, 5, 3]]), 1) == [5]
    with refuses(TypeError, "texts: 'a' is no id"):
        td.frequent_ids(["abc"], 2)
    with refuses(ValueError, "rows=0"):
        td.frequent_ids([[5]], 0)
