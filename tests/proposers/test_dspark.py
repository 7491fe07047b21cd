"""DSpark's Markov head drafts by its definition, and each broken convention changes the drafts."""

import pytest
import torch
from support.layouts import pair, publish
from support.tiny import VOCAB, make_pair, ragged_prompts, randomise

import torch_dflash as td
from torch_dflash.doctor.diagnosis import judge_texts
from torch_dflash.proposers.checkpoints import load_drafter_config
from torch_dflash.proposers.dflash.vocabulary import DraftVocabulary, MarkovHead

ROWS, DRAFTS = 3, 6


def cases():
    """(target, drafter): speculators' layout with its own ids, and z-lab's network with a head."""
    target, drafter = make_pair("qwen3", seed=3, agree=8.0, markov_rank=5)
    randomise(drafter, 5)
    with torch.no_grad():
        drafter.markov_head.markov_w2.weight.mul_(60)
    return {"speculators": pair("speculators_dspark"), "v1": (target, drafter)}


def by_hand(target, drafter, hidden, anchor):
    """The drafts after ``anchor``, row by row and id by id."""
    own = drafter.lm_head
    head = (target.get_output_embeddings() if own is None else own).weight
    first, second = (drafter.state_dict()[f"markov_head.markov_w{one}.weight"] for one in (1, 2))
    ids = torch.arange(len(head)) + (0 if drafter.d2t is None else drafter.d2t)
    drafts = torch.zeros(hidden.shape[:2], dtype=torch.int32)
    for row in range(len(hidden)):
        before = int(anchor[row])
        for k in range(hidden.shape[1]):
            scores = [
                float(head[said] @ hidden[row, k] + second[said] @ first[before]) for said in range(len(head))
            ]
            before = int(ids[scores.index(max(scores))])
            drafts[row, k] = before
    return drafts


@torch.no_grad()
def wrong(target, drafter):
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(ROWS, DRAFTS, 32, generator=generator)
    anchor = torch.randint(0, VOCAB, (ROWS,), generator=generator, dtype=torch.int32)
    found = drafter.choose(hidden, anchor, target.get_output_embeddings())
    assert found.dtype == torch.int32
    return int((found != by_hand(target, drafter, hidden, anchor)).sum())


def said(self, logits):
    best = torch.argmax(logits, dim=-1)
    return (best if self.d2t is None else best + self.d2t[best]).to(torch.int32)


def ignored(self, hidden, anchor, head, *_):
    return said(self, self.logits(hidden, head))


def anchor_for_all(self, hidden, anchor, head, *_):
    return said(self, self.logits(hidden, head) + self.markov_head(anchor)[:, None])


def one_too_late(self, hidden, anchor, head, *_):
    """The drafter reads the second token before."""
    logits, drafts, seen = self.logits(hidden, head), [], [anchor, anchor]
    for at in range(hidden.shape[1]):
        drafts.append(said(self, logits[:, at] + self.markov_head(seen[-2])))
        seen.append(drafts[-1])
    return torch.stack(drafts, dim=1)


def own_ids(self, hidden, anchor, head, *_):
    """The drafter reads the previous draft by its number in the drafter's vocabulary."""
    logits, drafts, before = self.logits(hidden, head), [], anchor
    for at in range(hidden.shape[1]):
        added = logits[:, at] + self.markov_head(before)
        before = added.argmax(-1)
        drafts.append(said(self, added))
    return torch.stack(drafts, dim=1)


def swapped(self, before):
    """W1 and W2 change places."""
    return torch.nn.functional.embedding(before, self.markov_w2.weight) @ self.markov_w1.weight.T


BROKEN = [
    (name, DraftVocabulary, "choose", broken)
    for name in ("speculators", "v1")
    for broken in (ignored, anchor_for_all, one_too_late)
]
BROKEN += [("speculators", DraftVocabulary, "choose", own_ids), ("v1", MarkovHead, "forward", swapped)]


@pytest.mark.parametrize("name", ["speculators", "v1"])
def test_drafts_are_the_definitions(name):
    assert wrong(*cases()[name]) == 0


@pytest.mark.parametrize(("name", "owner", "method", "broken"), BROKEN)
def test_a_broken_convention_drafts_otherwise(name, owner, method, broken, monkeypatch):
    given = cases()[name]
    monkeypatch.setattr(owner, method, broken)
    assert wrong(*given) > 0


def accepted(target, drafter, **options):
    engine = td.compile(target, drafter, runtime="eager", max_length=64, batch_size=ROWS)
    asked = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    out = engine.generate(*ragged_prompts(ROWS), **asked | options)
    return out.sequences, out.stats.acceptance_lengths


@pytest.mark.parametrize("name", ["speculators", "v1"])
def test_the_head_changes_drafts_and_never_the_text(name, monkeypatch):
    target, drafter = cases()[name]
    for options in ({}, {"do_sample": True, "temperature": 4.0, "top_k": 30, "seed": [5, 6, 7]}):
        plain, _ = accepted(target, None, **options)
        text, lengths = accepted(target, drafter, **options)
        assert torch.equal(text, plain) and max(sum(lengths, [])) > 2
        with monkeypatch.context() as patch:
            patch.setattr(DraftVocabulary, "choose", ignored)
            other, others = accepted(target, drafter, **options)
        assert torch.equal(other, plain) and others != lengths


def test_fields_that_contradict_each_other_are_named():
    for fields, words in (
        ({"markov_rank": True}, "markov_rank=True: must be the rank"),
        ({"markov_rank": 4, "selector_rank": 4}, "markov_rank=4 of a DFlash2 drafter"),
        ({"markov_rank": 4, "vocab_size": 0}, "vocab_size=0, but the drafter has tables of ids"),
    ):
        with pytest.raises(ValueError, match=words):
            make_pair("qwen3", **fields)


def test_who_does_not_know_the_head_refuses_it(tmp_path):
    target, drafter = cases()["v1"]
    asked = {"max_new_tokens": 8, "do_sample": False, "speculation_type": "dflash"}
    with pytest.raises(ValueError, match="markov_rank=5 of the drafter: speculation_type='dflash'"):
        target.generate(torch.tensor([[1, 2, 3]]), assistant_model=drafter, **asked)
    with pytest.raises(ValueError, match="texts: no answer of two tokens"):  # the doctor knows its parts
        judge_texts(target, drafter, [])


def test_its_default_is_speculators(tmp_path):
    """A config without rows, rank and head means speculators' values."""
    left_out = dict.fromkeys(("sample_from_anchor", "markov_rank", "markov_head_type"), ...)
    publish(tmp_path, "speculators_dspark", pair("speculators_dspark")[1], **left_out)
    config = load_drafter_config(tmp_path)
    assert config.sample_from_anchor and config.markov_rank == 256
