"""A proposer that drafts a test's script, and the target's own text for comparison."""

import torch

from torch_dflash.decode import Pair
from torch_dflash.ops.windows import read_rows
from torch_dflash.proposers.base import Proposer
from torch_dflash.state import Draft, PromptChunk


class Scripted(Proposer):
    """Drafts row b's tokens from ``script[b]``, indexed by absolute position.

    The script is a buffer, so that rewriting it in place changes the drafts without compiling anything.
    """

    name = "scripted"

    def __init__(self, batch_size: int, slots: int, width: int):
        super().__init__()
        self.width = width
        self.register_buffer("script", torch.zeros(batch_size, slots, dtype=torch.int32))

    def propose(self, pstate, anchor, length, embed, head):
        tokens = read_rows(self.script, length + 1, self.width - 1)
        return Draft(tokens, torch.full_like(length, self.width - 1)), pstate

    def say(self, rows: list[list[int]], shift: int = 0, vocab: int = 1 << 30) -> None:
        """Sets the script to whole rows, prompts included, every id moved by ``shift``."""
        self.script.zero_()
        for row, tokens in enumerate(rows):
            self.script[row, : len(tokens)] = (torch.tensor(tokens) + shift) % vocab


def pad(prompts: list[list[int]], side: str = "left") -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of different lengths as (input_ids, attention_mask); padded with 0, which is a token too."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        at = slice(width - len(prompt), None) if side == "left" else slice(len(prompt))
        ids[row, at], mask[row, at] = torch.tensor(prompt), 1
    return ids, mask


def run(engine, prompts: list[list[int]], side: str = "left", **options):
    """(The new part [B, new] of the engine's output, its statistics)."""
    ids, mask = pad(prompts, side)
    options = {"eos_token_id": None, "pad_token_id": 0} | options
    out = engine.generate(ids, mask, return_dict_in_generate=True, **options)
    assert torch.equal(out.sequences[:, : ids.shape[1]], ids)
    return out.sequences[:, ids.shape[1] :].tolist(), out.stats


def own_text(target, prompt: list[int], new: int, eos=None) -> list[int]:
    """The target's own greedy text: transformers' `generate` on one row without padding."""
    ids = torch.tensor([prompt])
    options = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": new}
    options |= {"do_sample": False, "eos_token_id": list(eos) if eos else None, "pad_token_id": 0}
    out = target.generate(**options)
    return out[0, len(prompt) :].tolist()


def _logits(pair: Pair, state, ids, row):
    return pair.target(ids, state.length, state.cache, count=row + 1).logits[:, 0]


def logits_in_block(engine, tokens: list[int], start: int, width: int, at: int) -> torch.Tensor:
    """Logits [V] after ``tokens[at]`` in a forward of ``width`` rows that begins at position ``start``.

    Everything before ``start`` is in the cache. Runs on the engine's own runtime.
    """
    from torch_dflash.requests.read import read_request
    from torch_dflash.requests.request import row_requests

    target, size = engine._models.target, engine.plan.batch_size
    options = {"max_new_tokens": 1, "seed": 0, "eos_token_id": None, "do_sample": False}
    request = read_request(target, torch.tensor([tokens[: at + 1]]), None, options)
    runtime = engine.runtime
    params = runtime.refresh(engine.tensors())
    state = runtime.begin(params, row_requests(request.rows, engine.plan))
    for done in range(0, start, engine.options.prefill_chunk_size):
        piece = tokens[done : min(done + engine.options.prefill_chunk_size, start)]
        ids = torch.zeros(size, engine.options.prefill_chunk_size, dtype=torch.int32)
        ids[0, : len(piece)] = torch.tensor(piece)
        count, following = torch.zeros(size, dtype=torch.int32), torch.full((size,), -1, dtype=torch.int32)
        count[0], following[0] = len(piece), tokens[done + len(piece)]
        state = runtime.prefill(params, state, PromptChunk(ids, count, following))
    block = torch.zeros(size, width, dtype=torch.int32)
    block[0, : at + 1 - start] = torch.tensor(tokens[start : at + 1])
    row = torch.full((size,), at - start, dtype=torch.int32)
    if type(runtime).__name__ == "EagerRuntime":
        return engine.pair.run(_logits, params, state, block, row)[0]
    import jax_bridge as jb
    from jax_bridge.programs.lower import lower

    step = lower(lambda *args: engine.pair.run(_logits, *args))
    return jb.to_torch(runtime._run("logits", step, (params, state, *jb.to_jax((block, row)))))[0]


def assert_same_text(engine, prompt, wanted, got, accepted) -> None:
    """The texts are equal, or first differ at a tie of the target's two best logits.

    A tie is a gap below twice the largest difference between the position's logits in the block
    and its logits alone; ``accepted`` (the row's acceptance lengths) gives the beginnings of blocks.
    """
    if wanted == got:
        return
    assert len(wanted) == len(got), f"{len(got)} tokens instead of {len(wanted)}"
    at = next(i for i, pair in enumerate(zip(wanted, got, strict=True)) if pair[0] != pair[1])
    before = len(prompt) + at - 1  # the position whose logits decided
    start = len(prompt)
    for count in accepted if at else ():
        if start + count > before:
            break
        start += count
    start, width = (start, engine.plan.verify_width) if at else (0, len(prompt))
    tokens = [*prompt, *wanted[:at]]
    block = logits_in_block(engine, tokens, start, width, before)
    alone = logits_in_block(engine, tokens, before, 1, before)
    best = alone.topk(2)
    gap, noise = float(best.values[0] - best.values[1]), float((block - alone).abs().max())
    assert gap < 2 * noise and {wanted[at], got[at]} == set(best.indices.tolist()), (
        f"token {at} is {got[at]}, the target says {wanted[at]}: a gap of {gap:.3g} is no tie at {noise:.3g}"
    )
