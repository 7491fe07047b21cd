"""Every streamer of transformers, given in each way, never leaves its reader waiting."""

import asyncio
import copy
import gc
import threading
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support import tiny
from support.refusals import refuses
from support.versions import needs_native
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AsyncTextIteratorStreamer,
    GenerationConfig,
    GenerationMixin,
    PreTrainedTokenizerFast,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)

import torch_dflash as td
from torch_dflash.integrations.streaming import streamer_of_caller
from torch_dflash.pieces import _drafted

NEW = 14
PATIENCE = 20.0  # seconds


@pytest.fixture(scope="module")
def pair():
    return tiny.make_pair(agree=2.5)


@pytest.fixture(scope="module")
def ids():
    return tiny.ragged_prompts(2)[0][:1]


class Letters:  # enough of a tokenizer for transformers' text streamers
    def decode(self, ids, **options):
        return "".join(chr(33 + int(token) % 94) for token in ids)


def assert_printed(pair, ids, capsys, loop):
    streamer = TextStreamer(Letters(), skip_prompt=True)
    options = {"max_new_tokens": NEW, "do_sample": False, "custom_generate": loop}
    out = pair[0].generate(ids, **options, streamer=streamer)
    assert capsys.readouterr().out == Letters().decode(out[0, ids.shape[1] :]) + "\n"


def calls(target, drafter, ids):
    """The ways to give a streamer, by name; each is a function of the streamer."""
    options = {"max_new_tokens": NEW, "do_sample": False}
    bound, block = partial(td.dflash, drafter, runtime="eager"), td.dflash(drafter, runtime="eager")

    def wrapper(model, *args, **kwargs):
        return block(model, *args, **kwargs)

    return {
        "generate": lambda s: td.generate(target, drafter, ids, **options, runtime="eager", streamer=s),
        "bound": lambda s: target.generate(ids, **options, custom_generate=bound(streamer=s)),
        "passed": lambda s: target.generate(ids, **options, custom_generate=block, streamer=s),
        "wrapped": lambda s: target.generate(ids, **options, custom_generate=wrapper, streamer=s),
    }


WAYS = ("generate", "bound", "passed", "wrapped")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("skip_prompt", [True, False])
def test_a_thread_that_reads_text(pair, ids, way, skip_prompt):
    streamer, out = TextIteratorStreamer(Letters(), skip_prompt=skip_prompt, timeout=PATIENCE), []
    thread = threading.Thread(target=lambda: out.append(calls(*pair, ids)[way](streamer)), daemon=True)
    thread.start()
    text = "".join(streamer)
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert text == Letters().decode(out[0][0, ids.shape[1] if skip_prompt else 0 :])


@pytest.mark.parametrize("way", WAYS)
def test_a_printing_streamer(pair, ids, way, capsys):
    out = calls(*pair, ids)[way](TextStreamer(Letters(), skip_prompt=True))
    assert capsys.readouterr().out == Letters().decode(out[0, ids.shape[1] :]) + "\n"


@pytest.mark.parametrize("way", WAYS)
def test_an_asynchronous_reader(pair, ids, way):
    async def read():
        streamer = AsyncTextIteratorStreamer(Letters(), skip_prompt=True, timeout=PATIENCE)
        running = asyncio.get_running_loop().run_in_executor(None, calls(*pair, ids)[way], streamer)
        pieces = [piece async for piece in streamer]
        return "".join(pieces), await running

    text, out = asyncio.run(asyncio.wait_for(read(), PATIENCE))
    assert text == Letters().decode(out[0, ids.shape[1] :])


def word_tokenizer():
    words = Tokenizer(WordLevel({f"w{token}": token for token in range(tiny.VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w1", unk_token="w0")


@needs_native
def test_both_ways_through_a_pipeline_say_its_text(pair):
    target, drafter = copy.deepcopy(pair)
    target.config.eos_token_id = 3  # a model on the hub has a stop id, and a drafter has none
    whole = {"model": target, "tokenizer": word_tokenizer(), "device": "cpu"}
    pipe, options = pipeline("text-generation", **whole), {"max_new_tokens": 6, "do_sample": False}
    want = pipe("w5 w6 w7", **options)
    for way in (
        {"custom_generate": td.dflash(drafter, runtime="eager")},
        {"assistant_model": drafter, "speculation_type": "dflash"},
    ):
        assert pipe("w5 w6 w7", **options, **way) == want
    with pytest.raises(ValueError, match="different tokenizer"):  # the reason why the pages name those two
        pipeline("text-generation", **whole, assistant_model=drafter)


def test_a_streamer_through_a_pipeline(pair, capsys):
    tokenizer = word_tokenizer()
    pipe = pipeline("text-generation", model=pair[0], tokenizer=tokenizer, device="cpu")
    (out,) = pipe(
        "w5 w6 w7", max_new_tokens=4, do_sample=False, custom_generate=td.dflash(pair[1], runtime="eager"),
        streamer=TextStreamer(tokenizer, skip_prompt=True),
    )  # fmt: skip
    shown = capsys.readouterr().out.split()
    assert len(shown) == 4 and out["generated_text"] == "w5 w6 w7" + " ".join(shown)


def test_a_calls_own_streamer_goes_before_the_bound_one(pair, ids, capsys):
    used = lambda *given: pytest.fail("the bound streamer was used")  # noqa: E731
    block = td.dflash(pair[1], runtime="eager", streamer=SimpleNamespace(put=used, end=used))
    options = {"max_new_tokens": 3, "do_sample": False, "custom_generate": block}
    pair[0].generate(ids, **options, streamer=TextStreamer(Letters(), skip_prompt=True))
    assert len(capsys.readouterr().out) == 4


def test_what_is_no_streamer_for_this_call(pair, ids):
    for streamer, error, words in (
        (object(), TypeError, ["streamer=object", "put"]),
        (TextStreamer(Letters()), ValueError, ["streamer with 2 rows", "one row"]),
    ):
        rows = ids.repeat(2, 1) if error is ValueError else ids
        block = td.dflash(pair[1], runtime="eager", streamer=streamer)
        options = {"attention_mask": torch.ones_like(rows), "max_new_tokens": 3, "custom_generate": block}
        with refuses(error, *words):
            pair[0].generate(rows, **options)
    with refuses(ValueError, "streamer=TextStreamer", "generate takes a streamer"):
        td.compile(*pair, runtime="eager", max_length=64).stream(ids, streamer=TextStreamer(Letters()))


def test_the_prompt_is_put_once(pair, ids):
    puts, ended = [], []
    put = lambda value: puts.append(value.flatten().tolist())  # noqa: E731
    streamer = SimpleNamespace(put=put, end=lambda: ended.append(True))
    options = {
        "max_new_tokens": 9,
        "do_sample": False,
        "custom_generate": td.dflash(pair[1], runtime="eager"),
    }
    out = pair[0].generate(ids, **options, streamer=streamer)
    assert puts[0] == ids[0].tolist() and ended == [True] and sum(puts, []) == out[0].tolist()
    assert streamer_of_caller(pair[0]) is None


def test_a_callers_variable_of_that_name_is_not_taken(pair, ids):
    streamer = object()  # an ordinary function's local: only transformers' own call counts
    out = td.dflash(pair[1], runtime="eager")(pair[0], ids, generation_config=GenerationConfig(max_length=30))
    assert streamer and out.shape[1] > ids.shape[1]


def test_a_streamer_is_of_one_generation_of_one_model(pair, ids, capsys):
    """The reader gets the outer call alone, without a custom generate's further calls of any model."""
    other, drafter = tiny.make_pair(agree=2.5)
    block = td.dflash(drafter, runtime="eager")

    def wrapper(model, input_ids, **given):
        block(other, input_ids, generation_config=given["generation_config"])
        out = block(model, input_ids, **given)
        block(model, input_ids, generation_config=given["generation_config"])
        return out

    assert_printed(pair, ids, capsys, wrapper)


def test_a_call_that_was_refused_has_not_taken_the_streamer(pair, ids, capsys):
    block = td.dflash(pair[1], runtime="eager")

    def wrapper(model, input_ids, **given):
        with refuses(ValueError, "seed='bad'"):
            block(model, input_ids, **given | {"seed": "bad"})
        return block(model, input_ids, **given)

    assert_printed(pair, ids, capsys, wrapper)


def test_a_call_that_refuses_its_models_has_not_taken_the_streamer(pair, ids, capsys):
    def wrapper(model, input_ids, **given):
        with torch.autocast("cpu", torch.bfloat16), refuses(ValueError, "torch.autocast is on"):
            td.dflash(pair[1], runtime="xla")(model, input_ids, **given)
        return td.dflash(pair[1], runtime="eager")(model, input_ids, **given)

    assert_printed(pair, ids, capsys, wrapper)


def test_a_generate_that_was_wrapped_is_found(pair, ids, capsys, monkeypatch):
    theirs = GenerationMixin.generate
    monkeypatch.setattr(GenerationMixin, "generate", lambda self, *args, **more: theirs(self, *args, **more))

    def deep(model, *args, depth=20, **more):
        if depth:
            return deep(model, *args, depth=depth - 1, **more)
        return td.dflash(pair[1], runtime="eager")(model, *args, **more)

    assert_printed(pair, ids, capsys, deep)


LONG = 20


class Halves:  # even ids are first bytes of a character and odd ids second bytes: any cut may split one
    def decode(self, ids, skip_special_tokens=True):
        text = bytes(0xA0 + token // 2 % 32 if token % 2 else 0xC3 for token in ids)
        return text.decode(errors="replace")


def stream(pair, batch, **options):
    """(The rows' tokens, their texts, marks of drafted tokens, pieces) of a whole stream."""
    asked = {"max_new_tokens": LONG, "do_sample": False, "eos_token_id": None, "tokenizer": Halves()}
    asked |= options
    pieces = list(td.stream(*pair, **batch, **asked))
    rows = list(zip(*pieces, strict=True))
    joined = [[token for piece in row for token in piece.tokens] for row in rows]
    drafted = [[flag for piece in row for flag in piece.drafted] for row in rows]
    return joined, ["".join(piece.text for piece in row) for row in rows], drafted, pieces


@pytest.mark.parametrize("runtime, rounds", [("eager", 1), ("eager", 3), ("xla", 4)])
def test_pieces_together_are_the_whole(pair, batch, runtime, rounds):
    asked = {"max_new_tokens": [LONG, 7], "do_sample": False, "eos_token_id": None, "runtime": runtime}
    whole = td.generate(*pair, **batch, return_dict_in_generate=True, **asked)
    tokens, texts, drafted, pieces = stream(pair, batch, rounds_per_chunk=rounds, **asked)
    assert tokens == whole.new_tokens
    assert texts == [Halves().decode(row) for row in tokens]
    assert any("\xe0" <= letter <= "\xff" for letter in texts[0])  # a whole character, of two tokens
    assert [piece.done for piece in pieces[-1]] == [True, True] and len(pieces) > 2
    assert not any(piece.done for piece in pieces[0])
    # All but the last token of a pass were drafted; a pass that the cap cut does not reach the last token.
    lengths, capped = whole.stats.acceptance_lengths, whole.stats.capped
    wanted = [sum(row) - len(row) + cut for row, cut in zip(lengths, capped, strict=True)]
    assert [sum(row) for row in drafted] == wanted
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


def closed(pieces):
    next(pieces), next(pieces)
    pieces.close()


def left(pieces, error=None):
    for number, _ in enumerate(pieces):
        if number == 1 and error:
            raise error
        if number == 1:
            break


def failed(pieces):
    with pytest.raises(KeyError):
        left(pieces, KeyError("the consumer's own"))


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
    asked = {"max_new_tokens": [LONG, 7], "do_sample": False, "eos_token_id": None, "tokenizer": Halves()}
    rounds = 1 if runtime == "eager" else 4
    pieces = td.stream(*pair, **batch, **asked, runtime=runtime, rounds_per_chunk=rounds)
    stop(pieces)
    assert len(states) == 2
    del pieces
    gc.collect()
    assert not any(leaf() is not None for leaf in states[-1])


def test_a_batch_without_a_tokenizer_has_no_text(pair):
    (piece,), *_ = td.stream(*pair, torch.tensor([[1, 2, 3]]), max_new_tokens=2, runtime="eager")
    assert piece.text == "" and len(piece.tokens) == 1
