"""A generation that is saved on one runtime and continues in another."""

from typing import Any

import torch_dflash as td
from support.tiny import ragged_prompts


def ends(target: Any, drafter: Any, here: str, there: str, folder: Any, new: int) -> list[list]:
    """Tokens and accepted counts of a batch of two rows: finished ``here``; saved, and finished ``there``."""
    first, second = (
        td.compile(target, drafter, runtime=runtime, max_length=64, batch_size=2, rounds_per_chunk=2)
        for runtime in (here, there)
    )
    asked: Any = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None}
    state = first.advance(first.start(*ragged_prompts(2), **asked))
    td.save_state(state, folder / "state", first)
    found = []
    for engine, left in ((first, state), (second, td.load_state(folder / "state", second))):
        for _ in range(new):
            left = engine.advance(left)
        kept = engine.runtime.fetch({"tokens": left.tokens, "accepted": left.accepted})
        found.append([kept["tokens"].tolist(), kept["accepted"].tolist()])
    return found
