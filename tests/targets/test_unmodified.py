"""A target changed after loading is refused by name, or followed; what changes no text is let be."""

from __future__ import annotations

import copy
import enum
import functools
import inspect
from dataclasses import dataclass
from types import MethodType

import numpy as np
import pytest
import torch
import transformers
from support.refusals import refuses as refuses
from support.scripted import own_text, run
from support.tiny import BASE, FAMILIES, make_drafter, make_pair, make_target, randomise
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.llama import modeling_llama

import torch_dflash as td
from torch_dflash.targets.skeleton import build_skeleton
from torch_dflash.targets.unmodified import check_unmodified

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
OTHERS = {
    "Mistral": {"sliding_window": 6},
    "Gemma": {"head_dim": 8},
    "Gemma2": {"head_dim": 8, "sliding_window": 6, "attn_implementation": "eager"},
    "Gemma3Text": {"head_dim": 8, "sliding_window": 6},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Granite": {},
    "Phi3": {},
    "Olmo2": {},
    "Cohere": {},
    "GPTNeoX": {},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.1},
    "StableLm": {},
    "Starcoder2": {},
    "SmolLM3": {"no_rope_layers": [1, 1, 1, 0]},
}


def build(name):
    if name in FAMILIES:
        return make_target(name)
    config = getattr(transformers, f"{name}Config")(**(BASE | OTHERS[name]))
    kind = name.removesuffix("Text") + "ForCausalLM"
    return randomise(getattr(transformers, kind)(config), 0)


def use(model):
    """What a model goes through that keeps the text as it was."""
    ids = torch.tensor([PROMPT])
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    model.eval()
    model.generate(ids, max_new_tokens=30, do_sample=False, pad_token_id=0)
    model(input_ids=ids, output_hidden_states=True, output_attentions=False)
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"  # the older name
    getattr(model, f"{kind}_checkpointing_enable")()
    model.tie_weights()
    model.requires_grad_(False)
    model.config.use_cache = False
    model.config.pad_token_id = model.generation_config.pad_token_id = 0
    model.config.output_hidden_states = True
    model.set_attn_implementation("eager")
    model.custom_note, model.name_or_path = "mine", "elsewhere"
    model.add_model_tags(["mine"])
    model.main_input_name, model.input_modalities, model.output_modalities = "ids", ("text",), ("text",)
    model.base_model_prefix, model.supports_gradient_checkpointing, model.loss_type = "model", False, None
    model.half().float()


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_what_a_model_goes_through_is_not_refused(name, tmp_path):
    model = build(name)
    skeleton = build_skeleton(model)
    check_unmodified(skeleton, model)
    use(model)
    check_unmodified(skeleton, model)
    model.save_pretrained(tmp_path)
    check_unmodified(skeleton, model)
    check_unmodified(build_skeleton(model), model)
    again = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    check_unmodified(build_skeleton(again), again)
    check_unmodified(build_skeleton(copy.deepcopy(again)), again)
    again.resize_token_embeddings(104)
    check_unmodified(build_skeleton(again), again)


def scaling(target):
    target.model.layers[2].self_attn.scaling *= 3


CHANGES = {
    "scaling": (scaling, "qwen3", ".model.layers.2.self_attn.scaling is 0.75", "should be 0.25"),
    "rope": (
        lambda target: setattr(target.model.rotary_emb, "attention_scaling", 1.5),
        "llama",
        ".model.rotary_emb.attention_scaling is 1.5",
        "should be 1.0",
    ),
    "softcap": (
        lambda target: setattr(target.model.layers[0].self_attn, "attn_logit_softcapping", None),
        "Gemma2",
        ".model.layers.0.self_attn.attn_logit_softcapping is None",
        "should be 50.0",
    ),
    "window": (
        lambda target: setattr(target.model.layers[3].self_attn, "sliding_window", None),
        "qwen2",
        ".self_attn.sliding_window is None",
        "should be 7",
    ),
    "eps": (
        lambda target: setattr(target.model.norm, "variance_epsilon", 0.1),
        "llama",
        ".model.norm.variance_epsilon is 0.1",
        "should be 1e-06",
    ),
    "a tensor": (
        lambda target: setattr(target.model.layers[1].self_attn, "scaling", torch.ones(3)),
        "llama",
        ".scaling is a tensor",
        "should be",
    ),
    "removed": (
        lambda target: delattr(target.model.layers[1].self_attn, "scaling"),
        "llama",
        ".model.layers.1.self_attn.scaling is absent",
        "should be",
    ),
    "a module removed": (
        lambda target: delattr(target.model.layers[1].mlp, "act_fn"),
        "llama",
        ".model.layers.1.mlp.act_fn is absent",
        "should be SiLU",
    ),
    "experts": (
        lambda target: setattr(target.model.layers[1].mlp.router, "top_k", 3),
        "gpt_oss",
        ".mlp.router.top_k is 3",
        "should be 2",
    ),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_changed_attributes_are_refused_by_name(name, late):
    change, family, *words = CHANGES[name]
    target = build(family)
    skeleton = build_skeleton(target)
    if late:  # after a first call
        check_unmodified(skeleton, target)
    change(target)
    with refuses(ValueError, type(target).__name__, words[0], words[1], "Undo the change"):
        check_unmodified(skeleton, target)


FIELDS = {
    "final_logit_softcapping": ("Gemma2", 3.0),
    "rms_norm_eps": ("llama", 0.5),
    "rope_parameters": ("gpt_oss", {"rope_type": "default", "rope_theta": 5.0}),
    "logits_scaling": ("Granite", 4.0),
    "layer_types": ("qwen2", ["full_attention"] * 4),
}


@pytest.mark.parametrize("field", FIELDS)
def test_changed_config_fields_are_refused_by_name(field):
    family, value = FIELDS[field]
    target = build(family)
    engine = td.compile(target, None, runtime="eager", max_length=32)
    setattr(target.config, field, value)
    with refuses(ValueError, f"config.{field} is ", "it was ", "build another engine"):
        run(engine, [PROMPT], max_new_tokens=3)


def test_a_dict_of_the_config_changed_in_place_is_seen():
    target = build("gpt_oss")
    engine = td.compile(target, None, runtime="eager", max_length=32)
    target.config.rope_parameters["factor"] = 8.0
    assert build("gpt_oss").config.rope_parameters["factor"] == 4.0  # no other model's dict
    with refuses(ValueError, "config.rope_parameters is ", "it was "):
        run(engine, [PROMPT], max_new_tokens=3)


def test_generate_follows_a_config_that_the_target_reads_as_it_runs():
    """Where no engine is held, there is another one for the changed config; it says what the target says."""
    target = build("Gemma2")
    ids = torch.tensor([PROMPT])
    texts = []
    for cap in (30.0, 0.001, None, 30.0):
        target.config.final_logit_softcapping = cap
        options = {"max_new_tokens": 12, "do_sample": False}
        text = td.generate(target, None, ids, runtime="eager", **options)[0, len(PROMPT) :].tolist()
        assert text == own_text(target, PROMPT, 12)
        texts.append(text)
    assert texts[0] == texts[3]
    target.config.attn_logit_softcapping = None  # which its layers read when they were made
    with refuses(ValueError, "self_attn.attn_logit_softcapping is 50.0", "should be None"):
        td.generate(target, None, ids, max_new_tokens=3, runtime="eager")


def test_a_drafter_is_held_to_the_same():
    target, drafter = make_pair("llama")
    engine = td.compile(target, drafter, runtime="eager", max_length=32)
    drafter.layers[0].self_attn.scale *= 2
    with refuses(ValueError, "DFlashDraftModel.layers.0.self_attn.scale is ", "should be"):
        run(engine, [PROMPT], max_new_tokens=3)
    other = make_drafter(target)
    td.generate(target, other, torch.tensor([PROMPT]), max_new_tokens=3, runtime="eager")
    engine = td.compile(target, other, runtime="eager", max_length=32)
    other.config.mask_token_id = 7
    with refuses(ValueError, "DFlashDraftModel.config.mask_token_id is 7, it was 96"):
        run(engine, [PROMPT], max_new_tokens=3)
    td.generate(target, other, torch.tensor([PROMPT]), max_new_tokens=3, runtime="eager")


def test_numbers_that_are_none_are_not_compared():
    target = build("llama")
    skeleton = build_skeleton(target)
    for model in (target, skeleton):
        model.model.norm.odd = float("nan")
    check_unmodified(skeleton, target)


def inner_config(model):
    model.model.config = copy.deepcopy(model.config)
    model.model.config.sliding_window = 3


def inner_function(model):
    model.model.layers[1].mlp.act_fn = transformers.activations.ACT2FN["gelu"]


def inner_method(model):
    model.prepare_inputs_for_generation = lambda *args, **kwargs: {}


def shared_dict(model):
    model.model.options["shift"] = 3


@dataclass
class Bend:
    by: float = 0.5


class Near(float):
    """A number of a kind of its own."""


class Kind(enum.Enum):
    A = 1
    B = 2


class WithOptions(transformers.LlamaForCausalLM):
    slope = 1.0
    _bend = 1.0

    def __init__(self, config):
        super().__init__(config)
        self.model.options = {"shift": 0}
        self.scale, self.own, self._gain = scaled(1.0), lambda rows: self.model.norm(rows), 1.0
        self.bend, self.acts, self.kind, self.bits = Bend(), {"by": 1, "act": torch.tanh}, Kind.A, b"1"
        self.over, self.of, self.long = scaled(Bend()), torch.nn.SiLU, [0] * 12_000
        self.near = Near(0.5)

    def get(self):
        return getattr(self, "late", 0.0)


def class_value(model):
    model.slope = 2.0


def scaled(factor, *, other=None):
    def scale(rows, times=1.0):
        return rows * factor * times

    return scale


def other_cell(model):
    model.scale = scaled(-3.0)


def other_default(model):
    model.scale.__defaults__ = (-3.0,)


def private_value(model):
    model._gain = -3.0


def set_(name, value):
    def change(model):
        setattr(model, name, value)

    return change


def far_in_a_list(model):
    model.long[11_000] = 3


def of_an_object(model):
    model.bend.by = -3.0


def beside_a_function(model):
    model.acts["by"] = -3


def in_a_cell(model):
    model.scale.__closure__[0].cell_contents = -3.0


def private_class_value(model):
    model._bend = -3.0


def other_call(model):
    module = model.model.layers[1].mlp
    module._call_impl = lambda rows: -rows


def other_wrapped_call(model):
    module = model.model.layers[1].mlp
    module._wrapped_call_impl = lambda rows: -rows


def other_generate(model):  # not its repository's, as transformers would put it there
    model.generate = functools.partial(print, model=None)


def dressed_hook(model):
    def hook(module, args, output):
        return output * -3

    dressed = functools.wraps(modeling_llama.rotate_half)(hook)
    model.model.layers[1].mlp.register_forward_hook(dressed)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (inner_config, "sliding_window is 3"),
        (inner_function, "act_fn is "),
        (inner_method, "a replaced prepare_inputs_for_generation"),
        (shared_dict, "options is {'shift': 3}"),
        (class_value, r"slope is 2\.0"),
        (other_cell, "scale is .*should be"),
        (other_default, "scale is .*should be"),
        (private_value, r"_gain is -3\.0"),
        (private_class_value, r"_bend is -3\.0"),
        (far_in_a_list, "long is "),
        (set_("near", Near(-3.0)), r"near is -3\.0"),
        (of_an_object, r"bend is Bend\(by=-3"),
        (beside_a_function, "acts is {'by': -3"),
        (in_a_cell, "scale is .*should be"),
        (set_("kind", Kind.B), "kind is <Kind.B"),
        (set_("bits", b"2"), "bits is b'2'"),
        (set_("of", torch.nn.Tanh), "of is .*Tanh"),
        (set_("late", 3.0), r"late is 3\.0, .* absent"),
        (other_call, r"a replaced _call_impl.*del model\.model\.layers\.1\.mlp\._call_impl"),
        (other_wrapped_call, "a replaced _wrapped_call_impl"),
        (other_generate, "a replaced generate"),
        (dressed_hook, "carries rotate_half"),
    ],
)
def test_changes_out_of_sight_are_refused(change, words):
    if change is inner_config:
        model = make_target("qwen2")
    else:
        torch.manual_seed(0)
        model = WithOptions(transformers.LlamaConfig(**(BASE | {"hidden_act": "silu"})))
    ids = torch.tensor([PROMPT])
    td.generate(model, None, ids, max_new_tokens=3, runtime="eager", do_sample=False)
    change(model)
    with pytest.raises(ValueError, match=words):
        td.generate(model, None, ids, max_new_tokens=3, runtime="eager", do_sample=False)


def test_a_replaced_function_is_refused():
    class Acting(transformers.LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.model.layers[0].gain = torch.tanh

    model = Acting(transformers.LlamaConfig(**BASE))
    td.generate(model, None, torch.tensor([PROMPT]), max_new_tokens=3, runtime="eager", verify=False)
    model.model.layers[0].gain = torch.sigmoid
    with pytest.raises(ValueError, match="gain is .*sigmoid.*tanh"):
        td.generate(model, None, torch.tensor([PROMPT]), max_new_tokens=3, runtime="eager", verify=False)


def test_accelerates_hook_is_named():
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module

    model = make_target("llama")
    add_hook_to_module(model.model.layers[0], AlignDevicesHook())
    with pytest.raises(ValueError, match=r"accelerate's AlignDevicesHook.*remove_hook_from_module"):
        td.generate(model, None, torch.tensor([PROMPT]), max_new_tokens=3, runtime="eager")
    remove_hook_from_module(model, recurse=True)  # as the message says
    td.generate(model, None, torch.tensor([PROMPT]), max_new_tokens=3, runtime="eager")


@pytest.mark.parametrize("buffer", [True, False])
def test_a_tensor_where_there_should_be_none_is_refused(buffer):
    model = make_target("llama")
    bias = torch.randn(model.lm_head.out_features)
    del model.lm_head._parameters["bias"]
    if buffer:
        model.lm_head.register_buffer("bias", bias)
    else:
        model.lm_head.bias = bias
    with pytest.raises(ValueError, match="lm_head.bias"):
        td.generate(model, None, torch.tensor([PROMPT]), max_new_tokens=3, runtime="eager")


def test_a_compiled_module_stays_usable():
    model = make_target("llama")
    wanted = own_text(model, PROMPT, 3)
    model.model.layers[0].compile(backend="eager")
    ids = torch.tensor([PROMPT])
    out = td.generate(model, None, ids, max_new_tokens=3, runtime="eager", do_sample=False)
    assert out[0, len(PROMPT) :].tolist() == wanted


def test_a_forward_that_accelerate_put_back_is_the_classs_own():
    model = make_target("llama")
    model.forward = MethodType(inspect.unwrap(type(model).forward), model)
    td.generate(model, None, torch.tensor([PROMPT]), max_new_tokens=3, runtime="eager")
    model.forward = MethodType(functools.wraps(type(model).forward)(lambda self, **given: None), model)
    with pytest.raises(ValueError, match=r"a replaced forward.*del model\.forward"):
        td.generate(model, None, torch.tensor([PROMPT]), max_new_tokens=3, runtime="eager")


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "gpt_oss"])
def test_router_logits_that_are_asked_for_are_not_made(name):
    model = build(name)
    wanted = own_text(model, PROMPT, 12)
    model.config.output_router_logits = True
    out = td.generate(
        model, None, torch.tensor([PROMPT]), max_new_tokens=12, runtime="eager", do_sample=False
    )
    assert out[0, len(PROMPT) :].tolist() == wanted


def test_a_hook_on_every_module_is_refused():
    model = make_target("llama")
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    try:
        with refuses(ValueError, "torch.nn.Module carries", "remove it"):
            td.generate(model, None, torch.tensor([PROMPT]), max_new_tokens=3, runtime="eager")
    finally:
        handle.remove()
    with FlopCounterMode(display=False):  # torch's own hooks change nothing
        td.generate(model, None, torch.tensor([PROMPT]), max_new_tokens=3, runtime="eager")


class Seen:
    def __init__(self):
        self.calls = 0


class Kept(transformers.LlamaForCausalLM):
    """What a forward keeps for itself, and what transformers leaves in a module, changes no text."""

    def __init__(self, config):
        super().__init__(config)
        self.seen, self.calls, self.kind = Seen(), 0, self.lm_head.weight.dtype

    def _init_weights(self, module):
        if not getattr(module, "_is_hf_initialized", False):
            super()._init_weights(module)

    def forward(self, input_ids=None, position_ids=None, **more):
        self.seen.calls += 1
        self.calls += 1
        if self.training and self.model.gradient_checkpointing:
            self._gradient_checkpointing_func(input_ids)
        return super().forward(input_ids, position_ids=position_ids, **more)


def test_what_a_forward_keeps_for_itself_is_let_be():
    model = randomise(Kept(transformers.LlamaConfig(**BASE)), 0).to(torch.bfloat16)
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{kind}_checkpointing_enable")()
    getattr(model, f"{kind}_checkpointing_disable")()
    model.eval()._is_hf_initialized = True
    engine = td.compile(model, None, runtime="eager", max_length=64)
    for _ in range(2):
        model(torch.tensor([PROMPT]))
        run(engine, [PROMPT], max_new_tokens=3)
        td.generate(model, None, torch.tensor([PROMPT]), max_new_tokens=3, runtime="eager")


class Lazy(transformers.LlamaForCausalLM):
    """Fills in what it needs as it first runs."""

    late_gain = None

    def __init__(self, config):
        super().__init__(config)
        self.gain = self.table = self.length = self.device_name = self.least = None

    def forward(self, input_ids=None, position_ids=None, **more):
        embeds = self.get_input_embeddings()(input_ids)
        if self.gain is None:
            self.gain = self.late_gain = self.config.hidden_size**-0.5
            self.table = torch.ones(embeds.shape[-1], device=embeds.device, dtype=embeds.dtype)
        self.length, self.device_name = embeds.shape[:2], embeds.device.type
        self.least = torch.finfo(embeds.dtype).min
        embeds = (embeds + self.gain) * self.table + self.late_gain
        return super().forward(inputs_embeds=embeds, position_ids=position_ids, **more)


def make_lazy():
    return randomise(Lazy(transformers.LlamaConfig(**BASE)), 0)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_forward_fills_in_is_let_be(dtype, first):
    model = make_lazy().to(dtype)
    if first:
        model(torch.tensor([PROMPT]))
    engine = td.compile(model, None, runtime="eager", max_length=64)
    model(torch.tensor([PROMPT * 2] * 3))
    assert run(engine, [PROMPT], max_new_tokens=3)[0] == [own_text(model, PROMPT, 3)]
    left = [value for module in engine.pair.target.model.modules() for value in vars(module).values()]
    assert not [value for value in left if isinstance(value, torch.Tensor) and value.is_meta]


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("name", ["gain", "late_gain"])
def test_a_constant_that_a_forward_fills_in_is_no_other(name, late):
    model = make_lazy()
    engine = td.compile(model, None, runtime="eager", max_length=64)
    if late:
        model(torch.tensor([PROMPT]))
        run(engine, [PROMPT], max_new_tokens=3)
    setattr(model, name, -3.0)
    with refuses(ValueError, f"Lazy.{name} is -3.0", "should be "):
        run(engine, [PROMPT], max_new_tokens=3)


class Plain(transformers.LlamaForCausalLM):
    """Holds tensors and arrays that are neither parameters nor buffers."""

    def __init__(self, config):
        super().__init__(config)
        self.shift, self.array = torch.zeros(3, device="cpu"), np.zeros(60_000)
        self.shifts, self.unknown = {"by": torch.zeros((), device="cpu")}, torch.ones(3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: model.shift.fill_(3), "shift is a tensor"),
        (lambda model: setattr(model, "shift", torch.ones(3)), "shift is a tensor"),
        (lambda model: setattr(model, "shift", torch.ones(4)), "shift is a tensor"),
        (lambda model: model.shifts["by"].fill_(3), "shifts is "),
        (lambda model: model.array.__setitem__(50_000, 3), "array is "),
    ],
)
def test_values_of_plain_tensors_and_arrays_are_compared(change, words):
    model = randomise(Plain(transformers.LlamaConfig(**BASE)), 0)
    engine = td.compile(model, None, runtime="eager", max_length=64)
    model.unknown.fill_(3)  # where the skeleton's is on the meta device, nothing can be compared
    run(engine, [PROMPT], max_new_tokens=3)
    change(model)
    with refuses(ValueError, f"Plain.{words}", "should be "):
        run(engine, [PROMPT], max_new_tokens=3)


def test_plain_tensors_of_another_device_are_let_be_of_another_dtype_refused():
    model = randomise(Plain(transformers.LlamaConfig(**BASE)), 0)
    engine = td.compile(model, None, runtime="eager", max_length=64)
    model.shift = torch.ones(3, device="meta")
    run(engine, [PROMPT], max_new_tokens=3)
    model.shift = torch.zeros(3, dtype=torch.bfloat16)
    with refuses(ValueError, "Plain.shift is a tensor", "should be "):
        run(engine, [PROMPT], max_new_tokens=3)


def function_of(shift):
    scope = {"SHIFT": shift}
    exec("def act(rows):\n    return rows + SHIFT\n", scope)
    return scope["act"]


ONE, TWO = function_of(0.0), function_of(3.0)


def test_a_function_of_other_globals_is_another():
    class Acts(transformers.LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.act = ONE

    model = randomise(Acts(transformers.LlamaConfig(**BASE)), 0)
    engine = td.compile(model, None, runtime="eager", max_length=64)
    run(engine, [PROMPT], max_new_tokens=3)
    model.act = TWO
    with refuses(ValueError, "Acts.act is <function act"):
        run(engine, [PROMPT], max_new_tokens=3)


@pytest.mark.parametrize("value", [np.float32(-3), [1, torch.float32], Bend(-3.0)], ids=str)
@pytest.mark.parametrize("name", ["odd", "_odd"])
def test_config_fields_of_any_kind_are_seen(name, value):
    model = make_target("llama")
    setattr(model.config, name, None)
    engine = td.compile(model, None, runtime="eager", max_length=32)
    setattr(model.config, name, value)
    with refuses(ValueError, f"LlamaForCausalLM.config.{name} is ", "it was None"):
        run(engine, [PROMPT], max_new_tokens=3)


def test_a_class_that_reads_values_as_it_is_built_is_named():
    class Item(transformers.LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.rate = self.lm_head.weight[0, 0].item()

    with refuses(TypeError, "Item cannot be built from its config alone"):
        td.generate(Item(transformers.LlamaConfig(**BASE)), None, torch.tensor([PROMPT]), runtime="eager")


def test_autocast_is_followed_or_refused():
    model, ids = make_target("llama"), torch.tensor([PROMPT])
    with torch.autocast("cpu", torch.bfloat16):
        with refuses(ValueError, "torch.autocast is on", "cast the models"):
            td.generate(model, None, ids, max_new_tokens=3)
        td.generate(model, None, ids, max_new_tokens=3, runtime="eager")
