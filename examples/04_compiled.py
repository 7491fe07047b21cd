"""Compile once, decode often: XLA programs in int8, and no compilation after warm-up."""

import torch

import torch_dflash as td

target, drafter, tokenizer = td.load_demo_pair(dtype=torch.bfloat16, progress=False)
engine = td.compile(target, drafter, max_length=256, quantize="int8", verify_width="auto").warmup()
for text in ("What is the capital of France?", "Write a haiku about rain."):
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    out = engine.generate(**inputs, max_new_tokens=32, do_sample=False, return_dict_in_generate=True)
    print(tokenizer.decode(out.new_tokens[0], skip_special_tokens=True))
    stats = out.stats
    print(
        f"   first token after {stats.time_to_first_token * 1e3:.0f} ms, then "
        f"{stats.time_per_output_token * 1e3:.1f} ms a token, {stats.compilations} compilations"
    )
