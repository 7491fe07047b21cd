"""Two processes decode as one and end together; the message names the process that failed."""

import signal

import pytest
from support.hosts import SILENT, Two
from support.slices import make_sliceable

pytestmark = pytest.mark.heavy
WORDS = "torch-dflash: process {} of 2 ends: "
JAXS_WORDS = "Terminating process because the JAX distributed service detected fatal errors"
"""JAX's own message, which may come first where its service ends with process 0."""
SOON = SILENT + 30
"""Seconds within which all end, on a machine with other work."""


@pytest.mark.parametrize(
    ("family", "cache", "drafter", "seed"),
    [
        ("qwen3", "static", "v1", "given"),
        ("llama", "paged", "dflash2", "drawn"),
        ("llama", "paged", "v1 union", "given"),
        ("qwen3_5", "paged", "v1", "given"),
    ],
)
def test_two_processes_say_what_one_device_says_of_the_first_ones_prompts(
    tmp_path, family, cache, drafter, seed
):
    with Two(tmp_path, "equal", family, cache, drafter, seed) as two:
        for rank in (0, 1):
            ended = two.end(rank)
            assert ended.status == 0 and ended.out.strip().endswith("checked"), ended


def test_every_door_is_open_to_two_processes(tmp_path):
    target, _ = make_sliceable("qwen3_moe", "2x2", "v1")
    target.save_pretrained(tmp_path, max_shard_size="30KB")
    stored = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    with Two(tmp_path, "doors", str(tmp_path)) as two:
        for rank in (0, 1):
            ended = two.end(rank)
            assert ended.status == 0 and ended.out.strip().endswith("checked"), ended
            read = int(next(line for line in ended.out.splitlines() if line.startswith("read")).split()[1])
            assert 0.4 * stored < read < 0.65 * stored, (rank, read, stored)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_does_not_answer_ends_the_other(tmp_path, victim, number):
    with Two(tmp_path, "lasting") as two:
        two.until("chunk 6")
        two.signal(victim, number)
        ended = two.end(1 - victim, SOON)
        assert ended.status not in (0, None), ended
        named = WORDS.format(1 - victim) + f"process {victim}" in ended.err
        with_service = victim == 0 and number == signal.SIGKILL
        assert named or (with_service and JAXS_WORDS in ended.err), ended
        assert "all of it" not in ended.out


@pytest.mark.parametrize("who", [0, 1])
def test_an_exception_in_one_process_ends_both(tmp_path, who):
    with Two(tmp_path, "raising", str(who)) as two:
        failed, other = two.end(who, 900), two.end(1 - who, SOON)
        assert failed.status == 1 and "ValueError: a streamer of mine" in failed.err, failed
        words = f"process {who} left generate: ValueError: a streamer of mine"
        assert other.status == 1 and WORDS.format(1 - who) + words in other.err, other


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("quietly", "process 1 has ended, and this one is in generate"),
        ("by an error", "process 1 left its program: ZeroDivisionError: of mine"),
    ],
)
def test_a_process_that_has_ended_is_missed(tmp_path, how, words):
    with Two(tmp_path, "leaving", how) as two:
        ended = two.end(0)
        assert ended.status == 1, ended
        assert WORDS.format(0) + words in ended.err, ended


def test_a_stream_that_one_process_leaves_ends_both(tmp_path):
    with Two(tmp_path, "streams") as two:
        left, other = two.end(1), two.end(0, SOON)
        assert left.status != 0, left
        assert other.status == 1 and "this stream was left, and process 0 goes on with it" in other.err, other


def test_a_stream_that_is_kept_harms_nobody_at_the_end(tmp_path):
    with Two(tmp_path, "keeping") as two:
        for rank in (0, 1):
            ended = two.end(rank)
            assert ended.status == 0 and ended.out.strip().endswith("checked"), ended
            assert "ignored" not in ended.err, ended


@pytest.mark.parametrize(
    ("what", "words"), [("plan", "max_length is 128 there, 64 in process 0"), ("weights", "their bits is")]
)
def test_processes_that_differ_are_told_so(tmp_path, what, words):
    with Two(tmp_path, "differing", what) as two:
        for rank in (0, 1):
            ended = two.end(rank)
            assert ended.status == 0, ended
            assert "process 1 is not where process 0 is: " + words in ended.out, ended


def test_another_text_in_one_process_ends_both(tmp_path):
    with Two(tmp_path, "drifting") as two:
        for rank in (0, 1):
            ended = two.end(rank)
            assert ended.status == 1 and "the text is" in ended.err, ended
