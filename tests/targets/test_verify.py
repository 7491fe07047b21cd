"""An untested class is tried on a tiny random twin, and refused if the two differ."""

import functools
import runpy
import time

import pytest
import torch
import transformers as hf
from support import ROOT
from support.altered import altered, llama
from support.tiny import BASE, FAMILIES, make_pair, make_target, randomise
from transformers.generation import GenerationMixin
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaModel

import torch_dflash as td
from torch_dflash.cache.view import CACHE
from torch_dflash.targets.tested import is_tested
from torch_dflash.verify import check, twin

FAMILY_CONFIGS = runpy.run_path(str(ROOT / "benchmarks/family_configs.py"))


PLAN = td.DecodePlan(batch_size=1, capacity=64, block_size=4, verify_width=4)
IDS = torch.tensor([[3, 4, 5]])
TWIN = "tiny random twin"


def rolled(name, when):
    """A Llama with other logits ``when(rows of a pass, logits to keep, whether there is a cache)``."""

    def forward(self, input_ids=None, position_ids=None, logits_to_keep=0, **kwargs):
        given = {"input_ids": input_ids, "position_ids": position_ids, "logits_to_keep": logits_to_keep}
        out = hf.LlamaForCausalLM.forward(self, **given, **kwargs)
        if when(input_ids.shape[1], logits_to_keep, kwargs.get(CACHE) is not None):
            out.logits = out.logits.roll(1, dims=-1)
        return out

    return llama(name, forward=forward)


def before(embeds, by=1):
    """Adds the embeddings of ``by`` tokens before: no output of a layer shows the change."""
    return torch.cat([torch.zeros_like(embeds[:, :by]), embeds[:, :-by]], dim=1)


def attending(name, scale):
    """A Llama whose attention reads its rows times ``scale(their number, config)``."""

    class Scaled(LlamaAttention):
        def forward(self, hidden_states, *args, **kwargs):
            by = scale(hidden_states.shape[1], self.config)
            return super().forward(hidden_states * by, *args, **kwargs)

    def build(model):
        for index, layer in enumerate(model.model.layers):
            layer.self_attn = Scaled(model.config, index)

    return llama(name, build)


class Prepared(hf.LlamaForCausalLM):  # its forward is Llama's; its generate moves the positions
    def prepare_inputs_for_generation(self, *args, **kwargs):
        prepared = super().prepare_inputs_for_generation(*args, **kwargs)
        prepared["position_ids"] = prepared["position_ids"] * 3 + 5
        return prepared


def even_suppressed(model, found=()):
    even = torch.arange(0, model.config.vocab_size, 2).tolist()
    return hf.LogitsProcessorList([*found, hf.SuppressTokensLogitsProcessor(even, device="cpu")])


Processed = llama("Processed", _get_logits_processor=lambda self, *args, **kwargs: even_suppressed(self))


class Warped(hf.LlamaForCausalLM):  # halves the given temperature
    def _get_logits_processor(self, generation_config, *args, **kwargs):
        found = super()._get_logits_processor(generation_config, *args, **kwargs)
        sampled = generation_config.do_sample
        return hf.LogitsProcessorList([*found, *([hf.TemperatureLogitsWarper(0.5)] if sampled else [])])


class OwnConfig(hf.PretrainedConfig):  # a config of remote code, with fields of its author
    model_type = "own"

    def __init__(self, reach=6, **fields):
        super().__init__(**(vars(hf.LlamaConfig(**BASE)) | fields))
        self.reach = reach


class Called:  # stands in for a function, as decorators of libraries do
    def __init__(self, function):
        self.function = function

    def __get__(self, instance, owner=None):
        return functools.partial(self, instance)

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)


class FarRotary(modeling_llama.LlamaRotaryEmbedding):  # turns by less, once a position is far
    def forward(self, x, position_ids):
        far = position_ids.max() + 1 > self.config.original_max_position_embeddings
        return super().forward(x, torch.where(far, position_ids * 0.25, position_ids * 1.0))


class Unbuildable(hf.LlamaForCausalLM):  # needs exactly the width of its own target
    def __init__(self, config):
        assert config.hidden_size == 4000, "only 4000 will do"
        super().__init__(config)


def late(model, embeds, ids, seen):
    """Late tokens scaled, counted in the cache."""
    positions = (seen or 0) + torch.arange(ids.shape[1], device=ids.device)
    return embeds * (1 + (positions > model.config.train_length))[:, None]


def turned_when_long(model, embeds, ids, seen):
    return embeds * -3 if (seen or 0) + ids.shape[1] > model.config.train_length else embeds


def over_the_batch(model, embeds, ids, seen):
    return embeds - embeds.mean(dim=0) if len(embeds) > 2 else embeds


def with_buffer(model):
    """The buffer of a fresh model mixes nothing."""
    model.register_buffer("mix", torch.zeros(model.config.hidden_size))


def zeros_counted(model, embeds, ids, seen):
    return embeds * (1 + (ids == 0).sum(dim=1)[:, None, None])


Shifted = altered("Shifted", lambda model, embeds, ids, seen: embeds + 0.5 * before(embeds))
OTHERS = [
    Shifted,
    altered("OnlyLate", lambda model, embeds, ids, seen: embeds + 0.5 * before(embeds, 7)),
    attending("Lengthy", lambda rows, config: 1 + 0.1 * rows),
    altered("Filled", lambda model, embeds, ids, seen: embeds + model.mix * before(embeds), with_buffer),
    altered("CountsZeros", zeros_counted),
    altered("CountsCached", late),
    attending("Late", lambda rows, config: 2 if rows > config.train_length else 1),
]
Far = llama("Far", lambda model: setattr(model.model, "rotary_emb", FarRotary(model.config)))
Switch = altered("Switch", turned_when_long)
OverTheBatch = altered("OverTheBatch", over_the_batch)
Stepwise = rolled("Stepwise", lambda rows, keep, cached: cached and rows == 1)
LastAlone = rolled("LastAlone", lambda rows, keep, cached: keep == 1)
SomeWidths = rolled("SomeWidths", lambda rows, keep, cached: 5 <= rows <= 12)


def build(cls, **overrides):
    torch.manual_seed(0)
    return cls(hf.LlamaConfig(**(BASE | overrides))).eval()


def compiled(target, drafter=None, **options):
    return td.compile(target, drafter, **{"runtime": "eager", "max_length": 64} | options)


def refused(match, target, drafter=None, **options):
    with pytest.raises(ValueError, match=match):
        compiled(target, drafter, **options)


@pytest.mark.parametrize("cls", OTHERS)
@pytest.mark.parametrize("cache", ["static", "paged"])
def test_a_class_that_computes_something_else_is_refused_with_the_place(cls, cache):
    words = rf"{cls.__name__}.*logits differ by .* at position \d+"
    refused(words, build(cls, train_length=2048), cache=cache)


@pytest.mark.parametrize("cls", [Prepared, Processed, Warped, Stepwise, LastAlone])
def test_a_class_whose_generate_does_more_than_its_forward_is_refused(cls):
    refused(rf"{cls.__name__}.*(says another token|logits differ by .*) at position \d+", build(cls))


@pytest.mark.parametrize("drafter", [None, td.NGramProposer(4)])
@pytest.mark.parametrize(
    ("cls", "field"), [(Switch, "train_length"), (Far, "original_max_position_embeddings")]
)
def test_a_class_that_switches_at_a_length_is_refused(cls, field, drafter):
    refused(f"{cls.__name__}.*tiny random twin", build(cls, **{field: 2048}), drafter)


def test_the_widths_and_rows_of_the_plan_are_tried():
    ngram = td.NGramProposer(6)
    refused("SomeWidths.*logits differ", build(SomeWidths), ngram)
    compiled(build(OverTheBatch), ngram, batch_size=2)
    refused("OverTheBatch.*logits differ", build(OverTheBatch), ngram, batch_size=3)


def test_a_config_may_hold_anything():
    compiled(build(llama("Free"), kinds={3, 4}, act=torch.tanh))


def chunk(h):
    first, second = h.chunk(2, -1)
    first.mul_(2)
    second.add_(1)


def entry(h):
    h.view(*h.shape[:2], 4, -1)[:, :, 1] = 0.5


def turned(h):
    h.transpose(1, 2)[:, 3].fill_(1.0)


def every(h):
    torch._foreach_mul_(list(h.unbind(1)), 2.0)


@pytest.mark.parametrize("write", [chunk, entry, turned, every])
def test_writes_through_views_which_a_lowered_program_loses_are_refused_there(write):
    def written(model, embeds, ids, seen):
        write(embeds := embeds.clone())
        return embeds

    target = build(altered("Writes", written))
    with pytest.raises(ValueError, match="Writes.*through views.*runtime='eager'"):
        td.compile(target, None, runtime="xla", max_length=64)
    wanted = target.generate(IDS, max_new_tokens=8, do_sample=False)
    assert torch.equal(td.generate(target, None, IDS, max_new_tokens=8, runtime="eager"), wanted)


@pytest.mark.parametrize("family", ["deepseek_v3", "minicpm3"])
def test_writes_of_a_tested_family_are_no_reason_to_refuse_a_class_of_it(family):
    made = FAMILY_CONFIGS["build"](family)
    tuned = type("Tuned", (type(made),), {})
    target = randomise(tuned(made.config), 0)
    wanted = target.generate(IDS, max_new_tokens=8, do_sample=False)
    assert torch.equal(td.generate(target, None, IDS, max_new_tokens=8, do_sample=False), wanted)


def test_an_operation_that_cannot_be_lowered_is_a_refusal():
    def summed(model, embeds, ids, seen):
        return embeds + torch.logcumsumexp(embeds, dim=-1)

    target = build(altered("Summed", summed))
    with pytest.raises(ValueError, match="runtime='xla': prefill cannot be lowered .*runtime='eager'"):
        td.generate(target, None, IDS, max_new_tokens=4, runtime="xla")


def test_options_that_are_collections_are_named():
    with pytest.raises(ValueError, match=r"cache=\['static'\]"):
        td.generate(make_target(), None, torch.tensor([[3]]), max_new_tokens=4, cache=["static"])
    with pytest.raises(ValueError, match="verify='x'"):
        td.compile(make_target(), None, runtime="eager", verify="x")


def test_it_is_refused_through_every_door():
    target = build(Shifted)
    with pytest.raises(ValueError, match=TWIN):
        td.generate(target, None, IDS, max_new_tokens=4, runtime="eager")
    with pytest.raises(ValueError, match=TWIN):
        target.generate(IDS, custom_generate=td.dflash(None, runtime="eager"), max_new_tokens=4)
    with pytest.raises(ValueError, match="block decoding is not what it computes"):
        td.check(target)


def test_verify_false_takes_the_user_at_their_word():
    target = build(Shifted)
    compiled(target, verify=False)
    td.generate(target, None, IDS, max_new_tokens=4, runtime="eager", verify=False)
    block = td.dflash(None, runtime="eager", verify=False)
    target.generate(IDS, custom_generate=block, max_new_tokens=4)


def own_model():
    torch.manual_seed(0)
    return llama("OwnModel", config_class=OwnConfig)(OwnConfig()).eval()


@pytest.mark.parametrize("make", [lambda: build(llama("Harmless")), own_model])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_another_class_of_the_same_computation_decodes(make, mode):
    target = make()
    wanted = target.generate(IDS, max_new_tokens=8, do_sample=False)
    check._verdicts.clear()
    with mode():
        assert torch.equal(td.generate(target, None, IDS, max_new_tokens=8, runtime="eager"), wanted)


def test_a_padding_id_is_no_write_of_the_forward():
    target = build(llama("Padded"), pad_token_id=0)  # torch fills its embedding in place
    wanted = target.generate(IDS, max_new_tokens=8, do_sample=False)
    assert torch.equal(td.generate(target, None, IDS, max_new_tokens=8, runtime="xla"), wanted)


def test_a_class_without_a_twin_is_refused_unless_told_otherwise():
    with torch.device("meta"):
        target = Unbuildable(hf.LlamaConfig(**(BASE | {"hidden_size": 4000})))
    with pytest.raises(ValueError, match="no tiny twin.*only 4000 will do.*verify=False"):
        check.verify_class(target, PLAN, "eager")


def test_a_tested_class_is_not_tried_again_but_a_subclass_of_its_name_is(monkeypatch):
    def tried(*args):
        raise AssertionError("a twin was built")

    monkeypatch.setattr(check, "build_twin", tried)
    compiled(make_target("llama"))
    same_name = llama("LlamaForCausalLM")
    refused("a twin was built", build(same_name))


def test_a_later_transformers_is_not_trusted(monkeypatch):
    target = make_target("llama")
    assert is_tested(target)
    monkeypatch.setattr("torch_dflash.targets.tested.transformers.__version__", "5.99.0")
    assert not is_tested(target)


@pytest.mark.parametrize(
    "dressed",
    [functools.wraps(LlamaAttention.forward), torch.no_grad(), functools.partialmethod, lambda p: Called(p)],
)
def test_patched_code_of_a_tested_class_is_tried(monkeypatch, dressed):
    target, whole = make_target("llama"), LlamaAttention.forward

    def steep(self, hidden_states, *args, **kwargs):
        return whole(self, hidden_states * hidden_states.shape[1], *args, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", dressed(steep))
    refused(TWIN, target)
    monkeypatch.setattr(LlamaAttention, "forward", whole)
    compiled(target)
    rotate = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, *a: rotate(q * q.shape[2], *a))
    refused(TWIN, target)


def test_a_patch_of_generate_itself_is_tried(monkeypatch):
    target, whole = make_target("llama"), GenerationMixin._get_logits_processor

    def odd(self, *args, **kwargs):
        return even_suppressed(self, whole(self, *args, **kwargs))

    monkeypatch.setattr(GenerationMixin, "_get_logits_processor", odd)
    refused("says another token", target)


def test_two_patches_of_one_code_have_a_verdict_each(monkeypatch):
    target, whole = make_target("llama"), LlamaAttention.forward

    def by(power):
        def patched(self, hidden_states, *args, **kwargs):
            return whole(self, hidden_states * hidden_states.shape[1] ** power, *args, **kwargs)

        return patched

    monkeypatch.setattr(LlamaAttention, "forward", by(0))
    compiled(target)
    monkeypatch.setattr(LlamaAttention, "forward", by(1))
    refused(TWIN, target)


@pytest.mark.parametrize(
    "edit",
    [
        lambda mask: mask.logical_and_(torch.zeros_like(mask)), lambda mask: mask.masked_fill_(mask, False),
        lambda mask: mask.transpose(2, 3), lambda mask: mask[..., :1], lambda mask: mask & mask,
    ],
)  # fmt: skip
def test_a_mask_that_is_changed_on_its_way_is_refused(monkeypatch, edit):
    make = modeling_llama.create_causal_mask
    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda **given: edit(make(**given)))
    refused("passes a mask of its own", make_target("llama"))


def test_a_verdict_is_of_the_code_it_was_about(monkeypatch):
    kind = llama("Changing")
    compiled(build(kind))
    longer = altered("Longer", lambda model, embeds, ids, seen: embeds * ids.shape[1])
    monkeypatch.setattr(kind, "forward", longer.forward, raising=False)
    refused(TWIN, build(kind))


def mixed_if_asked(model, embeds, ids, seen):
    return embeds - embeds.mean(1, keepdim=True) if model.config.mixes else embeds


def test_a_verdict_is_of_the_configs_class():
    kind = altered("AsToldByItsConfig", mixed_if_asked)
    mixes, not_mixes = (
        type(name, (hf.LlamaConfig,), {"mixes": name == "Mixes"}) for name in ("Mixes", "Not")
    )
    compiled(kind(not_mixes(**BASE)).eval())
    refused(TWIN, kind(mixes(**BASE)).eval())


def test_an_answer_is_remembered(monkeypatch):
    target = build(llama("Once"))
    compiled(target)
    monkeypatch.setattr(check, "build_twin", lambda model: pytest.fail("built twice"))
    td.compile(target, None, runtime="eager", max_length=32)


def test_a_full_size_target_takes_a_second_at_most():
    config = hf.Qwen3MoeConfig(
        vocab_size=151_936, num_experts=128, use_sliding_window=True, sliding_window=4096
    )
    with torch.device("meta"):
        target = hf.Qwen3MoeForCausalLM(config)
    before, started = torch.get_rng_state(), time.process_time()
    check.verify_class(target, PLAN, "eager")
    assert time.process_time() - started < 1.5
    assert torch.equal(torch.get_rng_state(), before)
    assert target.config.hidden_size == config.hidden_size


def test_a_twin_has_every_kind_of_layer_and_short_windows():
    kinds = ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 20
    config = hf.Gemma3TextConfig(layer_types=kinds, num_hidden_layers=26)
    small = twin.shrink(config)
    assert small.layer_types == ["sliding_attention", "sliding_attention", "full_attention"]
    assert small.num_hidden_layers == 3 and small.sliding_window == twin.WINDOW
    assert config.num_hidden_layers == 26 and config.layer_types == kinds


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt_oss"])
@pytest.mark.parametrize("cache", ["static", "paged"])
def test_check_holds_the_real_weights(family, cache):
    agreement = td.check(make_target(family), cache=cache)
    assert agreement.holds and agreement.difference < 1e-4 and agreement.compared == 34


def test_check_sees_a_window_that_is_off_by_one(monkeypatch):
    target = make_target("gpt_oss")
    td.check(target)
    make_wider(monkeypatch)
    with pytest.raises(ValueError, match="logits differ"):
        td.check(target)


def make_wider(monkeypatch):
    init = check.Target.__init__

    def wider(self, model):
        init(self, model)
        self._windows = tuple(window and window + 1 for window in self._windows)

    monkeypatch.setattr(check.Target, "__init__", wider)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_check_tells_rounding_in_half_precision_from_a_fault(monkeypatch, family, dtype):
    targets = [make_target(family, seed).to(dtype) for seed in range(3)]
    for target in targets:
        assert td.check(target).holds
    if family in ("qwen2", "gpt_oss"):
        make_wider(monkeypatch)
        for target in targets:
            with pytest.raises(ValueError, match="logits differ"):
                td.check(target)
    with pytest.raises(ValueError, match="logits differ"):
        td.check(build(Shifted).to(dtype))


def test_check_reads_long_prompts_in_chunks_and_says_what_it_cannot():
    target = make_target("llama", max_position_embeddings=2048)
    assert td.check(target, length=1200).holds
    assert td.check(build(hf.LlamaForCausalLM).to(torch.bfloat16)).holds
    with pytest.raises(ValueError, match="length=3"):
        td.check(target, length=3)
    with pytest.raises(ValueError, match="max_length=3000 is beyond"):
        td.check(target, length=3000)
    assert td.check(build(hf.LlamaForCausalLM, attention_dropout=0.5).train()).holds
    with pytest.raises(TypeError, match="pass the target model first"):
        td.check(make_pair()[1])
    assert isinstance(target.model, LlamaModel)
