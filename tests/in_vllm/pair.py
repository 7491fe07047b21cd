"""Random pairs that agree half the time, of sizes that tpu-inference's page layout takes."""

import json
from copy import deepcopy
from types import SimpleNamespace

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import MinistralConfig, MinistralForCausalLM, PreTrainedTokenizerFast

from torch_dflash.selftest import pairs

VOCAB, MASK, BLOCK = 250, 249, 6  # vLLM pads the vocabulary to 256
SIZES = {"hidden_size": 256, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


CLASSES = {"qwen3": "Qwen3ForCausalLM", "ministral": "MistralForCausalLM"}  # vLLM's names
WINDOWED = {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 8}
pairs.FAMILIES["ministral"] = (MinistralForCausalLM, MinistralConfig, WINDOWED)

GEMMA = WINDOWED | {"global_head_dim": 256, "final_logit_softcapping": 30.0, "pad_token_id": 0}
GEMMA |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
PIXELS = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
FAR = ("image_token_id", "video_token_id", "audio_token_id", "boi_token_id", "eoi_token_id", "boa_token_id")
IMAGES = {
    "gemma4": ("Gemma4", GEMMA, PIXELS | {"head_dim": 16, "position_embedding_size": 64}),
    "gemma4_unified": ("Gemma4Unified", GEMMA, {"mm_embed_dim": 32, "mm_posemb_size": 16, "patch_size": 4}),
}
"""Families whose config has images: (transformers' name, fields of the text's config, of the images')."""


def with_images(name, text, pixels):
    """An entry of `pairs.FAMILIES`; ids of images lie outside the vocabulary."""
    kind = getattr(transformers, f"{name}Config")
    known = {field: VOCAB + at for at, field in enumerate(FAR) if field in kind.__dataclass_fields__}

    def config(**fields):
        tied = {"tie_word_embeddings": fields.get("tie_word_embeddings", True)}
        return kind(text_config=deepcopy(fields | text | tied), vision_config=dict(pixels), **known)

    return getattr(transformers, f"{name}ForConditionalGeneration"), config, {}


for family, (name, *fields) in IMAGES.items():
    pairs.FAMILIES[family], CLASSES[family] = with_images(name, *fields), f"{name}ForConditionalGeneration"


def save(folder, target=None, drafter=None, agree=8.0, family="qwen3", layout=None, scale=1.0, said=0):
    """Write a target and a drafter in bfloat16 to ``folder``; options are fields of their configs.

    With ``agree`` the two mostly choose between the same two tokens; with 0 each of all.
    ``layout``: `as_speculators` or another, for the drafter's config. ``scale``: of the target's logits.
    ``said``: the number of ids that the drafter can say, by a head of its own; 0: all.
    """
    pairs.VOCAB, pairs.MASK = VOCAB, MASK
    fields = SIZES | {"vocab_size": VOCAB, "head_dim": 128, "max_position_embeddings": 512}
    model = pairs.make_target(family, 0, **(fields | (target or {})))
    own = {"mask_token_id": MASK, "block_size": BLOCK, "num_key_value_heads": 1, "head_dim": 64}
    own |= {"own_head": True, "draft_vocab_size": said} if said else {}
    with_text = SimpleNamespace(config=model.config.get_text_config())
    draft = pairs.make_drafter(with_text, 1, **(own | (drafter or {})))
    if family in IMAGES:  # they scale an embedding, which then would alone choose the next token
        model.get_input_embeddings().weight.data /= SIZES["hidden_size"] ** 0.5
    pairs.correlate(model, draft, agree)
    text_of(model).norm.weight.data *= scale
    own_tables(model, draft)
    model.to(torch.bfloat16).save_pretrained(folder / "target")
    draft.to(torch.bfloat16).save_pretrained(folder / "drafter")
    rewrite(folder / "target", lambda config: config | {"architectures": [CLASSES[family]]})
    if layout:
        rewrite(folder / "drafter", layout)


def text_of(model):
    return getattr(model.model, "language_model", model.model)


@torch.no_grad()
def own_tables(model, draft):
    """Give a drafter's own embedding and head the target's rows, and its Markov head some weight."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if draft.embed_tokens is not None:
        draft.embed_tokens.weight.copy_(embedding)
    if draft.d2t is not None:
        loud = head.norm(dim=1).argsort(descending=True)[: len(draft.d2t)]
        ids = loud.sort().values
        draft.d2t.copy_(ids - torch.arange(len(ids)))
        head = head[ids]
    if draft.lm_head is not None:
        draft.lm_head.weight.copy_(head)
    if draft.markov_head is not None:
        draft.markov_head.markov_w2.weight.mul_(10)


def to_fp8(folder):
    """Put fp8 in place of a target's projections, with a scale for each block of 128 x 128."""
    found, path = {}, folder / "model.safetensors"
    for name, weight in load_file(path).items():
        found[name] = weight
        if name.endswith("_proj.weight"):
            blocks = weight.float().unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
            scale = blocks.abs().amax((1, 3), keepdim=True) / 448
            found[name] = (blocks / scale).flatten(2).flatten(0, 1).to(torch.float8_e4m3fn)
            found[f"{name}_scale_inv"] = scale[:, 0, :, 0].contiguous()
    save_file(found, path, {"format": "pt"})
    own = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    rewrite(folder, lambda config: config | {"quantization_config": own})


def rewrite(folder, change):
    """Put ``change(fields)`` in place of the fields of a config."""
    path = folder / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def as_speculators(config):
    """The fields of a drafter of ours in the layout of the speculators library."""
    layer = bare(config)
    layer = {name: layer[name] for name in layer.keys() - {"block_size", "dtype", "num_target_layers"}}
    verifier = {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "target"}
    proposal = {"proposal_type": "greedy", "speculative_tokens": BLOCK - 1}
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        "transformer_layer_config": layer,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config["target_layer_ids"]],
        "block_size": config["block_size"],
        "mask_token_id": config["mask_token_id"],
        "dtype": config["dtype"],
        "tie_word_embeddings": False,
    }


MARKOV = ("markov_rank", "sample_from_anchor")


def as_deepspec(config):
    """The fields of a DSpark drafter of ours in DeepSpec's layout: the target's fields, and the drafter's."""
    return bare(config) | {
        "architectures": ["Qwen3DSparkModel"],
        "mask_token_id": config["mask_token_id"],
        "target_layer_ids": config["target_layer_ids"],
        "markov_rank": config["markov_rank"],
        "markov_head_type": "vanilla",
    }


def as_specforge(config):
    """The fields of a DSpark drafter of ours in SpecForge's layout: taps and mask in an object."""
    inside = {name: config[name] for name in ("mask_token_id", "target_layer_ids", "markov_rank")}
    named = {"architectures": ["DSparkDraftModel"], "dflash_config": inside | {"projector_type": "dspark"}}
    return bare(config) | named | {"markov_rank": config["markov_rank"], "markov_head_type": "vanilla"}


def as_speculators_dspark(config):
    """The fields of a DSpark drafter of ours in the layout of the speculators library."""
    found = as_speculators(config)
    found["speculators_config"]["algorithm"] = "dspark"
    found["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = BLOCK
    own = {name: config[name] for name in MARKOV} | {"markov_head_type": "vanilla"}
    return found | own | {"speculators_model_type": "dspark", "draft_vocab_size": config["draft_vocab_size"]}


def bare(config):
    """The fields that drafters of every layout share with their targets."""
    network = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    network += ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_parameters")
    network += ("vocab_size", "model_type", "hidden_act", "layer_types", "block_size", "dtype")
    return {name: config[name] for name in network} | {"num_target_layers": 4, "tie_word_embeddings": False}


def word_tokenizer():
    """A tokenizer with one word an id, ``w0 w1 ...``; the last is the mask, the first an unknown word."""
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(VOCAB)}, "w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")


def prompts(count, seed=0, longest=60):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest, (count,), generator=generator).tolist()
    return [torch.randint(0, MASK, (length,), generator=generator).tolist() for length in lengths]
