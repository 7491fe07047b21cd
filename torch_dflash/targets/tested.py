"""Classes of transformers whose decoding was held against their own (`docs/families.md`)."""

from __future__ import annotations

from types import BuiltinFunctionType
from typing import Any

import transformers
from packaging.version import Version
from torch import nn
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from torch_dflash.targets.code import functions_of
from torch_dflash.targets.origins import at_home, links

WITH = "5.24"
"""The newest transformers they were tested with: what a later one changed is not known."""
TESTED = frozenset(
    {
        "AXK1ForCausalLM",
        "AfmoeForCausalLM",
        "Apertus1p5TextForCausalLM",
        "ApertusForCausalLM",
        "ArceeForCausalLM",
        "AriaForConditionalGeneration",
        "AriaTextForCausalLM",
        "AyaVisionForConditionalGeneration",
        "BeamForCausalLM",
        "BertGenerationDecoder",
        "BertLMHeadModel",
        "BioGptForCausalLM",
        "BitNetForCausalLM",
        "CTRLLMHeadModel",
        "Cohere2ForCausalLM",
        "Cohere2MoeForCausalLM",
        "Cohere2VisionForConditionalGeneration",
        "CohereCompassForCausalLM",
        "CodeGenForCausalLM",
        "CohereForCausalLM",
        "CwmForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekVLForConditionalGeneration",
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
        "GPTJForCausalLM",
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
        "Glm4vForConditionalGeneration",
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
        "Idefics3ForConditionalGeneration",
        "InternVLForConditionalGeneration",
        "Jais2ForCausalLM",
        "JanusForConditionalGeneration",
        "Kolibri1ForCausalLM",
        "LagunaForCausalLM",
        "LlamaForCausalLM",
        "LlavaForConditionalGeneration",
        "LlavaNextForConditionalGeneration",
        "LlavaOnevisionForConditionalGeneration",
        "MellumForCausalLM",
        "MiMoV2FlashForCausalLM",
        "MiniCPM3ForCausalLM",
        "MiniMaxM2ForCausalLM",
        "MiniMaxM3VLForCausalLM",
        "Ministral3ForCausalLM",
        "MinistralForCausalLM",
        "Mistral3ForConditionalGeneration",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "ModernBertDecoderForCausalLM",
        "MuseGlimmerForConditionalGeneration",
        "NanoChatForCausalLM",
        "NemotronForCausalLM",
        "OPTForCausalLM",
        "Olmo2ForCausalLM",
        "Olmo3ForCausalLM",
        "OlmoForCausalLM",
        "OlmoeForCausalLM",
        "Ovis2ForConditionalGeneration",
        "PersimmonForCausalLM",
        "Phi3ForCausalLM",
        "Phi4MultimodalForCausalLM",
        "PhiForCausalLM",
        "PhimoeForCausalLM",
        "Qwen2AudioForConditionalGeneration",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3_5ForCausalLM",
        "RoCBertForCausalLM",
        "SeedOssForCausalLM",
        "SmolLM3ForCausalLM",
        "SmolVLMForConditionalGeneration",
        "SolarOpenForCausalLM",
        "StableLmForCausalLM",
        "Starcoder2ForCausalLM",
        "VaultGemmaForCausalLM",
        "VoxtralForConditionalGeneration",
        "YoutuForCausalLM",
    }
)


def is_tested(model: nn.Module) -> bool:
    """Whether ``model`` is of a tested class and runs transformers' own code: no subclass, no patch."""
    kind = type(model)
    if kind.__name__ not in TESTED or not kind.__module__.startswith("transformers.models."):
        return False
    if Version(transformers.__version__).release[:2] > Version(WITH).release:
        return False
    return all(map(at_home, functions_of(model)))


def check_implementations(config: Any) -> None:
    """Refuse attention or experts that are not transformers' and torch's own: they would not run.

    Raises:
        ValueError: names them.
    """
    kinds = (
        ("attn", "_attn_implementation", ALL_ATTENTION_FUNCTIONS),
        ("attn", "_attn_implementation", ALL_MASK_ATTENTION_FUNCTIONS),
        ("experts", "_experts_implementation", ALL_EXPERTS_FUNCTIONS),
    )
    for kind, field, registry in kinds:
        name = getattr(config, field, None)
        if name in registry and not _is_own(registry[name]):
            raise ValueError(
                f"{kind}_implementation={name!r} ({registry[name]!r}) is not transformers' own, and would "
                f"not run; call set_{kind}_implementation('eager') on the target, if that says the same."
            )
    scaled, softmax = functional.scaled_dot_product_attention, functional.softmax
    for name, value in (("scaled_dot_product_attention", scaled), ("softmax", softmax)):
        if not (isinstance(value, BuiltinFunctionType) or _is_own(value)):
            raise ValueError(
                f"torch.nn.functional.{name} is {value!r}, not torch's own, and would not run; put torch's "
                "own back before passing the target."
            )


def _is_own(function: Any) -> bool:
    found = list(links(function))
    return bool(found) and all(map(at_home, found))
