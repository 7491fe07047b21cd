"""Texts as they come: characters and stop strings are never split, and what was counted is what was said."""

import pytest
from support.tokenizers import byte_tokenizer

from torch_dflash.runtime import RowDelta
from torch_dflash.server.answers import Choice

TOKENIZER = byte_tokenizer()
END = TOKENIZER.eos_token_id


def told(text, stops, cuts, least=0, end="length"):
    """The pieces of a text that comes in reads of ``cuts`` tokens, and the choice."""
    ids = TOKENIZER(text)["input_ids"] + ([END] if end == "stop" else [])
    choice, pieces = Choice(0, [1], TOKENIZER, stops, least), []
    for at in range(0, len(ids), cuts):
        shown, tokens = len(choice.text), ids[at : at + cuts]
        scores = [-float(one) for one in range(at, at + len(tokens))]
        choice.take(RowDelta(tokens, [len(tokens)], at + cuts >= len(ids), scores), (END,))
        pieces.append(choice.text[shown:])
        if choice.finish:
            break
    return pieces, choice


@pytest.mark.parametrize("cuts", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("text", ["ab👩‍🚀c", "漢字かな", "plain"])
def test_no_piece_splits_a_character(text, cuts):
    pieces, choice = told(text, ["zz", "🚀!"], cuts)
    assert "".join(pieces) == choice.text == text and choice.finish == "length"
    assert not any("�" in piece for piece in pieces)


@pytest.mark.parametrize("cuts", [1, 2, 3, 50])
@pytest.mark.parametrize(
    ("stops", "rest"),
    [(["END"], "ab EN "), (["字!"], "ab EN END c漢"), (["END c", " END"], "ab EN"), (["never"], None)],
)
def test_a_stop_string_ends_the_text_and_no_part_of_it_is_shown(stops, rest, cuts):
    text = "ab EN END c漢字!d"
    pieces, choice = told(text, stops, cuts)
    wanted = text if rest is None else rest
    assert "".join(pieces) == choice.text == wanted
    assert choice.finish == ("length" if rest is None else "stop")
    seen = ""
    for piece in pieces:
        seen += piece
        assert wanted.startswith(seen)


def test_counts_end_with_the_token_that_completes_a_stop_string():
    _, choice = told("abSTOPcdef", ["STOP"], 5)
    assert TOKENIZER.decode(choice.tokens) == "abSTOP" and len(choice.scores) == 6
    assert choice.kept == [5]  # the first token is the prompt's, and no round's


def test_before_the_least_tokens_a_stop_string_is_text():
    _, choice = told("a.b.c.d", ["."], 3, least=3)
    assert choice.text == "a.b" and choice.finish == "stop"


@pytest.mark.parametrize(("end", "why"), [("stop", "stop"), ("length", "length")])
def test_the_end_is_told_by_the_last_token(end, why):
    assert told("abc", [], 2, end=end)[1].finish == why


def test_what_waits_for_a_stop_string_is_shown_at_the_end():
    pieces, choice = told("abcEN", ["END"], 1)
    assert choice.text == "abcEN" and pieces[-1] == "EN"


def test_an_unfinished_character_is_shown_at_the_end():
    ids = TOKENIZER("漢")["input_ids"][:2]
    choice = Choice(0, [1], TOKENIZER, ["x"], 0)
    choice.take(RowDelta(ids, [], True), ())
    assert choice.text == "�"
