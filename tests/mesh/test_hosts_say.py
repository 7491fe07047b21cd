"""In each call a process of a mesh reports its weights, its state and its mesh to the others."""

import copy
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
from support.tiny import make_drafter, make_target

import jax_bridge as jb
import jax_bridge.mesh.shape as shape
import torch_dflash as td
from jax_bridge.devices.samples import checksum
from jax_bridge.hosts.hosts import Hosts
from torch_dflash.engine.hosts import facts_of
from torch_dflash.generation import prepare

IDS = torch.tensor([[3, 1, 4, 1, 5]])
ASKED = {"max_new_tokens": 4, "eos_token_id": None}


class Alone:  # in the place of `jax_bridge.hosts.hosts.Hosts`: keeps the reports
    first = True

    def __init__(self):
        self.heard, self.steps = [], 0

    def order(self, mesh):
        return "[0, 1]"

    def agree(self, what, said, given=None):
        self.heard.append((what, said))
        return given

    def collective(self, what):
        self.heard.append((f"in {what}", {}))
        return nullcontext()

    @contextmanager
    def paused(self, what):
        self.heard.append((f"rests in {what}", {}))
        yield
        self.heard.append((f"goes on with {what}", {}))

    def leave(self, what, error):
        self.heard.append((f"left {what}", {}))

    def step(self):
        self.steps += 1

    def lead(self):
        return SimpleNamespace(go=lambda: True, stop=lambda: True)

    def said(self, what, field):
        return [said[field] for one, said in self.heard if one == what and field in said]


@pytest.fixture(scope="module")
def models():
    target = make_target("llama")
    other = copy.deepcopy(target)
    with torch.no_grad():
        other.lm_head.weight.mul_(1.5)
    return target, other


@pytest.fixture
def hosts(monkeypatch):
    alone = Alone()
    for module in ("engine.replicas", "generation"):
        monkeypatch.setattr(f"torch_dflash.{module}.hosts_of", lambda runtime, mesh, replicas: alone)
    monkeypatch.setattr("torch_dflash.eager.EagerRuntime.fingerprint", lambda self, found: checksum(found))
    return alone


def engine_of(target, **more):
    return td.compile(target, None, runtime="eager", max_length=32, verify=False, **more)


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("generate", lambda target: engine_of(target).generate(IDS, **ASKED)),
        ("generate", lambda target: td.generate(target, None, IDS, runtime="eager", verify=False, **ASKED)),
        ("stream", lambda target: list(engine_of(target).stream(IDS, **ASKED))),
        ("stream", lambda target: list(td.stream(target, None, IDS, runtime="eager", verify=False, **ASKED))),
        ("warmup", lambda target: engine_of(target).synchronize("warmup")),
    ],
)
def test_each_call_says_which_weights_it_decodes_with(models, hosts, what, call):
    for target in (*models, *models):
        call(target)
    first, other, again, and_other = hosts.said(what, "their bits")
    assert first == again != other == and_other


def test_a_call_of_a_state_says_which(models, hosts, tmp_path):
    engine, file = engine_of(models[0]), tmp_path / "state"
    states = [engine.start(IDS, **ASKED), engine.start(IDS.flip(1), **ASKED)]
    seeded = [engine.start(IDS, do_sample=True, seed=seed, **ASKED) for seed in (1, 2)]
    for state in (*states, *seeded, states[0]):
        td.save_state(state, file, engine)
        td.load_state(file, engine)
    for state in (*states, *seeded):
        engine.advance(state)
    for what in ("save_state", "load_state", "advance"):
        found = hosts.said(what, "the state")
        assert len(set(found)) == 4 and (what == "advance" or found[4] == found[0]), what


def of_a_class_of_its_own(weight):
    return torch.nn.Parameter(weight.detach().as_subclass(type("Other", (torch.Tensor,), {})))


def of_another_shape(weight):
    return torch.nn.Parameter(torch.zeros(7, 7))


def with_weight(make, call):
    """Calls an engine whose model got another output matrix after compilation."""

    def run(model, folder):
        engine = engine_of(model := copy.deepcopy(model))
        model.lm_head.weight = make(model.lm_head.weight)
        call(engine)

    return run


def saved_into(model, folder):
    engine = engine_of(model)
    td.save_state(engine.start(IDS, **ASKED), folder, engine)


def generate(engine, ids=IDS, **more):
    return engine.generate(ids, **ASKED, **more)


def stream_two(model, folder):
    td.generate(model, None, TWO, runtime="eager", verify=False, streamer=STREAMER, **ASKED)


STREAMER, TWO = SimpleNamespace(put=print, end=print), IDS.repeat(2, 1)
NO, MISSING = "ValueError: ", "FileNotFoundError: "
FAILING = [
    ("load_state", MISSING, "none", lambda model, at: td.load_state(at / "none", engine_of(model))),
    ("save_state", NO, "directory", saved_into),
    ("generate", NO, "cannot be traced", with_weight(of_another_shape, generate)),
    ("warmup", NO, "cannot be traced", with_weight(of_another_shape, lambda engine: engine.warmup())),
    ("generate", NO, "cannot read", with_weight(of_a_class_of_its_own, generate)),
    ("generate", NO, "streamer", stream_two),
    ("generate", NO, "streamer", lambda m, at: generate(engine_of(m, batch_size=2), TWO, streamer=STREAMER)),
]


@pytest.mark.parametrize(("what", "said", "words", "call"), FAILING, ids=lambda value: None)
def test_what_one_process_refuses_is_known_to_the_others(models, hosts, tmp_path, what, said, words, call):
    with pytest.raises((OSError, ValueError), match=words):
        call(models[0], tmp_path)
    assert hosts.said(what, "what it reads")[-1].startswith(said)


def test_what_jb_load_has_read_is_said(models, hosts, monkeypatch, tmp_path):
    monkeypatch.setattr("jax_bridge.checkpoints.load.spanning", lambda mesh: hosts)
    for number, model in enumerate(models):
        model.save_pretrained(tmp_path / str(number))
    for folder, dtype in (("0", None), ("1", None), ("0", None), ("0", torch.bfloat16)):
        loaded = jb.load(tmp_path / folder, dtype=dtype)
        assert loaded.checkpoint == hosts.said("jb.load", "the checkpoint")[-1]
        td.compile(loaded, None, max_length=32, verify=False).synchronize("warmup")
    for what, field in (("jb.load", "the checkpoint"), ("warmup", "the target")):
        first, other, again, narrow = hosts.said(what, field)
        assert first == again != other and narrow != first, what
    with pytest.raises(OSError, match="none"):
        jb.load(tmp_path / "none")
    assert hosts.said("jb.load", "what it reads")[-1].startswith("FileNotFoundError: ")


def test_weights_that_cannot_be_taken_in_end_all(models, hosts, monkeypatch, tmp_path):
    engine = engine_of(models[0])
    state = engine.start(IDS, **ASKED)
    td.save_state(state, tmp_path / "state", engine)

    def fail(*given):
        raise MemoryError

    calls = {
        "generate": lambda: engine.generate(IDS, **ASKED),
        "stream": lambda: list(engine.stream(IDS, **ASKED)),
        "start": lambda: engine.start(IDS, **ASKED),
        "advance": lambda: engine.advance(state),
        "load_state": lambda: td.load_state(tmp_path / "state", engine),
    }
    monkeypatch.setattr(engine.runtime, "refresh", fail)
    monkeypatch.setattr(engine.runtime, "place", fail)
    for what, call in calls.items():
        with pytest.raises(MemoryError):
            call()
        assert hosts.heard[-1] == (f"in {what}", {})


def test_an_interrupt_while_a_call_is_read_ends_all(models, hosts, monkeypatch):
    engine = engine_of(models[0])

    def interrupt(*given):
        raise KeyboardInterrupt

    for module, name in (("engine", "read_request"), ("hosts", "packed")):
        hosts.heard.clear()
        monkeypatch.setattr(f"torch_dflash.engine.{module}.{name}", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(IDS, **ASKED)
        assert hosts.heard[-1] == ("left generate", {})


def test_a_finished_stream_that_is_left_has_as_many_steps_as_one_read_to_its_end(models, hosts):
    steps = []
    for to_the_end in (True, False):
        before, gained = hosts.steps, 0
        for (tokens,) in engine_of(models[0]).stream(IDS, **ASKED):
            gained += len(tokens)
            if gained == ASKED["max_new_tokens"] and not to_the_end:
                break
        steps.append(hosts.steps - before)
    assert steps[0] == steps[1] > 0


def test_a_mesh_is_compared_by_its_devices_however_it_is_named(models, hosts):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("model",))
    for one in (1, mesh):
        options = ASKED | {"mesh": one, "seed": 0, "verify": False, "return_dict_in_generate": True}
        prepare("generate", models[0], None, IDS, None, options)
    first, other = hosts.said("generate", "what it reads")
    assert first == other


def test_a_streamer_that_fails_at_the_prompt_ends_all(models, hosts):
    def fail(tokens):
        raise ValueError("of mine")

    with pytest.raises(ValueError, match="of mine"):
        engine_of(models[0]).generate(IDS, streamer=SimpleNamespace(put=fail, end=fail), **ASKED)
    assert hosts.heard[-1] == ("in generate", {})


def test_the_order_of_devices_is_said(models, hosts, monkeypatch):
    devices = [SimpleNamespace(id=number) for number in range(3)]
    monkeypatch.setattr(shape, "default_device", lambda: devices[0])
    orders = [devices, devices[::-1]]
    meshes = [SimpleNamespace(axis_names=("model",), devices=np.array(order)) for order in orders]
    monkeypatch.setattr(shape, "Mesh", SimpleNamespace)
    monkeypatch.setattr(shape.jax, "devices", lambda: devices)
    said = [Hosts.order(SimpleNamespace(), mesh) for mesh in meshes]
    assert said == ["[0, 1, 2]", "[2, 1, 0]"]
    engine_of(models[0]).synchronize("warmup")
    assert hosts.said("warmup", "the mesh") == ["[0, 1]"]


class Odd:  # Python shows its address
    pass


@pytest.mark.parametrize("values", [(Odd(), Odd(), torch.float16), ([{8, 0}], [{0, 8}], [{0, 9}])])
def test_what_is_said_of_a_config_is_the_same_in_each_process(models, values):
    """The report holds no process number and no order of a set; Qwen3.5's config has a set."""
    model, said = copy.deepcopy(models[0]), []
    for value in values:
        model.config.extra = value
        said.append(facts_of(Alone(), None, model, None)["the target"])
    assert said[0] == said[1] != said[2]


def test_what_is_made_of_a_drafter_is_said(models):
    target, drafter = models[0], make_drafter(models[0])
    forms = [drafter, *(td.Union(td.NGramProposer(width), drafter, rows=8) for width in (4, 4, 6))]
    forms += [td.Union(td.NGramProposer(4), drafter), td.TreeProposer(drafter, rows=8)]
    forms += [td.TreeProposer(drafter, rows=16)]
    said = [facts_of(Alone(), None, target, form)["the drafter"] for form in forms]
    assert said[1] == said[2] and len(set(said)) == len(forms) - 1


@pytest.mark.parametrize(
    ("door", "place"),
    [
        ("engine", "torch_dflash.engine.engine.Deltas.by"),
        ("engine", "torch_dflash.runtime.RowDelta.tokens"),
        ("td", "torch_dflash.pieces.TextStream.push"),
    ],
)
def test_a_stream_whose_gain_fails_is_left_at_once(models, hosts, monkeypatch, door, place):
    left, lead = [], SimpleNamespace(go=lambda: True, stop=lambda: left.append("it") or True)
    monkeypatch.setattr(hosts, "lead", lambda: lead)

    def interrupt(*given, **more):
        raise KeyboardInterrupt

    if door == "engine":
        stream = engine_of(models[0]).stream(IDS, **ASKED)
    else:
        target = copy.deepcopy(models[0])  # an engine of another test's processes stays for the other
        stream = td.stream(target, None, IDS, tokenizer=object(), runtime="eager", verify=False, **ASKED)
    monkeypatch.setattr(place, property(interrupt) if place.endswith("tokens") else interrupt, raising=False)
    with pytest.raises(KeyboardInterrupt) as kept:  # its traceback holds the frames, as a notebook does
        list(stream)
    assert left == ["it"] and kept.tb is not None


def test_a_stream_rests_while_it_is_read(models, hosts):
    for _ in engine_of(models[0]).stream(IDS, **ASKED):
        assert hosts.heard[-1] == ("rests in a generation", {})
    assert hosts.heard[-1] == ("goes on with a generation", {})
