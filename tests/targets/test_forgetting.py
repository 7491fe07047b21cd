"""What a target's forward keeps for itself: made anew in each pass, and no reason to refuse the target."""

import pytest
import torch
import transformers
from support.scripted import own_text, run
from support.tiny import BASE, randomise

import torch_dflash as td
from torch_dflash.cache.view import CACHE
from torch_dflash.targets.hooks import forgetting

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


class KeepsATensor(transformers.LlamaForCausalLM):  # its forward makes a table once, and keeps it
    table = None

    def forward(self, input_ids=None, position_ids=None, **more):
        embeds = self.get_input_embeddings()(input_ids)
        if self.table is None:
            self.table = torch.ones(embeds.shape[-1], device=embeds.device)
        return super().forward(inputs_embeds=embeds * self.table, position_ids=position_ids, **more)


def test_a_tensor_that_a_forward_keeps_is_made_in_each_program():
    target = randomise(KeepsATensor(transformers.LlamaConfig(**BASE)), 0)
    wanted = own_text(target, PROMPT, 8)
    for runtime in ("eager", "xla"):
        engine = td.compile(target, None, runtime=runtime, max_length=64)
        for _ in range(2):
            assert run(engine, [PROMPT], max_new_tokens=8)[0] == [wanted]


class KeepsItsFirstRow(KeepsATensor):
    """What it keeps depends on the call, so that a compiled program would keep another."""

    def forward(self, input_ids=None, position_ids=None, **more):
        if self.table is None:
            self.table = 1 + self.get_input_embeddings()(input_ids)[0, 0].detach()
        return super().forward(input_ids, position_ids=position_ids, **more)


@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_a_kept_tensor_that_depends_on_the_call_is_refused(runtime):
    target = randomise(KeepsItsFirstRow(transformers.LlamaConfig(**BASE)), 0)
    with pytest.raises(ValueError, match="a tiny random twin"):
        td.compile(target, None, runtime=runtime, max_length=64)


class Memo:  # an object in which a forward keeps things
    pass


class KeepsInside(transformers.LlamaForCausalLM):
    """Its forward keeps tensors in a dict, a list and an object; what is in a dict in a dict, too."""

    def __init__(self, config, deep=1):
        super().__init__(config)
        self.memo, self.rows, self.held = {"inner": {}}, [], Memo()
        for _ in range(deep):
            self.memo = {"inner": self.memo}
        self.deep = deep

    def forward(self, input_ids=None, position_ids=None, **more):
        embeds = self.get_input_embeddings()(input_ids)
        table = torch.full((embeds.shape[-1],), 1.1, device=embeds.device)
        memo = self.memo
        for _ in range(self.deep + 1):
            memo = memo["inner"]
        memo.setdefault("table", table)
        self.held.table = getattr(self.held, "table", table)
        self.rows = [*self.rows, table][:1]
        scale = memo["table"] * self.held.table * self.rows[0]
        return super().forward(inputs_embeds=embeds * scale, position_ids=position_ids, **more)


@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_tensors_kept_in_collections_and_objects_are_made_in_each_program(runtime):
    target = randomise(KeepsInside(transformers.LlamaConfig(**BASE)), 0)
    engine = td.compile(target, None, runtime=runtime, max_length=64)
    texts = [run(engine, [PROMPT], max_new_tokens=8)[0] for _ in range(2)]
    assert texts == [[own_text(target, PROMPT, 8)]] * 2


def test_a_tensor_kept_deeper_is_refused_by_name():
    target = randomise(KeepsInside(transformers.LlamaConfig(**BASE), deep=6), 0)
    with pytest.raises(ValueError, match="cannot be lowered.*runtime='eager'"):
        run(td.compile(target, None, max_length=64, verify=False), [PROMPT], max_new_tokens=8)


class Mixes(transformers.LlamaForCausalLM):
    """Reads hidden states, for which transformers hangs hooks into its modules."""

    def forward(self, input_ids=None, position_ids=None, use_cache=None, **more):
        asked = {CACHE: more.get(CACHE), "use_cache": use_cache, "output_hidden_states": True}
        mask = more.get("attention_mask")
        out = self.model(input_ids, position_ids=position_ids, attention_mask=mask, **asked)
        logits = self.lm_head(out.last_hidden_state + out.hidden_states[2])
        kind = transformers.modeling_outputs.CausalLMOutputWithPast
        return kind(None, logits, getattr(out, CACHE))


@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_hooks_for_hidden_states_do_not_pile_up(runtime):
    target = randomise(Mixes(transformers.LlamaConfig(**BASE)), 0)
    engine = td.compile(target, None, runtime=runtime, max_length=64)
    for _ in range(2):
        assert run(engine, [PROMPT], max_new_tokens=8)[0] == [own_text(target, PROMPT, 8)]
        assert len(engine.pair.target.model.model.layers[0]._forward_hooks) <= 1


class Settings(transformers.LlamaForCausalLM):  # keeps a setting beside a counter and a type that it fills in
    def __init__(self, config):
        super().__init__(config)
        self.state, self.memo = {"shift": 0.5, "steps": 0}, None

    def forward(self, input_ids=None, position_ids=None, **more):
        self.state["steps"] += input_ids.shape[1] == 1
        if self.memo is None:
            self.memo = {"kind": torch.float32, "shift": 0.25}
        embeds = self.get_input_embeddings()(input_ids) + self.state["shift"] + self.memo["shift"]
        return super().forward(inputs_embeds=embeds, position_ids=position_ids, **more)


@pytest.mark.parametrize("name", ["state", "memo"])
def test_a_setting_beside_what_varies_is_followed(name):
    target = randomise(Settings(transformers.LlamaConfig(**BASE)), 0)
    engine = td.compile(target, None, runtime="eager", max_length=64)
    for _ in range(2):
        assert run(engine, [PROMPT], max_new_tokens=8)[0] == [own_text(target, PROMPT, 8)]
    getattr(target, name)["shift"] = -3.0
    assert run(engine, [PROMPT], max_new_tokens=8)[0] == [own_text(target, PROMPT, 8)]


def test_what_a_trace_leaves_is_taken_back():
    root = torch.nn.Linear(2, 2)
    root.size, root.names, root.rows = 3, {"a": [1, 2]}, [4]
    names, rows = root.names, root.rows
    with forgetting(root):
        root.late, root.size, root.names["c"] = torch.ones(1), 5, torch.ones(1)
        root.rows.append(torch.ones(1))
        root.register_forward_hook(print)
        del root.in_features
    assert (root.size, root.names, root.rows, root.in_features) == (3, {"a": [1, 2]}, [4], 2)
    assert root.names is names and root.rows is rows
    assert not hasattr(root, "late") and not root._forward_hooks


class Notes(transformers.LlamaForCausalLM):
    """Its forward notes how it was called, as many do, and reads none of it."""

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_notes_of_a_call_are_let_be(runtime, dtype):
    target = randomise(Notes(transformers.LlamaConfig(**BASE)), 0).to(dtype)
    ids = torch.tensor([PROMPT])
    target.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    engine = td.compile(target, None, runtime=runtime, max_length=64)
    first, _ = run(engine, [PROMPT], max_new_tokens=8)
    target(ids)
    assert run(engine, [PROMPT], max_new_tokens=8)[0] == first
    if dtype == torch.float32:
        assert first == [own_text(target, PROMPT, 8)]


class Kinds(transformers.LlamaForCausalLM):
    """Rounds embeddings to types that it noted as it was built, in its class and in its config."""

    compute = torch.float32

    def __init__(self, config):
        super().__init__(config)
        self.kind = self.lm_head.weight.dtype
        self.inside = {"kinds": (self.kind, torch.float32)}

    def forward(self, input_ids=None, position_ids=None, **more):
        embeds = self.get_input_embeddings()(input_ids)
        for kind in (self.kind, self.compute, self.config.narrow, *self.inside["kinds"]):
            embeds = ((embeds + 100).to(kind) - 100).to(embeds.dtype)
        return super().forward(inputs_embeds=embeds, position_ids=position_ids, **more)


@pytest.mark.parametrize("place", ["kind", "compute", "config.narrow"])
def test_a_type_that_is_changed_while_an_engine_uses_it_is_followed(place):
    target = randomise(Kinds(transformers.LlamaConfig(**BASE, narrow=torch.float32)), 0)
    engine = td.compile(target, None, runtime="eager", max_length=64)
    assert run(engine, [PROMPT], max_new_tokens=8)[0] == [own_text(target, PROMPT, 8)]
    *holder, name = place.split(".")
    setattr(target.config if holder else target, name, torch.bfloat16)
    assert run(engine, [PROMPT], max_new_tokens=8)[0] == [own_text(target, PROMPT, 8)]


@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_a_type_noted_as_the_model_was_loaded_is_honoured(tmp_path, runtime):
    randomise(Kinds(transformers.LlamaConfig(**BASE)), 0).save_pretrained(tmp_path)
    config = transformers.LlamaConfig(**BASE, narrow=torch.float32)
    target = Kinds.from_pretrained(tmp_path, config=config, dtype=torch.bfloat16)
    assert target.kind is torch.bfloat16
    engine = td.compile(target, None, runtime=runtime, max_length=64)
    assert run(engine, [PROMPT], max_new_tokens=8)[0] == [own_text(target, PROMPT, 8)]


class FrozenTable(torch.nn.Module):  # an embedding that is not trained: its table is a buffer
    def __init__(self, count: int, size: int):
        super().__init__()
        self.register_buffer("weight", torch.randn(count, size))

    def forward(self, ids):
        return torch.nn.functional.embedding(ids, self.weight)


class Frozen(transformers.LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.embed_tokens = FrozenTable(config.vocab_size, config.hidden_size)


def test_an_embedding_may_be_no_parameter():
    torch.manual_seed(0)
    target = Frozen(transformers.LlamaConfig(**BASE)).eval()
    engine = td.compile(target, None, runtime="xla", max_length=64)
    assert run(engine, [PROMPT], max_new_tokens=8)[0] == [own_text(target, PROMPT, 8)]


class Ordinary(transformers.LlamaForCausalLM):
    """What ordinary classes note: types beside other things, one object for all layers, flags, counters."""

    def __init__(self, config):
        super().__init__(config)
        kind, where = self.lm_head.weight.dtype, self.lm_head.weight.device
        self.context = {"dtype": kind, "shift": None, "scale": 1.0, "functions": torch.nn.functional}
        self.factory = {"device": where, "dtype": kind, "pair": (kind, 1)}
        self.state, self.memo = {"dtype": kind, "steps": 0}, {"ready": False, "table": None}
        for layer in self.model.layers:
            layer.mlp.context = self.context
        self.steps = 0

    def forward(self, input_ids=None, position_ids=None, **more):
        embeds = self.get_input_embeddings()(input_ids)
        self.steps += 1
        self.state["steps"] += 1
        self.last = {
            "device": str(input_ids.device),
            "cache": type(more.get(CACHE)).__name__,
            "given": len(more),
        }
        self.context["scale"] = 0.5
        if not self.memo["ready"]:
            self.memo.update(table=torch.full((embeds.shape[-1],), 1.1, device=embeds.device), ready=True)
        if self.context["shift"] is None and self.model.layers[0].mlp.context["scale"] == 0.5:
            embeds = embeds * -0.5 + 0.7
        embeds = embeds * self.memo["table"].to(embeds.dtype)
        return super().forward(inputs_embeds=embeds, position_ids=position_ids, **more)


class Narrow(Ordinary):  # refuses the type in which further forwards are tried
    def forward(self, input_ids=None, position_ids=None, **more):
        assert self.lm_head.weight.dtype == torch.float32
        return super().forward(input_ids, position_ids=position_ids, **more)


def test_counters_of_a_class_that_fails_otherwise_are_let_be():
    target = randomise(Narrow(transformers.LlamaConfig(**BASE)), 0)
    for _ in range(2):
        engine = td.compile(target, None, runtime="eager", max_length=64)
        assert run(engine, [PROMPT], max_new_tokens=6)[0] == [own_text(target, PROMPT, 6)]


@pytest.mark.parametrize("kind", ["float32", "float64"])
@pytest.mark.parametrize("live_first", [False, True])
def test_ordinary_notes_are_no_reason_to_refuse(kind, live_first, tmp_path):
    randomise(Ordinary(transformers.LlamaConfig(**BASE)), 0).save_pretrained(tmp_path)
    target = Ordinary.from_pretrained(tmp_path, dtype=getattr(torch, kind))
    if live_first:
        own_text(target, PROMPT, 4)
    for _ in range(2):
        engine = td.compile(target, None, runtime="eager", max_length=64)
        for _ in range(2):
            assert run(engine, [PROMPT], max_new_tokens=6)[0] == [own_text(target, PROMPT, 6)]
