"""A recurrence by products gives the outputs and the states of the recurrence row by row."""

import pytest
import torch
from torch.nn.functional import normalize

from torch_dflash.ops.recurrence import ScanRows, scan_block, scan_prompt, state_after
from torch_dflash.ops.short_conv import next_tail, short_conv
from torch_dflash.ops.trees import read_tree

B, H, DK, DV = 3, 2, 8, 12
KINDS = ["gated delta rule", "decay per channel", "mamba-2"]


def draw(kind, height, seed=0, alike=False, dtype=torch.float64):
    """Random rows of a kind; ``alike``: keys that hardly differ, written whole, as a repeated token has."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(B, H, *shape, generator=generator, dtype=torch.float64)

    def uniform(*shape):
        return torch.rand(B, H, *shape, generator=generator, dtype=torch.float64)

    query, key, value = normal(height, DK), normal(height, DK), normal(height, DV)
    key = key[:, :, :1] + 1e-3 * key if alike else key
    decay = -uniform(*((height, DK) if kind == KINDS[1] else (height,))) * (1e-3 if alike else 3)
    beta = None if kind == KINDS[2] else 1 - uniform(height) * (1e-3 if alike else 1)
    key = key if beta is None else normalize(key, dim=-1)
    parts = query, key, value, decay, beta
    return normal(DK, DV).to(dtype), ScanRows(*(None if one is None else one.to(dtype) for one in parts))


def one_by_one(state, rows, above=None):
    """Outputs, and the state after each row; ``above``: the parent row of each row of a tree."""
    states, outs = [], []
    for row in range(rows.key.shape[2]):
        parent = row - 1 if above is None else above[row]
        before = state if parent < 0 else states[parent]
        decay = rows.decay[:, :, row].exp()
        before = before * (decay[..., None] if decay.ndim == 3 else decay[..., None, None])
        key, update = rows.key[:, :, row], rows.value[:, :, row]
        if rows.beta is not None:
            update = rows.beta[:, :, row, None] * (update - (before * key[..., None]).sum(-2))
        states.append(before + key[..., None] * update[:, :, None])
        outs.append((states[-1] * rows.query[:, :, row, :, None]).sum(-2))
    return torch.stack(outs, 2), states


def after(state, states, counts):
    return torch.stack([state[b] if not c else states[c - 1][b] for b, c in enumerate(counts)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("alike", [False, True])
def test_blocks_and_prompts_are_what_rows_one_by_one_give(kind, alike):
    for height, counts in ((1, (0, 1, 1)), (7, (0, 3, 7)), (16, (16, 0, 1)), (90, (0, 90, 65))):
        state, rows = draw(kind, height, height, alike)
        wanted, states = one_by_one(state, rows)
        ends, count = after(state, states, counts), torch.tensor(counts, dtype=torch.int32)
        out, kept = scan_block(state, rows)
        torch.testing.assert_close(out, wanted)
        got = state_after(state, kept, count)
        torch.testing.assert_close(got, ends)
        out, read = scan_prompt(state, rows, count)
        for row, end in enumerate(counts):
            torch.testing.assert_close(out[row, :, :end], wanted[row, :, :end])
            assert end or torch.equal(got[row], state[row]) and torch.equal(read[row], state[row])
        torch.testing.assert_close(read, ends)


@pytest.mark.parametrize("kind", KINDS)
def test_in_float32_a_layer_is_right_to_1e_5(kind):
    for seed in range(4):
        state, rows = draw(kind, 64, seed, alike=seed % 2 == 1)
        wanted, states = one_by_one(state, rows)
        narrow = ScanRows(*(None if one is None else one.float() for one in rows))
        out, kept = scan_block(state.float(), narrow)
        count = torch.tensor([64, 33, 1], dtype=torch.int32)
        for ours, theirs in (
            (out, wanted),
            (state_after(state.float(), kept, count), after(state, states, (64, 33, 1))),
        ):
            assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_rejected_rows_and_padding_may_hold_anything(kind, odd):
    state, rows = draw(kind, 12)
    count = torch.tensor([0, 5, 12], dtype=torch.int32)
    out, kept = scan_block(state, rows)
    ends = state_after(state, kept, count)
    for row, end in enumerate(count.tolist()):
        for part in filter(lambda part: part is not None, rows):
            part[row, :, end:] = odd
    for got, held in (
        (scan_block(state, rows)[0], state_after(state, scan_block(state, rows)[1], count)),
        scan_prompt(state, rows, count),
    ):
        torch.testing.assert_close(held, ends)
        for row, end in enumerate(count.tolist()):
            torch.testing.assert_close(got[row, :, :end], out[row, :, :end])


ABOVE = (-1, 0, 1, 1, 0, 4, 5, 0)
"""The parents of eight rows in preorder."""
PATHS = ((0, 1, 3), (0, 4, 5), (0, 7, 7))
COUNTS = (3, 2, 0)


def tree():
    parent = torch.tensor([ABOVE[1:]], dtype=torch.int32).expand(B, -1) - 1
    return read_tree(parent, torch.full((B,), 7, dtype=torch.int32), 4)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_tree_see_their_own_paths(kind):
    state, rows = draw(kind, len(ABOVE))
    wanted, states = one_by_one(state, rows, ABOVE)
    out, kept = scan_block(state, rows, tree().seen())
    torch.testing.assert_close(out, wanted)
    got = state_after(state, kept, torch.tensor(COUNTS), torch.tensor(PATHS, dtype=torch.int32))
    for row, (path, count) in enumerate(zip(PATHS, COUNTS, strict=True)):
        torch.testing.assert_close(got[row], states[path[count - 1]][row] if count else state[row])


def test_a_short_convolution_goes_on_from_its_tail():
    generator = torch.Generator().manual_seed(0)
    rows, weight, bias = (torch.randn(*s, generator=generator) for s in ((B, 5, 20), (5, 4), (5,)))
    tail, wanted = (
        torch.zeros(B, 5, 3),
        torch.nn.functional.conv1d(torch.nn.functional.pad(rows, (3, 0)), weight[:, None], bias, groups=5),
    )
    count = torch.tensor([0, 2, 6])
    for given in (rows, rows.index_fill(2, torch.arange(8, 20), 9.0)):
        torch.testing.assert_close(short_conv(tail, given[:, :, :8], weight, bias), wanted[:, :, :8])
    ends = next_tail(tail, rows[:, :, :8], count)
    for row, end in enumerate(count.tolist()):
        out = short_conv(ends[row : row + 1], rows[row : row + 1, :, end:], weight, bias)
        torch.testing.assert_close(out, wanted[row : row + 1, :, end:])


def test_a_short_convolution_of_a_tree_follows_paths():
    generator = torch.Generator().manual_seed(0)
    tail, rows, weight = (torch.randn(*s, generator=generator) for s in ((B, 5, 3), (B, 5, 8), (5, 4)))
    out = short_conv(tail, rows, weight, None, tree())
    for row in range(len(ABOVE)):
        path = [row]
        while ABOVE[path[0]] >= 0:
            path.insert(0, ABOVE[path[0]])
        alone = short_conv(tail, rows[:, :, path], weight, None)
        torch.testing.assert_close(out[:, :, row], alone[:, :, -1])
    ends = next_tail(tail, rows, torch.tensor(COUNTS), torch.tensor(PATHS))
    for row, (path, count) in enumerate(zip(PATHS, COUNTS, strict=True)):
        both = torch.cat([tail[row], rows[row, :, list(path[:count])]], dim=1)
        torch.testing.assert_close(ends[row], both[:, -3:])
