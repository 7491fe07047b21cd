"""Process boundaries: forks after JAX has started, workers that are spawned, copies."""

import copy
import json
import pickle

import pytest
import torch
from support.shell import python
from support.tiny import make_target
from support.tokenizers import letters

import torch_dflash as td

EAGER = {"eager", "eager engine"}


@pytest.fixture(scope="module")
def said():
    done = python("from support.processes import main; main()")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_door_refuses_xla_in_a_fork_of_a_process_in_which_jax_runs(said):
    refused = {door: words for door, words in said["forked"].items() if door not in EAGER}
    assert len(refused) == 15
    for door, words in refused.items():
        assert words.startswith("RuntimeError: runtime='xla': this process was forked"), (door, words)
        assert "spawn" in words and "runtime='eager'" in words, (door, words)


def test_forks_decode_eagerly_and_spawned_workers_on_xla(said):
    assert {said["forked"][door] for door in EAGER} == {repr(said["own"])}
    assert said["before"]["generate"].startswith("tensor(")
    assert said["spawned"] == said["own"]


WAYS = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickle.dumps}


@pytest.fixture(scope="module")
def of_this_process():
    target = make_target("llama")
    engine = td.compile(target, None, runtime="eager", max_length=32)
    tokenizer = letters()[0]
    tokenizer.chat_template = "{{ messages }}"
    return {"Engine": engine, "Session": engine.session(), "Chat": td.Chat(engine, tokenizer)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["Engine", "Session", "Chat"])
def test_what_holds_programs_is_not_copied(of_this_process, kind, way):
    words = f"{kind} can be neither copied nor pickled.*compile in the worker"
    with pytest.raises(TypeError, match=words):
        WAYS[way](of_this_process[kind])
    if way != "copy":
        with pytest.raises(TypeError, match=words):
            WAYS[way]({"of a server": [of_this_process[kind]]})


def test_what_is_only_made_of_numbers_is_copied(of_this_process):
    ids = torch.tensor([[1, 2, 3]])
    output = of_this_process["Engine"].generate(ids, max_new_tokens=2, return_dict_in_generate=True)
    assert torch.equal(pickle.loads(pickle.dumps(output)).sequences, output.sequences)
    assert copy.deepcopy(td.NGramProposer(4)).width == 4
