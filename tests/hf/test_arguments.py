"""Every argument of transformers' ``generate`` is known, and a value that asks for nothing is taken."""

import inspect

import numpy as np
import pytest
import torch
from support import tiny
from support.published import publish
from support.refusals import IDS, refuses
from support.refusals import no_step_runs as no_step_runs
from transformers import AutoModel, DynamicCache, GenerationConfig, StoppingCriteriaList
from transformers.generation import GenerationMixin, LogitsProcessorList

import torch_dflash as td
from torch_dflash import generation
from torch_dflash.cache.view import CACHE
from torch_dflash.requests.refusals import HARMLESS, HONOURED, NEUTRAL, config_fields

RAN = pytest.fail.Exception


@pytest.fixture(scope="module")
def pair():
    return tiny.make_pair()


def generate(target, drafter, ids=IDS, **options):
    return td.generate(target, drafter, ids, **({"max_new_tokens": 2, "runtime": "eager"} | options))


def through(target, drafter, **options):
    return target.generate(
        IDS, max_new_tokens=2, custom_generate=td.dflash(drafter, runtime="eager"), **options
    )


def test_every_field_of_a_generation_config_is_classified():
    groups = [HONOURED, HARMLESS, set(NEUTRAL)]
    assert not config_fields() - set().union(*groups), "say in refusals.py what these do"
    assert sum(map(len, groups)) == len(set().union(*groups))


def test_a_field_of_a_newer_transformers_is_refused(pair, monkeypatch):
    class Newer(GenerationConfig):
        def __init__(self, **options):
            self.twist = options.pop("twist", None)
            super().__init__(**options)

    monkeypatch.setattr("torch_dflash.requests.refusals.GenerationConfig", Newer)
    for asked in ({"twist": 0.5}, {"generation_config": Newer(twist=0.5)}):
        with refuses(ValueError, "twist=0.5 is not supported", "leave twist unset"):
            generate(*pair, **asked)
    with pytest.raises(RAN, match="a step ran"):
        generate(*pair, twist=None)


def test_a_cache_that_rounds_is_refused():
    words = "cache_implementation='quantized' is not supported", "pass cache_implementation='dynamic'"
    target, drafter = tiny.make_pair()
    with refuses(ValueError, *words):
        generate(target, drafter, cache_implementation="quantized")
    target.generation_config.cache_implementation = "quantized"
    with refuses(ValueError, *words):
        generate(target, drafter)
    for kind in ("dynamic", "offloaded", "static", "offloaded_static"):
        with pytest.raises(RAN, match="a step ran"):
            generate(target, drafter, cache_implementation=kind)


# Each asks for something. The names that a call gives itself, or reads from the ids, are left out.
ASKED = {
    "inputs": IDS, "inputs_embeds": torch.zeros(1, 4, 32), "logits_processor": [print],
    "prefix_allowed_tokens_fn": print, "synced_gpus": True, "assistant_model": torch.nn.Linear(1, 1),
    "negative_prompt_ids": IDS, "negative_prompt_attention_mask": IDS, "custom_generate": "some/repository",
    "position_ids": torch.arange(4)[None] + 1, "cache_position": torch.arange(4),
    "token_type_ids": torch.ones(1, 4), "mm_token_type_ids": torch.ones(1, 4), "labels": IDS,
}  # fmt: skip
NOT_ASKED = {"stopping_criteria", "self", "generation_config", "streamer", "kwargs"}


def test_the_table_has_every_argument_of_transformers():
    assert set(inspect.signature(GenerationMixin.generate).parameters) - NOT_ASKED <= ASKED.keys()


@pytest.mark.parametrize("name", ASKED)
def test_arguments_that_a_round_cannot_honour(pair, name):
    fixes = ("pass", "leave")
    with pytest.raises(ValueError, match=rf"^{name}") as refusal:
        generate(*pair, **{name: ASKED[name]})
    assert any(fix in str(refusal.value) for fix in fixes) and len(str(refusal.value)) < 200
    with pytest.raises(RAN, match="a step ran"):
        generate(*pair, **{name: None})


def test_ids_by_another_name_and_no_ids(pair):
    target, drafter = pair
    with refuses(ValueError, "inputs=Tensor", "pass the ids as input_ids"):
        td.generate(target, drafter, inputs=IDS, runtime="eager")
    with refuses(TypeError, "input_ids=NoneType", "LongTensor"):
        td.generate(target, drafter, runtime="eager")


def test_a_filled_cache(pair):
    cache = DynamicCache(config=pair[0].config)
    with torch.no_grad():
        pair[0](IDS[:, :2], **{CACHE: cache})
    for name in ("cache", "past_key_values"):  # since transformers 5.24, and before
        with refuses(ValueError, "cache (past_key_values) holds 2 tokens", "whole input_ids"):
            generate(*pair, **{name: cache})
        with refuses(ValueError, "cache (past_key_values)=tuple", "whole input_ids"):
            generate(*pair, **{name: ()})
    with refuses(ValueError, "cache=5", "static"):
        generate(*pair, cache=5)


@pytest.mark.parametrize(
    "asked",
    [
        {"logits_processor": LogitsProcessorList(), "stopping_criteria": StoppingCriteriaList()},
        {"logits_processor": [], "tokenizer": object(), "trust_remote_code": False, "synced_gpus": False},
        {"past_key_values": DynamicCache(), "logits_to_keep": 0, "use_cache": True},
        {"cache": DynamicCache()},
        {"position_ids": torch.arange(4)[None], "token_type_ids": torch.zeros(1, 4)},
        {"suppress_tokens": [], "bad_words_ids": [], "begin_suppress_tokens": (), "stop_strings": []},
        {"renormalize_logits": True, "num_assistant_tokens": 5, "length_penalty": 2.0, "low_memory": True},
        {"generation_config": GenerationConfig(prefill_chunk_size=64)},
        {"repetition_penalty": 1, "num_beams": 1, "is_assistant": False},
    ],
    ids=lambda asked: "+".join(asked),
)
def test_what_asks_for_nothing_is_taken(pair, asked):
    with pytest.raises(RAN, match="a step ran"):
        generate(*pair, **asked)


@pytest.mark.parametrize("name", ["batch_size", "stop_slots", "pool_pages", "filters"])
def test_what_is_fixed_in_an_engine(pair, name):
    with refuses(TypeError, f"{name} is fixed when an engine is built", "torch_dflash.compile"):
        generate(*pair, **{name: 64})


def test_options_of_an_engine_reach_it(pair, monkeypatch):
    given = {"prefill_chunk_size": 32, "matmul_precision": "high", "page_size": 32, "verify_width": 2}
    built = []
    monkeypatch.setattr(generation, "cached_engine", lambda *args: built.append(args[2]) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate(*pair, **given)
    assert {name: getattr(built[0], name) for name in given} == given


def test_what_is_refused_by_name(pair):
    with refuses(ValueError, "stop_strings=['a']", "pass tokenizer="):
        generate(*pair, stop_strings=["a"], tokenizer=object())
    with refuses(ValueError, "is_assistant=True", "pass is_assistant=False"):
        generate(*pair, is_assistant=True)
    for door in (generate, through):
        with refuses(ValueError, "use_cache=None is not supported", "leave use_cache out"):
            door(*pair, use_cache=None)


MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
PLACES = torch.tensor([[1, 1, 0, 1], [0, 1, 2, 3]])


@pytest.mark.parametrize(
    ("positions", "held"),
    [
        (PLACES, True),
        (PLACES.masked_fill(MASK == 0, 0), True),
        (PLACES.tolist(), True),
        (PLACES[None].repeat(3, 1, 1), True),  # rotary sections of text
        (torch.arange(4)[None], False),
        (PLACES * 2, False),
        (PLACES + 1, False),
        (PLACES[:, :3], False),
        (torch.stack([PLACES, PLACES + 1]), False),
    ],
)
@pytest.mark.parametrize("door", ["generate", "custom_generate"])
def test_positions_of_the_users(pair, positions, held, door):
    if door == "custom_generate" and not isinstance(positions, torch.Tensor):
        return
    call = {"attention_mask": MASK, "position_ids": positions}
    words = ["position_ids", "cumsum", "leave position_ids out"]
    with pytest.raises(RAN, match="a step ran") if held else refuses(ValueError, *words):
        if door == "generate":
            generate(*pair, IDS.repeat(2, 1), **call)
        else:
            block = td.dflash(pair[1], runtime="eager")
            pair[0].generate(IDS.repeat(2, 1), **call, max_new_tokens=2, custom_generate=block)


NUMBERS = [
    ({"temperature": 10**400, "do_sample": True}, ["temperature=1000", "float32"]),
    ({"temperature": 1e39, "do_sample": True}, ["temperature=1e+39", "float32"]),
    ({"temperature": float("inf"), "do_sample": True}, ["temperature=inf"]),
    ({"temperature": "0.7", "do_sample": True}, ["temperature='0.7'", "a number"]),
    ({"temperature": np.array([0.7, 0.8]), "do_sample": True}, ["temperature has 2 entries", "one per row"]),
    ({"temperature": torch.tensor([[0.7]]), "do_sample": True}, ["temperature=[0.69", "a number"]),
    ({"top_p": float("nan"), "do_sample": True}, ["top_p=nan", "(0, 1]"]),
    ({"min_p": float("nan"), "do_sample": True}, ["min_p=nan", "[0, 1]"]),
    ({"top_k": 10**400, "do_sample": True}, ["top_k=1000", "int32"]),
    ({"top_k": 5.0, "do_sample": True}, ["top_k=5.0", "integer"]),
    ({"pad_token_id": 2**70}, [f"pad_token_id={2**70}", "int32"]),
    ({"pad_token_id": 2**40}, [f"pad_token_id={2**40}", "int32"]),
    ({"pad_token_id": -7}, ["pad_token_id=-7", "a token id"]),
    ({"pad_token_id": True}, ["pad_token_id=True", "integer"]),
    ({"pad_token_id": [1, 2]}, ["pad_token_id=[1, 2]", "one integer"]),
    ({"generation_config": GenerationConfig(pad_token_id=2**70)}, [f"pad_token_id={2**70}", "int32"]),
    ({"max_new_tokens": 10**400}, ["max_new_tokens=1000", "max_position_embeddings"]),
    ({"max_new_tokens": 2**70}, [f"max_new_tokens={2**70}", "max_position_embeddings"]),
    ({"max_new_tokens": float("nan")}, ["max_new_tokens=nan", "integer"]),
    ({"max_new_tokens": None, "max_length": 2**70}, ["max_new_tokens=", "max_position_embeddings"]),
    ({"seed": 10**400}, ["seed=1000", "modulo"]),
    ({"eos_token_id": 10**400}, ["eos_token_id holds 1000", "int32"]),
    ({"eos_token_id": np.array([1.5, 2.0])}, ["eos_token_id holds 1.5", "None or []"]),
]


@pytest.mark.parametrize(("given", "words"), NUMBERS, ids=lambda value: None)
def test_absurd_numbers(pair, given, words):
    with refuses(ValueError, *words):
        generate(*pair, **given)


def test_what_custom_generate_is_not(pair):
    target, drafter = pair
    with refuses(TypeError, "custom_generate=dflash", "dflash(drafter)"):
        target.generate(IDS, max_new_tokens=2, custom_generate=td.dflash)
    with refuses(TypeError, "custom_generate=DFlashDraftModel", "torch_dflash.dflash(drafter)"):
        target.generate(IDS, max_new_tokens=2, custom_generate=drafter)
    with refuses(TypeError, "drafter=Qwen3ForCausalLM", "DFlashDraftModel"):
        td.dflash(target)


def test_drafters_that_were_not_taken_for_one(pair, tmp_path):
    target, drafter = pair
    publish(tmp_path)
    other = AutoModel.from_pretrained(tmp_path)  # the config names qwen3
    for entry in (
        lambda: generate(target, other),
        lambda: td.compile(target, other, runtime="eager", max_length=64),
        lambda: td.dflash(other),
    ):
        with refuses(TypeError, "drafter=Qwen3Model", "DFlashDraftModel.from_pretrained"):
            entry()
    with refuses(AttributeError, "does not generate on its own", "speculation_type='dflash'"):
        target.generate(IDS, max_new_tokens=2, assistant_model=drafter)
    assert not hasattr(drafter, "generation_config")
