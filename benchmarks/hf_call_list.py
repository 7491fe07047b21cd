"""The calls of `hf_calls.py`: what users write, by the argument that they try."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    TextStreamer,
    TopKLogitsWarper,
)
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from torch_dflash.cache.argument import CACHE


@dataclass(frozen=True)
class Call:
    """Options, made anew for each door: processors and caches may keep something."""

    make: Callable[[], dict[str, Any]]
    one_row: bool = False

    def make_again(self, options: dict[str, Any]) -> dict[str, Any]:
        """``options`` with fresh objects."""
        return options | self.make()


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
    "`max_length`": greedy(max_new_tokens=None, max_length=30),
    "`max_new_tokens=0`": greedy(max_new_tokens=0),
    "`min_new_tokens`": greedy(min_new_tokens=8, eos_token_id=[10, 33]),
    "`min_length`": greedy(min_length=30, eos_token_id=[10, 33]),
    "`max_time`": greedy(max_time=900.0),
    "`eos_token_id` of one id": greedy(eos_token_id=33),
    "`eos_token_id` of several": greedy(eos_token_id=[33, 90]),
    "`eos_token_id` as a tensor": greedy(eos_token_id=torch.tensor([33, 90])),
    "`eos_token_id=-1`": greedy(eos_token_id=-1),
    "`eos_token_id=None`": greedy(eos_token_id=None),
    "`generation_config`": Call(lambda: {"generation_config": GenerationConfig(repetition_penalty=1.3)}),
    "`do_sample`, `temperature`": sampled(temperature=0.8),
    "`top_k`": sampled(top_k=5),
    "`top_p`": sampled(top_p=0.8),
    "`min_p`": sampled(min_p=0.1),
    "`typical_p`": sampled(typical_p=0.7),
    "`epsilon_cutoff`": sampled(epsilon_cutoff=0.01),
    "`eta_cutoff`": sampled(eta_cutoff=0.01),
    "`top_h`": sampled(top_h=0.5),
    "`num_return_sequences`": sampled(num_return_sequences=2),
    "`repetition_penalty`": greedy(repetition_penalty=1.4),
    "`no_repeat_ngram_size`": Call(lambda: {"no_repeat_ngram_size": 2}, one_row=True),
    "`no_repeat_ngram_size`, padded": greedy(no_repeat_ngram_size=2),
    "`bad_words_ids`": greedy(bad_words_ids=[[10], [33, 90]]),
    "`sequence_bias`": greedy(sequence_bias=[[[10], -4.0], [[33, 5], 6.0]]),
    "`suppress_tokens`": greedy(suppress_tokens=[10, 33]),
    "`begin_suppress_tokens`": greedy(begin_suppress_tokens=[10, 33]),
    "`forced_bos_token_id`": greedy(forced_bos_token_id=7),
    "`forced_eos_token_id`": greedy(forced_eos_token_id=96),
    "`exponential_decay_length_penalty`": greedy(exponential_decay_length_penalty=(4, 1.3)),
    "`renormalize_logits`": greedy(renormalize_logits=True),
    "`remove_invalid_values`": greedy(remove_invalid_values=True),
    "`stop_strings` without `tokenizer`": greedy(stop_strings=["a"]),
    "`logits_processor`: transformers' own": Call(
        lambda: {"logits_processor": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.4)])},
        one_row=True,
    ),
    "`logits_processor`: a warper": processors(lambda: TopKLogitsWarper(1)),
    "`logits_processor`: a user's": processors(lambda: own_processor),
    "`stopping_criteria`: transformers' own": criteria(
        lambda: MaxLengthCriteria(27), lambda: MaxTimeCriteria(900.0)
    ),
    "`stopping_criteria`: a user's": criteria(lambda: own_criterion),
    "`prefix_allowed_tokens_fn`": greedy(prefix_allowed_tokens_fn=lambda row, ids: [3, 5, 10, 33]),
    "`num_beams`": greedy(num_beams=2),
    "`penalty_alpha`": greedy(penalty_alpha=0.6, top_k=4),
    "`guidance_scale`": greedy(guidance_scale=1.5),
    "`watermarking_config`": Call(lambda: {"watermarking_config": {"bias": 2.0}}),
    "`streamer`": Call(lambda: {"streamer": Silent()}, one_row=True),
    "`return_dict_in_generate`": greedy(return_dict_in_generate=True),
    "`output_scores`": greedy(output_scores=True, return_dict_in_generate=True),
    "`output_logits`": greedy(output_logits=True, return_dict_in_generate=True),
    "`output_hidden_states`": greedy(output_hidden_states=True, return_dict_in_generate=True),
    "`cache_implementation`": greedy(cache_implementation="static"),
    "a cache of transformers', empty": Call(lambda: {CACHE: DynamicCache()}),
    "`use_cache=False`": greedy(use_cache=False),
    "`prompt_lookup_num_tokens`": greedy(prompt_lookup_num_tokens=3),
    "`inputs_embeds`": Call(lambda: {"inputs_embeds": torch.zeros(2, 23, 32)}),
    "`synced_gpus`": greedy(synced_gpus=False),
    "a misspelt option": greedy(max_tokens=4),
}
