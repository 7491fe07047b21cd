"""In pairs where one model has more ids drafts hold common ids alone, and the text is the target's."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.layouts import fixture, publish, with_more_ids
from support.layouts import pair as layout_pair
from support.refusals import refuses
from support.tiny import VOCAB, make_drafter, make_pair, ragged_prompts

import torch_dflash as td
from torch_dflash.proposers.notes import findings
from torch_dflash.proposers.pair import check_pair, tables_of_ids
from torch_dflash.train.fit.options import Objective
from torch_dflash.train.fit.student import Student

SECOND = {"selector_rank": 12, "selector_top_k": 4, "conv_group_size": 8}
HEAD = {"own_head": True}
KINDS = {"v1": {}, "dflash2": SECOND, "markov": {"markov_rank": 5}, "head": HEAD}
KINDS |= {"embedding": {"own_embedding": True}}
KINDS |= {"all": {**HEAD, "own_embedding": True, "markov_rank": 5, "sample_from_anchor": True}}
KINDS |= {"mask": {"mask_embedding": True}}


@pytest.fixture(scope="module")
def pairs():
    """(target, drafter) by kind: one target for most, and drafters with its tables if they have any."""
    target, made = make_pair("qwen3", seed=3, agree=8.0)[0], {"speculators": layout_pair("speculators")}
    for kind, fields in KINDS.items():
        drafter = make_drafter(target, 4, **fields)
        with torch.no_grad():
            for own, theirs in (
                (drafter.lm_head, target.get_output_embeddings()),
                (drafter.embed_tokens, target.get_input_embeddings()),
            ):
                if own is not None:
                    own.weight.copy_(theirs.weight)
        made[kind] = target, drafter
    return made


@pytest.fixture(scope="module")
def plain():
    """(A target of ``rows`` ids, its text); with more than `VOCAB` ids the text often holds the last one."""
    known = {}

    def get(target, rows):
        if (target, rows) not in known:
            longer = copy.deepcopy(target)
            if rows > VOCAB:
                with_more_ids(longer, rows)
            longer.resize_token_embeddings(rows)
            known[target, rows] = longer, decode(longer, None)
        return known[target, rows]

    return get


def decode(target, drafter):
    ids, mask = ragged_prompts(2, longest=6)
    engine = td.compile(target, drafter, runtime="eager", batch_size=2, max_length=24, verify=False)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    return engine.generate(ids % min(VOCAB, target.config.vocab_size), mask, **options)


@pytest.mark.parametrize("kind", [*KINDS, "speculators"])
def test_a_target_with_more_ids_is_drafted_for(pairs, plain, kind):  # under XLA: test_lossless_*.py
    target, drafter = pairs[kind]
    longer, text = plain(target, 112)
    assert torch.equal(decode(longer, drafter), text)
    assert (text[:, -11:] == 111).any()  # anchors without a row in the drafter's tables


@pytest.mark.parametrize("kind", ["v1", "dflash2", "all", "speculators"])
def test_so_is_one_with_fewer(pairs, plain, kind):
    target, drafter = copy.deepcopy(pairs[kind])
    shorter, text = plain(pairs[kind][0], 70)
    if drafter.embed_tokens is None:
        with refuses(ValueError, "mask_token_id=96 has no row in the target's embedding", "70 rows"):
            check_pair(shorter, drafter)
        drafter.config.mask_token_id = 60
    if drafter.lm_head is not None:  # the drafter would choose an id that the target does not know
        with torch.no_grad():
            head = drafter.lm_head.weight
            head[-1] = head[head.norm(dim=1).argmax()] * 2
    assert torch.equal(decode(shorter, drafter), text)


def test_drafts_are_those_that_they_were(pairs):
    """Further ids of the head's table change no draft; a smaller table limits drafts to its rows."""
    for kind in ("v1", "dflash2", "markov", "all"):
        target, drafter = pairs[kind]
        head, hidden = target.get_output_embeddings().weight, torch.randn(2, 5, 32)
        anchor = torch.tensor([3, 9], dtype=torch.int32)
        tables = head, torch.cat([head, torch.zeros(15, 32)]), head[:70]
        before, more, fewer = (
            drafter.choose(hidden, anchor, partial(F.linear, weight=table)) for table in tables
        )
        assert torch.equal(more, before)
        assert kind == "all" or fewer.max() < 70


def test_a_note_says_both_sizes(pairs, plain):
    for kind, words in (("v1", "no table of ids"), ("head", "lm_head"), ("dflash2", "candidate_selector")):
        target, drafter = pairs[kind]
        for rows in (112, 70):
            (said,) = [one for one in findings(plain(target, rows)[0], drafter) if one.field == "vocab_size"]
            for word in (f"vocab_size={VOCAB}: the target's is {rows}", words, "same tokenizer"):
                assert word in str(said)
        assert bool(tables_of_ids(drafter.config)) == (kind != "v1")
        assert not [one for one in findings(target, drafter) if one.field == "vocab_size"]


def test_a_head_of_more_rows_than_its_own_config_has_ids_is_read(pairs, tmp_path):
    target, drafter = pairs["speculators"]
    config = fixture("speculators")[0]
    table = torch.randn(VOCAB + 7, 32)
    tensors = {"lm_head.weight": table, "d2t": None, "t2d": None}
    publish(tmp_path, "speculators", drafter, tensors=tensors, draft_vocab_size=VOCAB + 7)
    assert config["transformer_layer_config"]["vocab_size"] == VOCAB
    loaded = td.load_drafter(tmp_path, dtype=torch.float32)
    assert torch.equal(loaded.lm_head.weight, table)
    assert torch.equal(decode(target, loaded), decode(target, None))


def test_a_fit_of_tables_needs_the_targets_ids_and_a_cut_head_has_rows_for_all(pairs, plain):
    target, drafter = pairs["dflash2"]
    longer, text = plain(target, 112)
    with refuses(ValueError, "vocab_size=97 of the drafter", "candidate_selector", "112", "begin a drafter"):
        Student(drafter, longer, Objective())
    with refuses(ValueError, "ids: 111 has no row"):
        td.with_draft_vocabulary(drafter, longer, [1, 2, 3, 4, 5, 111])
    narrow = td.with_draft_vocabulary(pairs["v1"][1], longer, [1, 2, 3, 111])
    assert narrow.config.vocab_size == 112
    assert torch.equal(decode(longer, narrow), text)
