"""``drafter.spec_generate`` gives the text of the method of the same name in z-lab's package."""

import inspect

import dflash.model as authors
import pytest
import torch
from support import tiny
from support.authors import as_before_5_24

import torch_dflash as td

EAGER = {"runtime": "eager"}
NEW = 23


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def models(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    target, drafter = tiny.make_pair(request.param, agree=2.5)
    drafter.save_pretrained(folder)
    # Options that z-lab's loop does not have must not reach ours.
    target.generation_config.update(
        repetition_penalty=1.9, eos_token_id=list(range(40)), pad_token_id=3, suppress_tokens=[5, 6, 7],
        min_new_tokens=4, exponential_decay_length_penalty=(1, 3.0), no_repeat_ngram_size=1,
        max_time=1e-9, stop_strings=["a"],
    )  # fmt: skip
    return target, drafter, authors.DFlashDraftModel.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def prompt():
    return torch.randint(0, tiny.MASK, (1, 19), generator=torch.Generator().manual_seed(6))


def authors_text(theirs, *call, **options):
    with as_before_5_24():
        return theirs.spec_generate(*call, **options)


def theirs_with_lengths(theirs, *call, **options):
    timer, authors._cuda_time = authors._cuda_time, lambda: 0.0
    try:
        with as_before_5_24():
            return authors.dflash_generate(theirs, *call, **options, return_stats=True)
    finally:
        authors._cuda_time = timer


def test_the_arguments_are_theirs():
    def arguments(method):
        return [(one.name, one.default) for one in inspect.signature(method).parameters.values()][1:]

    theirs, ours = (arguments(kind.spec_generate) for kind in (authors.DFlashDraftModel, td.DFlashDraftModel))
    assert ours[: len(theirs)] == theirs and [name for name, _ in ours[len(theirs) :]] == ["options"]


def test_tokens_and_acceptance_lengths_are_theirs(models, prompt):
    target, drafter, theirs = models
    free = authors_text(theirs, target, prompt, NEW, None)
    assert free.shape == (1, prompt.shape[1] + NEW)
    text = free[0, prompt.shape[1] :].tolist()
    late = next(place for place in range(9, NEW) if text[place] not in text[:place])
    for new, stops in ((NEW, None), (NEW, []), (NEW, [text[late], 96]), (1, None), (2, None), (7, [text[0]])):
        want = theirs_with_lengths(theirs, target, prompt, new, stops)
        assert torch.equal(authors_text(theirs, target, prompt, new, stops), want.output_ids)
        out = drafter.spec_generate(target, prompt, new, stops, **EAGER)
        assert out.dtype == want.output_ids.dtype and torch.equal(out, want.output_ids)
        more = drafter.spec_generate(target, prompt, new, stops, **EAGER, return_dict_in_generate=True)
        ours, width = more.stats.acceptance_lengths[0], drafter.config.block_size
        assert sum(ours) == sum(want.acceptance_lengths) == want.num_output_tokens - 1
        # The cap narrows z-lab's last blocks, and a narrower block may draft other tokens.
        lengths, start = [], prompt.shape[1]
        for length in want.acceptance_lengths:
            if start + width <= prompt.shape[1] + new:
                lengths.append(length)
            start += length
        assert ours[: len(lengths)] == lengths
    assert max(ours_of(drafter, target, prompt)) > 1


def ours_of(drafter, target, prompt):
    return drafter.spec_generate(
        target, prompt, NEW, None, **EAGER, return_dict_in_generate=True
    ).stats.acceptance_lengths[0]


def test_xla_says_the_same(models, prompt):
    target, drafter, theirs = models
    if target.config.model_type == "qwen3":
        want = authors_text(theirs, target, prompt, NEW, [96])
        assert torch.equal(drafter.spec_generate(target, prompt, NEW, [96], runtime="xla"), want)


def test_samples_stay_in_the_support_of_theirs(models, prompt):
    """A top-p or top-k that leaves one token makes both greedy; the seed repeats other samples."""
    target, drafter, theirs = models
    greedy = authors_text(theirs, target, prompt, NEW, None)
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}):
        assert torch.equal(authors_text(theirs, target, prompt, NEW, None, temperature=0.9, **narrow), greedy)
        assert torch.equal(drafter.spec_generate(target, prompt, NEW, None, 0.9, **narrow, **EAGER), greedy)
    call = (target, prompt, NEW, None, 5.0, 0.9, 30)
    first = drafter.spec_generate(*call, **EAGER, seed=4)
    asked = {"max_new_tokens": NEW, "do_sample": True, "temperature": 5.0, "top_p": 0.9, "top_k": 30}
    bare = tiny.make_pair(target.config.model_type, agree=2.5)[0]
    plain = td.generate(bare, None, prompt, **asked, eos_token_id=None, **EAGER, seed=4)
    assert torch.equal(first, plain) and not torch.equal(first, greedy)


def test_what_neither_could_do_is_refused_by_name(models, prompt):
    target, drafter, _ = models
    for change, words in (
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p=0.0"),
        ({"temperature": 1.0, "top_k": -2}, "top_k=-2"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
    ):
        call = {"target": target, "input_ids": prompt, "max_new_tokens": 4, "stop_token_ids": None} | change
        with pytest.raises(ValueError, match=words):
            drafter.spec_generate(**call, **EAGER)
