"""Small checkpoints with quantised weights in published fields."""

import json

import torch
import transformers as hf
from safetensors.torch import load_file, save_file

SMALL = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
KINDS = {
    "mxfp4": (hf.GptOssForCausalLM, hf.GptOssConfig, SMALL | MOE | {"sliding_window": 6}),
    "fp8": (hf.Qwen3ForCausalLM, hf.Qwen3Config, SMALL),
    "fp8_experts": (hf.MiniMaxM2ForCausalLM, hf.MiniMaxM2Config, SMALL | MOE | {"rotary_dim": 8}),
    "fp8_tensor": (hf.Qwen3ForCausalLM, hf.Qwen3Config, SMALL),
}
BY_EXPERTS = SMALL | {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
PACKED = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
"""The weights of Kimi-K2.5's config_groups, whose routed experts alone are packed."""
BLOCK = 16


def publish(name, folder, block=BLOCK):
    """A random model of ``name`` in published fields: codes and scales of blocks, other tensors unchanged."""
    kind, config, fields = KINDS[name]
    torch.manual_seed(0)
    kind(config(**fields)).to(torch.bfloat16).save_pretrained(folder)
    state, found = load_file(folder / "model.safetensors"), {}
    for tensor, value in state.items():
        last = tensor.rpartition(".")[2]
        if name == "mxfp4" and last in ("gate_up_proj", "down_proj"):
            e, i, o = value.shape
            found[tensor + "_blocks"] = torch.randint(0, 256, (e, o, i // 32, 16), dtype=torch.uint8)
            found[tensor + "_scales"] = torch.randint(118, 128, (e, o, i // 32), dtype=torch.uint8)
        elif name != "mxfp4" and value.ndim == 2 and ("proj" in tensor or ".experts." in tensor):
            rows, columns = (1, 1) if name == "fp8_tensor" else (-(-side // block) for side in value.shape)
            found[tensor] = (torch.randn(value.shape) * 100).to(torch.float8_e4m3fn)
            found[tensor + "_scale_inv"] = torch.rand(rows, columns) + 0.1
            if name == "fp8_tensor":
                found[tensor + "_scale_inv"] = found[tensor + "_scale_inv"][0, 0].clone()
        else:
            found[tensor] = value
    save_file({key: value.contiguous() for key, value in found.items()}, folder / "model.safetensors")
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "model.layers.*.self_attn"]}
    if name != "mxfp4":
        method = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [block, block]}
    say(folder, quantization_config=method)
    return folder


def pack(codes):
    """Codes [out, in] from -8 to 7 in integers of 32 bits, by the definition: 8 added, the first lowest."""
    wide = codes.long() + 8
    words = sum(wide[:, at::8] << 4 * at for at in range(8))
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32)


def packed(folder, named, scales=torch.bfloat16, size=32, **changes):
    """The checkpoint in ``folder`` with int4 in compressed-tensors' fields for the weights ``named`` so."""
    state, found = load_file(folder / "model.safetensors"), {}
    torch.manual_seed(1)
    for name, value in state.items():
        if named not in name or value.ndim != 2:
            found[name] = value
            continue
        out, width = value.shape
        found[name + "_packed"] = pack(torch.randint(-8, 8, value.shape))
        found[name + "_scale"] = ((torch.rand(out, width // (size or width)) + 0.1) / 40).to(scales)
        found[name + "_shape"] = torch.tensor(value.shape)
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    weights = PACKED | ({"group_size": size} if size else {"strategy": "channel", "group_size": None})
    group = {"weights": weights, "targets": ["Linear"], "input_activations": None, "output_activations": None}
    said = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
    said |= {"quantization_status": "compressed", "kv_cache_scheme": None} | {"config_groups": {"g": group}}
    say(folder, quantization_config=said | changes)
    return folder


def publish_int4(folder, named="proj", **options):
    """A random Qwen3-MoE, its experts stored one by one, with the weights ``named`` so `packed`."""
    torch.manual_seed(0)
    hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**BY_EXPERTS)).to(torch.bfloat16).save_pretrained(folder)
    return packed(folder, named, **options)


def say(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
