"""The loss has weights by their definition, torch's own values, and a sample that is right on average."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from support.blocks import make_batch
from support.refusals import refuses
from support.tiny import make_pair, make_target

from torch_dflash.train.fit.loop import measures
from torch_dflash.train.fit.objective import (
    LossVocabulary,
    block_losses,
    default_gamma,
    sample_vocabulary,
    weights_of,
)
from torch_dflash.train.fit.options import Objective
from torch_dflash.train.fit.student import Student

BLOCKS, ROWS, HIDDEN, VOCAB = (2, 3), 5, 8, 37


@pytest.fixture
def case():
    """States, targets and a head. Known rows are a prefix of each block, as the end of an answer has them."""
    generator = torch.Generator().manual_seed(0)
    count = torch.tensor([[5, 3, 0], [1, 5, 4]])
    return {
        "hidden": torch.randn(*BLOCKS, ROWS, HIDDEN, generator=generator),
        "targets": torch.randint(0, VOCAB, (*BLOCKS, ROWS), generator=generator, dtype=torch.int32),
        "known": torch.arange(ROWS) < count[..., None],
        "vocabulary": LossVocabulary(torch.randn(VOCAB, HIDDEN, generator=generator), None, None, None),
        "teacher": torch.randn(*BLOCKS, ROWS, HIDDEN, generator=generator),
    }


def losses(case, objective, **changes):
    given = case | {"logits_of": lambda hidden, head: head(hidden), "objective": objective} | changes
    if not objective.distils:
        given["teacher"] = None
    return block_losses(**given)


def figures(found):
    return [(name, value) for name, value in vars(found).items() if value is not None]


def full(case):
    """(cross-entropy, KL divergence, total variation) of every row from whole logits, by torch."""
    weight = case["vocabulary"].weight
    logits, wanted = case["hidden"] @ weight.T, case["teacher"] @ weight.T
    targets = case["targets"].long()
    ce = F.cross_entropy(logits.flatten(0, 2), targets.flatten(), reduction="none").view(targets.shape)
    scores = [F.log_softmax(rows, dim=-1) for rows in (logits, wanted)]
    kl = F.kl_div(*scores, reduction="none", log_target=True).sum(-1)
    return ce, kl, 0.5 * (logits.softmax(-1) - wanted.softmax(-1)).abs().sum(-1)


@pytest.mark.parametrize(("width", "gamma"), [(16, 7), (10, 5), (8, 4), (24, 10), (32, 13), (2, 1.75)])
def test_decay_weights_are_the_formula_with_the_published_constants(width, gamma):
    assert default_gamma(width) == gamma
    raw = [math.exp(-(k - 1) / gamma) for k in range(1, width)]
    found = weights_of(Objective(), torch.rand(2, 3, width - 1), torch.ones(2, 3, width - 1).bool())
    assert found.shape == (2, 3, width - 1)
    assert torch.allclose(found[1, 2], torch.tensor([value / sum(raw) for value in raw]))


def test_a_gamma_of_ones_own_is_taken():
    found = weights_of(Objective(gamma=2.5), torch.rand(1, 1, 4), torch.ones(1, 1, 4).bool())[0, 0]
    assert torch.allclose(found[1:] / found[:-1], torch.full((3,), math.exp(-1 / 2.5)))


@pytest.mark.parametrize("alpha", [0.2, 0.5, 1.0])
def test_dpace_weights_are_their_definition_and_pass_no_gradient(case, alpha):
    ce = torch.rand(*BLOCKS, ROWS, generator=torch.Generator().manual_seed(1)).mul(3).requires_grad_()
    known = case["known"]
    found = weights_of(Objective(weighting="dpace", alpha=alpha), ce, known)
    assert not found.requires_grad
    for row in range(BLOCKS[0]):
        for block in range(BLOCKS[1]):
            smooth = [(1 - alpha) * math.exp(-value) + alpha for value in ce[row, block].tolist()]
            rows = int(known[row, block].sum())
            for j in range(rows):
                # A row counts for every later known row that depends on it.
                wanted = sum(math.prod(smooth[: m + 1]) for m in range(j, rows)) / ROWS
                assert math.isclose(float(found[row, block, j]), wanted, rel_tol=1e-5)


MIXED = Objective(ce=0.1, tv=0.9)


@pytest.mark.parametrize(
    "objective",
    [Objective(), Objective(weighting="dpace"), Objective(kl=0.7), MIXED, Objective(kl=0.3, tv=0.5)],
)
@pytest.mark.parametrize("chunk", [4, 1024])
def test_values_and_gradients_are_torchs_on_whole_logits(case, objective, chunk):
    case["hidden"].requires_grad_()
    found = losses(case, dataclasses.replace(objective, rows_per_chunk=chunk))
    (gradient,) = torch.autograd.grad(found.loss, case["hidden"])
    ce, kl, tv = full(case)
    known = case["known"]
    weight = (weights_of(objective, ce, known) * known).detach()
    wanted = (weight * (objective.ce * ce + objective.kl * kl + objective.tv * tv)).sum()
    assert torch.allclose(found.loss, wanted, rtol=1e-5)
    assert torch.allclose(gradient, torch.autograd.grad(wanted, case["hidden"])[0], atol=1e-6)
    assert torch.allclose(found.ce, (ce * known).sum((0, 1)), rtol=1e-5) and not found.ce.requires_grad
    assert gradient.abs().sum((-1, -2))[0, 2] == 0  # the block without a known row


def test_hits_and_prefixes_are_counted(case):
    case["targets"][0, 0] = (case["hidden"][0, 0] @ case["vocabulary"].weight.T).argmax(-1)
    case["targets"][0, 1] = (case["hidden"][0, 1] @ case["vocabulary"].weight.T).argmax(-1)
    case["targets"][1, 2, 1] = (case["hidden"][1, 2, 1] @ case["vocabulary"].weight.T).argmax(-1)
    found = losses(case, Objective())
    right = (case["hidden"] @ case["vocabulary"].weight.T).argmax(-1) == case["targets"]
    hits, prefix = [0] * ROWS, [0] * ROWS
    for row in range(BLOCKS[0]):
        for block in range(BLOCKS[1]):
            whole = True
            for k in range(ROWS):
                hit = bool(right[row, block, k]) and bool(case["known"][row, block, k])
                whole = whole and hit
                hits[k] += hit
                prefix[k] += whole
    assert found.hits.tolist() == hits and found.prefix.tolist() == prefix
    assert found.known.tolist() == case["known"].sum((0, 1)).tolist() and found.blocks == 5
    assert hits != prefix and prefix[4] == 1 and prefix[2] == 2
    shown = measures(found)
    assert math.isclose(shown["acceptance_length"], 1 + sum(prefix) / 5, rel_tol=1e-6)
    assert shown["blocks"] == 5 and math.isclose(shown["loss"], float(found.loss) / 5, rel_tol=1e-6)


@pytest.mark.parametrize("objective", [Objective(kl=0.5), Objective(weighting="dpace", kl=0.5)])
def test_unknown_rows_contribute_nothing(case, objective):
    before = losses(case, objective)
    unknown = ~case["known"]
    case["hidden"][unknown] = 50.0
    case["teacher"][unknown] = -3.0
    case["targets"][unknown] = 1
    for name, value in figures(losses(case, objective)):
        assert torch.allclose(value, getattr(before, name)), name


def test_losses_of_parts_add_up_to_those_of_the_whole():
    target, drafter = make_pair("qwen3", seed=3)
    batch = make_batch(drafter)
    student = Student(drafter, target, Objective(weighting="dpace"))
    with torch.no_grad():
        whole = student(batch)
        rows = [
            dataclasses.replace(batch, **{name: value[row : row + 1] for name, value in vars(batch).items()
                                          if value is not None})
            for row in range(2)
        ]  # fmt: skip
        parts = [student(row) for row in rows]
    for name, value in figures(whole):
        assert torch.allclose(value, sum(getattr(part, name) for part in parts), rtol=1e-5), name


def test_multiplier_and_soft_cap_of_the_drafter_shape_the_loss(case):
    target, drafter = make_pair("qwen3", output_multiplier=0.5, final_logit_softcapping=4.0)
    found = losses(case, Objective(), logits_of=drafter.logits)
    logits = torch.tanh(case["hidden"] @ case["vocabulary"].weight.T * 0.5 / 4) * 4
    ce = F.cross_entropy(logits.flatten(0, 2), case["targets"].flatten().long(), reduction="none")
    assert torch.allclose(found.ce, (ce.view(case["known"].shape) * case["known"]).sum((0, 1)), rtol=1e-5)


def sampled(case, count, seed=0, bias=None):
    always = case["targets"].unique()
    weight = case["vocabulary"].weight
    return sample_vocabulary(weight, bias, always, count, torch.Generator().manual_seed(seed))


def test_all_other_ids_sampled_is_the_whole_softmax(case):
    bias = torch.randn(VOCAB, generator=torch.Generator().manual_seed(5))
    vocabulary = dataclasses.replace(case["vocabulary"], bias=bias)
    for objective in (Objective(), Objective(weighting="dpace"), Objective(kl=0.5)):
        whole = losses(case, objective, vocabulary=vocabulary)
        part = losses(case, objective, vocabulary=sampled(case, VOCAB, bias=bias))
        for name, value in figures(part):
            assert torch.allclose(value, getattr(whole, name), rtol=1e-5), name


def test_a_sample_estimates_the_partition_function(case):
    rows = case["hidden"].flatten(0, 2)
    whole = torch.exp(rows @ case["vocabulary"].weight.T).sum(-1)
    found = []
    for seed in range(400):
        part = sampled(case, 6, seed)
        assert len(part.weight) == len(case["targets"].unique()) + 6
        assert len(part.shift.unique()) == 2 and part.shift.min() == 0
        found.append(torch.exp(rows @ part.weight.T + part.shift).sum(-1))
    found = torch.stack(found)
    error = found.std(0) / len(found) ** 0.5
    assert ((found.mean(0) - whole).abs() < 4 * error).all()
    assert (found.std(0) > 0.01 * whole).any()  # otherwise nothing was sampled


def test_a_sample_holds_every_answers_ids_and_counts_hits_among_what_it_holds(case):
    part = sampled(case, 6)
    labels = part.index[case["targets"].long()]
    assert torch.equal(part.weight[labels.long()], case["vocabulary"].weight[case["targets"].long()])
    hits = ((case["hidden"] @ part.weight.T).argmax(-1) == labels) & case["known"]
    found = losses(case, Objective(), vocabulary=part)
    assert found.hits.tolist() == hits.sum((0, 1)).tolist()
    assert found.prefix.tolist() == hits.long().cumprod(-1).sum((0, 1)).tolist()


def test_kl_is_nothing_for_a_drafter_that_says_what_the_target_says_even_when_sampled(case):
    for vocabulary in (case["vocabulary"], sampled(case, 6)):
        with_kl = losses(case, Objective(kl=1.0), vocabulary=vocabulary, teacher=case["hidden"])
        without = losses(case, Objective(), vocabulary=vocabulary)
        assert abs(float(with_kl.loss - without.loss)) < 1e-5


@pytest.mark.parametrize("kl", [0.0, 0.5])
def test_embedding_head_and_norm_of_the_target_are_neither_trained_nor_saved(kl):
    target, drafter = make_pair("llama", seed=3)
    student = Student(drafter, target, Objective(kl=kl))
    batch = make_batch(drafter)
    batch = dataclasses.replace(
        batch, last=torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(1))
    )
    student(batch).loss.backward()
    assert all(weight.grad is None for weight in target.parameters())
    trained = {name for name, weight in student.named_parameters() if weight.requires_grad}
    assert trained == {f"drafter.{name}" for name, _ in drafter.named_parameters()}
    for name, weight in drafter.named_parameters():
        assert weight.grad is not None and weight.grad.abs().max() > 0, name
    saved = [name for name in student.state_dict() if not name.startswith("drafter.")]
    assert saved == (["final_norm.weight"] if kl else [])


def test_a_target_in_bfloat16_trains_a_drafter_in_float32():
    """`train fit` loads a bfloat16 checkpoint so, without mixed precision."""
    target, drafter = make_pair("qwen3", seed=3)
    batch = make_batch(drafter)
    wanted = Student(drafter, target, Objective())(batch).loss
    student = Student(drafter, target.bfloat16(), Objective())
    found = student(dataclasses.replace(batch, features=batch.features.bfloat16())).loss
    found.backward()
    assert torch.allclose(found, wanted, rtol=0.1)


def test_bad_options_are_refused_by_name():
    for options, words in (
        ({"weighting": "linear"}, ["weighting='linear'", "'decay' or 'dpace'"]),
        ({"gamma": 0.0}, ["gamma=0.0", "above 0"]),
        ({"gamma": math.nan}, ["gamma=nan", "above 0"]),
        ({"alpha": 0.0}, ["alpha=0.0", "at most 1"]),
        ({"alpha": 1.5}, ["alpha=1.5"]),
        ({"kl": -1.0}, ["kl=-1.0", "at least 0"]),
        ({"kl": math.nan}, ["kl=nan"]),
        ({"tv": -1.0}, ["tv=-1.0", "at least 0"]),
        ({"selector": math.nan}, ["selector=nan"]),
        ({"ce": 0.0}, ["ce=0", "kl=0 and tv=0"]),
        ({"kl": math.inf}, ["kl=inf"]),
        ({"rows_per_chunk": 0}, ["rows_per_chunk=0"]),
    ):
        with refuses(ValueError, *words):
            Objective(**options)


def test_a_target_whose_logits_are_soft_capped_has_no_kl():
    target, drafter = make_pair("qwen3")
    target.config.final_logit_softcapping = 30.0
    with refuses(ValueError, "kl > 0", "Qwen3ForCausalLM", "set kl=0"):
        Student(drafter, target, Objective(kl=1.0))


def test_a_drafter_for_another_target_is_refused():
    drafter = make_pair("qwen3")[1]
    with refuses(ValueError, "hidden_size=32", "64"):
        Student(drafter, make_target("qwen3", hidden_size=64), Objective())
