"""An answer as it comes: [drafted tokens] stand in brackets, the target's own picks do not."""

import torch_dflash as td

target, drafter, tokenizer = td.load_demo_pair(progress=False)
question = [{"role": "user", "content": "How many minutes are there in three hours?"}]
inputs = tokenizer.apply_chat_template(
    question, add_generation_prompt=True, return_tensors="pt", return_dict=True
)

text = td.TextStream(tokenizer)  # never splits a character, and leaves special tokens out
accepted = total = 0
for (piece,) in td.stream(target, drafter, **inputs, max_new_tokens=64, do_sample=False, runtime="eager"):
    for token, drafted in zip(piece.tokens, piece.drafted, strict=True):
        new = text.push([token])
        print(f"[{new}]" if drafted and new else new, end="", flush=True)
    accepted, total = accepted + sum(piece.drafted), total + len(piece.drafted)
print(text.push([], final=True) + f"\n{accepted} of {total} tokens were drafted")
