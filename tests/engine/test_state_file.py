"""A generation that is written to a file continues in another process, on the other runtime."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support import ROOT
from support.states import look
from support.tiny import make_drafter, make_pair, ragged_prompts, randomise

import torch_dflash as td
from torch_dflash.engine import saved as state_io
from torch_dflash.pytrees import register_state
from torch_dflash.storage import files

ROWS, NEW = 3, 20
OPTIONS = {"max_new_tokens": NEW, "eos_token_id": None}
MIXED = OPTIONS | {"do_sample": True, "temperature": [9.0, 0.0, 4.0], "top_k": 0, "seed": [5, 6, 7]}


def make_engine(runtime, family="llama", pair=None, **options):
    options = {"max_length": 64, "batch_size": ROWS + 1, "rounds_per_chunk": 2, "filters": False} | options
    return td.compile(*(pair or models(family)), runtime=runtime, **options)


KEPT = {}


def models(family):
    """Models that stay alive: an engine holds its models weakly."""
    return KEPT.setdefault(family, make_pair(family, agree=8.0))


def finish(engine, state) -> dict:
    """Texts and each round's token counts, as JSON holds them."""
    seen = look(engine.runtime, state)
    while not seen.done.all():
        state = engine.advance(state)
        seen = look(engine.runtime, state)
    rows = range(ROWS)
    return {
        "texts": [seen.tokens[row, : seen.length[row] + 1].tolist() for row in rows],
        "accepted": [seen.accepted[row, : seen.rounds[row]].tolist() for row in rows],
    }


def finish_elsewhere(path, runtime, cache) -> dict:
    """A new process loads ``path`` on ``runtime``, reads after other numbers of rounds, and finishes."""
    code = (
        "import json, sys, torch, test_state_file as t, torch_dflash as td\n"
        "torch.set_num_threads(1)\n"
        "engine = t.make_engine(sys.argv[2], rounds_per_chunk=3, cache=sys.argv[3])\n"
        "print(json.dumps(t.finish(engine, td.load_state(sys.argv[1], engine))))"
    )
    folders = map(str, (ROOT, ROOT / "tests", ROOT / "tests/engine"))
    options = {"env": os.environ | {"PYTHONPATH": os.pathsep.join(folders)}, "cwd": ROOT, "timeout": 300}
    command = [sys.executable, "-W", "error", "-c", code, str(path), runtime, cache]
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def eager():
    return make_engine("eager")


@pytest.fixture(scope="module")
def saved(eager, tmp_path_factory):
    """A file of a state two chunks into its generation, and the state."""
    path = tmp_path_factory.mktemp("saved") / "state.safetensors"
    state = eager.advance(eager.advance(eager.start(*ragged_prompts(ROWS), **MIXED)))
    td.save_state(state, path, eager)
    return path, state


@pytest.mark.parametrize(
    ("here", "there", "cache"),
    [("eager", "xla", "static"), ("xla", "eager", "static"), ("xla", "eager", "paged")],
)
def test_another_process_on_the_other_runtime_goes_on(here, there, cache, tmp_path):
    engine = make_engine(here, cache=cache)
    whole = finish(engine, engine.start(*ragged_prompts(ROWS), **MIXED))
    assert len({length for row in whole["accepted"] for length in row}) > 2
    state = engine.advance(engine.start(*ragged_prompts(ROWS), **MIXED))
    assert not look(engine.runtime, state).done[:ROWS].any()
    td.save_state(state, tmp_path / "state", engine)
    assert finish(engine, state) == whole  # saving does not change the state
    assert finish_elsewhere(tmp_path / "state", there, cache) == whole
    assert os.listdir(tmp_path) == ["state"]


def test_every_leaf_returns_as_it_was(eager, saved):
    path, state = saved
    back = td.load_state(path, eager)
    assert type(back) is td.DecodeState and type(back.proposer) is type(state.proposer)
    ours, again = (torch.utils._pytree.tree_flatten(one) for one in (state, back))
    assert ours[1] == again[1] and len(ours[0]) > 20
    for one, two in zip(ours[0], again[0], strict=True):
        assert one.dtype == two.dtype and torch.equal(one, two)
    with safe_open(path, framework="pt") as content:
        metadata = content.metadata()
    assert metadata["version"] == "1" and json.loads(metadata["plan"])["capacity"] == 64
    assert metadata["proposer"] == "dflash(width=6, taps=(0, 2))"  # no path of a module: files outlive moves


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("drafter", [None, td.NGramProposer(4)])
def test_other_proposers_and_dtypes(tmp_path, drafter, dtype):
    pair = (make_pair("qwen3")[0].to(dtype), drafter)
    engine = make_engine("eager", pair=pair)
    whole = finish(engine, engine.start(*ragged_prompts(ROWS), **OPTIONS, do_sample=False))
    state = engine.advance(engine.start(*ragged_prompts(ROWS), **OPTIONS, do_sample=False))
    td.save_state(state, tmp_path / "state", engine)
    assert finish(engine, td.load_state(tmp_path / "state", engine)) == whole


def test_a_state_of_another_plan_or_model_is_refused(saved):
    path, _ = saved
    plans = {
        "batch_size=4.*this engine 5; compile with batch_size=4": {"batch_size": 5},
        "capacity=64.*this engine 80; compile with max_length=64": {"max_length": 80},
        "verify_width=6.*this engine 4": {"verify_width": 4},
        "stop_slots=8.*this engine 2": {"stop_slots": 2},
        "filters=False.*this engine True": {"filters": True},
    }
    for message, options in plans.items():
        with pytest.raises(ValueError, match=message):
            td.load_state(path, make_engine("eager", **options))
    target, drafter = models("llama")
    taps = make_drafter(target, target_layer_ids=[0, 1])
    with pytest.raises(ValueError, match=r"taps=\(0, 2\)\), this engine's.*taps=\(0, 1\)\); compile with"):
        td.load_state(path, make_engine("eager", pair=(target, taps)))
    deeper = make_drafter(target, num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"lacks .proposer.layers\[2\].key, which this engine's state holds"):
        td.load_state(path, make_engine("eager", pair=(target, deeper)))
    shallower = make_drafter(target, num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"holds .proposer.layers\[1\].key, which this engine's state lacks"):
        td.load_state(path, make_engine("eager", pair=(target, shallower)))
    other = models("qwen3")  # its heads are wider
    words = r"a layer of the state's target is {'kind': 'attention'.*, of this engine's {.*; compile with"
    with pytest.raises(ValueError, match=words):
        td.load_state(path, make_engine("eager", pair=other))


def test_a_state_of_another_engine_is_not_written(saved, tmp_path):
    _, state = saved
    with pytest.raises(ValueError, match="the state: .tokens is .*this engine's is"):
        td.save_state(state, tmp_path / "state", make_engine("eager", max_length=80))
    assert not os.listdir(tmp_path)


def test_damaged_and_foreign_files_are_refused(eager, saved, tmp_path):
    path, _ = saved
    whole, bad = path.read_bytes(), tmp_path / "bad"
    with safe_open(path, framework="pt") as content:
        metadata = content.metadata()

    def refuses(message, content):
        bad.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            td.load_state(bad, eager)

    refuses("damaged or no safetensors file", whole[:-7])
    refuses("damaged or no safetensors file", b"")
    flipped = bytearray(whole)
    flipped[-5] ^= 4
    refuses("checksum is .*decode from the prompt again", bytes(flipped))
    refuses("checksum is", whole.replace(b"width=6", b"width=5"))
    save_file(load_file(path), bad)
    refuses("format is None, not 'torch_dflash.DecodeState'", bad.read_bytes())
    save_file(load_file(path), bad, metadata | {"version": "9"})
    refuses("version is 9, this release reads 1", bad.read_bytes())
    with pytest.raises(FileNotFoundError):
        td.load_state(tmp_path / "absent", eager)


def test_a_directory_is_refused(eager, saved, tmp_path):
    for act in (lambda: td.load_state(tmp_path, eager), lambda: td.save_state(saved[1], tmp_path, eager)):
        with pytest.raises(ValueError, match="path='.*' is a directory; pass the file in it"):
            act()
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({(0, 1): 999}, r"page_table\[0, 1\] is 999, the pool has pages 0 to 20; .*go back"),
        ({(1, 0): -1}, r"page_table\[1, 0\] is -1, the pool"),
        ({(1, 0): 7, (2, 0): 7}, r"page_table\[2, 0\] is 7, and so is page_table\[1, 0\]"),
        ({(2, 1): 9, (2, 2): 9}, r"page_table\[2, 2\] is 9, and so is page_table\[2, 1\]"),
        ({(0, 4): 20}, r"page_table\[0, 4\] is 20 after a column without a page"),
    ],
)
def test_impossible_page_tables_are_refused(cells, message, tmp_path, monkeypatch):
    engine = make_engine("eager", cache="paged", page_size=16)
    assert engine.plan.pages == 21
    state = engine.start(*ragged_prompts(ROWS), **MIXED)
    pages = state.page_table.clone()
    for cell, page in cells.items():
        pages[cell] = page
    path = tmp_path / "state"
    with pytest.raises(ValueError, match=f"the state: {message}"):
        td.save_state(replace(state, page_table=pages), path, engine)
    with monkeypatch.context() as unchecked:
        unchecked.setattr(state_io, "check_pages", lambda *_: None)
        td.save_state(replace(state, page_table=pages), path, engine)
    with pytest.raises(ValueError, match=f"{path}: {message}"):
        td.load_state(path, engine)


@pytest.mark.parametrize("cache", ["static", "paged"])
def test_a_consumed_state_says_which_one_to_use(cache, tmp_path):
    engine = make_engine("xla", cache=cache)
    state = engine.start(*ragged_prompts(ROWS), **MIXED)
    after = engine.advance(state)
    none = np.zeros(ROWS, np.int32)
    uses = (
        engine.advance,
        lambda old: engine.runtime.read(old, none, none),
        lambda old: td.save_state(old, tmp_path / "state", engine),
    )
    for use in uses:
        with pytest.raises(ValueError, match="is gone: engine.advance consumed this state. Use the one that"):
            use(state)
    assert not os.listdir(tmp_path)
    td.save_state(after, tmp_path / "state", engine)


def test_the_longest_match_belongs_to_the_proposer(tmp_path):
    target, path = make_pair("qwen3")[0], tmp_path / "state"
    engine = make_engine("eager", pair=(target, td.NGramProposer(4, max_ngram=2)))
    td.save_state(engine.start(*ragged_prompts(ROWS), **MIXED), path, engine)
    other = make_engine("eager", pair=(target, td.NGramProposer(4)))
    with pytest.raises(ValueError, match="max_ngram=2.*this engine's.*max_ngram=3.*and its arguments"):
        td.load_state(path, other)


def test_weights_are_not_compared(saved):
    path, _ = saved
    target, drafter = models("llama")
    other = randomise(make_drafter(target), seed=9)
    assert not any(map(torch.equal, drafter.parameters(), other.parameters()))
    engine = make_engine("eager", pair=(target, other))
    assert finish(engine, td.load_state(path, engine))["texts"]


def test_an_interrupted_write_leaves_what_was_there(eager, saved, tmp_path, monkeypatch):
    _, state = saved
    path = tmp_path / "state"
    td.save_state(state, path, eager)
    before = path.read_bytes()

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        td.save_state(eager.advance(eager.start(*ragged_prompts(ROWS), **MIXED)), path, eager)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["state"]


@register_state
@dataclass(frozen=True)
class Extra:  # a part of a state that this library does not know, with a leaf that may be None
    table: torch.Tensor
    spare: torch.Tensor | None


def test_any_registered_part_and_none_leaves_are_kept(eager, saved, tmp_path, monkeypatch):
    _, state = saved
    template = state_io.abstract_state(eager)
    wider = replace(template, cache=(Extra(torch.empty(2, 3, device="meta"), None),))
    monkeypatch.setattr(state_io, "abstract_state", lambda engine: wider)
    table = torch.arange(6.0).view(3, 2).T  # not contiguous
    td.save_state(replace(state, cache=(Extra(table, None),)), tmp_path / "state", eager)
    back = td.load_state(tmp_path / "state", eager).cache[0]
    assert type(back) is Extra and torch.equal(back.table, table) and back.spare is None
