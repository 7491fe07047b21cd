"""A pair on four devices says what it says on one: the same tokens, and as many accepted in each round."""

import pytest
from support.slices import Case, run_cases

CASES = [
    Case("qwen3", "paged", "2x2", "greedy", "v1"),
    Case("gpt_oss", "static", "4x1", "sampled", "v1"),
    Case("llama", "paged", "4x1", "filters", "dflash2"),
    Case("qwen3_moe", "static", "2x2", "greedy", "dflash2"),
]
# Every pair of two values of two of the fields stands in one of these or of those above.
COVER = [
    Case("qwen3", "static", "4x1", "sampled", "dflash2"),
    Case("qwen3", "static", "2x2", "filters", "v1"),
    Case("llama", "static", "2x2", "sampled", "v1"),
    Case("llama", "static", "2x2", "greedy", "v1"),
    Case("qwen2", "paged", "2x2", "sampled", "dflash2"),
    Case("qwen2", "static", "4x1", "greedy", "v1"),
    Case("qwen2", "paged", "4x1", "filters", "v1"),
    Case("gpt_oss", "paged", "2x2", "greedy", "dflash2"),
    Case("gpt_oss", "static", "2x2", "filters", "v1"),
    Case("qwen3_moe", "paged", "4x1", "sampled", "v1"),
    Case("qwen3_moe", "static", "4x1", "filters", "v1"),
]
TREES = [
    Case("llama", "paged", "4x1", "sampled", "v1 union"),
    Case("qwen3", "static", "2x2", "greedy", "v1 tree"),
    Case("gpt_oss", "paged", "2x2", "filters", "v1 union"),
    Case("qwen3_moe", "static", "4x1", "sampled", "dflash2 union"),
    Case("qwen2", "paged", "2x2", "greedy", "dflash2 tree"),
    Case("qwen3", "paged", "whole", "sampled", "v1 tree"),
    Case("llama", "static", "odd", "greedy", "v1 chain"),
]
PENALTIES = {
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.3,
    "no_repeat_ngram_size": 3,
    "suppress_tokens": [5, 7],
    "min_new_tokens": 4,
    "typical_p": 0.95,
}
TOLD = {"output_logprobs": True, "top_logprobs": 3, "output_scores": True}
OUTPUTS = {"outputs": ["output_scores", "output_logprobs"], "top_logprobs": 3}
OTHERS = [
    Case("qwen3", "static", "odd", "greedy", "v1"),
    Case("qwen3", "paged", "whole", "greedy", "v1"),
    Case("llama", "static", "2x2", "greedy", "v1", {"verify_width": "auto"}),
    Case("qwen3", "paged", "4x1", "sampled", "dflash2", {"verify_width": "auto"}),
    Case("qwen3", "static", "4x1", "greedy", "plain"),
    Case("llama", "paged", "2x2", "sampled", "ngram"),
    Case("qwen3", "paged", "2x2", "sampled", "v1", {"processors": [*PENALTIES]}, PENALTIES),
    Case("qwen2", "static", "4x1", "greedy", "v1", OUTPUTS, TOLD),
]

TREES += [
    Case("llama", "static", "2x2", "greedy", "v1 union", {"verify_width": "auto"}),
    Case("qwen3", "paged", "2x2", "sampled", "v1 tree", {"processors": [*PENALTIES]}, PENALTIES),
    Case("qwen2", "static", "4x1", "sampled", "v1 union", OUTPUTS, TOLD),
]


def same(cases: list[Case]) -> None:
    for case, found in zip(cases, run_cases(cases), strict=True):
        assert found["one"] == found["four"], case
        assert not found["again"], case
        assert case.drafter in ("plain", "ngram") or max(map(max, found["one"][0][1])) > 1, case


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case[:5]))
def test_four_devices_say_what_one_says(case):
    same([case._replace(runtime="eager")])


def test_a_tree_on_four_devices_is_the_tree_of_one():
    same([TREES[0]._replace(runtime="eager")])


@pytest.mark.heavy
@pytest.mark.parametrize("case", COVER + OTHERS + TREES[1:], ids=lambda case: "-".join(case[:5]))
def test_the_same_of_every_kind(case):
    same([case])


@pytest.mark.heavy
def test_the_cover_has_every_pair():
    every = [case[:5] for case in CASES + COVER]
    for first in range(5):
        for second in range(first):
            values = {row[first] for row in every}, {row[second] for row in every}
            found = {(row[first], row[second]) for row in every}
            assert len(found) == len(values[0]) * len(values[1]), (first, second)


@pytest.mark.heavy
@pytest.mark.parametrize("broken", ["wrong copies", "first chip's place"])
def test_a_wrong_cut_is_noticed(broken):
    chips = "odd" if broken == "wrong copies" else "2x2"
    (found,) = run_cases([Case("qwen3", "static", chips, "greedy", "v1", {}, {}, broken)])
    assert found["one"] != found["four"]


@pytest.mark.heavy
def test_drafts_of_another_chip_are_noticed():
    (found,) = run_cases([Case("qwen3", "static", "2x2", "greedy", "v1 tree", {}, {}, "first chip's drafts")])
    assert [text for text, *_ in found["one"]] == [text for text, *_ in found["four"]]
    assert found["one"] != found["four"]
