"""With products in another type the text is that of plain decoding in the same arithmetic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.arithmetic import ARITHMETIC
from support.scripted import run
from support.tiny import make_pair, make_target, small_pair
from torch import nn

import jax_bridge as jb
import torch_dflash as td
from jax_bridge.weights import layout
from jax_bridge.weights.formats import FEW_ROWS, Cast, Quantized, Readable, name_of, plain
from jax_bridge.weights.layout import WeightLayout, keep
from jax_bridge.weights.products import linear_jax

PROMPTS = [[5, 17, 80, 33, 2, 9, 41], [3, 1, 4], list(range(1, 30))]


def test_weights_that_lead_say_the_same(monkeypatch):
    target = make_target("llama", num_hidden_layers=2)
    options = {"max_length": 96, "batch_size": 3, "filters": False, "quantize": "int8"}
    texts = []
    for led in (False, True):
        monkeypatch.setattr(layout, "leads", lambda shape, led=led: led)
        texts.append(run(td.compile(target, None, **options), PROMPTS, max_new_tokens=40)[0])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("family", ["llama", "qwen3"])  # qwen3's embedding is its head
@pytest.mark.parametrize("case", ARITHMETIC)
def test_drafting_says_what_plain_decoding_says(case, family):
    dtype, options = ARITHMETIC[case]
    target, drafter = (model.to(getattr(torch, dtype)) for model in small_pair(family, agree=6.0))
    options = options | {"max_length": 96, "batch_size": 3, "filters": False}
    texts, stats = run(td.compile(target, drafter, **options), PROMPTS, max_new_tokens=40)
    assert texts == run(td.compile(target, None, **options), PROMPTS, max_new_tokens=40)[0]
    assert stats.mean_acceptance_length > 1.2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_type_that_is_slow_here_is_multiplied_in_float32(dtype, monkeypatch):
    monkeypatch.setattr(layout, "is_slow", lambda *weight: True)
    target, drafter = (model.to(dtype) for model in make_pair("qwen3", agree=6.0))
    options = {"max_length": 96, "batch_size": 3, "filters": False}
    drafting, alone = td.compile(target, drafter, **options), td.compile(target, None, **options)
    kept = drafting.runtime.refresh(drafting.tensors())["target.model.model.layers.0.mlp.up_proj.weight"]
    assert isinstance(kept, Cast) and kept.array.dtype == jnp.float32 and kept.dtype == name_of(dtype)
    texts, stats = run(drafting, PROMPTS, max_new_tokens=40)
    assert texts == run(alone, PROMPTS, max_new_tokens=40)[0]
    assert stats.mean_acceptance_length > 1.2
    rows, weight = torch.randn(5, 40).to(dtype), torch.randn(24, 40).to(dtype)
    kept = keep(weight, WeightLayout(Cast, torch.float32))
    whole = linear_jax(jb.to_jax(rows), kept)
    np.testing.assert_array_equal(whole, linear_jax(jb.to_jax(rows), jb.to_jax(weight)))
    np.testing.assert_array_equal(whole[:1], linear_jax(jb.to_jax(rows[:1]), kept))


def test_engines_of_one_model_keep_their_own_arithmetic():
    target, _ = make_pair("llama")
    engines = [td.compile(target, None, max_length=64, quantize=kind) for kind in (None, "int8")]
    first = [engine.runtime.refresh(engine.tensors()) for engine in engines]
    again = [engine.runtime.refresh(engine.tensors()) for engine in engines]
    for before, after in zip(first, again, strict=True):
        assert all(after[name] is before[name] for name in before)
    name = "target.model.model.layers.0.mlp.up_proj.weight"
    with torch.no_grad():
        target.model.layers[0].mlp.up_proj.weight.mul_(2)
    assert all(
        engine.runtime.refresh(engine.tensors())[name] is not before[name]
        for engine, before in zip(engines, first, strict=True)
    )


def test_each_linear_weight_is_multiplied_in_the_type_asked_for():
    pair = make_pair("qwen3")
    for kind, options in ((Quantized, {"quantize": "int8"}), (Cast, {"compute": "bfloat16"})):
        engine = td.compile(*pair, max_length=64, **options)
        params = engine.runtime.refresh(engine.tensors())
        linear = [
            f"{prefix}.{name}.weight"
            for prefix, model in (("target.model", pair[0]), ("proposer.drafter", pair[1]))
            for name, part in model.named_modules()
            if isinstance(part, nn.Linear) and name != "lm_head"
        ]
        head = "target.model.model.embed_tokens.weight"
        assert {name for name, leaf in params.items() if isinstance(leaf, kind)} == {*linear, head}
        # Rows of a tied head are read as they are.
        assert torch.equal(jb.to_torch(plain(params[head])), pair[0].model.embed_tokens.weight)


@pytest.mark.parametrize("device", ["cpu", "tpu"])  # whose form of int8 it is
def test_a_changed_weight_is_quantised_anew(monkeypatch, device):
    monkeypatch.setitem(layout.ARITHMETIC, "cpu", layout.ARITHMETIC[device])
    target, _ = make_pair("llama")
    engine = td.compile(target, None, max_length=64, quantize="int8")
    name = "target.model.model.layers.0.mlp.up_proj.weight"
    before = engine.runtime.refresh(engine.tensors())[name]
    with torch.no_grad():
        target.model.layers[0].mlp.up_proj.weight.mul_(2)
    after = engine.runtime.refresh(engine.tensors())[name]
    np.testing.assert_array_equal(before.array, after.array)
    np.testing.assert_allclose(2 * before.scale, after.scale)


torch.manual_seed(0)  # the same numbers in any order of imported files
ROWS, WEIGHT = torch.randn(3, 40), torch.randn(24, 40) * torch.rand(24, 1)


def by_hand(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The definition in float64: both sides in steps of a 127th of each row's largest entry."""
    own, scale = (x.double().abs().amax(dim=1, keepdim=True) / 127 for x in (rows, weight))
    return (rows.double() / own).round() @ (weight.double() / scale).round().T * own * scale.T


def test_int8_is_by_row_of_both_sides():
    kept = Quantized.of(WEIGHT, None)
    wanted = by_hand(ROWS, WEIGHT)
    got = jb.to_torch(linear_jax(jb.to_jax(ROWS), kept)).double()
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    error = (got - ROWS.double() @ WEIGHT.double().T).abs().max() / got.abs().max()
    assert 0 < error < 0.02
    # A scale of the columns, or no scale for the rows, would be far off.
    for wrong in (by_hand(ROWS, WEIGHT.T.contiguous().view(24, 40)), wanted * 2):
        assert not torch.allclose(got, wrong, atol=0.1)


@pytest.mark.parametrize("multiply", [linear_jax, jax.jit(linear_jax)], ids=["by itself", "compiled"])
def test_a_row_does_not_depend_on_the_rows_beside_it(multiply):
    kept = Quantized.of(WEIGHT, None)
    rows = jb.to_jax(torch.randn(100, 3, 40))
    for three in rows:
        together = multiply(three, kept)
        alone = [multiply(three[row : row + 1], kept) for row in range(3)]
        np.testing.assert_array_equal(together, jnp.concatenate(alone))


@pytest.mark.parametrize("count", [0, 1, 2, 3, FEW_ROWS, FEW_ROWS + 1])
def test_whichever_operand_leads_the_result_is_the_same(count):
    rows = jb.to_jax(torch.randn(count, 40))
    led, usual = (
        jax.jit(linear_jax)(rows, Quantized.of(WEIGHT, None, leads=leads)) for leads in (True, False)
    )
    np.testing.assert_array_equal(led, usual)


def test_few_rows_come_second_where_a_weight_leads():
    def compiled(count: int, leads: bool) -> str:
        kept = Quantized.of(WEIGHT, None, leads=leads)
        return jax.jit(linear_jax).lower(jnp.ones((count, 40)), kept).compile().as_text()

    assert all("s32[24,2]" in compiled(count, True) for count in (1, 2))  # XLA keeps the weight turned
    assert "s32[24" not in compiled(2, False) + compiled(FEW_ROWS + 1, True)


def test_zeros_stay_zeros():
    kept = Quantized.of(torch.zeros(4, 8), None)
    assert not np.asarray(linear_jax(jnp.zeros((2, 8)), kept)).any()
    assert not np.asarray(linear_jax(jnp.ones((1, 8)), kept)).any()


def test_a_half_precision_table_is_read_bit_by_bit():
    table = torch.randn(50, 8).bfloat16()
    kept = keep(table, WeightLayout(Readable))
    rows = kept.look_up(jnp.array([[3, 0], [49, 3]]))
    assert torch.equal(jb.to_torch(rows), table[torch.tensor([[3, 0], [49, 3]])])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"compute": "float16"}, "compute='float16': choose one of 'auto', 'float32', 'bfloat16'"),
        ({"quantize": "int4"}, "quantize='int4': choose one of None, 'int8'"),
        ({"quantize": "int8", "runtime": "eager"}, "quantize='int8': runtime='eager' has no such products"),
        ({"compute": "bfloat16", "runtime": "eager"}, "compute='bfloat16': runtime='eager' has no such"),
        ({"compute": "bfloat16", "quantize": "int8"}, "compute='bfloat16' with quantize='int8'"),
    ],
)
def test_what_no_product_is_built_for_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        td.compile(make_pair("llama")[0], None, **options)


def test_a_loaded_target_keeps_its_weights(tmp_path):
    target, drafter = make_pair("llama")
    target.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"quantize='int8': the target was loaded without; pass jb\.load"):
        td.compile(jb.load(tmp_path), drafter, quantize="int8")
