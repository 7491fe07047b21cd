"""Options by the names that vLLM, mlx-lm, llama.cpp and OpenAI's API have for them."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_LENGTH = "max_new_tokens"
_STOP = "stop_strings=[...], with tokenizer="
_SPELT = "grammar=torch_dflash.Grammar(...), or response_format= with tokenizer="
_WIDTH = "block_size (what is drafted) or verify_width (what is verified)"
_PLACE = "target.to(device) for runtime='eager'; runtime='xla' decodes on JAX's default device, or on mesh="
_LOADED = "a matter of loading: from_pretrained(..., dtype=)"
_IDS = "input_ids=, the tokenizer's ids"
_HERE = {
    "max_tokens": _LENGTH,
    "max_completion_tokens": _LENGTH,
    "max_output_tokens": _LENGTH,
    "n_predict": _LENGTH,
    "num_predict": _LENGTH,
    "min_tokens": "min_new_tokens",
    "temp": "temperature",
    "stop": _STOP,
    "stop_sequences": _STOP,
    "stop_words": _STOP,
    "stop_token_ids": "eos_token_id=[...]",
    "ignore_eos": "eos_token_id=None",
    "n": "num_return_sequences",
    "logprobs": "output_logprobs=True or top_logprobs=K, with return_dict_in_generate=True",
    "logit_bias": "sequence_bias={(id,): bias}",
    "logits_processors": "processors=(torch_dflash.HostProcessor(...),)",
    "repeat_penalty": "repetition_penalty",
    "json_schema": _SPELT,
    "guided_json": _SPELT,
    "guided_regex": _SPELT,
    "guided_decoding": _SPELT,
    "structured_outputs": _SPELT,
    "sampling_params": f"its fields one by one, such as {_LENGTH}, temperature and top_p",
    "messages": "torch_dflash.Chat(engine, tokenizer), or tokenizer.apply_chat_template for input_ids",
    "prompt": _IDS,
    "prompts": _IDS,
    "stream": "torch_dflash.stream(...)",
    "draft_model": "the drafter, the second argument",
    "num_draft_tokens": _WIDTH,
    "num_speculative_tokens": _WIDTH,
    "speculative_config": f"the drafter, the second argument, and {_WIDTH}",
    "device": _PLACE,
    "device_map": _PLACE,
    "dtype": _LOADED,
    "torch_dtype": _LOADED,
    "tensor_parallel_size": "mesh",
    "max_model_len": "max_length of torch_dflash.compile",
    "timeout": "max_time",
}


def meant(name: str, known: Iterable[str] = ()) -> str:
    """A sentence that says how ``name`` is called here, or which of ``known`` is spelt like it; else ""."""
    spelt = name.lower()
    if spelt in _HERE:
        return f" Here {name} is {_HERE[spelt]}."
    close = get_close_matches(spelt, known, n=1, cutoff=0.8)
    return f" Did you mean {close[0]}?" if close else ""


def check_compiled_options(unknown: Iterable[str], known: Iterable[str]) -> None:
    """Raise ``TypeError`` for a keyword that `torch_dflash.compile` does not take; ``known`` are its own."""
    for name in unknown:
        raise TypeError(
            f"unknown option {name!r}; torch_dflash.compile takes {', '.join(known)}, and the calls of its "
            "engine take options of a request, such as max_new_tokens." + meant(name, known)
        )
