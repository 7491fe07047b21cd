"""Decodes one question plainly and with drafts: same text, fewer target passes."""

import torch

import torch_dflash as td

target, drafter, tokenizer = td.load_demo_pair(progress=False)
question = [{"role": "user", "content": "Write a Python function that returns the n-th Fibonacci number."}]
inputs = tokenizer.apply_chat_template(
    question, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
options = {"max_new_tokens": 64, "do_sample": False, "return_dict_in_generate": True}

plain = td.generate(target, None, **inputs, **options)
drafted = td.generate(target, drafter, **inputs, **options)

print(tokenizer.decode(drafted.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print("same text:", torch.equal(plain.sequences, drafted.sequences))
print("acceptance length:", round(drafted.stats.mean_acceptance_length, 2))
print("target passes:", plain.stats.rounds, "->", drafted.stats.rounds)
