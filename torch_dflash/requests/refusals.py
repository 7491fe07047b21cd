"""Fields of transformers' ``GenerationConfig``: honoured, without effect, or refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from transformers import GenerationConfig

from torch_dflash.requests.rules import KINDS, ours

_READ = frozenset(
    "max_length max_new_tokens do_sample temperature top_k top_p min_p eos_token_id pad_token_id "
    "return_dict_in_generate stop_strings max_time num_return_sequences output_scores output_logits".split()
)
HONOURED = _READ.union(KINDS) - {*ours()}

# They change no token here: they speak of beams, of an assistant, of transformers' own caches and graphs, or
# of a prompt that is absent.
HARMLESS = frozenset(
    "assistant_confidence_threshold assistant_lookbehind bos_token_id cache_config cache_implementation "
    "compile_config continuous_batching_config decoder_start_token_id disable_compile early_stopping "
    "length_penalty low_memory max_cache_len max_matching_ngram_size num_assistant_tokens "
    "num_assistant_tokens_schedule prefill_chunk_size renormalize_logits target_lookbehind "
    "transformers_version use_cache".split()
)

# They change the text, or ask for what a round does not keep: refused unless neutral. An empty list
# always is.
NEUTRAL: dict[str, tuple] = {
    "num_beams": (1,),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "top_h": (),
    "force_words_ids": (),
    "constraints": (),
    "guidance_scale": (1.0,),
    "watermarking_config": (),
    "penalty_alpha": (0.0,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "remove_invalid_values": (False,),
    "token_healing": (False,),
    "prompt_lookup_num_tokens": (),
    "is_assistant": (False,),
    "assistant_early_exit": (),
    "assistant_ensemble_weight": (),
    "speculation_type": (),
    "use_mtp": (False,),
    "dola_layers": (),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
}


def config_fields() -> set[str]:
    """The options that the installed transformers has, by its own ``GenerationConfig``."""
    return {name for name in vars(GenerationConfig()) if not name.startswith("_")}


def refuse_doubled_cache(options: dict[str, Any]) -> None:
    """Raise ``ValueError`` for ``use_cache=None``, which is not to transformers as if nothing were given."""
    if options.get("use_cache", True) is None:
        raise ValueError(
            "use_cache=None is not supported in block decoding: transformers then feeds its cache what it "
            "holds already, which changes the text; leave use_cache out."
        )


def refuse_unsupported(config: GenerationConfig | SimpleNamespace) -> None:
    """Raise ``ValueError`` for an option that changes the text and that a round does not honour.

    A field of a transformers newer than these tables counts as one.
    """
    kind = getattr(config, "cache_implementation", None)
    if isinstance(kind, str) and kind == "quantized":  # the others keep what they are given
        raise ValueError(
            f"cache_implementation={kind!r} is not supported in block decoding: it rounds keys and values, "
            "which changes the text; pass cache_implementation='dynamic'."
        )
    defaults = GenerationConfig._get_default_generation_params()
    unknown = sorted(config_fields() - HONOURED - HARMLESS - NEUTRAL.keys())
    for name in (*NEUTRAL, *unknown):
        value = getattr(config, name, None)
        neutral = NEUTRAL.get(name, (defaults.get(name),))
        if not _is_neutral(value, neutral):
            fix = f"leave {name} unset" if neutral in ((), (None,)) else f"pass {name}={neutral[0]}"
            raise ValueError(f"{name}={value!r} is not supported in block decoding; {fix}.")


def _is_neutral(value: Any, neutral: tuple) -> bool:
    if value is None or isinstance(value, list | tuple | dict | set) and not value:
        return True
    # By number, not by truth: an array has no truth value.
    return isinstance(value, bool | int | float) and value in neutral
