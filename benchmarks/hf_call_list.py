"""The calls of `hf_calls.py`: calls of users, by the argument that they try."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedTokenizerFast,
    StaticCache,
    StoppingCriteriaList,
    StopStringCriteria,
    TextStreamer,
    TopKLogitsWarper,
)
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from torch_dflash.cache.view import CACHE
from torch_dflash.selftest.pairs import VOCAB, make_pair, ragged_prompts

PAIR = make_pair(agree=2.5)
IDS, MASK = ragged_prompts(2)
BATCH = {"input_ids": IDS, "attention_mask": MASK}
ROW = {"input_ids": IDS[:1], "attention_mask": MASK[:1]}
NO_IDS = {"attention_mask": MASK}
ONE_TOKEN = {"input_ids": IDS[:, -1:], "attention_mask": MASK[:, -1:]}


@dataclass(frozen=True)
class Call:
    """Options, made anew for each door: processors and caches may keep something.

    ``inputs``: the prompts; ``as_if``: the prompts for transformers instead, with as many columns;
    ``model``: fields of the target's own ``generation_config``.
    """

    make: Callable[[], dict[str, Any]]
    inputs: dict[str, Any] = field(default_factory=lambda: BATCH)
    as_if: dict[str, Any] | None = None
    model: dict[str, Any] = field(default_factory=dict)


def own_processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A user's: no id that the text's length divides."""
    banned = torch.arange(scores.shape[1]) % ids.shape[1] == 0
    return scores.masked_fill(banned, -torch.inf)


def own_criterion(ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
    """A user's: rows end with an odd id once they have 28 tokens."""
    return (ids[:, -1] % 2 == 1) & (ids.shape[1] >= 28)


class Silent(TextStreamer):
    """A streamer without a tokenizer."""

    def __init__(self):
        """Nothing to decode with."""

    def put(self, value: Any) -> None:
        """Nothing to show."""

    def end(self) -> None:
        """Nothing is held back."""


class Subclass(RepetitionPenaltyLogitsProcessor):
    """May do anything, by its type."""


def letter(token: int) -> str:
    """The character that a token stands for."""
    return chr(97 + token if token < 26 else 0x100 + token)


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are one character each, with the letters that transformers asks for."""
    names = {letter(token): token for token in range(VOCAB - 1)} | {"<unk>": VOCAB - 1}
    words = Tokenizer(models.WordLevel(names, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")


def filled_cache() -> DynamicCache:
    """The target's cache of the first four columns."""
    cache = DynamicCache(config=PAIR[0].config)
    with torch.no_grad():
        PAIR[0](IDS[:, :4], attention_mask=MASK[:, :4], **{CACHE: cache})
    return cache


def to_the_right() -> dict[str, torch.Tensor]:
    """The batch with its padding behind the prompts."""
    rows = [torch.cat([ids[mask == 1], ids[mask == 0]]) for ids, mask in zip(IDS, MASK, strict=True)]
    return {"input_ids": torch.stack(rows), "attention_mask": MASK.flip(1)}


def sampled(**options: Any) -> Call:
    """A sampled call of a batch."""
    return Call(lambda: {"do_sample": True, "top_k": 0} | options)


def greedy(**options: Any) -> Call:
    """A greedy call of a batch."""
    return Call(lambda: options)


def processors(*make: Callable[[], Any]) -> Call:
    """A call with a list of processors."""
    return Call(lambda: {"logits_processor": LogitsProcessorList([one() for one in make])})


def criteria(*make: Callable[[], Any]) -> Call:
    """A call with a list of criteria."""
    return Call(lambda: {"stopping_criteria": StoppingCriteriaList([one() for one in make])})


CALLS: dict[str, Call] = {
    "nothing but lengths": greedy(),
    "no length": greedy(max_new_tokens=None),
    "`max_length`": greedy(max_new_tokens=None, max_length=30),
    "`max_length` with `max_new_tokens`": greedy(max_length=30),
    "`max_length` of a prompt": greedy(max_new_tokens=None, max_length=23),
    "`max_new_tokens=0`": greedy(max_new_tokens=0),
    "`min_new_tokens`": greedy(min_new_tokens=8, eos_token_id=[10, 33]),
    "`min_length`": greedy(min_length=30, eos_token_id=[10, 33]),
    "`max_time`": greedy(max_time=900.0),
    "`eos_token_id` of one id": greedy(eos_token_id=33),
    "`eos_token_id` of several": greedy(eos_token_id=[33, 90]),
    "`eos_token_id` as a tensor": greedy(eos_token_id=torch.tensor([33, 90])),
    "`eos_token_id` as an array": greedy(eos_token_id=np.array([33, 90])),
    "`eos_token_id=-1`": greedy(eos_token_id=-1),
    "`eos_token_id=None`": greedy(eos_token_id=None),
    "`pad_token_id`": greedy(pad_token_id=7, eos_token_id=[33, 90]),
    "`pad_token_id=None`": greedy(pad_token_id=None, eos_token_id=[33, 90]),
    "`generation_config`": Call(lambda: {"generation_config": GenerationConfig(repetition_penalty=1.3)}),
    "`generation_config` of a length": Call(
        lambda: {"generation_config": GenerationConfig(max_length=30), "max_new_tokens": None}
    ),
    "`generation_config`, an option over it": Call(
        lambda: {"generation_config": GenerationConfig(repetition_penalty=9.0), "repetition_penalty": 1.3}
    ),
    "the model's own `generation_config`": Call(dict, model={"repetition_penalty": 1.3}),
    "the model's own, an option over it": Call(
        lambda: {"repetition_penalty": 1.0}, model={"repetition_penalty": 1.3}
    ),
    "`do_sample`, `temperature`": sampled(temperature=0.8),
    "`temperature` without `do_sample`": greedy(do_sample=None, temperature=0.8),
    "`temperature=0`": sampled(temperature=0.0),
    "`top_k`": sampled(top_k=5),
    "`top_k` of more than there are": sampled(top_k=500),
    "`top_p`": sampled(top_p=0.8),
    "`min_p`": sampled(min_p=0.1),
    "`typical_p`": sampled(typical_p=0.7),
    "`epsilon_cutoff`": sampled(epsilon_cutoff=0.01),
    "`eta_cutoff`": sampled(eta_cutoff=0.01),
    "`top_h`": sampled(top_h=0.5),
    "`num_return_sequences`": sampled(num_return_sequences=2),
    "`repetition_penalty`": greedy(repetition_penalty=1.4),
    "`no_repeat_ngram_size`": Call(lambda: {"no_repeat_ngram_size": 2}, ROW),
    "`no_repeat_ngram_size`, padded": greedy(no_repeat_ngram_size=2),
    "`bad_words_ids`": greedy(bad_words_ids=[[10], [33, 90]]),
    "`sequence_bias`": greedy(sequence_bias=[[[10], -4.0], [[33, 5], 6.0]]),
    "`suppress_tokens`": greedy(suppress_tokens=[10, 33]),
    "`begin_suppress_tokens`": greedy(begin_suppress_tokens=[10, 33]),
    "empty lists": greedy(suppress_tokens=[], begin_suppress_tokens=[]),
    "`forced_bos_token_id`": Call(lambda: {"forced_bos_token_id": 7}, ONE_TOKEN),
    "`forced_bos_token_id`, a longer prompt": greedy(forced_bos_token_id=7),
    "`forced_eos_token_id`": greedy(forced_eos_token_id=96),
    "`exponential_decay_length_penalty`": greedy(exponential_decay_length_penalty=(4, 1.3)),
    "`exponential_decay_length_penalty` from within the prompt": greedy(
        exponential_decay_length_penalty=(-1, 1.5)
    ),
    "`renormalize_logits`": greedy(renormalize_logits=True),
    "`remove_invalid_values`": greedy(remove_invalid_values=True),
    "`stop_strings` with `tokenizer`": Call(
        lambda: {"stop_strings": [letter(33), letter(90)], "tokenizer": letters()}
    ),
    "`stop_strings` without `tokenizer`": greedy(stop_strings=["a"]),
    "`tokenizer` alone": Call(lambda: {"tokenizer": letters()}),
    "`logits_processor`: transformers' own": Call(
        lambda: {"logits_processor": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(8.0)])},
        ROW,
    ),
    "`logits_processor`: a warper": processors(lambda: TopKLogitsWarper(1)),
    "`logits_processor`: a user's": processors(lambda: own_processor),
    "`logits_processor`: a subclass": processors(lambda: Subclass(1.4)),
    "`logits_processor`: a plain list": greedy(logits_processor=[own_processor]),
    "`logits_processor`, `stopping_criteria`: empty": Call(
        lambda: {"logits_processor": LogitsProcessorList(), "stopping_criteria": StoppingCriteriaList()}
    ),
    "`stopping_criteria`: transformers' own": criteria(
        lambda: MaxLengthCriteria(27), lambda: MaxTimeCriteria(900.0)
    ),
    "`stopping_criteria`: stop ids": criteria(lambda: EosTokenCriteria([33, 90])),
    "`stopping_criteria`: stop strings": criteria(lambda: StopStringCriteria(letters(), [letter(33)])),
    "`stopping_criteria`: a user's": criteria(lambda: own_criterion),
    "`prefix_allowed_tokens_fn`": greedy(prefix_allowed_tokens_fn=lambda row, ids: [3, 5, 10, 33]),
    "`num_beams`": greedy(num_beams=2),
    "`penalty_alpha`": greedy(penalty_alpha=0.6, top_k=4),
    "`guidance_scale`": greedy(guidance_scale=1.5),
    "`watermarking_config`": Call(lambda: {"watermarking_config": {"bias": 2.0}}),
    "`streamer`": Call(lambda: {"streamer": Silent()}, ROW),
    "`streamer`, two rows": Call(lambda: {"streamer": Silent()}),
    "`return_dict_in_generate`": greedy(return_dict_in_generate=True),
    "`output_scores`": greedy(output_scores=True, return_dict_in_generate=True),
    "`output_logits`": greedy(output_logits=True, return_dict_in_generate=True),
    "`output_hidden_states`": greedy(output_hidden_states=True, return_dict_in_generate=True),
    "`output_attentions`": greedy(output_attentions=True, return_dict_in_generate=True),
    "`cache_implementation`": greedy(cache_implementation="static"),
    "`cache_implementation='dynamic'`": greedy(cache_implementation="dynamic"),
    "`cache_implementation='quantized'`": greedy(cache_implementation="quantized"),
    "a cache of transformers', empty": Call(lambda: {CACHE: DynamicCache()}),
    "a static cache, empty": Call(lambda: {CACHE: StaticCache(config=PAIR[0].config, max_cache_len=48)}),
    "a cache of transformers', filled": Call(lambda: {CACHE: filled_cache()}),
    "`use_cache=False`": greedy(use_cache=False),
    "`use_cache=None`": greedy(use_cache=None),
    "`disable_compile`": greedy(disable_compile=True),
    "`prefill_chunk_size`": greedy(prefill_chunk_size=16),
    "`length_penalty`, `early_stopping`": greedy(length_penalty=2.0, early_stopping=True),
    "`logits_to_keep=0`": greedy(logits_to_keep=0),
    "`trust_remote_code`": greedy(trust_remote_code=True),
    "`prompt_lookup_num_tokens`": greedy(prompt_lookup_num_tokens=3),
    "`assistant_model`": Call(lambda: {"assistant_model": PAIR[0]}, ROW),
    "`inputs_embeds`": Call(lambda: {"inputs_embeds": torch.zeros(2, 23, 32)}),
    "`inputs_embeds` alone": Call(
        lambda: {"inputs_embeds": PAIR[0].get_input_embeddings()(IDS).detach()}, NO_IDS
    ),
    "`position_ids`, the usual": greedy(position_ids=(MASK.cumsum(1) - 1).clamp(min=0)),
    "`position_ids`, others": greedy(position_ids=(MASK.cumsum(1) - 1).clamp(min=0) * 2),
    "padding to the right": Call(dict, to_the_right(), as_if=BATCH),
    "no `attention_mask`": Call(lambda: {"pad_token_id": 96}, {"input_ids": IDS[:1]}),
    "no `attention_mask`, `pad_token_id` in a prompt": Call(dict, {"input_ids": IDS}),
    "`attention_mask` of bool": Call(dict, BATCH | {"attention_mask": MASK.bool()}),
    "`attention_mask` of float": Call(dict, BATCH | {"attention_mask": MASK.float()}),
    "`attention_mask` of int32": Call(dict, BATCH | {"attention_mask": MASK.int()}),
    "`attention_mask` of four axes": Call(dict, BATCH | {"attention_mask": MASK[:, None, None]}),
    "`input_ids` of one axis": Call(dict, {"input_ids": IDS[0]}),
    "`input_ids` as a list": Call(dict, {"input_ids": IDS.tolist()}),
    "`synced_gpus=False`": greedy(synced_gpus=False),
    "`synced_gpus=True`": greedy(synced_gpus=True),
    "a misspelt option": greedy(max_tokens=4),
}
