"""Penalties, stop strings and a rule of your own, exact inside blocks: the text is plain decoding's."""

import torch

import torch_dflash as td

target, drafter, tokenizer = td.load_demo_pair(progress=False)
question = [{"role": "user", "content": "List some animals of the forest."}]
inputs = tokenizer.apply_chat_template(
    question, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
comma = tokenizer.encode(",")[0]


def no_two_commas(tokens, length, logits):  # tokens [B, S], length [B, M], logits [B, M, V]
    last = tokens.gather(1, (length - 1).long())  # the token before each row of the block
    is_comma = torch.arange(logits.shape[-1], device=logits.device) == comma
    return logits.masked_fill((last == comma)[..., None] & is_comma, -torch.inf)


options = {
    "max_new_tokens": 48,
    "do_sample": False,
    "repetition_penalty": 1.1,
    "stop_strings": ["\n\n", "fox"],
    "tokenizer": tokenizer,
    "processors": (td.BlockProcessor(no_two_commas),),
}
drafted = td.generate(target, drafter, **inputs, **options)
plain = td.generate(target, None, **inputs, **options)
print(tokenizer.decode(drafted[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print("same text:", drafted.equal(plain))
