"""A union's trees on a slice at every door: saved states, chats, streams, replicas."""

import pytest
from support.slices import run_on_four

DOORS = """
import torch, torch_dflash as td
from support.slices import make_sliceable, prompts
target, union = make_sliceable("llama", "2x2", "v1 union")
options = {"max_length": 96, "batch_size": 3, "prefill_chunk_size": 32, "cache": "paged"}
options |= {"rounds_per_chunk": 2}
asked = {"max_new_tokens": 24, "eos_token_id": None, "do_sample": False}
one, four = (td.compile(target, union, **options, **where) for where in ({"runtime": "eager"}, {"mesh": 4}))
wanted = one.generate(*prompts(), **asked)
assert torch.equal(four.generate(*prompts(), **asked), wanted)
for first, second in ((four, one), (one, four)):
    td.save_state(first.advance(first.start(*prompts(), **asked)), "FOLDER/state", first)
    state = td.load_state("FOLDER/state", second)
    while not bool(second.runtime.fetch(state.done).all()):
        state = second.advance(state)
    tokens = second.runtime.fetch(state.tokens)
    for row, mask in enumerate(prompts()[1].sum(dim=1).tolist()):
        assert tokens[row, mask : mask + 24].equal(wanted[row, -24:].to(torch.int32)), row
said = []
for engine in (one, four):
    chat, turns = engine.session(), []
    text = [9, 2, 6, 40, 41, 42, 9, 2, 6]
    for more in ([7, 8, 9], [3]):
        own = asked | {"max_new_tokens": 8}
        turns.append([t for gain in chat.gains(text, len(text) - 1, **own) for t in gain.tokens])
        text = text + turns[-1] + more
    said.append(turns)
assert said[0] == said[1], said
gained = [[], [], []]
for rows in four.stream(*prompts(), **asked):
    gained = [a + b for a, b in zip(gained, rows)]
assert torch.tensor(gained).equal(wanted[:, -24:]), gained
two = td.compile(target, union, mesh=4, replicas=2, **options)
assert torch.equal(two.generate(*prompts(), **asked), wanted)
print("checked")
"""


@pytest.mark.heavy
def test_every_door_says_what_one_device_says(tmp_path):
    assert run_on_four(["-c", DOORS.replace("FOLDER", str(tmp_path))]).strip().endswith("checked")
