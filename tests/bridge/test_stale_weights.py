"""The XLA runtime continues with the current weights, whoever wrote them; tests hold the limits too."""

import gc

import pytest
import torch
from support.scripted import own_text, run
from support.states import look
from support.tiny import make_pair, make_target
from torch import nn

import torch_dflash as td
from jax_bridge.arrays import to_torch
from jax_bridge.devices.samples import SAMPLES, checksum, samples
from jax_bridge.devices.weights import TURNS, Weights
from jax_bridge.weights.layout import LayoutRules, Transposed

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
NEW = 12


@pytest.fixture
def weights():
    return Weights(LayoutRules())


class Model(nn.Module):  # weights of several shapes, as an engine names them
    def __init__(self, dtype=torch.float32):
        super().__init__()
        shapes = {"wide": (40, 96), "tall": (300, 8), "stack": (4, 16, 24), "norm": (64,), "one": (1,)}
        generator = torch.Generator().manual_seed(0)
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=generator).to(dtype)
            self.register_parameter(name, nn.Parameter(values))
        self.register_buffer("empty", torch.zeros(0, 3, dtype=dtype))
        self.register_buffer("scalar", torch.tensor(2.0, dtype=dtype))
        self.register_buffer("transposed", torch.randn(24, 40, generator=generator).to(dtype).T)
        self.register_buffer("gaps", torch.randn(24, 40, generator=generator).to(dtype)[::2, ::2])

    def tensors(self, part="target"):
        return {f"{part}.{name}": tensor for name, tensor in self.state_dict(keep_vars=True).items()}


def refreshed(weights, tensors):
    """Returns the arrays by name, and the names of those that are kept as transposes."""
    arrays = weights.refresh(tensors)
    transposed = {name for name, array in arrays.items() if isinstance(array, Transposed)}
    return {name: arrays[name].array if name in transposed else arrays[name] for name in arrays}, transposed


def converted(weights, tensors):
    arrays, transposed = refreshed(weights, tensors)
    for name, tensor in tensors.items():
        array = arrays[name].T if name in transposed else arrays[name]
        assert torch.equal(to_torch(array), tensor.detach()), name
    return arrays


def in_turns(weights, tensors):
    for _ in range(TURNS):
        weights.refresh(tensors)


def changed(before, after):
    return {name for name in before if after[name] is not before[name]}


def fused(model, **options):
    """A step of Trainer's default optimiser; torch does not count the writes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True, **options)
    sum((weight.float() ** 2).sum() for weight in model.parameters()).backward()
    optimizer.step()


def each(write):
    def all_of(model):
        for weight in model.parameters():
            write(weight)

    return all_of


@each
def in_inference_mode(weight):
    with torch.inference_mode():
        weight.mul_(1.5)


def no_grad(weight):
    with torch.no_grad():
        weight.add_(0.5)


def bits(weight):
    return weight.detach().view({2: torch.int16, 4: torch.int32}[weight.itemsize])


WRITES = {
    "fused AdamW": fused,
    "fused AdamW without decay": lambda model: fused(model, weight_decay=0.0),
    "torch.inference_mode()": in_inference_mode,
    "torch.no_grad()": each(no_grad),
    "detach()": each(lambda weight: weight.detach().mul_(1.5)),
    ".data": each(lambda weight: weight.data.mul_(1.5)),
    "a negated view": each(lambda weight: setattr(weight, "data", torch._neg_view(weight.data))),
    ".data replaced": each(lambda weight: setattr(weight, "data", weight.data * 1.5)),
    "numpy view": each(lambda weight: bits(weight).numpy().__iadd__(3)),
    "load_state_dict": lambda model: model.load_state_dict(
        {name: value + 1 for name, value in model.state_dict().items()}
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("write", WRITES)
def test_every_way_of_writing_a_weight_is_seen(write, dtype):
    model, weights = Model(dtype), Weights(LayoutRules(frozenset({"target.wide"})))
    before = converted(weights, model.tensors())
    assert not changed(before, refreshed(weights, model.tensors())[0])
    WRITES[write](model)
    written = {f"target.{name}" for name, _ in model.named_parameters()}
    assert written <= changed(before, converted(weights, model.tensors()))


@pytest.mark.parametrize("name", ["transposed", "gaps", "scalar", "one"])
def test_weights_of_any_layout_and_size_are_looked_at(name, weights):
    model = Model()
    converted(weights, model.tensors())
    getattr(model, name).data.mul_(1.5)
    in_turns(weights, model.tensors())
    converted(weights, model.tensors())


SMALL = ["wide", "tall", "stack", "norm", "one", "gaps", "transposed"]


@pytest.mark.parametrize("trained", [*SMALL, "an adapter", "all"])
def test_a_silent_step_is_seen_in_the_next_call_however_little_is_trained(trained, weights):
    model = Model(torch.bfloat16 if trained in SMALL else torch.float32)
    if trained == "an adapter":
        model.requires_grad_(False)
        model.norm.requires_grad_(True)
    written = [getattr(model, trained)] if trained in SMALL else list(model.parameters())
    before = converted(weights, model.tensors())
    for _ in range(3):  # whichever turn it is
        for weight in written:
            if weight.requires_grad or trained in SMALL:
                weight.data.mul_(-1)
        after = converted(weights, model.tensors())
        assert f"target.{trained if trained in SMALL else 'norm'}" in changed(before, after)
        before = after


def test_nothing_is_made_anew_while_nothing_changes(weights):
    model = Model()
    arrays = weights.refresh(model.tensors())
    assert all(weights.refresh(model.tensors()) is arrays for _ in range(TURNS))


def test_what_is_not_a_number_is_unchanged_as_long_as_its_bits_are(weights):
    model = Model()
    model.norm.data.fill_(torch.nan)
    before, after = (weights.refresh(model.tensors()) for _ in range(2))
    assert not changed(before, after)


def test_one_silent_write_puts_its_whole_model_in_doubt_and_no_other():
    """In bfloat16 a small step moves few elements, and Adam none of a row without a gradient."""
    target, drafter, weights = Model(), Model(), Weights(LayoutRules())
    before = weights.refresh(target.tensors() | drafter.tensors("proposer"))
    target.wide.data.mul_(1.5)
    target.stack.data[3, 5, 7] += 1  # no check would see this weight alone
    assert not torch.isin(target.stack[3, 5, 7], samples(target.stack).view(torch.float32))
    in_turns(weights, target.tensors() | drafter.tensors("proposer"))
    after = converted(weights, target.tensors() | drafter.tensors("proposer"))
    assert changed(before, after) == set(target.tensors())


def test_a_counted_write_converts_its_weight_alone(weights):
    model = Model()
    before = weights.refresh(model.tensors())
    no_grad(model.wide)
    after = converted(weights, model.tensors())
    assert changed(before, after) == {"target.wide"}


def test_engines_of_one_model_see_what_another_has_seen():
    model, one, two = Model(), Weights(LayoutRules()), Weights(LayoutRules())
    assert not changed(one.refresh(model.tensors()), two.refresh(model.tensors()))
    fused(model)
    assert not changed(converted(one, model.tensors()), converted(two, model.tensors()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inference_tensors_are_looked_at_in_every_row(dtype):
    with torch.inference_mode():
        model = Model(dtype).requires_grad_(False)
    assert model.tall.is_inference()
    weights = Weights(LayoutRules())
    converted(weights, model.tensors())
    rows = [(name, row) for name in ("wide", "tall") for row in range(0, getattr(model, name).shape[0], 7)]
    for name, row in rows:
        with torch.inference_mode():
            getattr(model, name)[row].add_(1)
        converted(weights, model.tensors())
    for name, size in (("tall", 8), ("norm", 64)):
        for column in range(size):  # a whole column of a tall weight, an element of a vector
            with torch.inference_mode():
                getattr(model, name)[..., column].add_(1)
            converted(weights, model.tensors())
    with torch.inference_mode():
        model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    converted(weights, model.tensors())


def test_places_are_spread_over_rows_and_columns():
    for shape in ((576, 576), (1536, 576), (49152, 576), (32, 2880, 5760), (4096, 1), (4, 9000)):
        weight = torch.empty(shape, device="meta")
        view = samples(weight)
        assert SAMPLES <= len(view)
        assert view.stride(0) <= max(1, shape[-1] - 1)  # no row is missed
        seen = torch.arange(len(view)) * view.stride(0)
        assert len((seen % shape[-1]).unique()) == min(len(seen), shape[-1])
    assert torch.equal(samples(torch.arange(63)), torch.arange(63))  # small ones whole


@pytest.mark.parametrize(
    "weight",
    [torch.arange(32000.0).view(64, 500).t(), torch.arange(15360.0).view(5, 64, 48).transpose(1, 2)]
    + [torch.arange(15360.0).view(48, 5, 64).permute(1, 2, 0), torch.arange(12800.0).view(100, 128)[:, :64]],
)
def test_each_row_has_a_place_however_a_weight_is_stored(weight):
    seen = torch.isin(weight.to(torch.int64), samples(weight).view(torch.float32).to(torch.int64))
    assert seen.any(dim=-1).all() and int(seen.sum()) < weight.numel() / 8


def test_a_new_engine_looks_at_all_that_another_one_converted(weights):
    model = Model()
    table = nn.Parameter(torch.randn(4096, 32))
    tensors = model.tensors() | {"target.table": table}
    old = weights.refresh(tensors)["target.table"]
    table.data[1234] += 1
    other = Weights(LayoutRules())
    assert other.refresh(tensors)["target.table"] is not old


@pytest.mark.parametrize(
    ("shape", "calls"), [((97, 32), TURNS**2), ((3000, 16), TURNS**2), ((300, 300), TURNS**3)]
)
def test_a_row_written_behind_torchs_back_is_seen_some_calls_later(shape, calls):
    """The write is that of ``weight.data[new_ids] = mean`` to rows of an embedding."""
    weight, weights = nn.Parameter(torch.randn(shape)), Weights(LayoutRules())
    others = {f"target.{number}": nn.Parameter(torch.randn(300, 300)) for number in range(TURNS)}
    tensors = {"target.weight": weight} | others
    array = weights.refresh(tensors)["target.weight"]
    for row in (0, shape[0] // 2, shape[0] - 1):
        weight.data[row] += 1
        late = [weights.refresh(tensors)["target.weight"] is array for _ in range(calls)]
        array = converted(weights, tensors)["target.weight"]
        assert not late[-1]


def test_part_of_a_row_written_behind_torchs_back_is_seen_after_forgetting(weights):
    """The write is neither counted nor looked at: a documented limit. torch's way to count it works too."""
    model = Model()
    before = weights.refresh(model.tensors())
    for _ in range(2):
        model.stack.data[3, 5, 7] += 1
        assert not torch.isin(model.stack[3, 5, 7], samples(model.stack).view(torch.float32))
        for _ in range(TURNS**2):
            assert weights.refresh(model.tensors())["target.stack"] is before["target.stack"]
        weights.forget(model.tensors())
        before = converted(weights, model.tensors())
    model.stack.data[3, 5, 7] += 1
    torch.autograd.graph.increment_version(model.stack)
    converted(weights, model.tensors())


def test_looking_at_a_weight_leaves_its_storage_as_it_was(weights):
    model = Model()
    weights.refresh(model.tensors())
    checksum(model.tensors())
    assert all(weight.untyped_storage().resizable() for weight in model.parameters())


def test_freed_weights_are_freed(weights):
    model = Model()
    weights.refresh(model.tensors())
    storages = [
        torch.multiprocessing.reductions.StorageWeakRef(t.untyped_storage()) for t in model.parameters()
    ]
    del model
    gc.collect()
    assert all(storage.expired() for storage in storages)


@pytest.fixture(scope="module")
def world():
    target, drafter = make_pair("llama", agree=6.0)
    return target, drafter, td.compile(target, drafter, max_length=32, rounds_per_chunk=2)


def lengths(engine):
    text, stats = run(engine, [PROMPT], max_new_tokens=NEW)
    return text[0], stats.acceptance_lengths


def test_decoding_follows_a_fused_step_of_either_model(world):
    target, drafter, engine = world
    before, accepted = lengths(engine)
    assert before == own_text(target, PROMPT, NEW)
    versions = [weight._version for weight in target.parameters()]
    fused(target)
    assert [weight._version for weight in target.parameters()] == versions
    after, accepted = lengths(engine)
    assert after == own_text(target, PROMPT, NEW) != before
    for weight in drafter.parameters():  # drafts token 0 only
        weight.data.zero_()
    again, worse = lengths(engine)
    assert again == after and worse != accepted


@pytest.mark.parametrize("runtime", ["xla", "eager"])
def test_refresh_converts_everything_on_the_next_use(world, runtime):
    target, drafter, engine = world
    if runtime == "eager":
        engine = td.compile(target, drafter, runtime="eager", max_length=32)
    text, _ = lengths(engine)
    row = target.lm_head.weight.data[text[-1]]
    kept = row.clone()
    try:
        row.mul_(-1)  # one row, through .data
        engine.refresh()
        assert lengths(engine)[0] == own_text(target, PROMPT, NEW) != text
    finally:
        row.copy_(kept)
        engine.refresh()
    assert lengths(engine)[0] == text


def test_a_state_in_flight_goes_on_with_the_new_weights(world):
    """`advance` looks at the weights once a chunk."""
    target, _, engine = world
    one, two = (engine.start(torch.tensor([PROMPT]), max_new_tokens=20, eos_token_id=None) for _ in range(2))
    one = engine.advance(one)
    fused(target)
    two = engine.advance(two)
    assert look(engine.runtime, one).tokens.tolist() != look(engine.runtime, two).tokens.tolist()


def test_inference_models_decode_as_they_now_are():
    with torch.inference_mode():
        target = make_target("llama", seed=5)
        engine = td.compile(target, None, max_length=32)
    before, _ = lengths(engine)
    with torch.inference_mode():
        target.load_state_dict(make_target("llama", seed=6).state_dict())
    assert lengths(engine)[0] == own_text(target, PROMPT, NEW) != before


def test_a_square_weight_that_is_turned_in_place_is_seen():
    target = make_target("llama")
    engine = td.compile(target, None, max_length=32)
    weight = target.model.layers[0].self_attn.q_proj.weight
    run(engine, [PROMPT], max_new_tokens=NEW)
    weight.data = weight.data.t()
    assert run(engine, [PROMPT], max_new_tokens=NEW)[0] == [own_text(target, PROMPT, NEW)]


def test_a_tensor_of_a_class_of_its_own_is_refused_by_name():
    class Negative(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function is nn.functional.linear:
                args = args[0], args[1].as_subclass(torch.Tensor) * -1, *args[2:]
            return super().__torch_function__(function, types, args, kwargs or {})

    target = make_target("llama")
    head = target.lm_head.weight
    target.lm_head.weight = nn.Parameter(head.detach().as_subclass(Negative))
    assert type(target.lm_head.weight) is Negative
    with pytest.raises(ValueError, match=r"target\.model\.lm_head\.weight is a Negative.*runtime='eager'"):
        run(td.compile(target, None, max_length=32), [PROMPT], max_new_tokens=NEW)
    eager = td.compile(target, None, max_length=32, runtime="eager")
    assert run(eager, [PROMPT], max_new_tokens=NEW)[0] == [own_text(target, PROMPT, NEW)]
