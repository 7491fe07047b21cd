"""Bad input: the error's type, and a message with field, value and fix, before any forward has run."""

import copy

import numpy as np
import peft
import pytest
import torch
from support import tiny
from support.refusals import IDS, no_step_runs, refuses  # noqa: F401 - an autouse fixture
from torch import nn
from transformers import DynamicCache, Qwen3ForCausalLM, T5Config, T5ForConditionalGeneration

import torch_dflash as td
from torch_dflash.cache.view import CACHE


@pytest.fixture(scope="module")
def pair():
    return tiny.make_pair()


def test_the_guard_itself_fails_a_good_call(pair):
    with pytest.raises(pytest.fail.Exception, match="a step ran"):
        td.generate(*pair, IDS, max_new_tokens=2, runtime="eager")


class Streamer:
    def put(self, value=None):
        raise AssertionError("the streamer was used")

    end = put


MASK = torch.ones(1, 4)
PROMPTS = [
    (None, None, TypeError, ["input_ids=NoneType", "LongTensor"]),
    ([[3, 4]], None, TypeError, ["input_ids=list", "LongTensor"]),
    (IDS[0], None, ValueError, ["input_ids has shape (4,)", "[B, T]"]),
    (IDS[:0], None, ValueError, ["input_ids has shape (0, 4)", "at least one row"]),
    (IDS[:, :0], None, ValueError, ["row 0", "empty prompt", "at least one token"]),
    (IDS.float(), None, TypeError, ["input_ids", "torch.float32", "integers"]),
    (IDS.bool(), None, TypeError, ["input_ids", "torch.bool", "integers"]),
    (IDS + 92, None, ValueError, ["input_ids of row 0 holds 97", "[0, 97)", "tokenizer"]),
    (IDS - 4, None, ValueError, ["input_ids of row 0 holds -1", "[0, 97)", "tokenizer"]),
    (IDS, [[1, 1, 1, 1]], TypeError, ["attention_mask=list", "tensor"]),
    (IDS, torch.ones(1, 5), ValueError, ["attention_mask has shape (1, 5)", "(1, 4)", "same shape"]),
    (IDS, torch.ones(1, 1, 4, 4), ValueError, ["attention_mask has shape (1, 1, 4, 4)", "2-D"]),
    (IDS, MASK * 0, ValueError, ["row 0", "empty prompt"]),
    (IDS, MASK * torch.tensor([1, 0, 1, 1]), ValueError, ["attention_mask of row 0 has a gap", "one end"]),
    (IDS, MASK * -torch.inf, ValueError, ["attention_mask", "0 and 1", "real tokens"]),
]


@pytest.mark.parametrize(("ids", "mask", "error", "words"), PROMPTS, ids=lambda value: None)
@pytest.mark.parametrize("streamer", [None, Streamer()], ids=["", "streamed"])
def test_prompts(pair, ids, mask, error, words, streamer):
    with refuses(error, *words):
        td.generate(*pair, ids, mask, max_new_tokens=2, runtime="eager", streamer=streamer)


BOTH, HOST = {"forced_eos_token_id": 3, "suppress_tokens": [3]}, {"runtime": "xla"}
OPTIONS = [
    ({"runtime": "tpu"}, ValueError, ["runtime='tpu'", "'xla', 'eager'"]),
    *[
        ({"max_new_tokens": value}, ValueError, [f"max_new_tokens={value!r}", "integer of at least 1"])
        for value in (0, -1, True, 1.5, "3")
    ],
    ({"max_new_tokens": [1, 2]}, ValueError, ["max_new_tokens has 2 entries", "one per row"]),
    ({"max_new_tokens": 509}, ValueError, ["4 tokens", "max_new_tokens=509", "=512", "shorten"]),
    ({"temperature": 0.5}, ValueError, ["temperature=[0.5]", "do_sample", "do_sample=True"]),
    ({"do_sample": "yes"}, ValueError, ["do_sample='yes'", "True, False"]),
    ({"seed": 1.5}, ValueError, ["seed=1.5", "integer"]),
    ({"seed": [1, 2]}, ValueError, ["seed has 2 entries", "one per row"]),
    ({"eos_token_id": "</s>"}, ValueError, ["eos_token_id holds '</s>'", "None or []"]),
    ({"eos_token_id": [3, 1.5]}, ValueError, ["eos_token_id holds 1.5", "None or []"]),
    ({"eos_token_id": -1}, ValueError, ["eos_token_id holds -1", "None or []"]),
    ({"eos_token_id": [[1], [2]]}, ValueError, ["eos_token_id has 2 entries", "one per row"]),
    ({"pad_token_id": "<pad>"}, ValueError, ["pad_token_id='<pad>'", "integer"]),
    ({"block_size": 1}, ValueError, ["block_size=1", "drafter=None"]),
    ({"block_size": 2.5}, ValueError, ["block_size=2.5", "integer"]),
    ({"block_size": 300}, ValueError, ["block_size=300", "<= 255"]),
    ({"verify_width": 7}, ValueError, ["verify_width=7", "block_size=6", "at most"]),
    ({"verify_width": 0}, ValueError, ["verify_width=0", "at least 1"]),
    ({"rounds_per_chunk": 0}, ValueError, ["rounds_per_chunk=0", "at least 1"]),
    ({"streamer": object()}, TypeError, ["streamer=object", "put"]),
    ({"colour": "red"}, TypeError, ["unknown option 'colour'", "GenerationConfig"]),
    ({"to_dict": 1}, TypeError, ["unknown option 'to_dict'", "GenerationConfig"]),
    ({"num_beams": 2}, ValueError, ["num_beams=2", "pass num_beams=1"]),
    ({"num_return_sequences": 2}, ValueError, ["num_return_sequences=2", "do_sample=True"]),
    ({"num_return_sequences": 0}, ValueError, ["num_return_sequences=0", "at least 1"]),
    ({"repetition_penalty": 0.0}, ValueError, ["repetition_penalty=0.0", "above 0"]),
    ({"repetition_penalty": [1.1, 1.2]}, ValueError, ["repetition_penalty has 2 entries", "one per row"]),
    ({"presence_penalty": "high"}, ValueError, ["presence_penalty='high'", "a finite number"]),
    ({"no_repeat_ngram_size": 1.5}, ValueError, ["no_repeat_ngram_size=1.5", "an integer"]),
    ({"stop_strings": ["a"]}, ValueError, ["stop_strings=['a']", "pass tokenizer="]),
    ({"stop_strings": [3]}, ValueError, ["stop_strings=[3]", "strings"]),
    ({"stop_strings": 5}, ValueError, ["stop_strings=5", "strings"]),
    ({"bad_words_ids": 5}, ValueError, ["bad_words_ids=5", "a list"]),
    ({"sequence_bias": [5]}, ValueError, ["sequence_bias holds 5", "-1.5"]),
    ({"exponential_decay_length_penalty": (2**31, 1.1)}, ValueError, ["2147483648", "(30, 1.01)"]),
    ({"stopping_criteria": print}, TypeError, ["stopping_criteria=builtin", "a list of criteria"]),
    ({"stopping_criteria": [5]}, TypeError, ["stopping_criteria holds 5", "functions"]),
    ({"processors": ([1],)}, ValueError, ["processors holds [1]", "BlockProcessor"]),
    ({"processors": (td.processors.RepetitionPenalty,)}, ValueError, ["processors holds <class", "Block"]),
    ({"max_time": -1}, ValueError, ["max_time=-1", "seconds of at least 0"]),
    ({"bad_words_ids": [1]}, ValueError, ["bad_words_ids holds 1: ", "[[5], [7, 8]]"]),
    ({"bad_words_ids": np.array([[1, 2]])}, ValueError, ["bad_words_ids=", "a list"]),
    ({"bad_words_ids": [[97]]}, ValueError, ["bad_words_ids holds 97", "0 to 96"]),
    ({"sequence_bias": [[[1], "much"]]}, ValueError, ["sequence_bias holds", "-1.5"]),
    ({"suppress_tokens": 5}, ValueError, ["suppress_tokens=5", "a list of token ids"]),
    ({"suppress_tokens": [[5]]}, ValueError, ["suppress_tokens holds [5]", "token ids"]),
    ({"suppress_tokens": [1.5]}, ValueError, ["suppress_tokens holds 1.5", "token ids"]),
    ({"forced_eos_token_id": -1}, ValueError, ["forced_eos_token_id holds -1", "token ids"]),
    # transformers' own words, if any: the id stands before the second name there, after the name here
    (BOTH, ValueError, ["forced_eos_token_id", "3"]),
    (BOTH, ValueError, ["forced_eos_token_id", "suppress_tokens"]),
    ({"exponential_decay_length_penalty": 3}, ValueError, ["length_penalty=3", "(30, 1.01)"]),
    ({"min_new_tokens": -2}, ValueError, ["min_new_tokens=-2", "0 for none"]),
    ({"min_length": -2}, ValueError, ["min_length=-2", "at least 0"]),
    (HOST | {"stopping_criteria": [lambda *_: False]}, ValueError, ["stopping_criteria <lambda>", "'eager'"]),
    (HOST | {"processors": (td.HostProcessor(abs),)}, ValueError, ["logits_processor abs", "BlockProcessor"]),
    ({"output_attentions": True}, ValueError, ["output_attentions=True", "pass output_attentions=False"]),
    ({"output_scores": "yes"}, ValueError, ["output_scores='yes'", "True or False"]),
    ({"output_logprobs": 1}, ValueError, ["output_logprobs=1", "True or False"]),
    ({"top_logprobs": -1}, ValueError, ["top_logprobs=-1", "at least 0"]),
    ({"top_logprobs": 1 << 20}, ValueError, ["top_logprobs=1048576", "at most"]),
    ({"output_logprobs": True}, ValueError, ["output_logprobs=True", "return_dict_in_generate=True"]),
    ({"top_logprobs": 2}, ValueError, ["top_logprobs=2", "return_dict_in_generate=True"]),
    ({"prompt_lookup_num_tokens": 3}, ValueError, ["prompt_lookup_num_tokens=3", "unset"]),
]
SAMPLING = [
    ({"temperature": -1.0}, "temperature=-1.0: must be a number, 0 (greedy) or more"),
    ({"temperature": float("nan")}, "temperature=nan: must be a number"),
    ({"temperature": [1.0, 2.0]}, "temperature has 2 entries for a batch of 1"),
    ({"top_p": 0.0}, "top_p=0.0: must be a number in (0, 1]"),
    ({"top_p": "a"}, "top_p='a': must be a number in (0, 1]"),
    ({"top_k": -1}, "top_k=-1: must be an integer, 0 (off) or more"),
    ({"min_p": 2.0}, "min_p=2.0: must be a number in [0, 1]"),
]
OPTIONS += [({"do_sample": True} | given, ValueError, [message]) for given, message in SAMPLING]


@pytest.mark.parametrize(("given", "error", "words"), OPTIONS, ids=lambda value: None)
def test_options(pair, given, error, words):
    with refuses(error, *words):
        td.generate(*pair, IDS, **({"max_new_tokens": 2, "runtime": "eager"} | given))


def with_three_taps(target):
    drafter = tiny.make_drafter(target)
    drafter.config.target_layer_ids = [0, 1, 2]
    return drafter


PAIRS = [
    (with_three_taps, ["target_layer_ids names 3 taps, but fc takes 2", "different drafters"]),
    ({"hidden_size": 24}, ["hidden_size=24", "is 32", "trained for this target"]),
    ({"mask_token_id": None}, ["mask_token_id is missing", "config.mask_token_id ="]),
    ({"mask_token_id": 97}, ["mask_token_id=97", "97 rows", "trained with"]),
    ({"target_layer_ids": [0, 4]}, ["target_layer_ids=[0, 4]", "[4]", "4 layers", "0-based"]),
    ({"num_target_layers": 5}, ["num_target_layers=5", "has 4", "trained for this target"]),
]


@pytest.mark.parametrize(("change", "words"), PAIRS, ids=lambda value: None)
@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_drafters_that_do_not_fit(pair, change, words, runtime):
    make = change if callable(change) else lambda target: tiny.make_drafter(target, **change)
    with refuses(ValueError, *words):
        td.compile(pair[0], make(pair[0]), runtime=runtime, max_length=64)


WINDOWS = {"layer_types": ["full_attention", "sliding_attention"]}
CONFIGS = [
    ({"target_layer_ids": [], "num_target_layers": None}, ["target_layer_ids=[]", "num_target_layers"]),
    ({"target_layer_ids": [-1, 2]}, ["target_layer_ids=-1", "at least 0"]),
    ({"mask_token_id": 1.5}, ["mask_token_id=1.5", "integer"]),
    ({"block_size": 1}, ["block_size=1", "set >= 2"]),
    ({"block_size": None}, ["block_size=None", "set >= 2"]),
    ({"num_key_value_heads": 3}, ["num_attention_heads=4", "num_key_value_heads=3"]),
    ({"layer_types": ["full_attention"]}, ["layer_types has 1 entries", "one per layer"]),
    ({"layer_types": ["full_attention", "chunked_attention"]}, ["layer_types", "chunked_attention", "full"]),
    (WINDOWS | {"sliding_window": None}, ["sliding_window=None", "set the window"]),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, ["rope_type='dynamic'", "static type"]),
]


@pytest.mark.parametrize(("change", "words"), CONFIGS, ids=lambda value: None)
def test_drafter_configs(pair, change, words):
    with refuses(ValueError, *words):
        tiny.make_drafter(pair[0], **change)


def call(target, drafter):
    return td.generate(target, drafter, IDS, max_new_tokens=2, runtime="eager")


def test_what_is_no_target(pair):
    target, drafter = pair
    t5 = T5Config(vocab_size=97, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with refuses(TypeError, "target=DFlashDraftModel", "target model first"):
        call(drafter, target)
    for other in (nn.Linear(2, 2), target.model):
        with refuses(TypeError, f"target={type(other).__name__}", "AutoModelForCausalLM"):
            call(other, drafter)
    with refuses(TypeError, "target=T5ForConditionalGeneration", "encoder-decoder", "causal LM"):
        call(T5ForConditionalGeneration(t5), None)
    canvas = type("DiffusionGemmaForBlockDiffusion", (type(target),), {})(target.config)
    with refuses(TypeError, "target=DiffusionGemmaForBlockDiffusion", "denoises a canvas", "causal LM"):
        call(canvas, None)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with refuses(ValueError, "rope_type='dynamic'", "static type"):
        call(tiny.make_target("llama", rope_parameters=rope), None)


def wrapped_drafters(drafter):
    """Wrappers, each with the remedy that the refusal names."""
    yield torch.compile(drafter, backend="eager"), "_orig_mod"
    yield nn.DataParallel(drafter), "module"
    adapters = peft.LoraConfig(r=2, target_modules=["q_proj"])
    yield peft.get_peft_model(copy.deepcopy(drafter), adapters), "merge_and_unload()"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_what_is_no_drafter(pair):
    for other in (nn.Linear(2, 2), pair[0], td.NGramProposer, td.DFlashDraftModel):
        with refuses(TypeError, f"drafter={type(other).__name__}", "DFlashDraftModel", "None"):
            call(pair[0], other)
    for wrapped, way in wrapped_drafters(pair[1]):
        with refuses(TypeError, f"drafter={type(wrapped).__name__}", f"pass its .{way}"):
            call(pair[0], wrapped)
        inside = getattr(wrapped, way.removesuffix("()"))
        inside = inside() if way.endswith("()") else inside  # the remedy of the message
        td.compile(pair[0], inside, runtime="eager", max_length=64)
    with refuses(ValueError, "width=1", "from 2"):
        td.NGramProposer(width=1)
    with refuses(ValueError, "block_size=6", "NGramProposer drafts 4"):
        td.compile(pair[0], td.NGramProposer(4), block_size=6, runtime="eager", max_length=64)


def test_weights_that_are_not_the_models_own(pair):
    target, drafter = pair
    with torch.device("meta"):
        hollow, hollow_drafter = Qwen3ForCausalLM(target.config), td.DFlashDraftModel(drafter.config)
    for arguments in ((hollow, None), (hollow, hollow_drafter)):
        with refuses(ValueError, "model.embed_tokens.weight is on the meta device", "load the weights"):
            call(*arguments)
    with refuses(ValueError, "the drafter is on meta, the target on cpu", "move them together"):
        call(target, hollow_drafter)


def test_engines(pair):
    def build(**options):
        return td.compile(*pair, **({"runtime": "eager", "max_length": 64} | options))

    sizes = {"max_length": 0, "batch_size": 1.5, "stop_slots": -1, "prefill_chunk_size": 0}
    for name, value in sizes.items():
        with refuses(ValueError, f"{name}={value}", "integer of at least"):
            build(**{name: value})
    with refuses(ValueError, "prefill_chunk_size=17", "power of two"):
        build(prefill_chunk_size=17)
    with refuses(ValueError, "max_length=513", "max_position_embeddings=512", "lower"):
        build(max_length=513)

    engine, two = build(stop_slots=1, filters=False), IDS.repeat(2, 1)
    calls = [
        (IDS, {"max_new_tokens": 61}, ValueError, ["max_new_tokens=61", "max_length=64", "larger"]),
        (IDS, {"eos_token_id": [1, 2]}, ValueError, ["eos_token_id has 2 ids", "stop_slots=1", "more"]),
        (IDS, {"do_sample": True, "top_k": 3}, ValueError, ["top_k", "filters=False", "filters=True"]),
        (IDS, {"block_size": 4}, TypeError, ["block_size is fixed", "torch_dflash.compile"]),
    ]
    for ids, options, error, words in calls:
        for entry in (engine.generate, engine.stream):  # a stream refuses at the call, not at `next`
            with refuses(error, *words):
                entry(ids, **({"max_new_tokens": 2} | options))
    with refuses(ValueError, "streamer with 2 rows", "one row"):
        build(batch_size=2).generate(two, max_new_tokens=2, streamer=Streamer())
    with refuses(ValueError, "streamer with 2 rows", "one row"):
        td.generate(*pair, two, max_new_tokens=2, streamer=Streamer(), runtime="eager")


def test_custom_generate(pair):
    target, drafter = pair
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(IDS[:, :2], **{CACHE: cache})
    calls = [
        ({"num_beams": 2}, ["num_beams=2", "pass num_beams=1"]),
        ({"top_h": 0.5, "do_sample": True}, ["top_h=0.5", "unset"]),
        ({CACHE: cache}, ["cache (past_key_values) holds 2 tokens", "without it"]),
    ]
    for bound in ({}, {"cache": "paged"}):  # the new cache is another one
        block = td.dflash(drafter, runtime="eager", **bound)
        for options, words in calls:
            with refuses(ValueError, *words):
                target.generate(IDS, max_new_tokens=3, custom_generate=block, **options)
    with refuses(ValueError, "inputs_embeds", "input_ids"):
        target.generate(inputs_embeds=torch.zeros(1, 3, 32), max_new_tokens=3, custom_generate=block)
    with refuses(TypeError, "dflash() takes runtime", "'max_new_tokens'", "target.generate"):
        td.dflash(drafter, max_new_tokens=3)


def test_rules_that_cannot_be_called():
    for kind in (td.BlockProcessor, td.HostProcessor):
        with pytest.raises(TypeError, match=f"{kind.__name__}\\(5\\): its function must be one"):
            kind(5)


@pytest.mark.parametrize("given, said", [(["repetition_penalty"], "a tuple"), (("top_k",), "'top_k'")])
def test_what_is_no_processor_is_refused(pair, given, said):
    with pytest.raises(ValueError, match=said):
        td.generate(*pair, torch.tensor([[1, 2]]), processors=given)
    with pytest.raises(ValueError, match=said):
        td.compile(*pair, runtime="eager", processors=given)
