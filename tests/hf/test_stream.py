"""`td.stream`: the text of `generate` as it comes, and what was drafted of it."""

import gc
import weakref

import pytest
import torch
from support.refusals import refuses

import torch_dflash as td
from torch_dflash.pieces import _drafted

NEW = 20


class Halves:  # even ids are first bytes of a character and odd ones second bytes: any cut may split one
    def decode(self, ids, skip_special_tokens=True):
        text = bytes(0xA0 + token // 2 % 32 if token % 2 else 0xC3 for token in ids)
        return text.decode(errors="replace")


def stream(pair, batch, **options):
    """(the rows' tokens, their texts, which tokens were drafted, pieces) of a whole stream."""
    asked = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "tokenizer": Halves()} | options
    pieces = list(td.stream(*pair, **batch, **asked))
    rows = list(zip(*pieces, strict=True))
    joined = [[token for piece in row for token in piece.tokens] for row in rows]
    drafted = [[flag for piece in row for flag in piece.drafted] for row in rows]
    return joined, ["".join(piece.text for piece in row) for row in rows], drafted, pieces


@pytest.mark.parametrize("runtime, rounds", [("eager", 1), ("eager", 3), ("xla", 4)])
def test_pieces_together_are_the_whole(pair, batch, runtime, rounds):
    asked = {"max_new_tokens": [NEW, 7], "do_sample": False, "eos_token_id": None, "runtime": runtime}
    whole = td.generate(*pair, **batch, return_dict_in_generate=True, **asked)
    tokens, texts, drafted, pieces = stream(pair, batch, rounds_per_chunk=rounds, **asked)
    assert tokens == whole.new_tokens
    assert texts == [Halves().decode(row) for row in tokens]
    assert any("\xe0" <= letter <= "\xff" for letter in texts[0])  # a whole character, of two tokens
    assert [piece.done for piece in pieces[-1]] == [True, True] and len(pieces) > 2
    assert not any(piece.done for piece in pieces[0])
    # Of a pass all but the last token were drafted; where the cap cut one, that last token was not reached.
    lengths, capped = whole.stats.acceptance_lengths, whole.stats.capped
    assert [sum(row) for row in drafted] == [
        sum(count - 1 for count in row) + cut for row, cut in zip(lengths, capped, strict=True)
    ]
    assert sum(map(sum, drafted)) > 0


@pytest.mark.parametrize(
    "rounds, count, expected",
    [
        ([], 1, [False]),
        ([3, 1], 4, [True, True, False, False]),
        ([2], 3, [False, True, False]),  # the prompt's pass and a round in one read
        ([4, 4], 5, [True, True, True, False, True]),  # cut in the second round
        ([2], 0, []),
    ],
)
def test_what_was_drafted(rounds, count, expected):
    assert _drafted(rounds, count) == expected


def test_plain_decoding_drafts_nothing(pair, batch):
    tokens, _, drafted, _ = stream((pair[0], None), batch, runtime="eager")
    assert tokens == stream(pair, batch, runtime="eager")[0] and not any(map(any, drafted))


def test_bad_input_is_told_before_the_first_piece(pair, batch):
    with refuses(ValueError, "max_new_tokens=0", "at least 1"):
        td.stream(*pair, **batch, max_new_tokens=0, runtime="eager")
    with refuses(ValueError, "stop_strings=['a']", "pass tokenizer="):
        td.stream(*pair, **batch, stop_strings=["a"], runtime="eager")
    with refuses(TypeError, "unknown option 'colour'"):
        td.stream(*pair, **batch, colour="red", runtime="eager")


def closed(pieces):
    next(pieces), next(pieces)
    pieces.close()


def left(pieces):
    for number, _ in enumerate(pieces):
        if number == 1:
            break


def failed(pieces):
    with pytest.raises(KeyError):
        for number, _ in enumerate(pieces):
            if number == 1:
                raise KeyError("the consumer's own")


@pytest.mark.parametrize(
    "runtime, stop", [("eager", closed), ("eager", left), ("eager", failed), ("xla", left)]
)
def test_an_abandoned_stream_frees_its_state(pair, batch, monkeypatch, runtime, stop):
    states = []
    step = td.engine.batch.Generation.step

    def watched(self, *given):
        progress = step(self, *given)
        states.append([weakref.ref(leaf) for leaf in (self, self.state.tokens, self.state.length)])
        return progress

    monkeypatch.setattr(td.engine.batch.Generation, "step", watched)
    asked = {"max_new_tokens": [NEW, 7], "do_sample": False, "eos_token_id": None, "tokenizer": Halves()}
    pieces = td.stream(
        *pair, **batch, **asked, runtime=runtime, rounds_per_chunk=1 if runtime == "eager" else 4
    )
    stop(pieces)
    assert len(states) == 2
    del pieces
    gc.collect()
    assert not any(leaf() is not None for leaf in states[-1])


def test_a_batch_without_a_tokenizer_has_no_text(pair):
    (piece,), *_ = td.stream(*pair, torch.tensor([[1, 2, 3]]), max_new_tokens=2, runtime="eager")
    assert piece.text == "" and len(piece.tokens) == 1
