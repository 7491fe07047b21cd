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


def say(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
