"""The timeline of the rounds of a decoding."""

import pytest

from torch_dflash.cli.comparison import draw_timeline


@pytest.mark.parametrize("lengths", [[], [3, 1, 4]])
def test_rounds_are_drawn_and_an_answer_without_any_too(tmp_path, lengths):
    path = tmp_path / "rounds.png"
    draw_timeline(path, {"DFlash": lengths, "plain": [1]}, width=8)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_link_is_written_through(tmp_path):
    link, path = tmp_path / "link.png", tmp_path / "rounds.png"
    link.symlink_to(path)
    draw_timeline(link, {"DFlash": [2]}, width=8)
    assert link.is_symlink() and path.read_bytes().startswith(b"\x89PNG")
