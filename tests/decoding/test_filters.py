"""Top-k, top-p and min-p keep the ids that transformers' own warpers keep; temperatures near 0 are greedy."""

from functools import partial

import jax
import pytest
import torch
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import jax_bridge as jb
import jax_bridge.ops  # noqa: F401 - registers the lowerings
from jax_bridge._torchax import call_torch
from jax_bridge.state import register_states
from torch_dflash.sampling import filter_logits, pick_tokens
from torch_dflash.state import Sampling

ROWS, WIDTH, VOCAB = 6, 5, 61
TEMPERATURE = [0.3, 0.7, 1.0, 1.5, 2.5, 0.9]
# One value per row: off, nearly off, and binding harder and harder; the last row keeps the best id alone.
VALUES = {"top_k": [0, 60, 31, 12, 5, 1], "top_p": [1.0, 0.999, 0.9, 0.6, 0.3, 0.01]}
VALUES |= {"min_p": [0.0, 0.001, 0.02, 0.1, 0.4, 1.0]}
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
# All filters at once: in each of the first three rows another filter decides, then they mix in other ways.
TOGETHER = {"top_k": [4, 40, 40, 12, 20, 6], "top_p": [0.99, 0.6, 0.99, 0.8, 0.9, 0.95]}
TOGETHER |= {"min_p": [0.001, 0.001, 0.3, 0.05, 0.02, 0.1]}


@pytest.fixture(params=["eager", "xla"])
def on(request):
    if request.param == "eager":
        return lambda function, *args: function(*args)

    def lowered(function, *args):
        register_states()
        return jb.to_torch(jax.jit(partial(call_torch, function))(*jb.to_jax(args)))

    return lowered


def sampling(temperature=TEMPERATURE, **filters) -> Sampling:
    columns = {name: filters.get(name, [off] * len(temperature)) for name, off in OFF.items()}
    return Sampling(
        temperature=torch.tensor(temperature),
        top_k=torch.tensor(columns["top_k"], dtype=torch.int32),
        top_p=torch.tensor(columns["top_p"]),
        min_p=torch.tensor(columns["min_p"]),
        seed=torch.arange(len(temperature), dtype=torch.int32),
    )


def scaled_logits(seed: int = 0) -> torch.Tensor:
    logits = torch.randn(ROWS, WIDTH, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    return logits / torch.tensor(TEMPERATURE)[:, None, None]


def kept_by_transformers(scaled, filters) -> torch.Tensor:
    """Marks the ids [B, M, V] that survive the warpers, one row of the batch after another."""
    rows = []
    for row, logits in enumerate(scaled):
        values = {name: column[row] for name, column in filters.items()}
        warpers = LogitsProcessorList()
        if values.get("top_k", 0) > 0:
            warpers.append(TopKLogitsWarper(values["top_k"]))
        if values.get("top_p", 1.0) < 1:
            warpers.append(TopPLogitsWarper(values["top_p"]))
        if values.get("min_p", 0.0) > 0:
            warpers.append(MinPLogitsWarper(values["min_p"]))
        rows.append(warpers(torch.zeros(WIDTH, 1, dtype=torch.long), logits.clone()).isfinite())
    return torch.stack(rows)


def assert_same_ids(on, scaled, filters):
    ours = on(filter_logits, scaled, sampling(**filters))
    kept = kept_by_transformers(scaled, filters)
    assert torch.equal(ours.isfinite(), kept)
    assert (ours[~kept] == -torch.inf).all()
    torch.testing.assert_close(ours[kept], scaled[kept], rtol=0, atol=0)
    return kept.sum(dim=-1)


@pytest.mark.parametrize("name", VALUES)
def test_a_filter_alone_keeps_what_transformers_keeps(on, name):
    for seed in range(4):
        counts = assert_same_ids(on, scaled_logits(seed), {name: VALUES[name]})
        assert (counts[0] == VOCAB).all() and (counts[-1] == 1).all()
        assert (counts[2:-1] > 1).any(dim=-1).all() and (counts[2:] < VOCAB).all()  # they bind


def test_all_filters_together_keep_what_transformers_keeps(on):
    for seed in range(4):
        scaled = scaled_logits(seed)
        assert_same_ids(on, scaled, TOGETHER)
    kept = kept_by_transformers(scaled, TOGETHER)
    for row, name in enumerate(TOGETHER):  # each of them decides somewhere
        others = {other: column for other, column in TOGETHER.items() if other != name}
        assert (kept != kept_by_transformers(scaled, others))[row].any()


def test_top_p_and_min_p_see_what_top_k_left(on):
    """Over the whole vocabulary the three best hold 0.6 of the mass; of what top-k 4 leaves, 0.75."""
    mass = torch.full((ROWS, 1, VOCAB), 0.2 / (VOCAB - 4))
    mass[..., :4] = 0.2
    mass = mass + torch.linspace(0, 1e-4, VOCAB)  # no ties
    filters = {"top_k": [4] * ROWS, "top_p": [0.7] * ROWS}
    ours = on(filter_logits, mass.log(), sampling(**filters)).isfinite().sum(dim=-1)
    assert (ours == 3).all()
    without = on(filter_logits, mass.log(), sampling(top_p=filters["top_p"])).isfinite().sum(dim=-1)
    assert (without == 4).all()


def test_equal_logits_at_the_edge_are_kept_together(on):
    logits = torch.tensor([4.0, 3.0, 3.0, 3.0, 1.0, 0.0]).expand(ROWS, WIDTH, -1)
    ours = on(filter_logits, logits, sampling(top_k=[2] * ROWS)).isfinite()
    kept = TopKLogitsWarper(2)(torch.zeros(1, 1), logits[0].clone()).isfinite()
    assert torch.equal(ours, kept.expand_as(ours)) and kept[0].sum() == 4


def test_a_top_k_beyond_the_vocabulary_filters_nothing(on):
    assert on(filter_logits, scaled_logits(), sampling(top_k=[VOCAB + 5] * ROWS)).isfinite().all()


@pytest.mark.parametrize("filters", [False, True])
@pytest.mark.parametrize("size", [1.0, 30.0, 3000.0])
def test_temperatures_at_and_near_zero_are_greedy(on, filters, size):
    """A float holds 1e-36, but a logit divided by 1e-36 may overflow."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(ROWS, WIDTH, VOCAB, generator=generator) * size
    logits[0] -= 10 * size  # the best one is negative
    logits[1] += 10 * size  # every one is positive
    temperature = [1e-36, 1e-36, 0.0, 1e-36, 1.0, 1e-30]
    values = {name: TOGETHER[name] for name in VALUES} if filters else {}
    position = torch.arange(ROWS * WIDTH, dtype=torch.int32).view(ROWS, WIDTH)
    settings = sampling(temperature, **values)
    picks = on(lambda *args: pick_tokens(*args, filters), logits, position, settings)
    greedy = torch.tensor(temperature) < 0.5
    best = logits.argmax(dim=-1).to(torch.int32)
    assert torch.equal(picks[greedy], best[greedy])
    if size == 1:
        assert not torch.equal(picks, best)  # the row between them is sampled


def test_a_batch_of_zeros_is_greedy(on):
    logits = scaled_logits()
    position = torch.zeros(ROWS, WIDTH, dtype=torch.int32)
    for temperature in ([0.0] * ROWS, [1e-36] * ROWS):
        picks = on(lambda *args: pick_tokens(*args, True), logits, position, sampling(temperature))
        assert torch.equal(picks, logits.argmax(dim=-1).to(torch.int32))
