"""Layers whose indexer chooses the positions that a row attends to: text and logits are transformers' own.

Contexts are longer than the choice, and index heads are 16: a sum of few ReLUs is zero for many keys, and the
zero that top-k takes then depends on the number of slots, in transformers as here.
"""

import runpy

import pytest
import torch
import transformers as hf
from support import ROOT
from support.hybrids import walk_gap
from support.refusals import refuses
from support.scripted import Scripted, own_text, run
from support.tiny import VOCAB, make_drafter, randomise

import jax_bridge as jb
import torch_dflash as td
from jax_bridge.aot.compile import abstract_pair
from jax_bridge.device_memory import bytes_of
from jax_bridge.weights.formats import unwrap
from torch_dflash.cache import indexed
from torch_dflash.cache.view import CacheView
from torch_dflash.targets.adapter import Target
from torch_dflash.verify.twin import build_twin

RIGHT, SEEN = 1e-5, 1e-2
CONFIGS = runpy.run_path(str(ROOT / "benchmarks/family_configs.py"))
KINDS = ("deepseek_v32", "glm_moe_dsa", "hy_v4", "axk2", "dots3_note_text")
CACHES = ("static", "paged")
NEW, PROMPTS = 14, [[11, 23, 5, 80, 41] * 4, [3, 90, 14], [60, 61, 12, 9, 33, 70, 71, 2] * 2]


def made(kind: str, seed: int = 3, **fields):
    if kind not in hf.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    own = {"vocab_size": VOCAB, "max_position_embeddings": 512} | fields
    config = CONFIGS["shrink"](hf.CONFIG_MAPPING[kind], CONFIGS["FAMILY"].get(kind, {}) | own)
    return randomise(hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval(), seed)


def compiled(model, drafter, runtime="eager", **options):
    options = {"cache": "static", "page_size": 16, "max_length": 64, "batch_size": 3} | options
    return td.compile(model, drafter, runtime=runtime, **{"verify": False} | options)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_walk_is_an_uncached_forward(kind, cache):
    model = made(kind)
    indexes = [spec.index for spec in Target(model).specs]
    assert any(indexes) and {spec.kind for spec in Target(model).specs} == {"shared"}
    assert all(indexes) == (kind in ("deepseek_v32", "axk2"))  # others share choices, or have windows
    assert walk_gap(model, cache=cache) < RIGHT
    assert walk_gap(model, cache=cache, width=1) < RIGHT
    assert walk_gap(made(kind, seed=4), cache=cache, width=16) < RIGHT
    if kind == "deepseek_v32":  # transformers' grouped products of experts take no float64
        dense = made(kind, mlp_layer_types=["dense"] * 4).double()
        assert walk_gap(dense, cache=cache) < RIGHT  # norms and scores are float32 in any model


@pytest.mark.parametrize("cache", CACHES)
def test_rejected_rows_and_padding_may_be_nan(cache):
    assert walk_gap(made("glm_moe_dsa"), cache=cache, poison=float("nan")) < RIGHT


def test_layers_that_expand_what_they_cache_choose_too():
    model = made("deepseek_v32")
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.register_forward_hook(lambda module, args, out: 2 * out)
    assert {(spec.kind, spec.index) for spec in Target(model).specs} == {("latent", 8)}
    assert walk_gap(model) < RIGHT
    with refuses(ValueError, "cache='paged': holds no latent layers", "choose 'static'"):
        compiled(model, None, cache="paged")


def test_layers_may_read_the_latents_of_a_layer_far_behind():
    """Mistral-Large-4, across a layer without positions that stores its own."""
    if "mistral_large4" not in hf.CONFIG_MAPPING:
        pytest.skip("this transformers has no mistral_large4")
    unset = dict.fromkeys(("layer_types", "mlp_layer_types", "indexer_types", "no_rope_layers"))
    for sources in ([0, 0, 0, 3, 0, 0], [0, 1, 0, 3]):
        config = CONFIGS["tiny_config"]("mistral_large4:shared").to_dict()
        own = unset | {"num_hidden_layers": len(sources), "kv_source_layers": sources}
        config = hf.CONFIG_MAPPING["mistral_large4"](**config | {"text_config": config["text_config"] | own})
        auto = hf.AutoModelForImageTextToText
        model = randomise(auto.from_config(config, dtype=torch.float32).eval(), 3)
        assert walk_gap(model) < RIGHT


@pytest.mark.parametrize("cache", CACHES)
def test_layers_may_read_the_latents_of_another(cache):
    """Mistral-Large-4: such a layer keeps a copy."""
    if "mistral_large4" not in hf.CONFIG_MAPPING:
        pytest.skip("this transformers has no mistral_large4")
    model = randomise(CONFIGS["build"]("mistral_large4:shared"), 3)
    assert model.config.text_config.kv_sharing_modes[:2] == ["store", "reuse_but_indexer"]
    assert walk_gap(model, cache=cache) < RIGHT
    expands, reads = (model.model.language_model.layers[at].self_attn.kv_b_proj for at in (0, 1))
    for layers in ([expands], [reads], [expands, reads]):
        held = [layer.register_forward_hook(lambda module, args, out: 2 * out) for layer in layers]
        with refuses(ValueError, "layers [1", "kv_b_proj plain", "no hook"):
            Target(model)
        for one in held:
            one.remove()
    assert walk_gap(model, cache=cache) < RIGHT


# --- broken on purpose -------------------------------------------------------------------------------------


def all_ones(self, layer_idx, rows):
    return torch.ones_like(sound_mask(self, layer_idx, rows))


def padded_slots(self, layer_idx, rows):
    mask = sound_mask(self, layer_idx, rows)
    at = torch.arange(mask.shape[3])
    return mask | (at >= (self.start + rows)[:, None])[:, None, None]


def no_choice(self, layer_idx, inputs, mask=None, more=None):
    more = {name: value for name, value in (more or {}).items() if name != "indices"}
    return sound_attend(self, layer_idx, inputs, mask, more)


def late(self, rows, view):
    view.start = view.start + 1
    try:
        return sound_rows(self, rows, view)
    finally:
        view.start = view.start - 1


def former(self, layer_idx, inputs, mask=None, more=None):
    """A layer without an indexer gets the choice before the last."""
    choices = vars(self).setdefault("choices", [])
    if isinstance(self.states[layer_idx], indexed.IndexedLayer):
        choices.append(more)
    else:
        more = choices[-2]
    return sound_attend(self, layer_idx, inputs, mask, more)


sound_mask, sound_attend = CacheView.choosable, CacheView.attend
sound_rows = indexed.IndexRows.extended
FAULTS = {
    "an index mask of ones": (CacheView, "choosable", all_ones),
    "top-k over padded slots": (CacheView, "choosable", padded_slots),
    "the choice ignored": (CacheView, "attend", no_choice),
    "index rows one slot late": (indexed.IndexRows, "extended", late),
    "the choice of two layers before": (CacheView, "attend", former),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen(name, monkeypatch):
    model = made("glm_moe_dsa", indexer_types=["full", "full", "shared", "shared"])
    assert [spec.index for spec in Target(model).specs] == [8, 8, None, None]
    assert walk_gap(model) < RIGHT
    monkeypatch.setattr(*FAULTS[name])
    assert walk_gap(model) > SEEN


# --- text --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runtime", ["eager", "xla"])
@pytest.mark.parametrize("kind", KINDS)
def test_text_is_the_targets_own(kind, runtime):
    """Short beside long rows, in both caches; XLA in one cache for each proposer that drafts."""
    model = made(kind)
    own = [own_text(model, prompt, NEW) for prompt in PROMPTS]
    assert len(set(own[0])) > 4
    asked = {"max_new_tokens": NEW, "do_sample": False}
    drafters = {"lookup": td.NGramProposer(4)} | ({"plain": None} if runtime == "eager" else {})
    if Target(model).blocks.fault is None:
        drafters["dflash"] = make_drafter(model, block_size=5)
    else:
        assert kind == "hy_v4"  # several streams a row
    for number, (name, drafter) in enumerate(drafters.items()):
        for cache in CACHES if runtime == "eager" else CACHES[number % 2 :][:1]:
            assert run(compiled(model, drafter, runtime, cache=cache), PROMPTS, **asked)[0] == own, name


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", ["glm_moe_dsa", "dots3_note_text"])
def test_greedy_beside_sampled_rows(kind, cache):
    model = made(kind)
    asked = {"do_sample": True, "temperature": [0.0, 1.0, 4.0], "seed": 3, "max_new_tokens": NEW}
    wanted = run(compiled(model, None, cache=cache), PROMPTS, **asked)[0]
    assert wanted[0] == own_text(model, PROMPTS[0], NEW)
    drafts = Scripted(3, 96, 6)
    drafts.say([prompt + text for prompt, text in zip(PROMPTS, wanted, strict=True)])
    text, stats = run(compiled(model, drafts, cache=cache), PROMPTS, **asked)
    assert text == wanted and stats.mean_acceptance_length > 4


@pytest.mark.parametrize("cache", CACHES)
def test_rows_of_slots_and_saved_states_keep_their_keys(cache, tmp_path):
    model = made("deepseek_v32")
    own = [own_text(model, prompt, NEW) for prompt in PROMPTS]
    engine = compiled(model, td.NGramProposer(4), cache=cache, batch_size=2)
    texts = engine.map(PROMPTS, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    assert [one.sequences[0, -NEW:].tolist() for one in texts] == own
    engine = compiled(model, td.NGramProposer(4), cache=cache, batch_size=1, rounds_per_chunk=1)
    ids = torch.tensor(PROMPTS[:1])
    state = engine.start(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    td.save_state(engine.advance(state), tmp_path / "state", engine)
    state = td.load_state(tmp_path / "state", engine)
    while not state.done.all():
        state = engine.advance(state)
    first = len(PROMPTS[0])
    assert state.tokens[0, first : first + NEW].tolist() == own[0]
    narrow = compiled(made("deepseek_v32", index_head_dim=12), td.NGramProposer(4), cache=cache, batch_size=1)
    with refuses(ValueError, "a layer of the state's target", "'index': 8", "'index': 12"):
        td.load_state(tmp_path / "state", narrow)


# --- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", CACHES)
def test_trees_are_refused(cache):
    model = made("glm_moe_dsa")
    with refuses(ValueError, "a tree of drafts with layers with an indexer", "td.NGramProposer()"):
        compiled(model, td.Union(td.NGramProposer(), make_drafter(model), rows=8), cache=cache)


NAMED = {
    "glm5_next": "its indexer pools keys",
    "minimax_m3_vl_text:sparse": "its key heads choose blocks",
    "qwen4_exp_text": "its indexer chooses compressed blocks",
    "deepseek_v4": "it caches compressed entries",
}


@pytest.mark.parametrize("case", NAMED)
def test_other_indexers_are_refused_by_name(case):
    if case.partition(":")[0] not in hf.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {case}")
    with refuses(ValueError, NAMED[case]):
        Target(CONFIGS["build"](case))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", ["glm_moe_dsa", "dots3_note_text"])
def test_keys_keep_the_models_type(kind, cache):
    """Dots keeps its indexer's keys in float32, whatever its weights are."""
    model = made(kind).to(torch.bfloat16)
    engine = compiled(model, td.NGramProposer(4), cache=cache)
    state = engine.start(torch.tensor(PROMPTS[:1]).expand(3, -1), max_new_tokens=NEW, do_sample=False)
    keys = torch.float32 if kind == "dots3_note_text" else torch.bfloat16
    kept = [leaf.dtype for leaf in torch.utils._pytree.tree_leaves(engine.advance(state).cache[0])]
    assert kept == [torch.bfloat16, keys]
    asked = {"max_new_tokens": NEW, "do_sample": False}
    texts = [
        run(compiled(model, one, cache=cache), PROMPTS, **asked)[0] for one in (None, td.NGramProposer(4))
    ]
    assert texts[0] == texts[1]


def test_a_twin_chooses_among_many_heads():
    """With two heads a quarter of the scores is zero; a choice of all positions would prove nothing."""
    config = build_twin(made("glm_moe_dsa", index_n_heads=2, index_topk=64)).config
    assert config.index_n_heads == 16 and config.index_topk == 6


def test_a_class_of_ones_own_is_tried_on_such_a_twin(monkeypatch):
    known = made("glm_moe_dsa")
    kind = type(known)

    class Own(kind):
        pass

    model = Own(known.config).eval()
    model.load_state_dict(known.state_dict())
    asked = {"max_new_tokens": NEW, "do_sample": False}
    engine = compiled(model, td.NGramProposer(4), verify=True)
    assert run(engine, PROMPTS, **asked)[0] == [own_text(known, prompt, NEW) for prompt in PROMPTS]
    monkeypatch.setattr(CacheView, "choosable", all_ones)
    with refuses(ValueError, "Own"):
        run(compiled(Own(known.config).eval(), td.NGramProposer(4), verify=True), PROMPTS, **asked)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_load_as_transformers_loads_them(kind, tmp_path):
    made(kind).to(torch.bfloat16).save_pretrained(tmp_path)
    live = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    loaded = jb.load(tmp_path)
    assert Target(loaded.model).specs == Target(live).specs
    arrays = unwrap(loaded.arrays)
    for name, tensor in live.state_dict().items():
        assert torch.equal(jb.to_torch(arrays[name]), tensor), name


@pytest.mark.parametrize(("cache", "lanes"), [("static", 576 + 128), ("paged", 640 + 128)])
def test_memory_counts_the_keys_of_indexers(cache, lanes):
    """DeepSeek-V3.2's widths: 256 bytes a position and layer beside the latents."""
    if "deepseek_v32" not in hf.CONFIG_MAPPING:
        pytest.skip("this transformers has no deepseek_v32")
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    sizes |= {"num_attention_heads": 128, "num_key_value_heads": 128, "index_head_dim": 128}
    config = CONFIGS["shrink"](hf.CONFIG_MAPPING["deepseek_v32"], sizes | {"max_position_embeddings": 4096})
    model = abstract_pair(config, None, capacity=4096, cache=cache)
    plan, found = model.pair.plan, bytes_of(model.state.cache)
    positions = plan.slots if cache == "static" else plan.pages * plan.page_size
    assert found == 2 * config.num_hidden_layers * positions * lanes
    assert {spec.width for spec in model.pair.target.specs} == {576 + 128}
