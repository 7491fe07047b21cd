"""Questions are drawn from files of prompts; the error for a line without one names the line."""

import gzip
import json
import re

import pytest
from support import ROOT

from torch_dflash.demo.questions import QUESTIONS
from torch_dflash.storage.files import StageError
from torch_dflash.train.answers.data import draw


def test_blank_lines_are_passed_over_and_files_take_turns(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"turns": ["one", "more"]}\n\n{"turns": ["two"]}\n\n')
    (tmp_path / "b.jsonl").write_text('\ufeff{"turns": ["th\u2028ree"]}\n', encoding="utf-8")
    drawn = draw(tmp_path, 3)
    assert [name for name, _ in drawn] == ["a", "b", "a"]
    assert {question for _, question in drawn} == {"one", "two", "th\u2028ree"}


def test_a_seed_draws_the_same_each_time_and_another_others(tmp_path):
    lines = (f'{{"turns": ["question {number}"]}}' for number in range(50))
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    drawn = [draw(tmp_path, 10, seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] and len({*drawn[0]}) == 10
    assert {*drawn[0]} != {*drawn[2]}
    assert drawn[0] != draw(tmp_path, 50)[40:]


def test_the_demos_questions_are_those_that_its_figures_are_of():
    figures = json.loads((ROOT / "docs/results/demo_cpu.json").read_text())
    asked = [(one["kind"], one["question"]) for one in figures["questions"] if one["kind"] not in QUESTIONS]
    assert draw(ROOT / "data/eval", len(asked)) == asked and len(asked) == 10


def test_packed_files_are_read_and_hidden_ones_or_copies_are_not(tmp_path):
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write('{"prompt": "two"}\n')
    for name in (".a.jsonl", "a.jsonl.bak", "a.jsonl~"):
        (tmp_path / name).write_text('{"prompt": "one"}\n')
    assert draw(tmp_path, 1) == [("b", "two")]
    with pytest.raises(StageError, match=re.escape("1 prompt(s)")):
        draw(tmp_path, 2)


BAD = ['{"turns": "hello"}', '{"turns": [5]}', '{"turns": [" "]}', '{"turns": []}', "{", "[" * 99999]
BAD += [
    '{"prompt": "a", "source": 5}',
    '{"prompt": "a", "source": []}',
    '{"prompt": "a", "source": "\\ud800"}',
]
BAD += [f'{{"prompt": "a", "n": {"1" * 9999}}}']


@pytest.mark.parametrize("line", BAD, ids=range(len(BAD)))
def test_a_line_without_a_question_is_named(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"turns": ["one"]}}\n\n{line}\n')
    with pytest.raises(StageError, match=re.escape(f"{path}:3")):
        draw(tmp_path, 1)


def test_a_folder_that_is_not_there_and_one_with_too_few_are_named(tmp_path):
    with pytest.raises(StageError, match="none: is not a folder"):
        draw(tmp_path / "none", 1)
    with pytest.raises(StageError, match=re.escape(f"{tmp_path}: 0 prompt(s)")):
        draw(tmp_path, 1)
