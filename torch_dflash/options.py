"""From a user's call and the model's ``generation_config`` to what each row asks for."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from torch_dflash.checks import INT32_MAX, check_counts, is_count

UNSET: Any = type("Unset", (), {"__repr__": lambda self: "<unset>"})()

# Options that change the text and that a round cannot honour yet: refused by name unless neutral.
_NEUTRAL = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "typical_p": (1.0,),
    "top_h": (),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "bad_words_ids": (),
    "force_words_ids": (),
    "constraints": (),
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "sequence_bias": (),
    "guidance_scale": (1.0,),
    "exponential_decay_length_penalty": (),
    "watermarking_config": (),
    "stop_strings": (),
    "max_time": (),
    "penalty_alpha": (0.0,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "remove_invalid_values": (False,),
    "token_healing": (False,),
    "prompt_lookup_num_tokens": (),
    "assistant_early_exit": (),
    "speculation_type": (),
    "use_mtp": (False,),
    "dola_layers": (),
    "output_scores": (False,),
    "output_logits": (False,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
}


# Fixed when an engine is built, so no option of a call on it.
_COMPILED = (
    "runtime",
    "block_size",
    "verify_width",
    "rounds_per_chunk",
    "batch_size",
    "stop_slots",
    "filters",
    "cache",
    "verify",
)


@dataclass(frozen=True)
class Request:
    """What a batch asks for, one entry per row. ``temperature`` 0 means greedy, ``top_k`` 0 no top-k."""

    max_new_tokens: list[int]
    temperature: list[float]
    top_k: list[int]
    top_p: list[float]
    min_p: list[float]
    seed: list[int]
    stop_ids: list[tuple[int, ...]]
    pad_token_id: int

    @property
    def filters(self) -> bool:
        """Whether any row filters the vocabulary."""
        rows = zip(self.temperature, self.top_k, self.top_p, self.min_p, strict=True)
        return any(t > 0 and (k > 0 or p < 1 or m > 0) for t, k, p, m in rows)


def defaults_of(target: Any, given: GenerationConfig | None) -> Any:
    """The model's ``generation_config``, or a user's with its unset fields filled from the model's."""
    if given is None:
        return target.generation_config
    if not isinstance(given, GenerationConfig):
        raise TypeError(
            f"generation_config={type(given).__name__}: pass a transformers GenerationConfig, or its options."
        )
    merged = copy.deepcopy(given)
    merged.update(defaults_only=True, **target.generation_config.to_dict())
    return merged


def resolve(
    defaults: GenerationConfig, prompt_lengths: list[int], width: int, options: dict[str, Any]
) -> Request:
    """Merge ``options`` over the model's defaults, as transformers' ``generate`` does.

    Args:
        defaults: the target's ``generation_config``; not modified.
        prompt_lengths: real tokens per row.
        width: columns of the padded prompt, which ``max_length`` counts.
        options: keyword arguments of the call; None means unset, save for ``eos_token_id`` (`UNSET`).

    Raises:
        ValueError: an option is out of range or cannot be honoured. TypeError: unknown option.
    """
    eos = options.pop("eos_token_id", UNSET)
    seed = options.pop("seed", None)
    config = copy.deepcopy(defaults)
    _check_call(options)
    per_row = {
        name: options.pop(name)
        for name in ("temperature", "top_k", "top_p", "min_p", "max_new_tokens")
        if options.get(name) is not None
        and (name == "max_new_tokens" or isinstance(options[name], Sequence | torch.Tensor))
    }
    asked = {name: value for name, value in options.items() if value is not None}
    config.update(**asked)
    config.update(defaults_only=True, **config._get_default_generation_params())
    refuse_unsupported(config)
    rows = len(prompt_lengths)
    sampled = bool(config.do_sample)
    if "temperature" in (asked | per_row) and not sampled:
        wanted = _rows("temperature", per_row.get("temperature", config.temperature), rows)
        if any(wanted) and options.get("do_sample") is None:
            raise ValueError(
                f"temperature={wanted} while do_sample is unset and the model's default is greedy; "
                "pass do_sample=True to sample."
            )

    def row_values(name, off):
        value = per_row.get(name, getattr(config, name, None))
        return _rows(name, off if value is None else value, rows)

    request = Request(
        max_new_tokens=_budgets(config, per_row, asked, prompt_lengths, width),
        temperature=row_values("temperature", 1.0) if sampled else [0.0] * rows,
        top_k=row_values("top_k", 0),
        top_p=row_values("top_p", 1.0),
        min_p=row_values("min_p", 0.0),
        seed=_seeds(seed, rows),
        stop_ids=_stop_ids(config.eos_token_id if eos is UNSET else eos, rows),
        pad_token_id=_pad(config, eos),
    )
    _check_ranges(request)
    return request


def _check_call(options: dict[str, Any]) -> None:
    """Refuse unknown names and wrong types before transformers sees them: its messages name no fix."""
    for name in options:
        if name in _COMPILED:
            raise TypeError(f"{name} is fixed when an engine is built; pass it to torch_dflash.compile.")
        if name.startswith("_") or name not in vars(GenerationConfig()):
            raise TypeError(
                f"unknown option {name!r}; options are seed and the fields of transformers' GenerationConfig."
            )
    if not isinstance(options.get("do_sample"), bool | None):
        raise ValueError(f"do_sample={options['do_sample']!r}: must be True, False or None (unset).")
    pad = options.get("pad_token_id")
    if pad is not None and not is_count(pad):
        raise ValueError(f"pad_token_id={pad!r}: must be one integer token id.")
    refuse_unsupported(SimpleNamespace(**options))


def refuse_unsupported(
    config: GenerationConfig | SimpleNamespace, already_done: tuple[str, ...] = ()
) -> None:
    """Raise ``ValueError`` for an option that changes the text and that a round does not honour.

    ``already_done`` names options that the caller has applied.
    """
    for name, neutral in _NEUTRAL.items():
        value = getattr(config, name, None)
        if value is not None and value not in neutral and name not in already_done:
            fix = f"pass {name}={neutral[0]}" if neutral else f"leave {name} unset"
            raise ValueError(f"{name}={value!r} is not supported in block decoding; {fix}.")


def _rows(name: str, value: Any, rows: int) -> list:
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if not isinstance(value, Sequence):
        return [value] * rows
    if len(value) != rows:
        raise ValueError(f"{name} has {len(value)} entries for a batch of {rows}; give one, or one per row.")
    return list(value)


def _budgets(config, per_row, asked, prompt_lengths, width) -> list[int]:
    rows = len(prompt_lengths)
    budget = per_row.get("max_new_tokens", config.max_new_tokens)
    if budget is None:
        if config.max_length == config._get_default_generation_params()["max_length"] and (
            "max_length" not in asked
        ):
            budget = config.max_length  # transformers' default: 20 tokens beyond the prompt
        else:
            budget = room_below(config.max_length, width)
    budgets = _rows("max_new_tokens", budget, rows)
    for value in budgets:
        check_counts(max_new_tokens=value)
    return budgets


def room_below(max_length: Any, width: int) -> int:
    """The new tokens that ``max_length`` leaves after ``width`` columns of prompt; ``ValueError`` if none."""
    check_counts(max_length=max_length)
    if max_length <= width:
        raise ValueError(
            f"max_length={max_length} leaves no room after the prompt's {width} columns; pass "
            f"max_new_tokens, or a max_length of at least {width + 1}."
        )
    return max_length - width


def drawn_seed() -> int:
    """A seed from torch's generator: ``torch.manual_seed`` rules, as everywhere in transformers."""
    return int(torch.randint(0, 2**31 - 1, (1,), device="cpu").item())


def _seeds(seed: Any, rows: int) -> list[int]:
    seed = drawn_seed() if seed is None else seed
    given: Any = seed.tolist() if isinstance(seed, torch.Tensor | np.ndarray) else seed
    one = not isinstance(given, Sequence)  # an array of no dimensions is a number
    seeds = [given] if one else _rows("seed", given, rows)
    for value in seeds:
        if not is_count(value):
            raise ValueError(f"seed={value!r}: must be an integer, or one integer per row.")
        if not -(2**63) <= value < 2**64:
            raise ValueError(f"seed={value}: must lie in [-2**63, 2**64); take it modulo 2**64.")
    # Rows of a batch must not share their noise.
    return [int(given) + row for row in range(rows)] if one else [int(value) for value in seeds]


def seed_key(seed: int) -> int:
    """The 32-bit key, unsigned, of a seed taken modulo 2**64 (so -1 is the seed 2**64 - 1).

    The low word, offset by 32 bits of the high word's splitmix64 finaliser (Steele et al. 2014): seeds that
    share their high word, as the rows of a batch do, never share a key; any other two do so by chance, one
    time in 2**32. The finaliser maps 0 to 0, so a seed below 2**32 is its own key; `sampling.noise_bits`
    does the rest of the mixing.
    """
    word = 2**64 - 1
    low, high = seed & 0xFFFFFFFF, (seed & word) >> 32
    high = (high ^ (high >> 30)) * 0xBF58476D1CE4E5B9 & word
    high = (high ^ (high >> 27)) * 0x94D049BB133111EB & word
    return low ^ ((high ^ (high >> 31)) & 0xFFFFFFFF)


def _stop_ids(eos, rows: int) -> list[tuple[int, ...]]:
    if isinstance(eos, torch.Tensor):
        eos = eos.tolist()
    if eos is None:
        return [()] * rows
    if not isinstance(eos, list | tuple):
        stops = [(eos,)] * rows
    elif any(isinstance(entry, list | tuple) for entry in eos):
        stops = [tuple(entry) for entry in _rows("eos_token_id", eos, rows)]
    else:
        stops = [tuple(eos)] * rows
    for stop in [stop for row in stops for stop in row]:
        if not is_count(stop) or stop < 0:
            raise ValueError(
                f"eos_token_id holds {stop!r}: must be token ids; pass None or [] to never stop."
            )
        if stop > INT32_MAX:
            raise ValueError(
                f"eos_token_id holds {stop}: token ids are int32, at most {INT32_MAX}; pass the target's own "
                "stop ids, or None to never stop."
            )
    return stops


def _pad(config: GenerationConfig, eos) -> int:
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    first = _stop_ids(config.eos_token_id if eos is UNSET else eos, 1)[0]
    return int(first[0]) if first else 0


def _check_ranges(request: Request) -> None:
    checks = {
        "temperature": (lambda v: 0 <= v < math.inf, "a number, 0 (greedy) or more"),
        "top_k": (
            lambda v: is_count(v) and 0 <= v <= INT32_MAX,
            f"an integer, 0 (off) or more, at most {INT32_MAX} (int32); pass 0 to keep every token",
        ),
        "top_p": (lambda v: 0 < v <= 1, "a number in (0, 1]"),
        "min_p": (lambda v: 0 <= v <= 1, "a number in [0, 1]"),
    }
    for name, (holds, rule) in checks.items():
        for value in getattr(request, name):
            if isinstance(value, bool) or not isinstance(value, Real) or not holds(value):
                raise ValueError(f"{name}={value!r}: must be {rule}.")
