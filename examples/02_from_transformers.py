"""The doors of transformers: one argument more to `generate`, an assistant, a pipeline."""

from transformers import pipeline

import torch_dflash as td

target, drafter, tokenizer = td.load_demo_pair(progress=False)
question = [{"role": "user", "content": "Name the seven days of the week."}]
inputs = tokenizer.apply_chat_template(
    question, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
options = {"max_new_tokens": 32, "do_sample": False}
own = target.generate(**inputs, **options)

here = target.generate(**inputs, **options, custom_generate=td.dflash(drafter))
print("same text, custom_generate:", here.equal(own))

there = target.generate(**inputs, **options, assistant_model=drafter, speculation_type="dflash")
print("same text, transformers' own loop:", there.equal(own))

answers = pipeline("text-generation", model=target, tokenizer=tokenizer)
answer = answers(question, custom_generate=td.dflash(drafter), return_full_text=False, **options)
print(answer[0]["generated_text"])
