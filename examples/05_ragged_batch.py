"""One engine for a batch of prompts of different lengths, each row with its own options."""

import torch_dflash as td

target, tokenizer = td.load_demo_target(progress=False)
tokenizer.padding_side = "left"
prompts = [  # lookup drafts repetitions of the text
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,",
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday,",
    "The dog says woof, the cat says meow, the cow says",
]
inputs = tokenizer(prompts, return_tensors="pt", padding=True)

engine = td.compile(target, td.NGramProposer(width=4), runtime="eager", max_length=128, batch_size=4)
out = engine.generate(
    **inputs,
    max_new_tokens=[8, 24, 16],
    do_sample=True,
    temperature=[0.0, 0.0, 0.8],  # 0 is greedy
    seed=[1, 2, 3],
    return_dict_in_generate=True,
)
for row, lengths in zip(out.sequences, out.stats.acceptance_lengths, strict=True):
    print(repr(tokenizer.decode(row, skip_special_tokens=True)))
    print("   acceptance lengths:", lengths)
