"""A fit's checkpoint is like the published ones for this library, the authors and transformers."""

import json

import dflash.model as authors
import pytest
import torch
from safetensors import safe_open
from support.trained import MASK, NEW, VOCAB, WIDTH
from support.versions import needs_native

import torch_dflash as td
from torch_dflash.train.export import add_figures, export_drafter

PER_LAYER = (
    "input_layernorm mlp.down_proj mlp.gate_proj mlp.up_proj post_attention_layernorm self_attn.k_norm "
    "self_attn.k_proj self_attn.o_proj self_attn.q_norm self_attn.q_proj self_attn.v_proj"
).split()


def test_the_exported_directory_loads_with_the_same_weights(overfit):
    loaded, info = td.DFlashDraftModel.from_pretrained(
        overfit.exported, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    wanted = dict(overfit.drafter.named_parameters())
    for name, value in loaded.named_parameters():
        assert torch.equal(value, wanted.pop(name)), name
    assert not wanted
    assert loaded.config.target_layer_ids == [0, 2] and loaded.config.mask_token_id == MASK


def test_the_config_is_in_the_published_layout(overfit):
    config = json.loads((overfit.exported / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and "auto_map" not in config
    assert config["block_size"] == WIDTH and config["num_target_layers"] == 4
    assert config["dflash_config"]["mask_token_id"] == MASK
    assert config["dflash_config"]["target_layer_ids"] == [0, 2]
    assert config["vocab_size"] == VOCAB and config["tie_word_embeddings"] is False
    assert config["layer_types"] == ["full_attention"]


def test_the_tensors_bear_the_published_names_alone(overfit):
    """No embedding and no head: both are the target's."""
    wanted = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    wanted |= {f"layers.0.{name}.weight" for name in PER_LAYER}
    names = sorted(path.name for path in overfit.exported.iterdir())
    assert names == ["README.md", "config.json", "model.safetensors"]
    with safe_open(overfit.exported / "model.safetensors", "pt") as file:
        assert set(file.keys()) == wanted
    assert len({path.stat().st_mode for path in overfit.exported.iterdir()}) == 1


@torch.no_grad()
def test_the_authors_loader_computes_the_same(world, overfit):
    theirs = authors.DFlashDraftModel.from_pretrained(overfit.exported).eval()
    sequence = world.cached()
    features = sequence.features([0])[0][None, :, :64]
    context, position = features[:, :9], torch.arange(9 + WIDTH)[None]
    ids = torch.tensor([[sequence.sequence(0).ids[9], *[MASK] * (WIDTH - 1)]])
    noise = world.target.get_input_embeddings()(ids)
    mine = overfit.drafter(noise, context, position).last_hidden_state
    found = theirs(noise_embedding=noise, target_hidden=context, position_ids=position)
    assert (mine - found).abs().max() < 1e-5 < 1 < mine.abs().max()


@needs_native
def test_transformers_own_loop_says_the_same_with_it(world, overfit):
    drafter = td.DFlashDraftModel.from_pretrained(overfit.exported, dtype=torch.float32)
    for prompt in overfit.trained[:3]:
        ids = torch.tensor([prompt])
        given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False}
        alone = world.target.generate(ids, **given, pad_token_id=0)
        found = world.target.generate(
            ids, **given, pad_token_id=0, assistant_model=drafter, speculation_type="dflash"
        )
        assert torch.equal(alone, found)


def test_it_is_written_in_bfloat16_and_the_trained_one_stays_as_it_is(world, overfit, tmp_path):
    before = {name: value.clone() for name, value in overfit.drafter.named_parameters()}
    export_drafter(overfit.drafter, tmp_path / "drafter", world.target, overfit.directory)
    for name, value in overfit.drafter.named_parameters():
        assert torch.equal(value, before[name])
    with safe_open(tmp_path / "drafter" / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    loaded = td.DFlashDraftModel.from_pretrained(tmp_path / "drafter", dtype="auto")
    assert loaded.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "words",
    [
        (
            "library_name: torch-dflash",
            "# DFlash drafter for target",
            f"blocks of {WIDTH}",
            f"mask id {MASK}",
        ),
        ("taps [0, 2]", "1 layers", "no\nembedding and no head"),
        ("| sequences | 9 |", "| epochs | 300 |", "| learning_rate | 0.005 |", "| weighting | decay |"),
        ("300 steps", "answers that the target itself wrote", "On held-out answers"),
        ("td.load_drafter", "td.generate(target, drafter", "(`--head dflash`)"),
    ],
)
def test_the_card_names_data_recipe_and_figures(overfit, words):
    card = (overfit.exported / "README.md").read_text()
    flat = " ".join(card.split())
    for word in words:
        assert " ".join(word.split()) in flat, word
    last = [line for line in overfit.log if line["kind"] == "held_out"][-1]
    assert f"acceptance length {last['acceptance_length']:.2f}" in card
    assert ", ".join(f"{rate:.3f}" for rate in last["accuracy"]) in card


def test_a_drafter_whose_log_was_lost_is_written_and_its_card_says_so(world, overfit, tmp_path):
    (tmp_path / "stage.json").write_bytes((overfit.directory / "stage.json").read_bytes())
    for lines in (None, "", '{"kind": "train", "step": 1}\n\0\0'):  # deleted; cut by a crash of the machine
        if lines is not None:
            (tmp_path / "log.jsonl").write_text(lines)
        export_drafter(overfit.drafter, tmp_path / "drafter", world.target, tmp_path)
        card = (tmp_path / "drafter" / "README.md").read_text()
        assert "holds no figures of held-out answers" in card and "| epochs | 300 |" in card


def test_figures_replace_those_before_them_in_the_card(tmp_path):
    row = {"acceptance_length": 2.345, "ngram_acceptance_length": 1.2, "per_position": [0.5, 0.25]}
    origin = {"hardware": "a CPU", "command": "torch-dflash train evaluate --limit 3"}
    row["provenance"] = origin
    options = {"limit": 3, "max_new_tokens": 9, "target_dtype": "bfloat16", "verify_width": 5}
    figures = {"options": options, "sets": {"one": row}}
    (tmp_path / "README.md").write_text("# A drafter\n\nWhat it is.\n")
    add_figures(tmp_path, figures)
    add_figures(tmp_path, figures | {"sets": {"two": row, "three": row | {"per_position": [1.0, 0.0]}}})
    card = (tmp_path / "README.md").read_text()
    assert (
        card.startswith("# A drafter\n\nWhat it is.\n\n## Acceptance\n") and card.count("## Acceptance") == 1
    )
    assert "| set | acceptance length | n-gram lookup | 1 | 2 |" in card and "| one |" not in card
    assert "| two | 2.35 | 1.20 | 0.50 | 0.25 |" in card or "| two | 2.34 | 1.20 | 0.50 | 0.25 |" in card
    assert card.count(origin["command"]) == 1
    assert "5 rows of each block verified" in card and "target in bfloat16" in card
