"""Classes of transformers whose decoding was held against their own (`docs/families.md`)."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from functools import partial, partialmethod
from pathlib import Path
from types import FunctionType
from typing import Any

import accelerate
import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

WITH = "5.23"
"""The newest transformers they were tested with: what a later one changed is not known."""
TESTED = frozenset(
    {
        "AXK1ForCausalLM",
        "AfmoeForCausalLM",
        "ApertusForCausalLM",
        "ArceeForCausalLM",
        "AriaTextForCausalLM",
        "BeamForCausalLM",
        "BertGenerationDecoder",
        "BertLMHeadModel",
        "BioGptForCausalLM",
        "BitNetForCausalLM",
        "CTRLLMHeadModel",
        "Cohere2ForCausalLM",
        "Cohere2MoeForCausalLM",
        "CohereCompassForCausalLM",
        "CohereForCausalLM",
        "CwmForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "Dots1ForCausalLM",
        "ElectraForCausalLM",
        "Emu3ForCausalLM",
        "Ernie4_5ForCausalLM",
        "Ernie4_5_MoeForCausalLM",
        "ErnieForCausalLM",
        "Exaone4ForCausalLM",
        "ExaoneMoeForCausalLM",
        "FlexOlmoForCausalLM",
        "FlintForCausalLM",
        "FuyuForCausalLM",
        "GPT2LMHeadModel",
        "GPTBigCodeForCausalLM",
        "GPTNeoXForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration",
        "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForCausalLM",
        "GemmaForCausalLM",
        "Glm4ForCausalLM",
        "Glm4MoeForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "GlmForCausalLM",
        "GotOcr2ForConditionalGeneration",
        "GptOssForCausalLM",
        "GraniteForCausalLM",
        "GraniteMoeForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeSWAForCausalLM",
        "GraniteMoeSharedForCausalLM",
        "GraniteSWAForCausalLM",
        "HYV3ForCausalLM",
        "HeliumForCausalLM",
        "HunYuanDenseV1ForCausalLM",
        "HunYuanMoEV1ForCausalLM",
        "HyperCLOVAXForCausalLM",
        "Jais2ForCausalLM",
        "Kolibri1ForCausalLM",
        "LagunaForCausalLM",
        "LlamaForCausalLM",
        "MellumForCausalLM",
        "MiMoV2FlashForCausalLM",
        "MiniCPM3ForCausalLM",
        "MiniMaxM2ForCausalLM",
        "MiniMaxM3VLForCausalLM",
        "Ministral3ForCausalLM",
        "MinistralForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "ModernBertDecoderForCausalLM",
        "NanoChatForCausalLM",
        "NemotronForCausalLM",
        "OPTForCausalLM",
        "Olmo2ForCausalLM",
        "Olmo3ForCausalLM",
        "OlmoForCausalLM",
        "OlmoeForCausalLM",
        "PersimmonForCausalLM",
        "Phi3ForCausalLM",
        "Phi4MultimodalForCausalLM",
        "PhiForCausalLM",
        "PhimoeForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "RoCBertForCausalLM",
        "SeedOssForCausalLM",
        "SmolLM3ForCausalLM",
        "SolarOpenForCausalLM",
        "StableLmForCausalLM",
        "Starcoder2ForCausalLM",
        "VaultGemmaForCausalLM",
        "YoutuForCausalLM",
    }
)


_HOMES = tuple(
    str(Path(file or "").parent) + os.sep
    for file in (transformers.__file__, torch.__file__, accelerate.__file__, __file__)
)
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep


def is_tested(model: nn.Module) -> bool:
    """Whether ``model`` is of a tested class and runs transformers' own code: no subclass, no patch."""
    kind = type(model)
    if kind.__name__ not in TESTED or not kind.__module__.startswith("transformers.models."):
        return False
    if Version(transformers.__version__).release[:2] > Version(WITH).release:
        return False
    return all(_at_home(function) for function in code_of(model))


def code_of(model: nn.Module) -> set[Any]:
    """The functions that ``model`` may run: methods of its modules and their bases, and of their files."""
    kinds = {base for module in model.modules() for base in type(module).__mro__ if _is_hf(base.__module__)}
    kinds |= {type(module) for module in model.modules()}
    names = {kind.__module__ for kind in kinds if kind.__module__.startswith("transformers.models.")}
    spaces = [*map(vars, kinds), *(vars(sys.modules[name]) for name in names)]
    return {function for space in spaces for value in list(space.values()) for function in _functions(value)}


def _is_hf(name: str) -> bool:
    return name.partition(".")[0] == "transformers"


def _functions(value: Any) -> Iterator[FunctionType]:
    """The functions behind a value: itself, and what a decorator, a descriptor or a partial of it wraps."""
    while value is not None:
        if isinstance(value, FunctionType):
            yield value
            value = vars(value).get("__wrapped__")
        elif isinstance(value, staticmethod | classmethod):
            value = value.__func__
        elif isinstance(value, partial | partialmethod):
            value = value.func
        else:
            call = getattr(type(value), "__call__", None)  # noqa: B004 - an object that stands for a function
            value = (
                value.fget
                if isinstance(value, property)
                else call
                if isinstance(call, FunctionType)
                else None
            )


def check_attention(config: Any) -> None:
    """Refuse an attention implementation that is not transformers' own: it would not run.

    Raises:
        ValueError: names it.
    """
    name = getattr(config, "_attn_implementation", None)
    for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        function = registry[name] if name in registry else None
        functions = list(_functions(function))
        if function is not None and not (functions and all(map(_at_home, functions))):
            raise ValueError(
                f"attn_implementation={name!r} ({function!r}) is not transformers' own, and would not run; "
                "call set_attn_implementation('eager') on the target, if that says the same."
            )


def _at_home(function: FunctionType) -> bool:
    file = function.__code__.co_filename
    standard = file.startswith((_STANDARD, "<frozen ")) and "-packages" + os.sep not in file
    return file.startswith(_HOMES) or standard
