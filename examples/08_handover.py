"""Start eagerly, carry the state to XLA in mid-generation, come back: the same tokens as either alone."""

import torch

import jax_bridge as jb
import torch_dflash as td

target, tokenizer = td.load_demo_target(progress=False)
ids = tokenizer("Once upon a time there was a", return_tensors="pt")["input_ids"]
drafter = td.NGramProposer(width=4)
options = {"max_length": 64, "rounds_per_chunk": 3}
eager = td.compile(target, drafter, runtime="eager", **options)
xla = td.compile(target, drafter, runtime="xla", **options)
whole = eager.generate(ids, max_new_tokens=32, do_sample=False)[0]

state = eager.advance(eager.start(ids, max_new_tokens=32, do_sample=False))  # three rounds in PyTorch
state = jb.state_to_torch(xla.advance(jb.state_to_jax(state)))  # three in one XLA program
while not bool(state.done.all()):
    state = eager.advance(state)

tokens = state.tokens[0, : int(state.length[0]) + 1].long()
print(tokenizer.decode(tokens))
print("same tokens:", torch.equal(tokens, whole))
