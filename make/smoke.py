"""The smoke test of `make dist`: from an installed wheel both runtimes decode, and data files are there."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import torch_dflash as td
from torch_dflash.demo.pair import load_demo_drafter

assert Path(td.__file__).is_relative_to(sys.prefix), f"{td.__file__} is not the installed package"
assert version("torch-dflash") == td.__version__
assert td.checkpoints, "published/pairs.json"
assert load_demo_drafter(torch.bfloat16).config.block_size > 1, "assets"
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).eval()
ids = torch.arange(1, 9)[None]
options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
wanted = model.generate(ids, **options)
for runtime in ("eager", "xla"):
    assert td.generate(model, td.NGramProposer(4), ids, runtime=runtime, **options).equal(wanted), runtime
print(f"torch-dflash {td.__version__}: eager and xla decode as transformers does")
