"""Streamers print the returned text, through each door that takes one; none leaves its reader waiting."""

import asyncio
import threading
from queue import Empty

import pytest
import torch
from support.doors import DOORS
from support.tokenizers import letters
from transformers import AsyncTextIteratorStreamer, TextIteratorStreamer, TextStreamer

GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
PATIENCE = 30.0
TAKING = ["generate", "custom_generate", "folder", "native"]


@pytest.fixture(scope="module")
def words():
    return letters()[0]


@pytest.mark.parametrize("door", TAKING)
@pytest.mark.parametrize("skip_prompt", [False, True], ids=["whole", "new"])
def test_a_printed_text(pair, row, door, words, skip_prompt, capsys):
    """After `StreamerTester.test_text_streamer_matches_non_streaming` and
    `StreamerTester.test_text_streamer_skip_prompt`."""
    expected = pair[0].generate(**row, **GREEDY)[0, row["input_ids"].shape[1] if skip_prompt else 0 :]
    DOORS[door](pair, row, **GREEDY, streamer=TextStreamer(words, skip_prompt=skip_prompt))
    assert capsys.readouterr().out == words.decode(expected) + "\n"


@pytest.mark.parametrize("door", TAKING)
def test_options_of_decoding(pair, row, door, words, capsys):
    """After `StreamerTester.test_text_streamer_decode_kwargs`: special tokens are left out."""
    ids = torch.cat([row["input_ids"], torch.tensor([[96]])], dim=1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    DOORS[door](pair, inputs, **GREEDY, streamer=TextStreamer(words, skip_special_tokens=True))
    out = capsys.readouterr().out
    assert "<unk>" not in out
    assert out == words.decode(pair[0].generate(**inputs, **GREEDY)[0], skip_special_tokens=True) + "\n"


@pytest.mark.parametrize("door", TAKING)
def test_a_reader_in_a_thread(pair, row, door, words):
    """After `StreamerTester.test_iterator_streamer_matches_non_streaming`."""
    streamer = TextIteratorStreamer(words, timeout=PATIENCE)
    given = GREEDY | {"streamer": streamer}
    thread = threading.Thread(target=DOORS[door], args=(pair, row), kwargs=given, daemon=True)
    thread.start()
    text = "".join(streamer)
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert text == words.decode(pair[0].generate(**row, **GREEDY)[0])


@pytest.mark.parametrize("door", TAKING)
def test_an_asynchronous_reader(pair, row, door, words):
    """After `AsyncStreamerTester.test_async_iterator_streamer_matches_non_streaming`."""

    async def read():
        streamer = AsyncTextIteratorStreamer(words, timeout=PATIENCE)
        call = asyncio.to_thread(DOORS[door], pair, row, **GREEDY, streamer=streamer)
        running = asyncio.ensure_future(call)
        pieces = [piece async for piece in streamer]
        return "".join(pieces), await running

    text, out = asyncio.run(asyncio.wait_for(read(), PATIENCE))
    assert text == words.decode(out[0])


@pytest.mark.parametrize("door", TAKING)
def test_a_reader_that_waits_too_short(pair, row, door, words):
    """After `StreamerTester.test_iterator_streamer_timeout`: it leaves, and the call ends all the same."""
    streamer, entered, out = TextIteratorStreamer(words, timeout=0.001), threading.Event(), []

    def call():
        entered.wait(PATIENCE)
        out.append(DOORS[door](pair, row, **GREEDY, streamer=streamer))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    with pytest.raises(Empty):
        "".join(streamer)
    entered.set()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert torch.equal(out[0], pair[0].generate(**row, **GREEDY))


@pytest.mark.parametrize("door", TAKING)
def test_more_rows_than_one(pair, batch, door, words):
    """After `GenerationTesterMixin.test_assisted_decoding_matches_greedy_search`: streamers have one row."""
    with pytest.raises(ValueError, match="one row|batch"):
        DOORS[door](pair, batch, **GREEDY, streamer=TextStreamer(words))
