"""Each convention of DFlash2 broken on purpose leaves the text right and changes states or drafts."""

import pytest
import torch
import torch.nn.functional as F
from decoding.test_mutations import around, loop_gap, network_gap
from support.authors import CASES, EXACT, LOOP, Case, engine_runs

from torch_dflash.proposers.dflash2 import convolution
from torch_dflash.proposers.dflash2.convolution import DynamicConvolution
from torch_dflash.proposers.dflash2.selector import CandidateSelector

SEEN = 1e-3


def rolled_rows(original, rows, dynamic, base):
    """The block's last row stands before its first."""
    out = torch.zeros_like(rows)
    for back in range(base.shape[0]):
        seen = rows.roll(back, dims=1)
        grouped = seen.unflatten(-1, (dynamic.shape[3], -1)) * dynamic[:, :, back, :, None]
        out = out + base[back] * seen + grouped.flatten(2)
    return out


def untransposed(original, self, rows):
    kernels = self.kernel_projection(rows).unflatten(-1, (self.taps, 2, self.groups)).transpose(2, 3)
    return convolution.convolve(rows, kernels[..., 0, :, :], self.base_kernel[0]), kernels[..., 1, :, :]


IN_THE_NETWORK = {
    "a convolution reads across the block's edge": around(convolution, "convolve", rolled_rows),
    "a convolution reads the next group's kernel": around(
        convolution, "convolve", lambda right, rows, dynamic, base: right(rows, dynamic.roll(1, 3), base)
    ),
    "the taps are turned round": around(
        convolution, "convolve", lambda right, rows, dynamic, base: right(rows, dynamic.flip(2), base.flip(0))
    ),
    "the kernel projection is untransposed": around(DynamicConvolution, "before", untransposed),
    "the kernels of before and after are swapped": around(
        DynamicConvolution, "after", lambda right, self, rows, kernel: convolution.convolve(
            rows, kernel, self.base_kernel[0]
        )
    ),
}  # fmt: skip


def anchor_for_all(original, self, hidden, logits, anchor, *name):
    rows = [
        original(self, hidden[:, at : at + 1], logits[:, at : at + 1], anchor, *name)
        for at in range(hidden.shape[1])
    ]
    return torch.cat(rows, dim=1)


def topk_turned(original, logits, count, **options):
    """Scores and candidates have different orders."""
    best = original(logits, count, **options)
    return best.values, best.indices.flip(-1)


def swapped(original, self, *given):
    names = CandidateSelector.lookups
    kept = [self._parameters[name] for name in names]
    self._parameters.update(zip(names, reversed(kept), strict=True))
    try:
        return original(self, *given)
    finally:
        self._parameters.update(zip(names, kept, strict=True))


IN_THE_SELECTOR = {
    "the predecessor is the anchor": around(CandidateSelector, "forward", anchor_for_all),
    "the predecessor is another row's": around(
        CandidateSelector,
        "forward",
        lambda right, self, hidden, logits, anchor, *name: right(self, hidden, logits, anchor.roll(1), *name),
    ),
    "candidates are sorted otherwise": around(torch, "topk", topk_turned),
    "the codebooks are swapped": around(CandidateSelector, "forward", swapped),
    "the selector is left out": around(
        CandidateSelector, "forward", lambda right, self, hidden, logits, anchor, *name: logits.argmax(-1)
    ),
    "the state is another row's": around(
        CandidateSelector,
        "forward",
        lambda right, self, hidden, logits, *rest: right(self, hidden.roll(1, 1), logits, *rest),
    ),
}


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    built = Case(tmp_path_factory.mktemp("drafter"), *CASES["dflash2, everything"])
    assert loop_gap(built) < LOOP and network_gap(built) < EXACT and other_drafts(built) == 0
    return built


def other_drafts(case) -> int:
    """Rounds of the authors' run that begin at the position of one of ours, and draft other tokens."""
    runs = engine_runs(case)
    assert [run.text for run in runs] == [run.text for run in case.runs]
    found = 0
    for ours, theirs in zip(runs, case.runs, strict=True):
        common = ours.drafts.keys() & theirs.drafts.keys()
        found += sum(ours.drafts[start] != theirs.drafts[start] for start in common)
    return found


@pytest.mark.parametrize("name", IN_THE_NETWORK)
def test_hidden_states_show_it(case, monkeypatch, name):
    IN_THE_NETWORK[name](monkeypatch)
    assert loop_gap(case) > SEEN and network_gap(case) > SEEN


@pytest.mark.parametrize("name", IN_THE_SELECTOR)
def test_drafts_show_it(case, monkeypatch, name):
    IN_THE_SELECTOR[name](monkeypatch)
    assert other_drafts(case) > 0


def test_an_ignored_mask_embedding_shows(case, monkeypatch):
    embedding = F.embedding
    mask = case.drafter.config.mask_token_id

    def without(ids, weight, *more, **named):
        found = embedding(ids, weight, *more, **named)
        return (
            found if found.shape[-1] != case.target.config.hidden_size else found * (ids != mask)[..., None]
        )

    monkeypatch.setattr(F, "embedding", without)
    assert loop_gap(case) > SEEN
