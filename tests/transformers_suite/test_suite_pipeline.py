"""``pipeline("text-generation")``: its texts with ``custom_generate`` are those without."""

import pytest
from support.tokenizers import TEMPLATE, letters
from support.versions import needs_native
from transformers import TextStreamer, pipeline

import torch_dflash as td

GREEDY = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(scope="module")
def pipe(pair):
    return pipeline("text-generation", model=pair[0], tokenizer=letters()[0], device="cpu")


@pytest.fixture(scope="module")
def block(pair):
    return {"custom_generate": td.dflash(pair[1], runtime="eager")}


@pytest.mark.parametrize("more", [{}, {"return_full_text": False}, {"return_tensors": True}], ids=str)
def test_one_text(pipe, block, more):
    """After `TextGenerationPipelineTests.test_small_model_pt` and
    `TextGenerationPipelineTests.run_pipeline_test`."""
    assert pipe("hello", **GREEDY, **more, **block) == pipe("hello", **GREEDY, **more)


@pytest.mark.parametrize("size", [1, 2])
def test_texts(pipe, block, size):
    """After `TextGenerationPipelineTests.test_small_model_pt`: lists, one at a time and in padded batches."""
    texts = ["hello", "a", "longer than others"]
    asked = GREEDY | {"batch_size": size}
    assert pipe(texts, **asked, **block) == pipe(texts, **asked)


def test_several_answers(pipe, block):
    """After `TextGenerationPipelineTests.run_pipeline_test`: ``num_return_sequences`` of a sample."""
    asked = {"max_new_tokens": 6, "do_sample": True, "temperature": 3.0, "num_return_sequences": 3}
    found = pipe("hello", **asked, **block)
    assert len(found) == 3 and all(one["generated_text"].startswith("hello") for one in found)


def test_a_chat(pipe, block):
    """After `TextGenerationPipelineTests.test_small_chat_model_pt`."""
    pipe.tokenizer.chat_template = TEMPLATE
    messages = [{"role": "user", "content": "hello"}]
    assert pipe(messages, **GREEDY, **block) == pipe(messages, **GREEDY)


def test_a_streamer(pipe, block, capsys):
    """After `TextGenerationPipelineTests.test_pipeline_assisted_generation`, and what it prints."""
    streamer = TextStreamer(pipe.tokenizer, skip_prompt=True)
    (out,) = pipe("hello", **GREEDY, **block, streamer=streamer)
    assert "hello" + capsys.readouterr().out.removesuffix("\n") == out["generated_text"]


@needs_native
def test_the_native_loop(pair, pipe):
    """After `TextGenerationPipelineTests.test_pipeline_assisted_generation`: by a drafter in the call."""
    native = {"assistant_model": pair[1], "speculation_type": "dflash"}
    assert pipe("hello", **GREEDY, **native) == pipe("hello", **GREEDY)
