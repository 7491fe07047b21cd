"""State files that no engine wrote, threads that load while others decode, models cast in mid-generation."""

import json

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from support.refusals import refuses as refuses
from support.scripted import own_text, run
from support.states import look
from support.threads import in_threads
from support.tiny import make_pair, ragged_prompts, small_pair

import jax_bridge as jb
import torch_dflash as td
from torch_dflash.engine import saved as state_io

OPTIONS = {"max_new_tokens": 12, "eos_token_id": [5, 96], "do_sample": False}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def pair():
    return make_pair("llama", agree=8.0)


def make_engine(pair, runtime="eager"):
    return td.compile(*pair, runtime=runtime, max_length=48, batch_size=3, rounds_per_chunk=1)


@pytest.fixture(scope="module")
def engine(pair):
    return make_engine(pair)


@pytest.fixture(scope="module")
def saved(engine, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "state"
    td.save_state(engine.advance(engine.start(*ragged_prompts(2), **OPTIONS)), path, engine)
    with safe_open(path, framework="pt") as content:
        return path, load_file(path), content.metadata()


def craft(path, tensors, metadata):
    sealed = metadata | {"checksum": state_io._checksum(tensors, metadata)}
    save_file(tensors, path, sealed)
    return path


ODD_PLANS = ["", "{", "[]", "7", "null", '"x"', "[" * 100_000]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        *(("plan", plan, "not a plan as JSON") for plan in (None, *ODD_PLANS)),
        *(("proposer", proposer, f"{proposer}, this engine's is") for proposer in (None, "", "x")),
    ],
    ids=range(len(ODD_PLANS) + 4),
)
def test_a_file_without_its_plan_or_proposer_is_refused(engine, saved, tmp_path, field, value, words):
    _, tensors, metadata = saved
    metadata = {name: text for name, text in metadata.items() if name != field}
    metadata |= {} if value is None else {field: value}
    with refuses(ValueError, f"{field} is ", words):
        td.load_state(craft(tmp_path / "bad", tensors, metadata), engine)


@pytest.mark.parametrize(
    "change", [{"capacity": "48"}, {"capacity": [48]}, {"batch_size": None}, {"odd": {}}]
)
def test_odd_fields_of_a_plan_are_named(engine, saved, tmp_path, change):
    _, tensors, metadata = saved
    metadata = metadata | {"plan": json.dumps(json.loads(metadata["plan"]) | change)}
    (field, value), *_ = change.items()
    with refuses(ValueError, f"the state has {field}={value!r}"):
        td.load_state(craft(tmp_path / "bad", tensors, metadata), engine)


@pytest.mark.parametrize(
    ("name", "at", "value", "said"),
    [
        ("limit", (0,), 10**6, "limit[0] is 1000000, it may be 0 to 48"),
        ("limit", (1,), -1, "limit[1] is -1"),
        ("length", (0,), 10**6, "length[0] is 1000000, it may be 0 to 34"),
        ("length", (1,), -2, "length[1] is -2"),
        ("rounds", (0,), 49, "rounds[0] is 49, it may be 0 to 48"),
        ("rounds", (0,), -1, "rounds[0] is -1"),
        ("tokens", (0, 2), 97, "tokens[0, 2] is 97, it may be 0 to 96"),
        ("tokens", (1, 0), -1, "tokens[1, 0] is -1"),
        ("stop_ids", (1, 1), -2, "stop_ids[1, 1] is -2"),
        ("done", (2,), False, "done[2] is False, but length is 0 and limit 0"),
        ("length", (0,), 3, "proposer has taken in ["),
    ],
)
def test_counts_and_tokens_out_of_range_are_named(engine, saved, tmp_path, name, at, value, said):
    _, tensors, metadata = saved
    changed = tensors["." + name].clone()
    changed[at] = value
    path = craft(tmp_path / "bad", tensors | {"." + name: changed}, metadata)
    with refuses(ValueError, f"{path}: ", said, "decode from the prompt again"):
        td.load_state(path, engine)


@pytest.mark.parametrize("cache", ["static", "paged"])
@pytest.mark.parametrize("drafter", [None, td.NGramProposer(4), "dflash"])
def test_whatever_an_engine_writes_it_loads(pair, tmp_path, drafter, cache):
    drafter = pair[1] if drafter == "dflash" else drafter
    engine = td.compile(pair[0], drafter, runtime="eager", max_length=40, batch_size=3, cache=cache)
    few, many, stops = (
        {"max_new_tokens": [1, 9]},
        {"max_new_tokens": 17},
        {"eos_token_id": [*range(0, 60, 9)]},
    )
    for options in (few, many, stops):
        state = engine.start(*ragged_prompts(2), **({"max_new_tokens": 17, "eos_token_id": None} | options))
        for _ in range(20):
            td.save_state(state, tmp_path / "state", engine)
            state = engine.advance(td.load_state(tmp_path / "state", engine))
        assert look(engine.runtime, state).done.all()


def test_a_full_disk_is_an_os_error_and_leaves_the_old_file(engine, saved, tmp_path, monkeypatch):
    path = tmp_path / "state"
    path.write_bytes(saved[0].read_bytes())

    def full(*args):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(state_io, "save_file", full)
    with pytest.raises(OSError, match="No space left on device: .*state"):
        td.save_state(td.load_state(path, engine), path, engine)
    assert path.read_bytes() == saved[0].read_bytes() and [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_states_are_saved_and_loaded_while_others_decode(pair, saved, tmp_path, runtime):
    """The first calls of XLA trace the modules that compute a state's shapes."""
    engine = make_engine(pair, runtime)
    text, said = own_text(pair[0], PROMPT, 12), []

    def decode():
        said.extend(run(engine, [PROMPT], max_new_tokens=12)[0][0] for _ in range(8))

    def io():
        for _ in range(12):
            td.save_state(td.load_state(saved[0], engine), tmp_path / "state", engine)

    assert not (errors := in_threads(decode, io, decode)), errors
    assert said == [text] * 16
    assert all(tensor.is_meta for tensor in engine.pair.parameters())


@pytest.mark.parametrize(
    ("runtime", "cast"), [("eager", "target"), ("eager", "drafter"), ("xla", "target"), ("xla", "drafter")]
)
def test_a_model_cast_in_mid_generation_is_refused_by_name(runtime, cast):
    pair = dict(zip(("target", "drafter"), make_pair("llama"), strict=True))
    engine = make_engine(pair.values(), runtime)
    state = engine.start(*ragged_prompts(2), **OPTIONS)
    pair[cast].to(torch.bfloat16)
    words = f"made with a {cast} in torch.float32, which is in torch.bfloat16 now", "cast it"
    with refuses(ValueError, *words):
        engine.advance(state)
    if runtime == "eager" and cast == "target":
        text = own_text(pair["target"], PROMPT, 12)
        assert run(engine, [PROMPT], max_new_tokens=12)[0] == [text]  # a new generation has the new dtype


@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_a_default_device_of_the_callers_changes_nothing(pair, runtime, tmp_path):
    text = own_text(pair[0], PROMPT, 12)
    engine = make_engine(pair, runtime)
    ids, mask = torch.tensor([PROMPT]), torch.ones(1, len(PROMPT), dtype=torch.long)
    with torch.device("meta"):
        out = engine.generate(ids, mask, max_new_tokens=12, eos_token_id=None)
        state = engine.advance(engine.start(ids, mask, max_new_tokens=12, eos_token_id=None))
        td.save_state(state, tmp_path / "state", engine)
        engine.advance(td.load_state(tmp_path / "state", engine))
        if runtime == "xla":
            engine.warmup()
        made = make_engine(pair).generate(ids, mask, max_new_tokens=12, eos_token_id=None)
        pieces = [*engine.stream(ids, mask, max_new_tokens=12, do_sample=True, top_k=0, seed=3)]
    assert out[0, 8:].tolist() == made[0, 8:].tolist() == text and len(sum((p[0] for p in pieces), [])) == 12
    assert not out.is_meta


def test_tied_weights_that_were_parted_are_followed():
    target, _ = make_pair("qwen3")
    assert target.config.tie_word_embeddings
    engine = td.compile(target, None, runtime="eager", max_length=32)
    state = {name: value.clone() for name, value in target.state_dict().items()}
    target.load_state_dict(state, assign=True)
    assert run(engine, [PROMPT], max_new_tokens=6)[0] == [own_text(target, PROMPT, 6)]
    with torch.no_grad():
        target.lm_head.weight.mul_(-1)
    assert run(engine, [PROMPT], max_new_tokens=6)[0] == [own_text(target, PROMPT, 6)]


def test_a_state_of_another_plan_or_side_is_refused_by_name():
    pair = small_pair("llama")
    options = {"max_length": 48, "batch_size": 2}
    engine = td.compile(*pair, **options)
    ids, mask = ragged_prompts(2)
    asked = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    plain = td.compile(pair[0], None, **options).start(ids, mask, **asked)
    with pytest.raises(ValueError, match="another plan or proposer"):
        engine.advance(plain)
    eager = td.compile(*pair, runtime="eager", **options).start(ids, mask, **asked)
    with pytest.raises(TypeError, match="state_to_jax"):
        engine.advance(eager)


def test_taking_a_state_out_compiles_nothing_after_warm_up():
    pair = [model.to(torch.bfloat16) for model in make_pair("llama")]
    engine = td.compile(*pair, max_length=48, batch_size=2).warmup()
    compiled = engine.runtime.compilations
    state = engine.start(*ragged_prompts(2), max_new_tokens=8, do_sample=False, eos_token_id=None)
    engine.advance(engine.advance(state))
    assert engine.runtime.compilations == compiled


def test_a_foreign_state_is_refused_by_name(pair):
    options = {"runtime": "eager", "max_length": 48, "rounds_per_chunk": 1}
    own = td.compile(*pair, batch_size=3, **options)
    words = "another plan or proposer", "the engine that made it"
    for drafter, changes in (
        (td.NGramProposer(), {}),
        (None, {}),
        (pair[1], {"batch_size": 2}),
        (pair[1], {"cache": "paged", "page_size": 16}),
    ):
        other = td.compile(pair[0], drafter, **({"batch_size": 3} | options | changes))
        with refuses(ValueError, *words):
            own.advance(other.start(*ragged_prompts(2), **OPTIONS))
    state = own.start(*ragged_prompts(2), **OPTIONS)
    with refuses(TypeError, "jax_bridge.state_to_torch"):
        own.advance(jb.state_to_jax(state))
    assert look(own.runtime, own.advance(jb.state_to_torch(jb.state_to_jax(state)))).length.max() > 0
