"""At each row of a block a plan's processors see the text of plain decoding."""

import pytest
import torch
from support.scripted import pad
from support.tiny import VOCAB, make_pair

import torch_dflash as td

PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [2, 7, 1], [6, 6, 2, 6, 6]]
NEW, PENALTY = 24, 1.7


def repetition(penalty: float, late: int = 0):
    """transformers' repetition penalty, which misses the newest ``late`` tokens before a row."""

    def function(tokens, length, logits):
        slots = torch.arange(tokens.shape[1], device=tokens.device)
        known = slots < (length - late)[..., None]  # [B, M, S]
        ids = torch.where(known, tokens[:, None], logits.shape[-1]).long()
        present = torch.zeros(*logits.shape[:2], logits.shape[2] + 1, device=logits.device)
        present = present.scatter(2, ids, 1.0)[..., :-1] > 0
        changed = torch.where(logits < 0, logits * penalty, logits / penalty)
        return torch.where(present, changed, logits)

    return td.BlockProcessor(function)


@pytest.fixture(scope="module")
def pair():
    return make_pair("llama", agree=4.0)


def texts(pair, *processors, runtime="eager"):
    ids, mask = pad(PROMPTS)
    asked = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "runtime": runtime}
    out = td.generate(*pair, ids, mask, processors=processors, return_dict_in_generate=True, **asked)
    return out.new_tokens, out.stats.rounds


def theirs(target, **options):
    options |= {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return [
        target.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in PROMPTS
    ]


@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_a_users_rule_inside_of_blocks_is_that_of_plain_decoding(pair, runtime):
    rows, rounds = texts(pair, repetition(PENALTY), runtime=runtime)
    assert rows == theirs(pair[0], repetition_penalty=PENALTY) != theirs(pair[0])
    assert rounds < NEW - 1  # some drafts were kept, so rows of a block saw the drafts before them


def test_a_processor_that_misses_the_newest_token_shows(pair):
    assert texts(pair, repetition(PENALTY, late=1))[0] != theirs(pair[0], repetition_penalty=PENALTY)


def test_rows_that_do_not_see_the_drafts_before_them_show(pair, monkeypatch):
    def committed_alone(processors, memories, text, logits, scaled=False):
        for processor in processors:
            if not scaled:
                text = text._replace(length=text.length[:, :1].expand_as(text.length))
                logits = processor((), text, logits)
        return logits

    monkeypatch.setattr("torch_dflash.decode.process", committed_alone)
    assert texts(pair, repetition(PENALTY))[0] != theirs(pair[0], repetition_penalty=PENALTY)


def test_processors_run_in_turn_and_belong_to_the_plan(pair):
    both, _ = texts(pair, repetition(2.0), repetition(0.5))
    assert both == theirs(pair[0])  # each undoes the other
    assert both != texts(pair, repetition(2.0))[0]


def test_a_function_that_returns_something_else_is_refused(pair):
    for function, said in ((lambda *given: None, "NoneType"), (lambda *given: given[2][..., 1:], str(VOCAB))):
        with pytest.raises(ValueError, match=said):
            texts(pair, td.BlockProcessor(function))


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 9, "top_p": 0.9, "typical_p": 0.8}], ids=["bare", "filters"]
)
def test_what_a_rule_makes_infinite_is_said_sampled_too(pair, options):
    """Infinite scores do not turn into NaN, for which the first id would win."""

    def forced(tokens, length, logits):
        wanted = (length % 5 + 3)[..., None] == torch.arange(logits.shape[-1])
        return torch.where(wanted, torch.inf, logits)

    ids, mask = pad(PROMPTS)
    asked = {"max_new_tokens": 9, "eos_token_id": None, "runtime": "eager", "return_dict_in_generate": True}
    rule = (td.BlockProcessor(forced),)
    for own in ({"do_sample": False}, {"do_sample": True, "seed": 2, "top_k": 0} | options):
        out = td.generate(*pair, ids, mask, processors=rule, **asked | own)
        assert out.new_tokens == [[at % 5 + 3 for at in range(len(row), len(row) + 9)] for row in PROMPTS]
