"""A conversation: each turn reads only what is new, and an edit goes back to what is shared."""

import torch_dflash as td

target, drafter, tokenizer = td.load_demo_pair(progress=False)
engine = td.compile(target, drafter, runtime="eager", max_length=512)
chat = td.Chat(engine, tokenizer, do_sample=False, max_new_tokens=32)
messages = []


def ask(text):
    messages.append({"role": "user", "content": text})
    messages.append(chat(messages))
    print(f"> {text}\n{messages[-1]['content']}")
    print(f"   {chat.stats.prefilled} tokens read, acceptance length {chat.stats.mean_acceptance_length:.2f}")


ask("What is the capital of France?")
ask("Which river flows through Paris?")
del messages[2:]  # the second turn is taken back
ask("Name a famous museum in Paris.")
