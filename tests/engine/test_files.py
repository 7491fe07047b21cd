"""A file is whole or absent, whoever else writes or reads it, and no link leads a write away."""

import os
import stat
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.threads import in_threads

from torch_dflash.storage.files import write_whole


def test_two_threads_write_one_path_and_a_reader_sees_whole_files(tmp_path):
    path, running = tmp_path / "state", threading.Event()

    def write(value):
        tensors = {"values": torch.full((20_000,), value)}
        for _ in range(25):
            write_whole(path, lambda part: save_file(tensors, part))

    def read():
        running.wait()
        while running.is_set():
            values = load_file(path)["values"]
            assert len(values) == 20_000 and len(values.unique()) == 1

    def write_both():
        write(0)
        running.set()
        errors = in_threads(lambda: write(1), lambda: write(2))
        running.clear()
        assert not errors, errors

    assert not (errors := in_threads(write_both, read)), errors
    assert os.listdir(tmp_path) == ["state"]


def test_a_link_at_the_name_of_the_part_is_not_written_through(tmp_path):
    path, theirs = tmp_path / "state", tmp_path / "theirs"
    theirs.write_text("theirs")
    (tmp_path / f".state.{os.getpid()}.part").symlink_to(theirs)
    write_whole(path, lambda part: part.write_text("ours"))
    assert (path.read_text(), theirs.read_text()) == ("ours", "theirs")


def test_a_part_that_is_there_already_is_neither_written_nor_removed(tmp_path, monkeypatch):
    path, theirs = tmp_path / "state", tmp_path / "theirs"
    monkeypatch.setattr("secrets.token_hex", lambda count: "guessed")
    part = tmp_path / f".state.guessed.{os.getpid()}.part"
    part.symlink_to(theirs)
    with pytest.raises(FileExistsError):
        write_whole(path, lambda part: part.write_text("ours"))
    assert part.is_symlink() and not theirs.exists() and not path.exists()


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_permissions_are_any_files(tmp_path, mask):
    before = os.umask(mask)
    try:
        write_whole(tmp_path / "state", lambda part: save_file({"one": torch.ones(1)}, part))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o666 & ~mask
