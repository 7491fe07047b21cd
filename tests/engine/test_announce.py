"""A long compilation shows a bar at a terminal, else a line at each end; a quick one shows nothing."""

import logging
import re
import sys
import time

import jax
import jax.numpy as jnp
import pytest
import torch
from support.shell import python
from support.tiny import small_pair

import torch_dflash as td
from jax_bridge.programs.lower import Programs
from torch_dflash import progress

ROOM = 76  # not another test's
FIRST = {"an empty state", "the caches", "prompts of 16 tokens", "rounds", "the results' read"}
heard: list[str] = []  # all programs that any thread compiles
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: heard.append(event) if "backend_compile" in event else None
)


@pytest.fixture
def lines(monkeypatch, caplog):
    """The announcements, without a wait of seconds."""
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(progress, "LONG", 0.0)
    return caplog


def messages(lines):
    return [record.getMessage() for record in lines.records if record.name == "torch_dflash"]


def programs_in(said):
    form = rf"torch-dflash: compiling (.*) \({ROOM} positions, batch 1\): \d+\.\d s, \d of \d programs so far"
    return {found[1]: line for line in said if (found := re.fullmatch(form, line))}


def test_slow_programs_are_a_line_at_each_end(lines, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    engine = td.compile(*small_pair("llama"), max_length=ROOM)
    ask = {"max_new_tokens": 4, "do_sample": False}
    engine.generate(torch.tensor([[5, 6, 7]]), **ask)
    ends = programs_in(said := messages(lines))
    assert {"prompts of 16 tokens", "rounds"} <= {*ends} and {*ends} <= FIRST
    for name, end in ends.items():
        begin = f"torch-dflash: compiling {name} ({ROOM} positions, batch 1) ..."
        assert said.index(begin) < said.index(end)
    assert re.search(r": \d+\.\d s, (\d) of \1 programs so far$", [*ends.values()][-1])
    lines.clear()
    engine.generate(torch.tensor([[5, 6, 7, 8]]), **ask)
    assert not any(f"({ROOM} positions" in line for line in messages(lines))


def test_slow_compilations_are_a_bar_at_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    compiling = progress.Compiling("8 positions")
    ends = [compiling.start(what) for what in ("prompts of 64 tokens", "rounds")]
    ends[1]()
    time.sleep(2 * progress.TICK)
    ends[0]()
    compiling.join()
    shown = capsys.readouterr().err
    assert "prompts of 64 tokens:  50%" in shown and "1/2 [00:00" in shown


def test_warmup_has_its_bar_instead(lines):
    td.compile(*small_pair("llama"), max_length=ROOM, prefill_chunk_size=16).warmup(progress=False)
    assert not messages(lines)


def test_warmup_without_a_terminal_says_in_one_line_what_its_bar_would(lines, monkeypatch):
    engine = td.compile(*small_pair("llama"), max_length=ROOM, prefill_chunk_size=16)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    engine.warmup()
    begun, *between, ended = messages(lines)
    line = f"torch-dflash: compiling all programs for {ROOM} positions, batch 1"
    assert begun == f"{line} ..." and re.fullmatch(rf"{line}: \d+\.\d s", ended)
    assert {"prompts of 16 tokens", "rounds"} <= {*programs_in(between)}
    lines.clear()
    engine.warmup()  # nothing is left to compile
    assert not programs_in(messages(lines))


def test_a_program_that_compiles_quickly_has_no_line_in_a_warmup(lines, monkeypatch):
    monkeypatch.setattr(progress, "LONG", 1e3)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    td.compile(*small_pair("llama"), max_length=ROOM, prefill_chunk_size=16, quantize="int8").warmup()
    begun, _ = messages(lines)
    assert begun.endswith(f"{ROOM} positions, batch 1; the text is the int8 model's ...")


def test_warmup_at_a_terminal_has_its_bar_alone(lines, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    td.compile(*small_pair("llama"), max_length=ROOM, prefill_chunk_size=16).warmup()
    assert not messages(lines) and "rounds" in capsys.readouterr().err


def test_a_quick_compilation_is_not_said(caplog):
    programs = Programs("highest", "8 positions")
    assert programs.get("step", lambda x: x + 1, (jnp.zeros(3),))(jnp.zeros(3)).tolist() == [1, 1, 1]
    assert not messages(caplog)


def test_it_stands_on_stderr_and_can_be_silenced():
    code = """
import logging, time
from torch_dflash import progress
progress.PATIENCE = 0.0
SILENCE
with progress.announced("compiling rounds"):
    time.sleep(0.3)
"""
    said = python(code.replace("SILENCE", ""))
    lines = "torch-dflash: compiling rounds ...\ntorch-dflash: compiling rounds: 0.3 s\n"
    assert (said.stdout, said.stderr) == ("", lines)
    silenced = python(code.replace("SILENCE", "logging.getLogger('torch_dflash').setLevel('ERROR')"))
    assert (silenced.stdout, silenced.stderr) == ("", "")


def test_a_failure_leaves_nothing_behind(lines, monkeypatch):
    """After a failure of tracing or of compiling the next call starts anew."""
    programs, fail = Programs("highest", "8 positions"), [True]

    def step(x):
        if fail.pop():
            raise FloatingPointError("traced")
        return x * 2

    with pytest.raises(FloatingPointError, match="traced"):
        programs.get("step", step, (jnp.ones(2),))
    whole = jax.stages.Lowered.compile

    def short_of_memory(self, *args, **kwargs):
        monkeypatch.setattr(jax.stages.Lowered, "compile", whole)
        raise MemoryError("compiled")

    monkeypatch.setattr(jax.stages.Lowered, "compile", short_of_memory)
    fail[:] = [False]
    with pytest.raises(MemoryError, match="compiled"):
        programs.get("step", step, (jnp.ones(2),))
    fail[:] = [False]
    assert programs.get("step", step, (jnp.ones(2),))(jnp.ones(2)).tolist() == [2, 2]


def test_rounds_are_compiled_beside_the_prompt(monkeypatch):
    """Both start before either is waited for; the call that needs a program counts it."""
    order, whole = [], Programs.get

    def get(self, name, *args, **kwargs):
        order.append((name, sorted(key[0] for key in self._started)))
        return whole(self, name, *args, **kwargs)

    monkeypatch.setattr(Programs, "get", get)
    heard.clear()
    engine = td.compile(*small_pair("llama"), max_length=ROOM)
    before = engine.runtime.compilations
    engine.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)
    assert ("prefill", ["begin", "caches", "prefill", "rounds"]) in order
    assert engine.runtime.compilations - before == len(heard) >= 3
    assert logging.getLogger("torch_dflash").handlers == []  # handlers are the user's affair
