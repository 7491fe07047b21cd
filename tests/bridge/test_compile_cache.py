"""Compiled programs outlive the process: found by the next, kept where the user says, never in the way."""

import ast
from pathlib import Path

from support.shell import python

RUN = """
import time
import jax, torch, torch_dflash as td
from support.tiny import make_pair
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event.split("/")[-1]))
engine = td.compile(*make_pair("qwen3"), max_length=48, batch_size=2, prefill_chunk_size=16)
# On an idle machine these tiny programs may take less than JAX's one second.
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
started, compiled = time.perf_counter(), engine.runtime.compilations
engine.warmup()
seconds, compiled = time.perf_counter() - started, engine.runtime.compilations - compiled
ids = torch.tensor([[5, 6, 7]])
text = engine.generate(ids, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
state = engine.start(ids, max_new_tokens=30, do_sample=False)
# Ready first: the pointer of one that is not waits and holds the lock that XLA's threads may wait for.
old = [leaf.unsafe_buffer_pointer() for leaf in jax.block_until_ready(jax.tree.leaves(state))]
new = [leaf.unsafe_buffer_pointer() for leaf in jax.block_until_ready(jax.tree.leaves(engine.advance(state)))]
hits = events.count("cache_hits")
print([compiled, text.stats.compilations, text.sequences.tolist(), old == new], hits, round(seconds, 2),
      jax.config.jax_compilation_cache_dir, sep="|")
"""
BUILD = """
import jax, torch_dflash as td
from support.tiny import make_target
CONFIG
td.compile(make_target("llama"), None, max_length=48)
print(jax.config.jax_compilation_cache_dir)
"""


def said_by(code, **environment):
    done = python(code, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def unset(monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")


def test_a_second_process_finds_the_programs(tmp_path, monkeypatch):
    unset(monkeypatch)
    first, second = (said_by(RUN, XDG_CACHE_HOME=str(tmp_path)).split("|") for _ in range(2))
    # Programs made ready, the same after warm-up, the text, and whether donated buffers keep their address.
    compiled, later, _, stayed = ast.literal_eval(first[0])
    assert compiled >= 4 and later == 0 and stayed
    assert first[0] == second[0]
    assert int(second[1]) >= 4 and float(second[2]) < float(first[2])
    folder = tmp_path / "torch-dflash" / "xla"
    assert first[3] == second[3] == str(folder)
    for step in ("begin", "caches", "prefill", "rounds"):
        assert list(folder.glob(f"jit_{step}-*")), step


def test_the_users_own_folder_and_refusal_stand(tmp_path, monkeypatch):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    plain = BUILD.replace("CONFIG", "")
    said = said_by(plain, XDG_CACHE_HOME=str(ours), JAX_COMPILATION_CACHE_DIR=str(theirs))
    assert said == str(theirs) and not ours.exists()
    unset(monkeypatch)
    off = BUILD.replace("CONFIG", "jax.config.update('jax_enable_compilation_cache', False)")
    assert said_by(off, XDG_CACHE_HOME=str(ours)) == "None" and not ours.exists()


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path, monkeypatch):
    unset(monkeypatch)
    Path(tmp_path / "torch-dflash").write_text("a file where the folder should be")
    caught = """
import warnings
warnings.simplefilter("ignore")
shown, show = [], warnings.warn
warnings.warn = lambda message, *a, **k: (shown.append(str(message)), show(message, *a, **k))
td.compile(make_target("llama"), None, max_length=48)
td.compile(make_target("llama"), None, max_length=48)
ours = [message for message in shown if "are not kept" in message]
assert len(ours) == 1 and "torch-dflash/xla" in ours[0] and "jax_compilation_cache_dir" in ours[0], shown
"""
    assert said_by(BUILD.replace("CONFIG", caught), XDG_CACHE_HOME=str(tmp_path)) == "None"
