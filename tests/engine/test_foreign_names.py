"""Options by other programs' names, and names in the place of models: the error says what to write here."""

from pathlib import Path

import pytest
from support import tiny
from support.refusals import IDS, no_step_runs, refuses  # noqa: F401 - an autouse fixture
from support.tokenizers import letters

import torch_dflash as td


@pytest.fixture(scope="module")
def pair():
    return tiny.make_pair()


@pytest.fixture(scope="module")
def engine(pair):
    return td.compile(*pair, runtime="eager", max_length=64)


NAMES = {
    "max_tokens": "Here max_tokens is max_new_tokens.",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "temp": "Here temp is temperature.",
    "stop": "Here stop is stop_strings=[...], with tokenizer=.",
    "stop_token_ids": "eos_token_id=[...]",
    "n": "num_return_sequences",
    "logit_bias": "sequence_bias",
    "logits_processors": "processors=(torch_dflash.HostProcessor",
    "guided_json": "response_format=",
    "messages": "torch_dflash.Chat",
    "num_draft_tokens": "block_size",
    "device": "target.to(device)",
    "dtype": "from_pretrained",
    "max_new_token": "Did you mean max_new_tokens?",
    "tempurature": "Did you mean temperature?",
    "topk": "Did you mean top_k?",
    "top_K": "Did you mean top_k?",
    "Max_Tokens": "Here Max_Tokens is max_new_tokens.",
    "verify_widht": "Did you mean verify_width?",
}


@pytest.mark.parametrize("name", NAMES)
def test_an_option_by_another_name(pair, engine, name):
    for call in (
        lambda **options: td.generate(*pair, IDS, runtime="eager", **options),
        lambda **options: td.stream(*pair, IDS, runtime="eager", **options),
        lambda **options: engine.generate(IDS, **options),
    ):
        with refuses(TypeError, f"unknown option {name!r}", NAMES[name]):
            call(**{name: 5})


COMPILED = {
    "max_tokens": "Here max_tokens is max_new_tokens.",
    "device": "target.to(device)",
    "dtype": "from_pretrained",
    "max_model_len": "Here max_model_len is max_length of torch_dflash.compile.",
    "Batch_Size": "Did you mean batch_size?",
    "temperature": "the calls of its engine take options of a request",
    "colour": "torch_dflash.compile takes runtime, max_length,",
}


@pytest.mark.parametrize("name", COMPILED)
def test_an_option_of_compile_by_another_name(pair, name):
    with refuses(TypeError, f"unknown option {name!r}", COMPILED[name]):
        td.compile(*pair, **{name: 3})


def test_an_option_of_no_meaning_gets_no_advice(engine):
    with pytest.raises(TypeError, match="unknown option 'colour'.*GenerationConfig.$"):
        engine.generate(IDS, colour=1)
    with refuses(TypeError, "dflash() takes", "not 'max_tokens'", "Here max_tokens is max_new_tokens"):
        td.dflash(None, max_tokens=5)


DOORS = {
    "generate": lambda target, *drafter: td.generate(target, *drafter),
    "stream": lambda target, *drafter: td.stream(target, *drafter),
    "compile": lambda target, *drafter: td.compile(target, *drafter),
    "dflash": lambda target, *drafter: td.dflash(*drafter),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_drafter_that_is_none_names_the_call_that_loads_one(pair, door):
    call, target = DOORS[door], pair[0]
    with refuses(TypeError, "drafter is missing", "torch_dflash.load_drafter(path_or_id, target)", "None"):
        call(target)
    for name in ("z-lab/some-drafter", Path("z-lab/some-drafter")):
        words = "drafter='z-lab/some-drafter'", "torch_dflash.load_drafter('z-lab/some-drafter', target)"
        with refuses(TypeError, *words):
            call(target, name)
    with refuses(TypeError, "drafter=Tensor", "load_drafter", "input_ids come third"):
        call(target, IDS)
    if door != "dflash":
        words = (
            "target='some/model'",
            "AutoModelForCausalLM.from_pretrained('some/model')",
            "jax_bridge.load(",
        )
        with refuses(TypeError, *words):
            call("some/model", None)


def test_other_models_by_their_names(engine):
    with refuses(TypeError, "target='some/model'", "AutoModelForCausalLM.from_pretrained('some/model')"):
        td.check("some/model")
    with refuses(TypeError, "engine=str", "torch_dflash.compile(target, drafter)"):
        td.Chat("some/model", letters()[0])
    with refuses(TypeError, "tokenizer='some/model'", "AutoTokenizer.from_pretrained('some/model')"):
        td.Chat(engine, "some/model")
    with refuses(TypeError, "tokenizer='some/model'", "AutoTokenizer.from_pretrained('some/model')"):
        engine.generate(IDS, stop_strings="x", tokenizer="some/model")


def test_the_model_in_the_place_of_the_drafters_name(pair):
    for source in (pair[0], pair[1], None):
        words = (
            f"source={type(source).__name__}",
            "the target comes second",
            "load_drafter(path_or_id, target)",
        )
        with refuses(TypeError, *words):
            td.load_drafter(source, "z-lab/some-drafter")
