"""Drafters of every published layout load with our fields and tensors, come back, or are refused."""

import json
import warnings

import pytest
import torch
from safetensors.torch import save_file
from support.layouts import LAYOUTS, expected, fixture, pair, publish
from support.tiny import MASK, VOCAB
from transformers import PreTrainedModel

import torch_dflash as td
from torch_dflash.doctor.diagnosis import judge_texts
from torch_dflash.proposers.checkpoint.extras import extras_of
from torch_dflash.proposers.checkpoint.hub import hub_card
from torch_dflash.proposers.checkpoints import load_drafter_config
from torch_dflash.proposers.layouts.pieces import TensorSlice
from torch_dflash.train.fit.kinds import KNOWN
from torch_dflash.train.fit.options import Objective
from torch_dflash.train.fit.student import Student

OF_NO_NETWORK = tuple("architectures bos_token_id eos_token_id pad_token_id num_target_layers dtype".split())
OF_NO_NETWORK += ("transformers_version", "tie_word_embeddings", "use_cache", "max_window_layers")


def same(one, two):
    assert type(one) is type(two) and one.state_dict().keys() == two.state_dict().keys()
    assert all(torch.equal(one.state_dict()[name], value) for name, value in two.state_dict().items())
    fields = two.config.to_dict()
    for name in (*fields["dflash_config"], *vars(type(two.config)).get("__annotations__", {})):
        if name not in OF_NO_NETWORK:
            assert getattr(one.config, name) == getattr(two.config, name), name
    for layer, other in zip(one.layers, two.layers, strict=True):
        assert layer.self_attn.window == other.self_attn.window
        assert layer.self_attn.causal == other.self_attn.causal
    assert torch.equal(one.rotary_emb.inv_freq, two.rotary_emb.inv_freq)


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_loads_as_the_same_weights_in_ours_and_comes_back(name, tmp_path):
    own = pair(name)[1]
    (tmp_path / "theirs").mkdir()
    loaded = td.load_drafter(publish(tmp_path / "theirs", name, own))
    same(loaded, own)
    assert loaded.name_or_path == loaded.config.name_or_path == str(tmp_path / "theirs")
    same(type(own).from_pretrained(tmp_path / "theirs"), own)
    assert load_drafter_config(tmp_path / "theirs").target_layer_ids == [0, 2]
    if name == "assistant":
        with pytest.raises(ValueError, match="vocab_size=0: set drafter.config.vocab_size"):
            loaded.save_pretrained(tmp_path / "ours")
        loaded.config.vocab_size = own.config.vocab_size = VOCAB
    loaded.save_pretrained(tmp_path / "ours")
    same(td.load_drafter(tmp_path / "ours"), own)


@pytest.mark.parametrize("inside", [True, False])
def test_dsparks_fields_within_their_own_object_or_by_servers_names_are_read(inside, tmp_path):
    own = pair("deepspec")[1]
    named = ("markov_rank", "block_size", "mask_token_id", "target_layer_ids")
    fields = fixture("deepspec")[0]
    moved = {name: fields[name] for name in named}
    moved = {"dspark_config": moved} if inside else {f"dspark_{name}": moved[name] for name in named}
    publish(tmp_path, "deepspec", own, **(dict.fromkeys(named, ...) | moved))
    with warnings.catch_warnings(action="error"):
        same(td.load_drafter(tmp_path), own)


def test_which_row_drafts_first_is_asked_for_where_a_layout_may_have_either(tmp_path):
    fields = {"markov_rank": 0, "enable_confidence_head": True}
    publish(tmp_path, "zlab_flat", own := pair("zlab_flat")[1], **fields)
    with pytest.warns(UserWarning, match="sample_from_anchor is missing.*read as false.*doctor.*set it"):
        same(td.load_drafter(tmp_path), own)
    for flag in (True, False):
        publish(tmp_path, "zlab_flat", own, **fields, sample_from_anchor=flag)
        with warnings.catch_warnings(action="error"):
            assert td.load_drafter(tmp_path).config.sample_from_anchor is flag


def test_an_unknown_field_within_dsparks_object_is_named(tmp_path):
    publish(tmp_path, "deepspec", pair("deepspec")[1], dspark_config={"odd": 3})
    with pytest.warns(UserWarning, match="dspark_config.odd=3"):
        td.load_drafter(tmp_path)


REFUSED = {
    "speculators": [
        (
            {"speculators_model_type": "mtp"},
            "speculators_model_type='mtp'.*only dflash, dflash2, dspark",
        ),
        ({"aux_hidden_state_layer_ids": [0, 2]}, "aux_hidden_state_layer_ids=.0, 2..*numbers from 1"),
        ({"mask_token_id": ...}, "mask_token_id is missing"),
        ({"target_hidden_size": 48}, "target_hidden_size=48.*hidden_size=32"),
        ({"transformer_layer_config": 3}, "transformer_layer_config=3.*must be an object"),
        ({"draft_vocab_size": 98}, r"d2t in .* should have shape \(98,\)|mismatched_keys=.*lm_head"),
        ({"tensors": {"d2t": None}}, "d2t in .* should have shape"),
        ({"tensors": {"d2t": torch.full((40,), 90)}}, "d2t in .* beyond the target's vocab_size=97"),
        ({"tensors": {"d2t": torch.zeros(40, dtype=torch.int64)}}, "t2d in .* marks other ids"),
        ({"tensors": {"markov_head.weight": torch.zeros(2)}}, "unexpected_keys=.*markov_head"),
    ],
    "speculators_dspark": [
        ({"markov_head_type": "gated"}, "markov_head_type='gated'.*only 'vanilla'"),
        ({"markov_head_type": "rnn"}, "markov_head_type='rnn'.*only 'vanilla'"),
        ({"markov_rank": -1}, "markov_rank=-1: must be the rank"),
        ({"markov_rank": 4}, r"markov_rank=4.*markov_w1.weight would have shape \(97, 4\)"),
        ({"markov_rank": 0}, "unexpected_keys=.*markov_head"),
        ({"tensors": {"markov_head.markov_w2.weight": None}}, "missing_keys=.*markov_w2"),
        ({"tensors": {"markov_head.gate_proj.weight": torch.zeros(8, 40)}}, "unexpected_keys=.*gate_proj"),
    ],
    "zlab_flat": [
        ({"markov_rank": 8, "markov_head_type": "vanilla"}, "sample_from_anchor is missing.*add true if"),
        (
            {"markov_rank": 8, "markov_head_type": "rnn", "sample_from_anchor": True},
            "markov_head_type='rnn'.*'vanilla'",
        ),
        ({"markov_rank": 8, "sample_from_anchor": True}, "missing_keys=.*markov_w1"),
    ],
    "speculators_dflash2": [({"draft_vocab_size": 40}, "draft_vocab_size=40 of a DFlash2 drafter")],
    "assistant": [({"model_type": "gemma4_assistant"}, "model_type='gemma4_assistant'.*only muse_glimmer")],
    "specforge": [
        ({"dflash_config": {"projector_type": "domino"}}, "projector_type='domino'.*only 'dflash'"),
        ({"dflash_config": {"shift_label": True}}, "shift_label=True"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"is_neox_style": "no"}, "is_neox_style='no'"),
    ],
    "deepspec": [
        ({"markov_rank": ...}, "markov_rank is missing"),
        ({"dspark_config": 3}, "dspark_config=3.*must be an object"),
        ({"markov_head_type": "gated"}, "markov_head_type='gated'.*'vanilla'"),
        (
            {"architectures": ["Gemma4DSparkModel"]},
            r"architectures=\['Gemma4DSparkModel'\].*Qwen3DSparkModel",
        ),
        (
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9},
            "layer_types=.*only full_attention",
        ),
        ({"target_layer_ids": [-1, 2]}, "target_layer_ids=-1"),
    ],
    "specforge_dspark": [
        (
            {"dflash_config": {"projector_type": "dspark", "attention_mode": "mla"}},
            "attention_mode='mla'.*'gqa'",
        ),
        (
            {"dflash_config": {"projector_type": "dspark", "target_layer_ids": [0, 2]}},
            "mask_token_id is missing",
        ),
    ],
    "liquid_dspark": [({"rope_is_neox_style": 0}, "rope_is_neox_style=0"), ({"head_dim": ...}, "head_dim")],
    "laguna": [
        ({"gating": "softmax"}, "gating='softmax'"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "one entry per layer, all alike"),
        ({"num_key_value_heads": 1}, r"qkv_proj.* by the config its rows are \[64, 16, 16\]"),
    ],
    "mimo": [({"tensors": {"layers.0.self_attn.attention_sink_bias": None}}, "missing_keys=.*sink_bias")],
}


@pytest.mark.parametrize(
    ("name", "changes", "words"), [(name, *one) for name, cases in REFUSED.items() for one in cases]
)
def test_what_is_not_known_is_named(name, changes, words, tmp_path):
    publish(tmp_path, name, pair(name)[1], **changes)
    with pytest.raises(ValueError, match=words):
        td.load_drafter(tmp_path)


def test_a_mask_embedding_of_another_id_or_shape_is_named(tmp_path):
    publish(tmp_path, "mimo", expected("mimo"))
    for kept, words in (
        (
            {"mask_token_id": MASK - 1, "embedding": torch.zeros(32)},
            f"mask_token_id={MASK}.*is of {MASK - 1}",
        ),
        (torch.zeros(31), "holds no vector of hidden_size=32"),
        (print, "no plain tensor"),
    ):
        torch.save(kept, tmp_path / "mask_embedding.pt")
        with pytest.raises(ValueError, match=words):
            td.load_drafter(tmp_path)


def test_zlabs_layout_may_hold_an_embedding_and_a_head(tmp_path):
    own = expected("zlab_flat")
    tables = {"embed_tokens.weight": torch.randn(VOCAB, 32), "lm_head.weight": torch.randn(VOCAB, 32)}
    publish(tmp_path, "zlab_flat", own, tensors=tables)
    loaded = td.load_drafter(tmp_path)
    assert torch.equal(loaded.embed_tokens.weight, tables["embed_tokens.weight"])
    assert torch.equal(loaded.lm_head.weight, tables["lm_head.weight"])
    save_file(
        tables | own.state_dict() | {"embed_tokens.weight": torch.zeros(5, 32)},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(ValueError, match="mismatched_keys=.*embed_tokens"):
        td.load_drafter(tmp_path)


@pytest.mark.parametrize(
    "name", ["speculators", "speculators_anchor", "speculators_dspark", "mimo", "laguna"]
)
def test_who_does_not_know_a_part_refuses_it(name, tmp_path):
    target, drafter = pair(name)
    part = next(iter(extras_of(drafter.config)))
    if part not in KNOWN:
        with pytest.raises(ValueError, match=f"{part}=True of the drafter: training does not know"):
            Student(drafter, target, Objective())
    unknown = f"{part}=True of the drafter: the doctor does not know"
    known = "texts: no answer of two tokens"
    with pytest.raises(ValueError, match=known if part == "sample_from_anchor" else unknown):
        judge_texts(target, drafter, [])
    with pytest.raises(
        ValueError, match=f"{part}=True of the drafter: speculation_type='dflash'.*custom_generate"
    ):
        asked = {"max_new_tokens": 8, "do_sample": False, "speculation_type": "dflash"}
        target.generate(torch.tensor([[1, 2, 3]]), assistant_model=drafter, **asked)


def test_a_card_says_what_is_not_zlabs():
    assert "no embedding and no head" in str(hub_card(expected("zlab_flat"), "a/b"))
    assert "`own_head=True`" in str(hub_card(expected("speculators"), "a/b"))


UNKNOWN = [
    ("zlab_flat", {"head_type": "causal"}, "head_type='causal'"),
    ("zlab_flat", {"architectures": ["JetSpecDraftModel"]}, "architectures=['JetSpecDraftModel']"),
    ("zlab_flat", {"dflash_config": {"is_causal": True}}, "dflash_config.is_causal=True"),
    ("zlab_flat", {"dflash_config": {"gating": "per-head"}}, "dflash_config.gating='per-head'"),
    ("zlab_flat", {"rope_scaling": {"rope_type": "default", "alpha": 9.0}}, "rope_scaling.alpha=9.0"),
    ("zlab_flat", {"first_layer_scale": 0}, "first_layer_scale=0"),
    ("zlab_flat", {"dflash_config": {"output_scale": 0.0}}, "dflash_config.output_scale=0.0"),
    ("zlab_flat", {"long": list(range(99))}, "long=[0, 1, 2,"),
    ("specforge", {"dflash_config": {"markov_rank": 4}}, "dflash_config.markov_rank=4"),
    ("mimo", {"attention_value_scale": 0.5}, "attention_value_scale=0.5"),
    ("laguna", {"dflash_config": {"sample_from_anchor": True}}, "dflash_config.sample_from_anchor=True"),
    ("speculators", {"is_causal": True}, "is_causal=True"),
    ("speculators", {"dflash_config": {"block_size": 4}}, "dflash_config={'block_size': 4}"),
    (
        "speculators",
        {"transformer_layer_config": {"value_scale": 2}},
        "transformer_layer_config.value_scale=2",
    ),
    ("assistant", {"output_multiplier": 0.2}, "output_multiplier=0.2"),
]


@pytest.mark.parametrize(("name", "changes", "words"), UNKNOWN)
def test_what_no_draft_reads_is_named_in_one_warning_and_left_out(name, changes, words, tmp_path):
    own, config = pair(name)[1], fixture(name)[0]
    changes = {
        field: config.get(field, {}) | value if field.endswith("_config") and field in config else value
        for field, value in changes.items()
    }
    publish(tmp_path, name, own, also_unknown="x", **changes)
    with pytest.warns(UserWarning) as heard:
        loaded = td.load_drafter(tmp_path)
    (said,) = {str(one.message) for one in heard}
    for word in (words, "also_unknown='x'", str(tmp_path), "target's own", "torch-dflash doctor"):
        assert word in said
    assert len(heard) == 1 and len(said) < 600
    same(loaded, own)


def said_by_meaning():
    """Pairs (layout, changes of its config.json) that leave the network of the fixture as it is."""
    rope = {"rope_type": "default", "rope_theta": 1e6}
    yield from (
        ("zlab_flat", {"head_type": None, "mlp_bias": False, "unknown": "", "more": {}}),
        ("zlab_flat", {"dflash_config": {"num_target_layers": 4, "markov_rank": None, "gating": None}}),
        ("zlab_flat", {"dflash_config": {"output_multiplier": 1.0, "is_causal": False, "markov_rank": 0}}),
        ("zlab_flat", {"is_neox_style": True, "partial_rotary_factor": 1.0}),
        ("zlab_flat", {"num_anchors": 512, "loss_decay_gamma": 7.0, "dflash_config": {"num_anchors": 512}}),
        ("zlab_flat", {"rope_parameters": rope | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}}),
        ("zlab_flat", {"architectures": ["Qwen3DFlashDraftModel"]}),
        ("zlab_flat", {"dflash_config": {"projector_type": "dflash", "causal": False}, "is_causal": False}),
        ("specforge", {"dflash_config": {"causal": None}}),
        ("mimo", {"dflash_config": {"projector_type": "dflash", "pure_draft_prefix_len": 0}}),
        ("laguna", {"num_anchors": 512, "is_neox_style": True}),
        ("speculators", {"projector_type": "dflash", "shift_label": False, "pure_draft_prefix_len": 1}),
        ("speculators", {"transformer_layer_config": {"num_anchors": 4, "is_neox_style": True}}),
    )


@pytest.mark.parametrize(("name", "changes"), list(said_by_meaning()))
def test_known_fields_at_their_default_and_fields_of_training_pass(name, changes, tmp_path):
    own, config = pair(name)[1], fixture(name)[0]
    changes = {
        field: config.get(field, {}) | value if field.endswith("_config") else value
        for field, value in changes.items()
    }
    publish(tmp_path, name, own, **changes)
    with warnings.catch_warnings(action="error"):
        loaded = td.load_drafter(tmp_path)
    own.config.is_causal = loaded.config.is_causal  # unset and false are one without sliding layers
    same(loaded, own)


@pytest.mark.parametrize("architecture", ["DFlash2DraftModel", "Qwen3DFlash2DraftModel", "DFlashDraftModel"])
@pytest.mark.parametrize("nested", [{"projector_type": "dflash2"}, {"causal": False}, {}])
def test_dflash2_as_its_trainers_export_it(architecture, nested, tmp_path):
    own = expected("speculators_dflash2")
    own.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw |= {"architectures": [architecture], "is_causal": False, "num_anchors": 512}
    raw["dflash_config"] |= nested | {"causal": False}
    assert raw["block_size"] == raw["dflash_config"]["block_size"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with warnings.catch_warnings(action="error"):
        same(td.load_drafter(tmp_path), own)


MEANT = [
    ("zlab_flat", {"dflash_config": {"projector_type": "dspark"}}, "projector_type='dspark'.*only 'dflash'"),
    ("speculators", {"projector_type": "domino"}, "projector_type='domino'.*Domino head"),
    ("speculators", {"shift_label": True}, "shift_label=True"),
]


@pytest.mark.parametrize(("name", "changes", "words"), MEANT)
def test_a_field_whose_meaning_cannot_be_honoured_has_its_own_words(name, changes, words, tmp_path):
    publish(tmp_path, name, pair(name)[1], **changes)
    with pytest.raises(ValueError, match=words) as error:
        td.load_drafter(tmp_path)
    assert "remove" not in str(error.value)


@pytest.mark.parametrize("name", ["zlab_flat", "deepspec"])
def test_whether_a_drafter_is_quantised_its_tensors_say(name, tmp_path):
    """A trainer may copy the config of a quantised target."""
    own, method = pair(name)[1], {"quant_method": "fp8"}
    publish(tmp_path, name, own, quantization_config=method)
    with pytest.warns(UserWarning, match="quantization_config={'quant_method': 'fp8'}.*not read"):
        same(td.load_drafter(tmp_path), own)
    codes = {"fc.weight": own.fc.weight.detach().to(torch.float8_e4m3fn)}
    publish(tmp_path, name, own, quantization_config=method, tensors=codes)
    words = "fc.weight in .* is stored as torch.float8_e4m3fn, quantised.*plain weights"
    with pytest.warns(UserWarning), pytest.raises(ValueError, match=words):
        td.load_drafter(tmp_path)


def test_a_tensor_without_a_place_is_an_error_beside_an_unknown_field(tmp_path):
    tensors = {"extra_head.weight": torch.zeros(2)}
    publish(tmp_path, "zlab_flat", expected("zlab_flat"), tensors=tensors, extra_head="mlp")
    with (
        pytest.warns(UserWarning, match="extra_head='mlp'"),
        pytest.raises(ValueError, match="extra_head.we"),
    ):
        td.load_drafter(tmp_path)


def test_a_field_of_mimos_of_another_type_is_named(tmp_path):
    own = fixture("mimo")[0]["dflash_config"]
    publish(tmp_path, "mimo", expected("mimo"), dflash_config=own | {"use_swa": "no"})
    with pytest.raises(ValueError, match="use_swa='no'.*true or false"):
        td.load_drafter(tmp_path)


@pytest.mark.parametrize(
    ("name", "tensors", "words"),
    [
        ("speculators", {"d2t": torch.zeros(40)}, "d2t in .* is of torch.float32"),
        ("speculators_anchor", {"d2t": torch.ones(VOCAB, dtype=torch.int64)}, "d2t in .* no smaller"),
        ("mimo", {"mask_embedding": torch.zeros(32)}, "mask_embedding.pt lies beside"),
    ],
)
def test_tables_that_say_two_things_are_named(name, tensors, words, tmp_path):
    own = expected(name)
    publish(tmp_path, name, own, tensors=tensors)
    with pytest.raises(ValueError, match=words):
        td.load_drafter(tmp_path)


@pytest.mark.parametrize("name", ["zlab_flat", "speculators", "laguna", "speculators_dflash2"])
@pytest.mark.parametrize("tensor", [None, torch.zeros(3)])
def test_tensors_are_compared_before_weights_are_read(name, tensor, tmp_path, monkeypatch):
    own = expected(name)
    publish(tmp_path, name, own, tensors={"layers.1.self_attn.k_norm.weight": tensor})
    monkeypatch.setattr(TensorSlice, "read", lambda self: pytest.fail("read"))
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", lambda *args, **given: pytest.fail("allocated"))
    problem = "missing" if tensor is None else "mismatched"
    with pytest.raises(ValueError, match=f"{problem}_keys=.*layers.1.self_attn.k_norm.* in {tmp_path}"):
        td.load_drafter(tmp_path)
