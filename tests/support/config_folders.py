"""A tiny pair's configs without weights, for commands that read configs alone."""

import torch_dflash as td
from support.tiny import BASE, FAMILIES, MASK

DRAFTER = {
    "hidden_size": BASE["hidden_size"], "vocab_size": BASE["vocab_size"], "intermediate_size": 40,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "num_target_layers": BASE["num_hidden_layers"],
    "target_layer_ids": [0, 2], "block_size": 6, "mask_token_id": MASK,
}  # fmt: skip


def write_configs(tmp_path):
    _, config, extra = FAMILIES["qwen3"]
    config(**(BASE | extra)).save_pretrained(tmp_path / "target")
    td.DFlashConfig(**DRAFTER, architectures=["DFlashDraftModel"]).save_pretrained(tmp_path / "drafter")
    return tmp_path
