"""States and trees across the border: lossless in both directions, in mid-generation, memory owned."""

from dataclasses import fields, is_dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.scripted import own_text
from support.states import look
from support.tiny import small_pair

import jax_bridge as jb
import torch_dflash as td
from jax_bridge._torchax import call_torch
from torch_dflash.ops.windows import write_rows

NEW = 20
PROMPTS = [[5, 17, 80, 33, 2, 9, 41], [7] * 3, list(range(20, 41))]


class Side:  # an engine's steps one by one, on one side of the border
    def __init__(self, pair, runtime, cache="static"):
        options = {"max_length": 64, "batch_size": 4, "rounds_per_chunk": 1, "filters": False}
        options["outputs"] = ("output_logprobs",)
        self.engine = td.compile(*pair, runtime=runtime, cache=cache, page_size=16, **options)
        self.runtime = self.engine.runtime
        self.params = self.runtime.refresh(self.engine.tensors())

    def start(self, **options):
        ids = torch.zeros(3, 21, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(PROMPTS):
            ids[row, : len(prompt)], mask[row, : len(prompt)] = torch.tensor(prompt), 1
        options = {"max_new_tokens": NEW, "eos_token_id": None, "seed": 0, "do_sample": False} | options
        return self.engine.start(ids, mask, **options)

    def advance(self, state, rounds=1):
        for _ in range(rounds):
            state = self.engine.advance(state)
        return state

    def finish(self, state):
        while not look(self.runtime, state).done.all():
            state = self.advance(state)
        seen = look(self.runtime, state)
        rows = range(len(PROMPTS))
        texts = [seen.tokens[r, len(PROMPTS[r]) : seen.length[r] + 1].tolist() for r in rows]
        return texts, [seen.accepted[r, : seen.rounds[r]].tolist() for r in rows]


@pytest.fixture(scope="module")
def pair():
    return small_pair("gpt_oss", agree=6.0)


@pytest.fixture(scope="module", params=["static", "paged"])
def cache(request):
    return request.param


@pytest.fixture(scope="module")
def eager(pair, cache):
    return Side(pair, "eager", cache)


@pytest.fixture(scope="module")
def xla(pair, cache):
    return Side(pair, "xla", cache)


@pytest.fixture(scope="module")
def half_pair():
    """A pair in bfloat16, so that no dtype passes by being the default."""
    return tuple(model.to(torch.bfloat16) for model in small_pair("qwen3"))


def leaves(tree, path=""):
    """(path, leaf) of every array in a state, whichever side it is on."""
    if is_dataclass(tree):
        for field in fields(tree):
            yield from leaves(getattr(tree, field.name), f"{path}.{field.name}")
    elif isinstance(tree, tuple | dict):
        for index, item in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(item, f"{path}[{index}]")
    elif tree is not None:
        yield path, tree


@pytest.mark.parametrize("sampled", [False, True])
def test_a_state_crosses_twice_in_mid_generation(pair, eager, xla, sampled):
    options = {"do_sample": True, "temperature": 9.0, "top_k": 0} if sampled else {}
    alone = eager.finish(eager.start(**options))
    assert alone == xla.finish(xla.start(**options))
    assert max(map(max, alone[1])) > 1
    if not sampled:
        assert alone[0] == [own_text(pair[0], prompt, NEW) for prompt in PROMPTS]
    for first, second in ((0, 2), (1, 1), (2, 3)):
        state = eager.start(**options)
        for _ in range(first):
            state = eager.advance(state)
        state = xla.advance(jb.state_to_jax(state), second)
        assert eager.finish(jb.state_to_torch(state)) == alone
        state = eager.advance(jb.state_to_torch(xla.advance(xla.start(**options), first)), second)
        assert xla.finish(jb.state_to_jax(state)) == alone


@pytest.mark.parametrize("half", [False, True])
def test_conversion_keeps_every_field(pair, half_pair, half, cache):
    side = Side(half_pair if half else pair, "eager", cache)
    state = side.advance(side.start(), 2)
    there = jb.state_to_jax(state)
    back = jb.state_to_torch(there)
    assert type(there) is type(back) is td.DecodeState
    ours, theirs, again = (dict(leaves(one)) for one in (state, there, back))
    assert list(ours) == list(theirs) == list(again) and len(ours) > 20
    for path, tensor in ours.items():
        array, copy = theirs[path], again[path]
        assert isinstance(array, jax.Array) and array.shape == tuple(tensor.shape), path
        assert copy.dtype == tensor.dtype and array.dtype.name == str(tensor.dtype)[6:], path
        assert torch.equal(copy, tensor), path
        assert np.array_equal(np.asarray(array).astype(np.float64), tensor.double().numpy()), path
    dtypes = {tensor.dtype for tensor in ours.values()}
    wide = torch.bfloat16 if half else torch.float32
    assert dtypes == {wide, torch.float32, torch.int32, torch.uint8, torch.bool}


def test_copies_own_their_memory(eager, xla):
    state = eager.start()
    there = jb.state_to_jax(state)
    before = {path: leaf.clone() for path, leaf in leaves(state)}
    back = dict(leaves(jb.state_to_torch(there)))
    for path, leaf in leaves(state):
        assert leaf.data_ptr() != dict(leaves(there))[path].unsafe_buffer_pointer(), path
    after = xla.advance(there)  # consumes `there`, and neither the source nor the copy of `there`
    assert all(torch.equal(leaf, before[path]) for path, leaf in leaves(state))
    assert all(torch.equal(leaf, before[path]) for path, leaf in back.items())
    kept = np.array(after.tokens)
    mine = jb.state_to_torch(after)
    mine.tokens.fill_(1)  # writing to a copy does not change the original
    assert np.array_equal(after.tokens, kept) and not mine.tokens.numpy().tolist() == kept.tolist()


def test_a_change_on_one_side_is_seen_on_the_other(eager, xla, cache):
    state = eager.advance(eager.start())
    state.tokens[1, 30] = 77
    leaf = "pool" if cache == "paged" else "value"
    getattr(state.cache[1], leaf)[0, 1, 2, 3] = -5.5
    there = jb.state_to_jax(state)
    assert int(there.tokens[1, 30]) == 77 and float(getattr(there.cache[1], leaf)[0, 1, 2, 3]) == -5.5
    object.__setattr__(there.cache[0], leaf, getattr(there.cache[0], leaf).at[2, 0, 4, 1].set(9.25))
    back = jb.state_to_torch(there)
    assert float(getattr(back.cache[0], leaf)[2, 0, 4, 1]) == 9.25 and int(back.tokens[1, 30]) == 77
    # A change on the other side changes the text.
    plain = eager.finish(jb.state_to_torch(xla.start()))
    state = eager.start()
    state.tokens[0, len(PROMPTS[0])] = (int(state.tokens[0, len(PROMPTS[0])]) + 1) % 96
    texts = xla.finish(jb.state_to_jax(state))[0]
    assert texts[0] != plain[0][0] and texts[1:] == plain[0][1:]


def test_any_tree_crosses_and_returns():
    base = torch.arange(24, dtype=torch.float32).view(4, 6)
    tensors = {
        "bf16": torch.randn(3, 5).to(torch.bfloat16), "f16": torch.randn(2).half(),
        "flags": torch.tensor([True, False, True]), "bytes": torch.tensor([[0, 255]], dtype=torch.uint8),
        "small": torch.tensor([-128, 127], dtype=torch.int8), "scalar": torch.tensor(3.5),
        "no rows": torch.empty(0, 4, dtype=torch.bfloat16), "no flags": torch.empty(2, 0, dtype=torch.bool),
        "turned": base.T, "strided": base[1::2, ::3], "one": base[:, 1:2], "unaligned": base.flatten()[1:],
        "spread": torch.tensor([7.0]).expand(3),
    }  # fmt: skip
    tree = {"a": [tensors, None, 3], "b": ("text", 2.5, (torch.tensor([1, 2], dtype=torch.int32),))}
    there = jb.to_jax(tree)
    assert there["a"][1:] == [None, 3] and there["b"][:2] == ("text", 2.5)
    back = jb.to_torch(there)
    for name, tensor in tensors.items():
        array, copy = there["a"][0][name], back["a"][0][name]
        assert isinstance(array, jax.Array) and array.dtype.name == str(tensor.dtype)[6:], name
        assert copy.dtype == tensor.dtype and copy.shape == tensor.shape and torch.equal(copy, tensor), name
    assert torch.equal(back["b"][2][0], tree["b"][2][0])
    shared = jb.to_torch(jb.to_jax(tree, copy=False), copy=False)
    assert all(torch.equal(shared["a"][0][name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("wide", [False, True])
def test_wide_types_are_narrowed_or_refused(wide):
    with jax.enable_x64(wide):
        ids = torch.tensor([-(2**31), 2**31 - 1, 5])
        assert jb.to_jax(ids).dtype == jnp.int32 and jb.to_jax(ids).tolist() == ids.tolist()
        assert jb.to_jax(torch.empty(0, dtype=torch.int64)).dtype == jnp.int32
        for value in (2**31, -(2**31) - 1):
            with pytest.raises(ValueError, match=f"int64.*{value}.*beyond int32.*runtime='eager'"):
                jb.to_jax({"ids": torch.tensor([0, value])})
        with pytest.raises(ValueError, match="float64 tensor has no place.*runtime='eager', or pass"):
            jb.to_jax([torch.zeros(2, dtype=torch.float64)])


@pytest.fixture
def process_of_64_bits():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def test_a_process_of_64_bits_decodes_a_pair_of_32(process_of_64_bits, tmp_path):
    target, drafter = small_pair("qwen3", agree=6.0)
    target.save_pretrained(tmp_path / "target")
    ids, greedy = torch.tensor(PROMPTS[:1]), {"do_sample": False, "max_new_tokens": NEW}
    want = target.generate(ids, **greedy)
    options = {"max_length": 64, "outputs": ("output_logprobs",)}
    eager, xla = (
        td.compile(model, drafter, runtime=runtime, **options)
        for model, runtime in ((target, "eager"), (jb.load(tmp_path / "target"), "xla"))
    )
    assert torch.equal(xla.generate(ids, **greedy), want)
    sampled = {"do_sample": True, "top_k": 5, "seed": 3, "max_new_tokens": NEW}
    assert torch.equal(xla.generate(ids, **sampled), eager.generate(ids, **sampled))
    state = xla.advance(jb.state_to_jax(eager.advance(eager.start(ids, **greedy))))
    td.save_state(state, tmp_path / "state", xla)
    state = xla.advance(td.load_state(tmp_path / "state", xla))
    back = eager.advance(jb.state_to_torch(state))
    length = int(back.length[0])
    assert length > ids.shape[1] + 4 and torch.equal(back.tokens[0, :length], want[0, :length].int())


def test_a_pair_in_float64_decodes_as_its_refusal_says():
    target, drafter = (model.double() for model in small_pair("qwen3"))
    ids, options = torch.tensor(PROMPTS[:1]), {"do_sample": False, "max_new_tokens": 5}
    with pytest.raises(ValueError, match="float64.*runtime='eager', or pass model.float()"):
        td.generate(target, drafter, ids, runtime="xla", **options)
    want = target.generate(ids, **options)
    assert torch.equal(td.generate(target, drafter, ids, runtime="eager", **options), want)
    assert torch.equal(td.generate(target.float(), drafter.float(), ids, runtime="xla", **options), want)


def test_views_share_memory_only_when_asked_for():
    tensor = torch.zeros(64)
    copy, view = jb.to_jax(tensor), jb.to_jax(tensor, copy=False)
    tensor[3] = 4.0
    assert float(view[3]) == 4.0 and float(copy[3]) == 0.0
    assert view.unsafe_buffer_pointer() == tensor.data_ptr() != copy.unsafe_buffer_pointer()
    array = jnp.arange(64, dtype=jnp.float32)
    assert jb.to_torch(array, copy=False).data_ptr() == array.unsafe_buffer_pointer()
    assert jb.to_torch(array).data_ptr() != array.unsafe_buffer_pointer()
    parameter = torch.nn.Parameter(torch.ones(3))
    assert jb.to_jax(parameter).tolist() == [1, 1, 1]  # a parameter that wants gradients is no obstacle


@pytest.mark.parametrize("batch", [1, 5, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_write_rows_lowers_to_the_same_writes(batch, dtype):
    generator = torch.Generator().manual_seed(batch)
    for shape, dim in (((batch, 40), 1), ((batch, 2, 40, 3), 2)):
        buffer = torch.randint(0, 99, shape, generator=generator).to(dtype)
        rows = torch.randint(100, 200, (*shape[:dim], 6, *shape[dim + 1 :]), generator=generator).to(dtype)
        start = torch.randint(0, 35, (batch,), generator=generator, dtype=torch.int32)
        start[0] = 34  # the last place a window fits
        lowered = jax.jit(partial(call_torch, partial(write_rows, dim=dim)), donate_argnums=0)
        arguments = jb.to_jax((buffer, rows, start))
        program = lowered.lower(*arguments).compile()
        assert "scatter" not in program.as_text() and "dynamic-update-slice" in program.as_text()
        written = jb.to_torch(program(*arguments))
        by_hand = buffer.clone()
        for row, at in enumerate(start.tolist()):
            by_hand[row].narrow(dim - 1, at, 6).copy_(rows[row])
        assert torch.equal(written, by_hand)
        assert torch.equal(write_rows(buffer, rows, start, dim), by_hand)


@pytest.mark.parametrize("there", [16, 32])
def test_a_state_of_other_pages_is_refused(there):
    here = 48 - there
    target = small_pair()[0]
    ids = torch.tensor([[3, 1, 4]])
    mine, theirs = (
        td.compile(target, None, max_length=96, cache="paged", page_size=size) for size in (here, there)
    )
    with pytest.raises(ValueError, match="another plan"):
        mine.advance(theirs.start(ids, max_new_tokens=4))


def test_a_state_of_numpy_arrays_goes_on():
    target = small_pair()[0].bfloat16()
    engine = td.compile(target, None, max_length=64, rounds_per_chunk=4)
    states = [engine.start(torch.tensor([[3, 1, 4]]), max_new_tokens=4) for _ in range(2)]
    found = [engine.advance(state) for state in (states[0], jax.device_get(states[1]))]
    assert jb.state_to_torch(found[0]).tokens.tolist() == jb.state_to_torch(found[1]).tokens.tolist()
