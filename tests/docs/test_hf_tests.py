"""docs/hf_tests.md: the tables name the tests of transformers that the suite's docstrings name."""

import ast
import re

import pytest
from support import ROOT

SUITE = ROOT / "tests" / "transformers_suite"
PAGE = (ROOT / "docs" / "hf_tests.md").read_text()


def suite():
    """The docstring of each test, by ``file::test`` as the page writes it."""
    return {
        f"{path.stem.removeprefix('test_suite_')}::{node.name}": ast.get_docstring(node) or ""
        for path in sorted(SUITE.glob("test_*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def told(page):
    """(transformers' test, ours) for each pair in the first table."""
    table = page.partition("## What applies")[2].partition("\n## ")[0]
    rows = [re.findall(r"`([\w.:]+)`", line) for line in table.splitlines() if line.startswith("| `")]
    return {(theirs, ours) for theirs, *all_ours in rows for ours in all_ours}


def differences(page):
    """Pairs that only the table or only a docstring names, and tests of the page that do not exist."""
    said = {(theirs, ours) for ours, text in suite().items() for theirs in re.findall(r"`(\w+\.\w+)`", text)}
    return said ^ told(page), set(re.findall(r"`(\w+::\w+)`", page)) - suite().keys()


def test_the_table_and_the_tests_agree():
    pairs, lost = differences(PAGE)
    assert not pairs and not lost and len(told(PAGE)) > 80


def test_every_test_says_what_it_is_after():
    for name, text in suite().items():
        assert text.startswith("After "), name
        assert re.search(r"`\w+\.\w+`", text) or "docs/hf_tests.md" in text, name


def test_every_file_of_the_suite_is_a_room_of_its_own():
    elsewhere = {path.name for path in (ROOT / "tests").rglob("test_*.py") if path.parent != SUITE}
    assert not elsewhere & {path.name for path in SUITE.glob("*.py")}


@pytest.mark.parametrize(
    "change",
    [("`greedy::test_dictionaries`", ""), ("test_greedy_generate`", "test_x`"), ("test_a_state", "test_no")],
)
def test_a_page_that_lies_is_caught(change):
    assert any(differences(PAGE.replace(*change, 1)))
