"""Decoding follows the live model: adapters, hooks, patches, quantised layers, changes."""

import argparse
import functools
import gc
import logging
import operator
import types
import weakref
from functools import partial
from types import MappingProxyType

import accelerate
import numpy as np
import pytest
import torch
import transformers
from support.doors import through_pipeline
from support.quantised import publish
from support.refusals import refuses
from support.scripted import own_text, run
from support.threads import beside
from support.tiny import BASE, VOCAB, make_drafter, make_target, randomise
from support.tokenizers import TEMPLATE, byte_tokenizer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.models.llama import modeling_llama
from transformers.utils.quantization_config import QuantizationMethod

import torch_dflash as td
from torch_dflash.doctor.judge import Answered, record
from torch_dflash.engine import engine as engine_module
from torch_dflash.targets.guard import Guard
from torch_dflash.targets.skeleton import configs_of
from torch_dflash.train.features.extract import FeatureExtractor

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
NEW = 12
PEFTS = "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
CHANGED = "was changed since this engine was built"


def eager(target, drafter=None, **options):
    return td.compile(target, drafter, runtime="eager", max_length=64, **options)


def own_of(model) -> list[int]:
    return own_text(model, PROMPT, NEW)


def text_of(engine) -> list[int]:
    return run(engine, [PROMPT], max_new_tokens=NEW)[0][0]


class Wide(nn.Module):
    def __init__(self, inner, gain=1.3):
        super().__init__()
        self.inner, self.gain = inner, nn.Parameter(torch.full((inner.out_features,), gain))

    def forward(self, rows):
        return self.inner(rows) * self.gain


def steer(target, layer=1, by=3.0):
    vector = by * torch.randn(target.config.hidden_size, generator=torch.Generator().manual_seed(1))

    def add(module, args, out):
        return out + vector if isinstance(out, torch.Tensor) else (out[0] + vector, *out[1:])

    return target.model.layers[layer].register_forward_hook(add), vector


def replaced(target):
    for layer in target.model.layers:
        layer.mlp.down_proj = Wide(layer.mlp.down_proj)


def scaled(target):
    for layer in target.model.layers:
        layer.self_attn.scaling *= 3


def bound(target):
    """Patches the instance of a module, as Liger-Kernel does."""
    mlp = target.model.layers[0].mlp
    mlp.forward = types.MethodType(lambda self, rows: self.down_proj(self.up_proj(rows)), mlp)


def closed_over(target):
    """Replaces forwards of a part of a layer, a layer and the model by functions that call the old ones."""
    owns = {}
    for name in ("model", "model.layers.0.mlp", "model.layers.1", "model.layers.2.self_attn"):
        module = target.get_submodule(name)
        owns[name] = module.forward
    target.model.forward = lambda own=owns["model"], **given: own(**given)
    mlp, layer = owns["model.layers.0.mlp"], owns["model.layers.1"]
    target.model.layers[0].mlp.forward = lambda rows: mlp(rows) * 2

    @functools.wraps(layer)
    def louder(rows, *args, **given):
        return layer(rows * 1.5, *args, **given)

    target.model.layers[1].forward = louder
    attend = lambda *args, **given: owns["model.layers.2.self_attn"](*args, **given)  # noqa: E731
    target.model.layers[2].self_attn.forward = attend


def in_an_attribute(target):
    """Keeps a tensor that is neither a parameter nor a buffer."""
    mlp = target.model.layers[0].mlp
    mlp.shift = torch.full((target.config.hidden_size,), 2.0)
    mlp.register_forward_hook(lambda module, args, out: out + module.shift)


CHANGES = {"vector": steer, "module": replaced, "attribute": scaled, "method": bound, "closure": closed_over}
CHANGES |= {"tensor": in_an_attribute}


@pytest.mark.parametrize("runtime", ["eager", "xla"])
@pytest.mark.parametrize("names", ["vector", "module", "attribute", "method", "closure", "tensor", "many"])
def test_a_changed_model_decodes_to_its_own_text(names, runtime):
    target = make_target("llama")
    plain = own_of(target)
    for name in CHANGES if names == "many" else [names]:
        CHANGES[name](target)
    wanted = own_of(target)
    assert wanted != plain
    assert text_of(td.compile(target, td.NGramProposer(), runtime=runtime, max_length=64)) == wanted


def last_alone(module, args, out):
    out = out[0] if isinstance(out, tuple) else out
    return torch.cat([out[:, :-1], out[:, -1:] * 3], dim=1)


def over_the_sequence(module, args, out):
    return (out[0] if isinstance(out, tuple) else out) + out.mean(dim=1, keepdim=True)


def from_the_right(module, args, out):
    return out * torch.arange(out.shape[1], 0, -1)[:, None]


class Counting(nn.Module):  # keeps state from call to call
    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, *args, **kwargs):
        self.calls += 1
        return self.inner(*args, **kwargs) * (1 + self.calls)


@pytest.mark.parametrize("hook", [last_alone, over_the_sequence, from_the_right])
@pytest.mark.parametrize("drafter", [None, td.NGramProposer(4)])
def test_a_hook_that_looks_beyond_its_own_position_is_refused(hook, drafter):
    target = make_target("llama")
    target.model.layers[1].register_forward_hook(hook)
    with refuses(ValueError, "LlamaForCausalLM", "logits differ by", "use its own generate"):
        eager(target, drafter)
    eager(target, drafter, verify=False)


def in_steps_alone(module, args, out):
    """Steers single steps alone, as many hooks do, and no prompt."""
    return out * 3 if out.shape[1] == 1 else out


def in_the_prompt_alone(module, args, out):
    return out * 3 if out.shape[1] > 1 else out


class Steered(transformers.LlamaForCausalLM):  # acts once an attribute is set; no twin has the attribute
    steer = None

    def forward(self, input_ids=None, position_ids=None, **more):
        out = super().forward(input_ids=input_ids, position_ids=position_ids, **more)
        if self.steer is not None:
            out.logits[:, -1] += self.steer
        return out


class Suppressing(transformers.LlamaForCausalLM):  # a class whose `generate` does more than its forward
    def _get_logits_processor(self, *args, **more):
        found = super()._get_logits_processor(*args, **more)
        found.append(transformers.SuppressTokensLogitsProcessor(list(range(40))))
        return found


def set_later(monkeypatch):
    target = randomise(Steered(transformers.LlamaConfig(**BASE)), 0)
    target.steer = torch.linspace(-6, 6, target.config.vocab_size)
    return target


def beyond_the_twins_layers(monkeypatch):
    whole = modeling_llama.LlamaDecoderLayer.forward

    def patched(self, rows, *args, **more):
        out = whole(self, rows, *args, **more)
        if self.self_attn.layer_idx == 3:
            out = torch.cat([out[:, :-1], out[:, -1:] + torch.linspace(-3, 3, out.shape[-1])], dim=1)
        return out

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", patched)
    return make_target("llama")


def hooked(hook):
    def make(monkeypatch):
        target = make_target("llama")
        target.model.layers[1].mlp.register_forward_hook(hook)
        return target

    return make


def suppressing_behind_a_hook(monkeypatch):
    target = randomise(Suppressing(transformers.LlamaConfig(**BASE)), 0)
    target.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out * 2)
    return target


def attention_patched(monkeypatch):
    whole = modeling_llama.eager_attention_forward
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", lambda *args, **more: whole(*args, **more))
    return make_target("llama")


def counting(monkeypatch):
    target = make_target("llama")
    target.model.layers[1].mlp = Counting(target.model.layers[1].mlp)
    return target


def an_alora(monkeypatch):
    peft = pytest.importorskip("peft")
    options = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM", "alora_invocation_tokens": [4, 1]}
    return peft.get_peft_model(make_target("llama"), peft.LoraConfig(**options))


def a_learned_prompt(monkeypatch):
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return peft.get_peft_model(make_target("llama"), config)


def a_generate_of_its_own(monkeypatch):
    target = make_target("llama")
    target.prepare_inputs_for_generation, target.generate = functools.partial(print), lambda *args: None
    return target


STEPS, PLACES, OWN = "tells single tokens from prompts", "looks at other positions", "its own generate"
REFUSED = {
    "steps alone": (hooked(in_steps_alone), [STEPS, OWN]),
    "the prompt alone": (hooked(in_the_prompt_alone), [STEPS, OWN]),
    "an attribute": (set_later, [PLACES, OWN]),
    "a later layer": (beyond_the_twins_layers, [PLACES, OWN]),
    "generate": (suppressing_behind_a_hook, ["it changes logits", OWN]),
    "attention": (
        attention_patched,
        ["modeling_llama.eager_attention_forward", "put transformers' own back"],
    ),
    "state between calls": (counting, ["LlamaForCausalLM", "logits differ by"]),
    "aLoRA": (an_alora, ["LlamaForCausalLM", "'default', an aLoRA", "delete the adapter"]),
    "a learned prompt": (a_learned_prompt, ["PromptTuningConfig", "before the prompt", OWN]),
    "own generate": (a_generate_of_its_own, ["LlamaForCausalLM carries a replaced", "delete it"]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_no_block_computes_are_refused(kind, monkeypatch):
    make, words = REFUSED[kind]
    with refuses(ValueError, *words):
        eager(make(monkeypatch), td.NGramProposer(4))


def test_a_verdict_is_not_that_of_a_hook_before_it_changed():
    target, modes = make_target("llama"), [0, "all"]
    get = functools.partial(operator.getitem, iter(lambda: modes[1], None))  # no guard looks into this

    def hook(module, args, out):
        return out * 2 if next(get.args[0]) == "all" else last_alone(module, args, out)

    target.model.layers[1].mlp.register_forward_hook(hook)
    eager(target)
    modes[1] = "last"
    with refuses(ValueError, "looks at other positions"):
        eager(target)


class Merged(nn.Module):  # multiplies its weights once, until it is trained again
    def __init__(self, inner):
        super().__init__()
        self.inner, self.turn, self.whole = inner, nn.Parameter(torch.eye(inner.out_features)), None

    def train(self, mode=True):
        self.whole = None
        return super().train(mode)

    def forward(self, rows):
        if self.whole is None:
            self.whole = (self.turn @ self.inner.weight).detach()
        return nn.functional.linear(input=rows, weight=self.whole)


@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_a_weight_that_a_module_multiplies_once_is_multiplied_in_every_request(runtime):
    target = make_target("llama")
    for layer in target.model.layers:
        layer.mlp.down_proj = Merged(layer.mlp.down_proj)
    engine = td.compile(target.eval(), None, runtime=runtime, max_length=64)
    before = text_of(engine)
    assert before == own_of(target)
    target.train()
    with torch.no_grad():
        for layer in target.model.layers:
            layer.mlp.down_proj.turn.mul_(-3)
    assert text_of(engine) == own_of(target.eval()) != before


class Published(nn.Module):  # rotary embeddings as modelling files of older releases have them
    def __init__(self, frequencies):
        super().__init__()
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def forward(self, rows, position_ids):
        with torch.autocast(device_type=rows.device.type, enabled=False):
            turns = position_ids[:, :, None].float() * self.inv_freq
            turns = torch.cat((turns, turns), dim=-1)
        return turns.cos().to(rows.dtype), turns.sin().to(rows.dtype)


@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_a_forward_may_turn_autocast_off_and_not_on(runtime):
    target = make_target("llama")
    target.model.rotary_emb = Published(target.model.rotary_emb.inv_freq.clone())
    engine = td.compile(target, None, runtime=runtime, max_length=64)
    wanted = own_of(target)
    assert text_of(engine) == wanted
    target.forward = torch.autocast("cpu", dtype=torch.bfloat16)(target.forward)  # as accelerate does
    with refuses(ValueError, "turns torch.autocast on", "unwrap_model"):
        text_of(engine)
    del target.forward
    assert text_of(engine) == wanted


def test_weights_that_a_hook_closes_over_are_refused_on_xla_by_name():
    target = make_target("llama")
    beside = nn.Linear(target.config.hidden_size, target.config.hidden_size)
    target.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out + beside(out))
    assert text_of(eager(target)) == own_of(target)
    with refuses(ValueError, "reads a Parameter", "closure", "runtime='eager'"):
        text_of(td.compile(target, td.NGramProposer(), max_length=64))


def test_layers_that_were_removed_are_named():
    target = make_target("llama")
    target.model.layers = target.model.layers[:2]
    with refuses(ValueError, "layers [2, 3]", "num_hidden_layers=2 in its config, if the others"):
        eager(target)
    target.config.num_hidden_layers = 2
    assert text_of(eager(target)) == own_of(target)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_:FutureWarning")
def test_what_only_gradients_read_makes_no_copy_anew(caplog):
    target = make_target("llama")
    engine = eager(target)
    pair = engine.pair
    changes = [target.gradient_checkpointing_enable, target.gradient_checkpointing_disable]
    for change in [*changes, target.enable_input_require_grads, target.train, target.eval]:
        change()
        text_of(engine)
        assert engine.pair is pair and CHANGED not in caplog.text


class Captures:  # keeps all outputs, as tools for activations do
    def __init__(self):
        self.seen, self.count = [], 0

    def add(self, module, args, out):
        self.seen.append(out)

    def number(self, module, args, out):
        self.count += 1


SEEN, CALLS, UPDATED = [], 0, {}


def counted_in_a_global(module, args, out):
    global CALLS
    CALLS += 1


def in_a_closure(captures):
    seen = captures.seen
    return lambda module, args, out: seen.append(out)


KEEPS = {
    "list": lambda captures: captures.add,
    "count": lambda captures: captures.number,
    "closure": in_a_closure,
    "global list": lambda captures: lambda module, args, out: SEEN.append(out),
    "global dict": lambda captures: lambda module, args, out: UPDATED.update(last=out),
    "global count": lambda captures: counted_in_a_global,
}


@pytest.mark.parametrize("kind", KEEPS)
def test_a_hook_that_keeps_what_it_sees_is_refused_and_keeps_nothing_of_ours(kind):
    target, captures = make_target("llama"), Captures()
    target.model.layers[1].register_forward_hook(KEEPS[kind](captures))
    with refuses(ValueError, "LlamaForCausalLM.model.layers.1 carries", "keeps something", "remove the hook"):
        eager(target)
    assert not captures.seen and not SEEN and not UPDATED and captures.count == CALLS == 0


LOG = logging.getLogger("a hook's")


def test_a_hook_that_logs_keeps_nothing(caplog):
    """Loggers note levels and other loggers at each call."""
    target = make_target("llama")
    target.model.layers[1].register_forward_hook(lambda *given: LOG.debug("runs"))
    engine = eager(target)
    for number in range(2):
        logging.getLogger(f"another {number}").debug("")
        text_of(engine)
        assert CHANGED not in caplog.text


class Linear8bitLt(nn.Linear):  # the name of bitsandbytes' class
    pass


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, ids):
        return self.inner(ids)


def scripted(target):
    target.model.layers[0].mlp = torch.jit.trace(target.model.layers[0].mlp, torch.ones(1, 2, 32))


PARTS = {
    "load_in_4bit=True": lambda t: setattr(t.model.layers[0].mlp, "up_proj", Linear8bitLt(32, 64)),
    "property weight": lambda t: t.set_input_embeddings(Around(t.get_input_embeddings())),
    "TorchScript": scripted,
    "0.self_attn.q_proj is a Linear of quantize_dynamic, which is not decoded here; pass the model": (
        lambda t: torch.ao.quantization.quantize_dynamic(t, {nn.Linear}, inplace=True)
    ),
    "model.norm keeps its weights in a mappingproxy": (
        lambda t: vars(t.model.norm).update(_parameters=MappingProxyType(t.model.norm._parameters))
    ),
    "has layers of compressed-tensors, not decoded here; load it with": (
        lambda t: vars(t).update(quantization_method=QuantizationMethod.COMPRESSED_TENSORS)
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("words", PARTS)
def test_parts_that_cannot_be_bound_are_named(words):
    target = make_target("llama")
    PARTS[words](target)
    with refuses(ValueError, "LlamaForCausalLM", words):
        eager(target)


@pytest.mark.filterwarnings("ignore")
def test_a_quantised_model_decodes_once_it_is_loaded_as_the_refusal_says(tmp_path):
    target, config = make_target("qwen3"), transformers.FineGrainedFP8Config(weight_block_size=(16, 16))
    vars(target).update(quantization_method=config.quant_method)  # as transformers does
    target.config.quantization_config = config
    way = "quantization_config=FineGrainedFP8Config(dequantize=True)"
    with refuses(ValueError, "Qwen3ForCausalLM has layers of fp8, not decoded here", way):
        eager(target)
    config = transformers.FineGrainedFP8Config(dequantize=True)
    folder = publish("fp8", tmp_path)
    kind, exact = transformers.Qwen3ForCausalLM, torch.float32
    target = kind.from_pretrained(folder, quantization_config=config, dtype=exact)
    assert text_of(eager(target)) == own_of(target)


@pytest.mark.filterwarnings("ignore")
def test_a_sharded_model_decodes_once_its_weights_are_gathered():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))  # torchax hides torch's source of a default one
        sharded = fully_shard(make_target("llama", num_hidden_layers=2), mesh=mesh)
        with refuses(ValueError, "LlamaForCausalLM.model.embed_tokens.weight is a DTensor", "full_tensor()"):
            eager(sharded)
        whole = make_target("llama", 1, num_hidden_layers=2)
        whole.load_state_dict({name: part.full_tensor() for name, part in sharded.state_dict().items()})
    finally:
        torch.distributed.destroy_process_group()
    wanted = own_of(make_target("llama", num_hidden_layers=2))
    assert text_of(eager(whole)) == wanted


def adapted(vocab_size=VOCAB, **more):
    peft = pytest.importorskip("peft")
    target = make_target("llama", num_hidden_layers=2, vocab_size=vocab_size)
    options = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False}
    torch.manual_seed(0)
    model = peft.get_peft_model(target, peft.LoraConfig(**(options | more)))
    model.add_adapter("b", peft.LoraConfig(**options))
    return model.eval()


@pytest.mark.filterwarnings(PEFTS)
@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_adapters_are_followed_as_they_are_switched(runtime, caplog):
    model = adapted()
    engine = td.compile(model, None, runtime=runtime, max_length=64)
    first = own_of(model)
    assert text_of(engine) == first
    model.set_adapter("b")
    second = own_of(model)
    assert text_of(engine) == second != first
    assert [CHANGED in line for line in caplog.messages if "compiling" not in line] == [True]
    with model.disable_adapter():
        assert text_of(engine) == own_of(model) not in (first, second)
    model.set_adapter("default")
    text, stats = run(engine, [PROMPT], max_new_tokens=NEW)
    assert text == [first] and stats.compilations == 0  # earlier programs are kept
    model.base_model.model.model.layers[0].self_attn.q_proj.set_scale("default", 3.0)  # a dict, in place
    assert text_of(engine) == own_of(model) != first


@pytest.mark.filterwarnings(PEFTS)
def test_every_door_takes_an_adapted_model():
    model = adapted(use_dora=True)
    ids = torch.tensor([PROMPT])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False}
    options |= {"eos_token_id": None, "pad_token_id": 0}
    wanted = model.generate(input_ids=ids, **options)
    drafter = make_drafter(model.get_base_model(), target_layer_ids=[0, 1])
    assert torch.equal(td.generate(model, drafter, ids, runtime="eager", **options), wanted)
    loop = td.dflash(drafter, runtime="eager")
    assert torch.equal(model.generate(input_ids=ids, custom_generate=loop, **options), wanted)
    assert td.check(model).holds


class Noisy(nn.Module):  # differs in training, without torch's dropout
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, rows):
        return self.inner(rows) * (1 - 3 * self.training)


class PutsBack(Noisy):
    """Evaluates the wrapped module, and restores the mode."""

    def forward(self, rows):
        was = self.training
        self.eval()
        out = self.inner(rows)
        self.train(was)
        return out


@pytest.mark.filterwarnings(PEFTS)
@pytest.mark.parametrize("kind", ["an adapter's dropout", Noisy, PutsBack])
def test_a_model_in_training_mode_decodes_as_in_evaluation_mode(kind):
    if isinstance(kind, type):
        model: nn.Module = make_target("llama", num_hidden_layers=2)
        model.model.layers[1].mlp = kind(model.model.layers[1].mlp)
    else:
        model = adapted(lora_dropout=0.5)
    wanted = own_of(model.eval())
    model.train()
    modes = [part.training for part in model.modules()]
    assert text_of(eager(model, td.NGramProposer(4))) == wanted
    assert modes == [part.training for part in model.modules()] and "training" not in vars(nn.Module)


@pytest.mark.parametrize(
    ("runtime", "decorated"),
    [("eager", kind()) for kind in (torch.no_grad, torch.enable_grad, torch.inference_mode)]
    + [("eager", torch.compiler.disable), ("xla", torch.no_grad())],
)
def test_a_hook_that_a_decorator_of_torchs_holds_is_followed(runtime, decorated):
    target, gain = make_target("llama"), [1.0]
    engine = td.compile(target, td.NGramProposer(), runtime=runtime, max_length=64)
    said = [text_of(engine)]
    handle = target.model.layers[0].mlp.register_forward_hook(decorated(lambda *given: given[2] * gain[0]))
    for gain[0] in (-3.0, -5.0):
        said.append(text_of(engine))
        assert said[-1] == own_text(target, PROMPT, NEW) != said[-2]
    handle.remove()
    assert text_of(engine) == said[0]


def test_hooks_that_come_and_go_between_calls_are_followed(caplog):
    target = make_target("llama")
    engine = eager(target, td.NGramProposer())
    plain = own_of(target)
    assert text_of(engine) == plain
    handle, vector = steer(target)
    steered = own_of(target)
    assert text_of(engine) == steered != plain
    built = engine.pair
    assert text_of(engine) == steered and engine.pair is built  # nothing is copied twice
    vector.mul_(-1)
    assert text_of(engine) == own_of(target) and engine.pair is not built
    handle.remove()
    assert text_of(engine) == plain
    assert sum(CHANGED in line for line in caplog.messages) == 2  # the copy without a hook was kept


GAIN = 1.0


class Scale(nn.Module):  # a module that is no part of the model
    def __init__(self, size):
        super().__init__()
        self.by, self.gain = 2.0, nn.Parameter(torch.ones(size))


class Shared:
    gain = 1.0


shared = types.ModuleType("settings_of_a_hook")
shared.GAIN = 1.0


class Switch:
    def __init__(self, scale):
        self.scale, self.settings = scale, {"vector": torch.ones(scale.gain.shape), "array": np.ones(3)}
        self.args, self.table = argparse.Namespace(gain=1.0), {1: {"gain": 1.0}}

    def hook(self, module, args, out):
        gain = self.args.gain * self.table[1]["gain"] * Shared.gain * shared.GAIN * GAIN
        return out * self.scale.by * self.scale.gain * self.settings["vector"] * gain


def linear_patch(switch, patch):
    forward = nn.Linear.forward
    patch.setattr(nn.Linear, "forward", lambda self, rows: forward(self, rows) * 2)


REACHED = {
    "a number": lambda switch, patch: setattr(switch.scale, "by", 3.0),
    "a weight": lambda switch, patch: switch.scale.gain.data.mul_(3),
    "another weight": lambda switch, patch: setattr(switch.scale, "gain", nn.Parameter(torch.ones(32) * 3)),
    "a vector": lambda switch, patch: switch.settings["vector"].numpy().__imul__(3),
    "an array": lambda switch, patch: switch.settings["array"].__imul__(3),
    "a hook": lambda switch, patch: switch.scale.register_forward_hook(lambda module, args, out: out * 2),
    "an object": lambda switch, patch: setattr(switch, "scale", Scale(32)),
    "a namespace": lambda switch, patch: setattr(switch.args, "gain", 2.0),
    "an inner dict": lambda switch, patch: switch.table[1].update(gain=2.0),
    "a class": lambda switch, patch: setattr(Shared, "gain", Shared.gain + 1),
    "a module": lambda switch, patch: setattr(shared, "GAIN", shared.GAIN + 1),
    "a global": lambda switch, patch: patch.setitem(globals(), "GAIN", 3.0),
    "a class of torch": linear_patch,
}


@pytest.mark.parametrize("way", ["a method", "a closure", "a patch of a class"])
@pytest.mark.parametrize("change", REACHED)
def test_what_a_hook_reaches_is_looked_at(change, way, monkeypatch):
    """A program holds a hook's tensor as a constant."""
    target, whole = make_target("llama"), modeling_llama.LlamaMLP.forward
    switch = Switch(Scale(target.config.hidden_size))
    if way == "a patch of a class":
        patched = lambda self, rows: switch.hook(self, (rows,), whole(self, rows))  # noqa: E731
        monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", patched)
    else:
        hook = switch.hook if way == "a method" else lambda *given: switch.hook(*given)
        target.model.layers[1].mlp.register_forward_hook(hook)
    guard = Guard(target)
    target(torch.tensor([PROMPT]))
    assert guard.holds() and guard.holds()
    REACHED[change](switch, monkeypatch)
    assert not guard.holds()


class Steers(nn.Module):  # a module outside the model with a method that is a hook
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def hook(self, module, args, out):
        return out * self.scale


def test_weights_of_a_module_beside_the_model_are_followed():
    target, steers = make_target("llama"), Steers()
    target.model.layers[0].mlp.register_forward_hook(steers.hook)
    before = text_of(engine := eager(target))
    steers.scale.data.fill_(-3.0)
    assert text_of(engine) == own_of(target) != before


def test_a_hook_removed_while_an_engine_is_built_is_no_part_of_it(monkeypatch):
    target = make_target("llama")
    wanted = own_of(target)
    handle, _ = steer(target)
    trace = engine_module.Target
    monkeypatch.setattr(engine_module, "Target", lambda model: [trace(model), handle.remove()][0])
    assert text_of(eager(target)) == wanted


@pytest.mark.slow
def test_a_program_follows_a_module_that_a_hook_reaches():
    target = make_target("llama")
    switch = Switch(Scale(target.config.hidden_size))
    target.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out * switch.scale.by)
    engine = td.compile(target, None, max_length=64)
    first = text_of(engine)
    assert first == own_of(target)
    switch.scale.by = -3.0
    assert text_of(engine) == own_of(target) != first


class Louder(modeling_llama.LlamaMLP):
    def forward(self, x):
        return 2 * super().forward(x)


def with_hook(monkeypatch, target):
    """Adds a hook that is wrapped as another function."""
    doubled = functools.wraps(modeling_llama.rotate_half)(lambda module, args, out: out * 2)
    target.model.layers[1].mlp.register_forward_hook(doubled)


def scaled_by(kind, name, change):
    """Patches ``name`` in ``kind`` around the present function."""

    def patch(monkeypatch, target):
        whole = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *given: change(whole, *given))

    return patch


def fewer_layers(monkeypatch, target):
    del target.model.layers[3]
    target.config.num_hidden_layers = 3


class ReadsConfig(transformers.LlamaForCausalLM):  # reads its config in each run
    def forward(self, input_ids=None, position_ids=None, **more):
        embeds = self.get_input_embeddings()(input_ids) * getattr(self.config, "mlp_gain", 1.0)
        return super().forward(inputs_embeds=embeds, position_ids=position_ids, **more)


MLP = modeling_llama.LlamaMLP
PATCHES = {
    # Liger-Kernel's patch of a modelling file
    "file": scaled_by(modeling_llama, "apply_rotary_pos_emb", lambda own, q, k, *a: own(q * 1.5, k, *a)),
    "class": scaled_by(MLP, "forward", lambda own, module, rows: own(module, rows) * 2),
    "function behind one of the file": scaled_by(modeling_llama, "rotate_half", lambda own, rows: rows),
    "attribute": lambda patch, t: setattr(t.model.layers[0].self_attn, "scaling", 5.0),
    "config": lambda patch, t: setattr(t.config, "mlp_gain", 3.0),
    "child": lambda patch, t: setattr(t.model.layers[2].mlp, "act_fn", nn.Tanh()),
    "bias": lambda patch, t: setattr(t.lm_head, "bias", nn.Parameter(torch.linspace(-9, 9, VOCAB))),
    "layers": fewer_layers,
    "hook": with_hook,
    "hook of inputs": lambda patch, t: t.model.layers[1].mlp.register_forward_pre_hook(lambda m, x: x[0] * 2),
    "class of a module": lambda patch, t: setattr(t.model.layers[2].mlp, "__class__", Louder),
}


@pytest.mark.parametrize("change", PATCHES)
def test_every_change_is_followed_once(change, monkeypatch, caplog):
    kind = ReadsConfig if change == "config" else transformers.LlamaForCausalLM
    target = randomise(kind(transformers.LlamaConfig(**BASE)), 0)
    engine = eager(target, td.NGramProposer())
    plain = text_of(engine)
    assert plain == own_of(target)
    PATCHES[change](monkeypatch, target)
    wanted = own_of(target)
    assert text_of(engine) == text_of(engine) == wanted != plain
    assert sum(CHANGED in line for line in caplog.messages) == 1
    assert text_of(eager(target, td.NGramProposer())) == wanted


def test_what_a_model_goes_through_is_no_change(tmp_path, caplog):
    target = make_target("qwen3")
    ids = torch.tensor([PROMPT])
    engine = eager(target, td.NGramProposer())
    text_of(engine)
    built = engine.pair
    target.train()
    target(input_ids=ids, labels=ids).loss.backward()
    target.eval().requires_grad_(False)
    target.generate(ids, max_new_tokens=3, do_sample=True, pad_token_id=0)
    target.generate(ids, max_new_tokens=3, cache_implementation="static", disable_compile=True)
    accelerate.Accelerator(cpu=True).prepare(target)
    torch.compile(target, backend="eager")
    target.save_pretrained(tmp_path)
    target.tie_weights()
    target.config.use_cache, target.config.pad_token_id = False, 0
    target.generation_config.temperature = 0.3
    target(ids, output_hidden_states=True)  # transformers adds hooks
    with torch.no_grad():
        target.lm_head.weight.mul_(-1)  # weights are read in every call
    assert text_of(engine) == own_of(target) and engine.pair is built
    assert not [line for line in caplog.messages if CHANGED in line]


def test_a_drafter_is_followed_too():
    target = make_target("qwen3")
    drafter = make_drafter(target)
    engine = eager(target, drafter)
    wanted = text_of(engine)
    before = engine.pair
    drafter.layers[0].self_attn.scale *= 2
    assert text_of(engine) == wanted and engine.pair is not before
    assert engine.pair.proposer.drafter.layers[0].self_attn.scale == drafter.layers[0].self_attn.scale


def test_a_session_begins_anew_when_the_model_was_changed():
    target = make_target("llama")
    session = eager(target).session()

    def text(prompt):
        found = session.gains(prompt, max_new_tokens=NEW, eos_token_id=None, do_sample=False)
        return [token for gain in found for token in gain.tokens]

    first = text(PROMPT)
    scaled(target)
    assert text([*PROMPT, *first]) == own_text(target, [*PROMPT, *first], NEW)
    assert session.stats is not None and session.stats.prefilled == len(PROMPT) + NEW


def test_a_change_that_is_refused_and_undone_leaves_the_engine_as_it_was():
    target = make_target("llama")
    engine = eager(target)
    wanted, built = text_of(engine), engine.pair
    handle = target.model.layers[1].register_forward_hook(last_alone)
    for _ in range(2):
        with refuses(ValueError, "logits differ by"):
            text_of(engine)
    handle.remove()
    assert text_of(engine) == wanted and engine.pair is built


def test_refresh_asks_the_guard():
    target = make_target("llama")
    engine = eager(target)
    before = engine.pair
    engine.refresh()
    assert engine.pair is before
    scaled(target)
    engine.refresh()
    assert engine.pair is not before


def test_accelerates_offloading_is_refused_by_name():
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module

    target = make_target("llama")
    add_hook_to_module(target.model.layers[0], AlignDevicesHook())
    with refuses(ValueError, "model.layers.0", "AlignDevicesHook", "remove_hook_from_module"):
        eager(target)
    remove_hook_from_module(target, recurse=True)
    assert text_of(eager(target)) == own_of(target)


class Holds:  # an object that does not copy, in an attribute of a model
    def __init__(self):
        self.lock = __import__("threading").Lock()


def test_what_does_not_copy_is_shared():
    target = make_target("llama")
    target.helper, target.model.functions = Holds(), {"functional": nn.functional}
    engine = eager(target)
    assert text_of(engine) == own_of(target)
    assert engine.pair.target.model.helper.lock is target.helper.lock


def test_a_compiled_module_stays_usable():
    target = make_target("llama")
    wanted = own_of(target)
    target.model.layers[0].compile(backend="eager")
    assert text_of(eager(target)) == wanted


class Knows:  # the hook's object knows the model, as in libraries that steer
    def __init__(self, target):
        self.target = target
        target.model.layers[1].mlp.register_forward_hook(self.hook)

    def hook(self, module, args, out):
        return out * 2


@pytest.mark.parametrize("change", [replaced, closed_over, Knows])
@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_an_engine_of_a_changed_model_keeps_none_alive(change, runtime):
    target = make_target("llama")
    change(target)
    td.generate(target, None, torch.tensor([PROMPT]), max_new_tokens=3, runtime=runtime)
    held = weakref.ref(target)
    del target
    gc.collect()
    assert held() is None


def quantised(name, folder):
    """The model of ``folder`` quantised by ``name``, or a skip that names the package."""
    config = {
        "torchao": lambda: transformers.TorchAoConfig(
            pytest.importorskip("torchao.quantization").Int8WeightOnlyConfig()
        ),
        "optimum.quanto": lambda: transformers.QuantoConfig(weights="int8"),
        "bitsandbytes": lambda: transformers.BitsAndBytesConfig(load_in_4bit=True),
    }[name]
    pytest.importorskip(name)
    kind = transformers.LlamaForCausalLM
    target = kind.from_pretrained(folder, dtype=torch.float32, quantization_config=config()).eval()
    packing = [module for module in target.modules() if hasattr(module, "support_avx512bf16_for_cpu")]
    if any(module.support_avx512bf16_for_cpu for module in packing):
        with refuses(ValueError, "bitsandbytes", "support_avx512bf16_for_cpu=False"):
            eager(target)
    for module in packing:
        module.support_avx512bf16_for_cpu = False
    return target


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["torchao", "optimum.quanto", "bitsandbytes"])
def test_quantised_layers_decode_eagerly_and_xla_names_them(name, tmp_path):
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
    randomise(transformers.LlamaForCausalLM(transformers.LlamaConfig(**(BASE | sizes))), 0).save_pretrained(
        tmp_path
    )
    target = quantised(name, tmp_path)
    engine = eager(target, td.NGramProposer())
    assert text_of(engine) == own_of(target)
    with refuses(ValueError, "which runtime='xla' cannot read", "runtime='eager'", "dequantise"):
        text_of(td.compile(target, td.NGramProposer(), max_length=64, verify=False))


def diagnosed(model, drafter, ids, options):
    model, words = model.get_base_model(), byte_tokenizer(TEMPLATE)
    td.diagnose(model, drafter, words, ["a"], max_new_tokens=3, blocks=1)


def chatted(model, drafter, ids, options):
    td.Chat(eager(model, drafter), byte_tokenizer(TEMPLATE), max_new_tokens=3)(
        [{"role": "user", "content": "a"}]
    )


def extracted(model, drafter, ids, options):
    FeatureExtractor(model.get_base_model(), (0, 1), torch.float32, "eager")(ids.tolist())


def streamed(model, drafter, ids, options):
    list(td.stream(model, drafter, ids, runtime="eager", **options))


def piped(model, drafter, ids, options):
    through_pipeline((model, drafter), {"input_ids": ids}, max_new_tokens=3, do_sample=False)


def custom(model, drafter, ids, options):
    model.generate(input_ids=ids, custom_generate=td.dflash(drafter, runtime="eager"), **options)


DOORS = {
    "generate": lambda model, drafter, ids, more: td.generate(model, drafter, ids, runtime="eager", **more),
    "custom_generate": custom,
    "compile": lambda model, drafter, ids, options: eager(model, drafter).generate(ids, **options),
    "stream": streamed,
    "pipeline": piped,
    "Chat": chatted,
    "check": lambda model, drafter, ids, options: td.check(model),
    "diagnose": diagnosed,
    "record": lambda model, drafter, ids, options: record(model.get_base_model(), [Answered(ids[0], 2)]),
    "features": extracted,
}


def seen_in(model):
    """All objects in modules and configs of ``model``, by identity."""
    holders = [vars(part) for part in model.modules()]
    holders += [held for one in holders for held in one.values() if isinstance(held, dict)]
    holders += [vars(config) for config in configs_of(model)]
    return [[(key, id(value)) for key, value in holder.items()] for holder in holders]


@pytest.mark.filterwarnings(PEFTS)
@pytest.mark.parametrize(
    "door, training", [(door, False) for door in DOORS] + [("compile", True), ("check", True)]
)
def test_another_thread_never_sees_a_call_in_the_users_model(door, training, caplog):
    model = adapted(vocab_size=260, lora_dropout=0.3)
    drafter = make_drafter(model.get_base_model(), target_layer_ids=[0, 1], mask_token_id=258)
    ids = torch.tensor([PROMPT])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 3, "do_sample": False}
    options |= {"eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        logits = model(ids).logits
    beside_it = eager(model, verify=False)
    text, pair = text_of(beside_it), beside_it.pair
    model.train(training)
    shown, looks = seen_in(model), []

    def look():
        with torch.no_grad():
            looks.append(seen_in(model) == shown and (training or torch.equal(model(ids).logits, logits)))

    beside(partial(DOORS[door], model, drafter, ids, options), modeling_llama.LlamaModel.forward, look)
    assert looks and all(looks) and seen_in(model) == shown
    assert text_of(beside_it) == text and beside_it.pair is pair and CHANGED not in caplog.text
