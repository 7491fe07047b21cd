"""Random pairs that agree half the time, of sizes that tpu-inference's page layout takes."""

import json

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import MinistralConfig, MinistralForCausalLM, PreTrainedTokenizerFast

from torch_dflash.selftest import pairs

VOCAB, MASK, BLOCK = 250, 249, 6  # vLLM pads the vocabulary to 256
SIZES = {"hidden_size": 256, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


CLASSES = {"qwen3": "Qwen3ForCausalLM", "ministral": "MistralForCausalLM"}  # vLLM's names
WINDOWED = {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 8}
pairs.FAMILIES["ministral"] = (MinistralForCausalLM, MinistralConfig, WINDOWED)


def save(folder, target=None, drafter=None, agree=8.0, family="qwen3", speculators=False, scale=1.0):
    """Write a target and a drafter in bfloat16 to ``folder``; options are fields of their configs.

    With ``agree`` the two mostly choose between the same two tokens; with 0 each of all.
    ``speculators``: the drafter's config in the layout of that library. ``scale``: of the target's logits.
    """
    pairs.VOCAB, pairs.MASK = VOCAB, MASK
    fields = SIZES | {"vocab_size": VOCAB, "head_dim": 128, "max_position_embeddings": 512}
    model = pairs.make_target(family, 0, **(fields | (target or {})))
    own = {"mask_token_id": MASK, "block_size": BLOCK, "num_key_value_heads": 1, "head_dim": 64}
    draft = pairs.make_drafter(model, 1, **(own | (drafter or {})))
    pairs.correlate(model, draft, agree)
    model.model.norm.weight.data *= scale
    model.to(torch.bfloat16).save_pretrained(folder / "target")
    draft.to(torch.bfloat16).save_pretrained(folder / "drafter")
    rewrite(folder / "target", lambda config: config | {"architectures": [CLASSES[family]]})
    if speculators:
        rewrite(folder / "drafter", as_speculators)


def rewrite(folder, change):
    """Put ``change(fields)`` in place of the fields of a config."""
    path = folder / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def as_speculators(config):
    """The fields of a drafter of ours in the layout of the speculators library."""
    network = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    network += ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_parameters")
    network += ("vocab_size", "model_type", "hidden_act", "layer_types")
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
        "transformer_layer_config": {name: config[name] for name in network},
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config["target_layer_ids"]],
        "block_size": config["block_size"],
        "mask_token_id": config["mask_token_id"],
        "dtype": config["dtype"],
        "tie_word_embeddings": False,
    }


def word_tokenizer():
    """A tokenizer with one word an id, ``w0 w1 ...``; the last is the mask, the first an unknown word."""
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(VOCAB)}, "w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")


def prompts(count, seed=0, longest=60):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest, (count,), generator=generator).tolist()
    return [torch.randint(0, MASK, (length,), generator=generator).tolist() for length in lengths]
