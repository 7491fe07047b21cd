"""Arguments of transformers' ``generate`` outside of ``GenerationConfig``: ignored, or refused with a fix."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers.generation import GenerationMixin

from torch_dflash.requests.aliases import meant
from torch_dflash.requests.logprobs import OF_LOGITS
from torch_dflash.requests.options import OF_A_CALL, OF_AN_ENGINE
from torch_dflash.requests.prompts import MEDIA
from torch_dflash.requests.refusals import config_fields
from torch_dflash.requests.rules import ours

# Fixed when an engine is built, so no option of a call. `max_length` of a call is transformers' own, and
# `top_logprobs` what it asks of an engine that may keep more.
COMPILED = frozenset(OF_AN_ENGINE) - {"max_length", "top_logprobs"}
_TEXT = "block decoding reads text alone; use the target's own generate for images, videos and sound"
_ALONE = "block decoding reads input_ids and attention_mask alone; leave it out"
_ONE_TOKEN = "written for one token at a time"
_OPTIONS = {
    "logits_processor": f"{_ONE_TOKEN}; pass options, or processors=(td.HostProcessor(...),)",
    "stopping_criteria": "an engine knows stop_strings, max_time and eos_token_id; generate takes criteria",
    "prefix_allowed_tokens_fn": f"{_ONE_TOKEN}; pass processors=(td.HostProcessor(...),)",
    "inputs": "pass the ids as input_ids",
    "inputs_embeds": "block decoding feeds tokens back; pass input_ids alone",
    "position_ids": "block decoding counts positions itself; leave it out",
    "cache_position": "block decoding counts positions itself; leave it out",
    "past_key_values": "block decoding keeps its own cache; pass the whole input_ids without it",
    "token_type_ids": "block decoding knows text alone; pass zeros or leave it out",
    "mm_token_type_ids": f"{_TEXT}, and pass zeros for text",
    "assistant_model": "the drafter stands beside the target; leave it out",
    "synced_gpus": "every process decodes on its own; pass synced_gpus=False",
    "streamer": "this call hands out its tokens itself; generate takes a streamer",
    "custom_generate": "this is block decoding already; leave it out",
    "negative_prompt_ids": "guidance is not supported; leave it out",
    "negative_prompt_attention_mask": "guidance is not supported; leave it out",
}
# Without a meaning here, or without one for the text.
_IGNORED = ("assistant_tokenizer", "trust_remote_code", "logits_to_keep", "use_cache")


def _no_tokens(cache: Any) -> bool:
    return hasattr(cache, "get_seq_length") and int(cache.get_seq_length()) == 0


def _is_empty(given: Any) -> bool:
    return isinstance(given, list | tuple | dict) and not given


def _all_zero(given: Any) -> bool:
    return isinstance(given, torch.Tensor) and not given.any()


# Values other than None that ask for nothing.
_NOTHING: dict[str, Callable[[Any], bool]] = {
    "logits_processor": _is_empty,
    "stopping_criteria": _is_empty,
    "mm_encoder_outputs": _is_empty,  # transformers' own, of a multimodal model given text alone
    "past_key_values": _no_tokens,
    "token_type_ids": _all_zero,
    "mm_token_type_ids": _all_zero,
    "synced_gpus": lambda given: given is False,
}


def is_cache(given: Any) -> bool:
    """Whether ``cache`` is transformers' own, called otherwise before 5.24; here it names a kind of ours."""
    return hasattr(given, "get_seq_length") or isinstance(given, tuple)


def check_argument(name: str, value: Any, target: Any) -> None:
    """Refuse an argument that is no option of this call, unless it asks for nothing.

    Raises:
        TypeError: a name that neither transformers nor an engine knows, or one of `torch_dflash.compile`.
        ValueError: an argument of transformers that a round cannot honour; the message says what to do.
    """
    if name in COMPILED:
        raise TypeError(f"{name} is fixed when an engine is built; pass it to torch_dflash.compile.")
    if not _known(name, target):
        own = *ours(), "response_format", *OF_LOGITS
        raise TypeError(
            f"unknown option {name!r}; options are seed, {', '.join(own)} and the fields of transformers' "
            "GenerationConfig." + meant(name, [*config_fields(), "seed", "tokenizer", *own, *OF_A_CALL])
        )
    if value is not None and name not in _IGNORED and not _NOTHING.get(name, lambda _: False)(value):
        fix = _OPTIONS.get(name, _TEXT if MEDIA.search(name) else _ALONE)
        raise ValueError(f"{_shown(name, value)}: {fix}.")


def _known(name: str, target: Any) -> bool:
    mixin: Any = GenerationMixin
    calls = (mixin.generate, type(target).forward)
    return name in _OPTIONS or name in _IGNORED or any(name in inspect.signature(c).parameters for c in calls)


def _shown(name: str, value: Any) -> str:
    """The argument in a few words: arrays and models print pages."""
    name = "cache (past_key_values)" if name == "past_key_values" else name
    if hasattr(value, "get_seq_length"):
        return f"{name} holds {value.get_seq_length()} tokens"
    if isinstance(value, list | tuple) and value:
        return f"{name} holds {type(value[0]).__name__}"
    plain = isinstance(value, bool | int | float | str)
    return f"{name}={value!r}" if plain else f"{name}={type(value).__name__}"
