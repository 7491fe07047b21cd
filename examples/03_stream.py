"""An answer as it comes: [drafted tokens] stand in brackets, the target's own picks do not."""

import torch_dflash as td

target, drafter, tokenizer = td.load_demo_pair(progress=False)
question = [{"role": "user", "content": "What is 12 times 12? Show each step."}]
inputs = tokenizer.apply_chat_template(
    question, add_generation_prompt=True, return_tensors="pt", return_dict=True
)

accepted = total = 0
for (piece,) in td.stream(
    target, drafter, **inputs, tokenizer=tokenizer, max_new_tokens=48, do_sample=False, runtime="eager"
):
    for token, drafted in zip(piece.tokens, piece.drafted, strict=True):
        text = tokenizer.decode([token])
        print(f"[{text}]" if drafted else text, end="", flush=True)
    accepted, total = accepted + sum(piece.drafted), total + len(piece.drafted)
print(f"\n{accepted} of {total} tokens were drafted")
