"""A target that keeps state, shares objects, or acts in some passes alone is no reason for a refusal."""

import functools
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from support.altered import altered, llama, tiny
from support.scripted import own_text, run
from support.tiny import BASE

import torch_dflash as td
from torch_dflash.cache.view import CACHE
from torch_dflash.targets.hooks import restoring_attributes
from torch_dflash.verify import check

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def compiled(target, runtime="eager", **more) -> td.Engine:
    return td.compile(target, None, runtime=runtime, max_length=64, **more)


def text(engine: td.Engine) -> list[int]:
    return run(engine, [PROMPT], max_new_tokens=8)[0][0]


def rounded(embeds, *kinds):
    for kind in kinds:
        embeds = ((embeds + 100).to(kind) - 100).to(embeds.dtype)
    return embeds


def with_a_tensor(model, embeds, ids, seen):
    if model.table is None:
        model.table = torch.ones(embeds.shape[-1], device=embeds.device)
    return embeds * model.table


def with_its_first_row(model, embeds, ids, seen):
    """Keeps a table of its first embedding: a compiled program would keep another one."""
    if model.table is None:
        model.table = 1 + embeds[0, 0].detach()
    return embeds * model.table


def nested(model, deep=1):
    model.memo, model.rows, model.held, model.deep = {"inner": {}}, [], SimpleNamespace(), deep
    for _ in range(deep):
        model.memo = {"inner": model.memo}


def with_tensors_inside(model, embeds, ids, seen):
    table = torch.full((embeds.shape[-1],), 1.1, device=embeds.device)
    memo = model.memo
    for _ in range(model.deep + 1):
        memo = memo["inner"]
    memo.setdefault("table", table)
    model.held.table = getattr(model.held, "table", table)
    model.rows = [*model.rows, table][:1]
    return embeds * memo["table"] * model.held.table * model.rows[0]


class Mixes(transformers.LlamaForCausalLM):  # transformers adds hooks for its hidden states
    def forward(self, input_ids=None, position_ids=None, use_cache=None, **more):
        asked = {CACHE: more.get(CACHE), "use_cache": use_cache, "output_hidden_states": True}
        mask = more.get("attention_mask")
        out = self.model(input_ids, position_ids=position_ids, attention_mask=mask, **asked)
        logits = self.lm_head(out.last_hidden_state + out.hidden_states[2])
        kind = transformers.modeling_outputs.CausalLMOutputWithPast
        return kind(None, logits, getattr(out, CACHE))


class FrozenTable(torch.nn.Module):  # an embedding that is not trained: its table is a buffer
    def __init__(self, count: int, size: int):
        super().__init__()
        self.register_buffer("weight", torch.randn(count, size))

    def forward(self, ids):
        return torch.nn.functional.embedding(ids, self.weight)


def frozen(model):
    torch.manual_seed(0)
    model.model.embed_tokens = FrozenTable(model.config.vocab_size, model.config.hidden_size)


class RefusesDoubles(transformers.LlamaForCausalLM):
    def to(self, *args, **named):
        if torch.float64 in args:
            raise TypeError("no double precision here")
        return super().to(*args, **named)

    def forward(self, input_ids=None, position_ids=None, **more):
        return super().forward(input_ids, position_ids=position_ids, **more)


class Mode(Enum):
    PLAIN = "plain"


def counters(model):
    model.counts, model.lengths = {Mode.PLAIN: 0}, []


def counted(model, embeds, ids, seen):
    """Records passes without a cache, and a counter in the class that begins in a later pass."""
    if seen is None:
        model.counts[Mode.PLAIN] += 1
        model.lengths.append(len(model.lengths))
    elif seen > 0:
        type(model).steps = getattr(type(model), "steps", 0) + 1
    return embeds


class Notes(transformers.LlamaForCausalLM):  # notes its arguments, as many models do, and reads no note
    def __init__(self, config):
        super().__init__(config)
        self.prefills, self.steps, self.kind = 0, 0, self.lm_head.weight.dtype
        self.was_decoding = False

    def forward(self, input_ids=None, position_ids=None, use_cache=None, **more):
        self.prefills += input_ids.shape[1] > 1
        self.steps += input_ids.shape[1] == 1
        self.was_decoding = input_ids.shape[1] == 1
        past = more.get(CACHE)
        self.first_pass = past is None or past.get_seq_length() == 0
        self.ids_kind, self.where = input_ids.dtype, f"{input_ids.device}:causal"
        self.is_decoding = input_ids.shape[1] == 1
        self.phase, self.uses_cache = "decode" if self.is_decoding else "prefill", use_cache
        if not hasattr(self, "least"):
            self.least = torch.finfo(self.dtype).min
        found = super().forward(input_ids, position_ids=position_ids, use_cache=use_cache, **more)
        self.last, self.last_hidden = getattr(found, CACHE), found.logits
        return found


KEPT = {"tensor": altered("KeepsATensor", with_a_tensor, table=None)}
KEPT |= {"tensors inside": altered("KeepsInside", with_tensors_inside, nested), "hooks": Mixes}
KEPT |= {"buffer": llama("Frozen", frozen), "notes": Notes, "no doubles": RefusesDoubles}
KEPT |= {"counters": altered("Counts", counted, counters)}


@pytest.mark.parametrize(
    ("runtime", "kind"),
    [("eager", kind) for kind in KEPT if kind != "buffer"] + [("xla", kind) for kind in [*KEPT][:5]],
)
def test_what_a_forward_keeps_is_made_anew_in_each_program(runtime, kind):
    target = tiny(KEPT[kind])
    wanted, engine = own_text(target, PROMPT, 8), compiled(target, runtime)
    for _ in range(2):
        assert text(engine) == wanted
        assert len(engine.pair.target.model.model.layers[0]._forward_hooks) <= 1
        target(torch.tensor([PROMPT]), use_cache=False)
    if kind == "counters":
        assert text(compiled(target)) == wanted


@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_a_kept_tensor_that_depends_on_the_call_is_refused(runtime):
    with pytest.raises(ValueError, match="a tiny random twin"):
        compiled(tiny(altered("KeepsItsFirstRow", with_its_first_row, table=None)), runtime)


def test_a_tensor_kept_deeper_is_refused_by_name():
    target = tiny(altered("KeepsDeep", with_tensors_inside, functools.partial(nested, deep=6)))
    with pytest.raises(ValueError, match="cannot be lowered.*runtime='eager'"):
        text(compiled(target, "xla", verify=False))


def settings(model):
    """Reads a setting next to a counter, and a setting next to a type that the model fills in."""
    model.state, model.memo = {"shift": 0.5, "steps": 0}, None


def set_by(model, embeds, ids, seen):
    model.state["steps"] += ids.shape[1] == 1
    if model.memo is None:
        model.memo = {"kind": torch.float32, "shift": 0.25}
    return embeds + model.state["shift"] + model.memo["shift"]


def grown(model, embeds, ids, seen):
    """Scales after its longest pass, as some models do beyond their trained length."""
    model.scale = 3.0 if ids.shape[1] > 60 else model.scale
    return embeds + (model.scale - 1)


def noted_uncached(model, embeds, ids, seen):
    """Passes without a cache leave an entry next to a setting."""
    if seen is None:
        model.info["uncached"] = True
    return embeds + model.info["shift"]


def kinds(model):
    model.kind = model.lm_head.weight.dtype
    model.inside = {"kinds": (model.kind, torch.float32)}


def of_kinds(model, embeds, ids, seen):
    """Rounds to types that the model noted at its construction, in the class and in the config."""
    return rounded(embeds, model.kind, model.compute, model.config.narrow, *model.inside["kinds"])


Kinds = altered("Kinds", of_kinds, kinds, compute=torch.float32)
Grows = altered("Grows", grown, lambda model: setattr(model, "scale", 1.0))
NotesUncached = altered("Uncached", noted_uncached, lambda model: setattr(model, "info", {"shift": 0.0}))
Settings = altered("Settings", set_by, settings)
NARROW = torch.bfloat16
CHANGES: dict[str, tuple[Any, Any]] = {
    "a dict": (Settings, lambda target: target.state.update(shift=-3.0)),
    "a dict that it fills": (Settings, lambda target: target.memo.update(shift=-3.0)),
    "a long pass": (Grows, lambda target: target(torch.zeros(1, 64, dtype=torch.long))),
    "a scale": (Grows, lambda target: setattr(target, "scale", -3.0)),
    "a late entry": (NotesUncached, lambda target: target.info.update(shift=-3.0, uncached=True)),
    "a type": (Kinds, lambda target: setattr(target, "kind", NARROW)),
    "a type of the class": (Kinds, lambda target: setattr(target, "compute", NARROW)),
    "a type of the config": (Kinds, lambda target: setattr(target.config, "narrow", NARROW)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_while_an_engine_uses_it_is_followed(change):
    kind, do = CHANGES[change]
    target = tiny(kind, narrow=torch.float32)
    engine = compiled(target, verify=kind is not NotesUncached)
    assert text(engine) == text(engine) == own_text(target, PROMPT, 8)
    do(target)
    assert text(engine) == own_text(target, PROMPT, 8)
    if kind is Grows:
        assert text(compiled(target)) == own_text(target, PROMPT, 8)


def test_what_a_trace_leaves_is_taken_back():
    root = torch.nn.Linear(2, 2)
    root.size, root.names, root.rows = 3, {"a": [1, 2]}, [4]
    names, rows = root.names, root.rows
    with restoring_attributes(root):
        root.late, root.size, root.names["c"] = torch.ones(1), 5, torch.ones(1)
        root.rows.append(torch.ones(1))
        root.register_forward_hook(print)
        del root.in_features
    assert (root.size, root.names, root.rows, root.in_features) == (3, {"a": [1, 2]}, [4], 2)
    assert root.names is names and root.rows is rows
    assert not hasattr(root, "late") and not root._forward_hooks


@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_notes_in_half_precision_are_let_be(runtime):
    target = tiny(Notes).to(torch.bfloat16)
    ids = torch.tensor([PROMPT])
    target.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    engine = compiled(target, runtime)
    first = text(engine)
    target(ids)
    assert text(engine) == first


@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_a_type_noted_as_the_model_was_loaded_is_honoured(tmp_path, runtime):
    tiny(Kinds).save_pretrained(tmp_path)
    config = transformers.LlamaConfig(**BASE, narrow=torch.float32)
    target = Kinds.from_pretrained(tmp_path, config=config, dtype=torch.bfloat16)
    assert target.kind is torch.bfloat16
    assert text(compiled(target, runtime)) == own_text(target, PROMPT, 8)


def ordinary(model):
    """Notes as ordinary classes do: types among other things, one object for all layers, flags, counters."""
    kind, where = model.lm_head.weight.dtype, model.lm_head.weight.device
    model.context = {"dtype": kind, "shift": None, "scale": 1.0, "functions": torch.nn.functional}
    model.factory = {"device": where, "dtype": kind, "pair": (kind, 1)}
    model.state, model.memo = {"dtype": kind, "steps": 0}, {"ready": False, "table": None}
    for layer in model.model.layers:
        layer.mlp.context = model.context
    model.steps = 0


def of_ordinary(model, embeds, ids, seen):
    model.steps += 1
    model.state["steps"] += 1
    model.last = {"device": str(ids.device), "cache": type(seen).__name__}
    model.context["scale"] = 0.5
    if not model.memo["ready"]:
        model.memo.update(table=torch.full((embeds.shape[-1],), 1.1, device=embeds.device), ready=True)
    if model.context["shift"] is None and model.model.layers[0].mlp.context["scale"] == 0.5:
        embeds = embeds * -0.5 + 0.7
    return embeds * model.memo["table"].to(embeds.dtype)


def of_narrow(model, embeds, ids, seen):
    """Refuses the type of the further trial forwards."""
    assert model.lm_head.weight.dtype == torch.float32
    return of_ordinary(model, embeds, ids, seen)


Ordinary = altered("Ordinary", of_ordinary, ordinary)


def test_counters_of_a_class_that_fails_otherwise_are_let_be():
    target = tiny(altered("Narrow", of_narrow, ordinary))
    for _ in range(2):
        assert text(compiled(target)) == own_text(target, PROMPT, 8)


@pytest.mark.parametrize("kind", ["float32", "float64"])
@pytest.mark.parametrize("live_first", [False, True])
def test_ordinary_notes_are_no_reason_to_refuse(kind, live_first, tmp_path):
    tiny(Ordinary).save_pretrained(tmp_path)
    target = Ordinary.from_pretrained(tmp_path, dtype=getattr(torch, kind))
    if live_first:
        own_text(target, PROMPT, 4)
    for _ in range(2):
        engine = compiled(target)
        for _ in range(2):
            assert text(engine) == own_text(target, PROMPT, 8)


@dataclass(frozen=True, eq=False)
class Policy:  # a type that models of it share
    dtype: torch.dtype


@functools.cache
def policy_for(dtype: torch.dtype) -> Policy:
    return Policy(dtype)


def interned(model):
    model.policy = policy_for(model.lm_head.weight.dtype)


Interned = altered("Interned", lambda model, embeds, ids, seen: rounded(embeds, model.policy.dtype), interned)


def test_what_other_models_share_is_not_written(tmp_path):
    other = tiny(Interned)
    other.save_pretrained(tmp_path)
    before = own_text(other, PROMPT, 8)
    target = Interned.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert text(compiled(target)) == own_text(target, PROMPT, 8)
    assert policy_for(torch.float32).dtype == torch.float32
    assert own_text(other, PROMPT, 8) == before == own_text(tiny(Interned), PROMPT, 8)


def test_a_constructor_may_compile_a_pair():
    helper = []
    target = tiny(llama("BuildsAnother", lambda model: [compiled(one) for one in helper]))
    helper.append(tiny(RefusesDoubles))
    assert compiled(target, verify=False).plan.capacity == 64


def test_an_engine_makes_no_pass_that_is_longer_than_its_twins():
    lengths = []

    def noted(model, embeds, ids, seen):
        lengths.append(ids.shape[1])
        return embeds

    compiled(tiny(altered("Longest", noted)), verify=False)
    assert max(lengths) < 16


def test_a_trial_that_did_not_end_says_nothing(monkeypatch):
    target = tiny(altered("Singles", lambda model, embeds, ids, seen: embeds + 0.5 * (ids.shape[1] == 1)))

    def stop(*args, **named):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(check, "compare", stop)
        compiled(target)
    with pytest.raises(ValueError, match="tiny random twin"):
        compiled(target)
