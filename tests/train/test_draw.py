"""Questions drawn from files of prompts; a line that has none is named."""

import re

import pytest

from torch_dflash.storage.files import StageError
from torch_dflash.train.answers.draw import draw


def test_blank_lines_are_passed_over_and_files_take_turns(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"turns": ["one", "more"]}\n\n{"turns": ["two"]}\n\n')
    (tmp_path / "b.jsonl").write_text('\ufeff{"turns": ["th\u2028ree"]}\n', encoding="utf-8")
    drawn = draw(tmp_path, 3)
    assert [name for name, _ in drawn] == ["a", "b", "a"]
    assert {question for _, question in drawn} == {"one", "two", "th\u2028ree"}


@pytest.mark.parametrize(
    "line", ['{"turns": "hello"}', '{"turns": [5]}', '{"turns": [" "]}', '{"turns": []}', "{", "[" * 99999]
)
def test_a_line_without_a_question_is_named(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"turns": ["one"]}}\n\n{line}\n')
    with pytest.raises(StageError, match=re.escape(f"{path}:3")):
        draw(tmp_path, 1)


def test_a_folder_that_is_not_there_and_one_with_too_few_are_named(tmp_path):
    with pytest.raises(StageError, match="none: there is no such folder"):
        draw(tmp_path / "none", 1)
    with pytest.raises(StageError, match=re.escape(f"{tmp_path}: 0 prompts")):
        draw(tmp_path, 1)
