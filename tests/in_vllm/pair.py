"""Random pairs that agree half the time, of sizes that tpu-inference's page layout takes."""

import torch

from torch_dflash.selftest import pairs

VOCAB, MASK, BLOCK = 250, 249, 6  # vLLM pads the vocabulary to 256
SIZES = {"hidden_size": 256, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


def save(folder, target=None, drafter=None, agree=8.0):
    """Write a target and a drafter in bfloat16 to ``folder``; options are fields of their configs.

    With ``agree`` the two mostly choose between the same two tokens; with 0 each of all.
    """
    pairs.VOCAB, pairs.MASK = VOCAB, MASK
    fields = SIZES | {"vocab_size": VOCAB, "head_dim": 128, "max_position_embeddings": 512}
    model = pairs.make_target(
        "qwen3", 0, **(fields | {"architectures": ["Qwen3ForCausalLM"]} | (target or {}))
    )
    own = {"mask_token_id": MASK, "block_size": BLOCK, "num_key_value_heads": 1, "head_dim": 64}
    draft = pairs.make_drafter(model, 1, **(own | (drafter or {})))
    pairs.correlate(model, draft, agree)
    model.to(torch.bfloat16).save_pretrained(folder / "target")
    draft.to(torch.bfloat16).save_pretrained(folder / "drafter")


def prompts(count, seed=0, longest=60):
    """Random prompts of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest, (count,), generator=generator).tolist()
    return [torch.randint(0, MASK, (length,), generator=generator).tolist() for length in lengths]
