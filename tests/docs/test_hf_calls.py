"""docs/hf.md: no call of transformers' ``generate`` says something else here, and its table is true."""

import json
import sys

import pytest
from support import ROOT

BENCHMARKS = str(ROOT / "benchmarks")


@pytest.fixture(scope="module")
def module():
    sys.path.insert(0, BENCHMARKS)
    try:
        import hf_calls
    finally:
        sys.path.remove(BENCHMARKS)
    return hf_calls


def test_every_call_gives_the_same_text_or_is_refused(module):
    known = json.loads((ROOT / "docs/results/hf_calls.json").read_text())["calls"]
    found = module.run()
    assert found.keys() == known.keys()
    for name, doors in found.items():
        for door, said in doors.items():
            assert said != module.OTHER, (name, door)
            # transformers' own words, and so which call it refuses itself, differ between its versions.
            assert said.partition(":")[0] == known[name][door].partition(":")[0], (name, door, said)


def test_another_text_would_show(module, monkeypatch):
    monkeypatch.setattr(module, "CALLS", {name: module.CALLS[name] for name in ["`repetition_penalty`"]})
    penalty = module.td.processors.RepetitionPenalty
    monkeypatch.setattr(penalty, "__call__", lambda self, memory, text, logits: logits)
    assert set(module.run()["`repetition_penalty`"].values()) == {module.OTHER}
