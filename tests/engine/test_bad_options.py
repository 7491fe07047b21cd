"""Options that show late or by other programs' names, and names for models: the error says what to write."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from support import tiny
from support.refusals import IDS, no_step_runs, refuses  # noqa: F401 - an autouse fixture
from support.tokenizers import letters
from transformers import GenerationConfig

import torch_dflash as td


@pytest.fixture(scope="module")
def pair():
    return tiny.make_pair()


def generate(target, drafter, ids=IDS, mask=None, **options):
    return td.generate(target, drafter, ids, mask, **({"max_new_tokens": 2, "runtime": "eager"} | options))


RANGES = [
    ({"eos_token_id": 2**40}, [f"eos_token_id holds {2**40}", "int32", "None to never stop"]),
    ({"eos_token_id": [1, 2**31]}, [f"eos_token_id holds {2**31}", str(2**31 - 1), "None to never stop"]),
    ({"eos_token_id": [[1, 2**31]]}, [f"eos_token_id holds {2**31}", "int32"]),
    ({"eos_token_id": [[1, [2]]]}, ["eos_token_id holds [2]", "None or []"]),
    ({"top_k": 2**40, "do_sample": True}, [f"top_k={2**40}", "int32", "pass 0"]),
    ({"top_k": [2**31], "do_sample": True}, [f"top_k={2**31}", str(2**31 - 1)]),
    ({"seed": 2**64}, [f"seed={2**64}", "[-2**63, 2**64)", "modulo"]),
    ({"seed": -(2**63) - 1}, [f"seed={-(2**63) - 1}", "[-2**63, 2**64)"]),
    ({"seed": [2**200]}, [f"seed={2**200}", "[-2**63, 2**64)"]),
    ({"seed": True}, ["seed=True", "integer"]),
    ({"seed": torch.tensor(1.5)}, ["seed=1.5", "integer"]),
    ({"seed": np.array([1, 2])}, ["seed has 2 entries", "one per row"]),
    ({"seed": [np.float64(1)]}, ["seed=np.float64(1.0)", "integer"]),
]


@pytest.mark.parametrize(("given", "words"), RANGES, ids=lambda value: None)
def test_numbers_beyond_their_range(pair, given, words):
    with refuses(ValueError, *words):
        generate(*pair, **given)


def test_a_model_that_torch_compile_wrapped(pair):
    wrapped = torch.compile(pair[0], backend="eager")
    for entry in (generate, td.compile):
        with refuses(TypeError, "target=", "torch.compile", "original module", "target._orig_mod"):
            entry(wrapped, pair[1], runtime="eager")


@pytest.mark.parametrize("wrap", [torch.nn.DataParallel, torch.optim.swa_utils.AveragedModel])
def test_a_model_in_a_wrapper_is_asked_for(pair, wrap):
    wrapped = wrap(pair[0])
    for entry in (generate, td.compile):
        with refuses(TypeError, f"target={wrap.__name__}", "target.module"):
            entry(wrapped, pair[1], runtime="eager")
    td.compile(wrapped.module, None, runtime="eager", max_length=64)


def test_max_length_below_the_prompt(pair):
    target = copy.deepcopy(pair[0])
    words = ["max_length=3", "prompt's 4 columns", "max_new_tokens", "at least 5"]
    with refuses(ValueError, *words):
        generate(*pair, max_new_tokens=None, max_length=3)
    with refuses(ValueError, *words):
        generate(*pair, max_new_tokens=None, generation_config=GenerationConfig(max_length=3))
    with refuses(ValueError, "max_length='9'", "integer"):
        generate(*pair, max_new_tokens=None, max_length="9")
    target.generation_config.max_length = 3
    with refuses(ValueError, *words):
        generate(target, pair[1], max_new_tokens=None)
    # transformers checks first where it is the door; td.generate checks by itself.
    with refuses(ValueError, *words):
        td.dflash(pair[1], runtime="eager")(target, IDS, generation_config=target.generation_config)


def test_the_pad_token_inside_a_prompt(pair):
    words = ["row 0", "pad_token_id=5", "inside its prompt", "pass attention_mask explicitly"]
    with refuses(ValueError, *words):
        generate(*pair, pad_token_id=5)
    with refuses(ValueError, *words):  # transformers makes the mask
        block = td.dflash(pair[1], runtime="eager")
        pair[0].generate(IDS, pad_token_id=5, max_new_tokens=2, custom_generate=block)
    with refuses(ValueError, "row 0", "pad_token_id=5", "empty prompt", "pass attention_mask explicitly"):
        generate(*pair, torch.full_like(IDS, 5), pad_token_id=5)
    with refuses(ValueError, "attention_mask of row 0 has a gap"):  # the mask is wrong
        generate(*pair, IDS, torch.tensor([[1, 0, 0, 1]]), pad_token_id=5)
    with pytest.raises(pytest.fail.Exception, match="a step ran"):  # the remedy of the message
        generate(*pair, IDS, torch.ones_like(IDS), pad_token_id=5)


def test_dflash_refuses_what_it_binds_when_it_is_made(pair):
    for bound, words in {
        ("runtime", "xlaa"): ["runtime='xlaa'", "'xla', 'eager'"],
        ("block_size", 2.5): ["block_size=2.5", "integer"],
        ("verify_width", 0): ["verify_width=0", "at least 1"],
        ("rounds_per_chunk", 0): ["rounds_per_chunk=0", "at least 1"],
        ("cache", "page"): ["cache='page'", "'static', 'paged'"],
    }.items():
        with refuses(ValueError, *words):
            td.dflash(pair[1], **dict([bound]))


@pytest.mark.parametrize(("name", "verb"), [("block_size", "draft"), ("verify_width", "verify")])
def test_widths_without_a_drafter(pair, name, verb):
    words = [f"{name}=2 without a drafter", f"nothing to {verb}", f"leave {name} unset"]
    for entry in (generate, td.compile):
        with refuses(ValueError, *words):
            entry(pair[0], None, runtime="eager", **{name: 2})
    with refuses(ValueError, *words):
        td.dflash(None, **{name: 2})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 10**9}, "batch_size=1000000000"),
        ({"stop_slots": 10**10}, "stop_slots=10000000000"),
        ({"cache": "paged", "pool_pages": 10**12}, "pool_pages=1000000000000"),
        ({"cache": "paged", "page_size": 16 * 10**12}, "page_size=16000000000000"),
        ({"filters": "no"}, "filters='no'"),
    ],
)
def test_absurd_sizes_are_refused_before_anything_is_allocated(options, words):
    with pytest.raises(ValueError, match=words):
        td.compile(tiny.make_pair()[0], None, runtime="eager", max_length=64, **options)


@pytest.mark.parametrize("given", [(2.5,), ("4",), (4, "x"), (4, 10**9), (1,), (10**9,), (True,)])
def test_lookup_of_absurd_sizes_is_refused(given):
    with pytest.raises(ValueError, match="must be an integer from"):
        td.NGramProposer(*given)


def test_an_engine_without_a_length_has_the_targets_context():
    target = tiny.make_target("llama", num_hidden_layers=1, max_position_embeddings=96)
    for context, length in ((96, 96), (4096, 1024)):
        target.config.max_position_embeddings = context
        assert td.compile(target, None, runtime="eager").plan.capacity == length


@pytest.fixture(scope="module")
def engine(pair):
    return td.compile(*pair, runtime="eager", max_length=64)


NAMES = {
    "max_tokens": "Here max_tokens is max_new_tokens.", "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens", "temp": "Here temp is temperature.",
    "stop": "Here stop is stop_strings=[...], with tokenizer=.", "stop_token_ids": "eos_token_id=[...]",
    "n": "num_return_sequences", "logit_bias": "sequence_bias",
    "logits_processors": "processors=(torch_dflash.HostProcessor", "guided_json": "response_format=",
    "messages": "torch_dflash.Chat", "num_draft_tokens": "block_size", "device": "target.to(device)",
    "dtype": "from_pretrained", "max_new_token": "Did you mean max_new_tokens?",
    "tempurature": "Did you mean temperature?", "topk": "Did you mean top_k?", "top_K": "Did you mean top_k?",
    "Max_Tokens": "Here Max_Tokens is max_new_tokens.", "verify_widht": "Did you mean verify_width?",
}  # fmt: skip


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
        words = "target='some/model'", "CausalLM.from_pretrained('some/model')", "jax_bridge.load("
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
        said = f"source={type(source).__name__}"
        words = said, "the first argument", "load_drafter(path_or_id, target)"
        with refuses(TypeError, *words):
            td.load_drafter(source, "z-lab/some-drafter")
