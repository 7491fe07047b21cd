"""DSpark drafters of other layouts draft by their authors' definition, from the tensors of the file.

The definition stands here a second time, row by row and without this package's network: keys and values
of the context through each layer's own projections, no mask within a block, and a draft of every row.
"""

import json

import pytest
import torch
from safetensors.torch import load_file
from support.layouts import fixture, pair, publish
from support.tiny import MASK

import torch_dflash as td
from torch_dflash.proposers.layouts import pieces as rotary
from torch_dflash.proposers.layouts.pieces import TensorSlice

NAMES = ["deepspec", "deepspec_dflash", "specforge_dspark", "liquid_dspark"]
CONTEXT, BLOCK = 7, 6


def norm(rows, weight, eps=1e-6):
    return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps) * weight


def turn(heads, positions, theta, beside):
    """Heads [R, heads, D], each channel pair turned by its angle."""
    out = torch.empty_like(heads)
    half = heads.shape[-1] // 2
    for pair_of in range(half):
        first, second = (2 * pair_of, 2 * pair_of + 1) if beside else (pair_of, pair_of + half)
        angle = positions.double() * theta ** (-2.0 * pair_of / heads.shape[-1])
        cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]
        out[..., first] = heads[..., first] * cos - heads[..., second] * sin
        out[..., second] = heads[..., second] * cos + heads[..., first] * sin
    return out


def defined(folder, features, noise):
    """Hidden states [BLOCK, H] of one block behind CONTEXT tokens."""
    config, state = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    rope = config.get("rope_parameters") or config
    theta, beside = float(rope["rope_theta"]), config.get("rope_is_neox_style") is False
    heads, groups, dim = (config[f"num_{one}_heads"] for one in ("attention", "key_value")), None, 16
    heads, groups = heads
    context = norm(features @ state["fc.weight"].T, state["hidden_norm.weight"])
    at = torch.arange(CONTEXT + BLOCK)
    for layer in range(config["num_hidden_layers"]):
        own = {
            name.removeprefix(f"layers.{layer}."): value
            for name, value in state.items()
            if name.startswith(f"layers.{layer}.")
        }
        normed = norm(noise, own["input_layernorm.weight"])
        rows = torch.cat([context, normed])
        key, value = (
            (rows @ own[f"self_attn.{one}_proj.weight"].T).view(-1, groups, dim) for one in ("k", "v")
        )
        query = (normed @ own["self_attn.q_proj.weight"].T).view(-1, heads, dim)
        key = turn(norm(key, own["self_attn.k_norm.weight"]), at, theta, beside)
        query = turn(norm(query, own["self_attn.q_norm.weight"]), at[CONTEXT:], theta, beside)
        seen = []
        for head in range(heads):
            group = head // (heads // groups)
            scores = query[:, head] @ key[:, group].T * dim**-0.5
            seen.append(scores.softmax(-1) @ value[:, group])
        noise = noise + torch.cat(seen, dim=-1) @ own["self_attn.o_proj.weight"].T
        normed = norm(noise, own["post_attention_layernorm.weight"])
        gate, up = (normed @ own[f"mlp.{one}_proj.weight"].T for one in ("gate", "up"))
        noise = noise + (torch.nn.functional.silu(gate) * up) @ own["mlp.down_proj.weight"].T
    return norm(noise, state["norm.weight"])


def drafted(folder, target, features, anchor):
    """The block's drafts by the definition: each row drafts the next token, with a bias of the one before."""
    state = load_file(folder / "model.safetensors")
    embedding = state.get("embed_tokens.weight", target.get_input_embeddings().weight)
    head = state.get("lm_head.weight", target.get_output_embeddings().weight)
    hidden = defined(folder, features, embedding[torch.tensor([anchor] + [MASK] * (BLOCK - 1))])
    before, drafts = anchor, []
    for row in hidden:
        logits = head @ row
        if "markov_head.markov_w1.weight" in state:
            logits = (
                logits + state["markov_head.markov_w2.weight"] @ state["markov_head.markov_w1.weight"][before]
            )
        before = int(logits.argmax())
        drafts.append(before)
    return hidden, drafts


@torch.no_grad()
def compare(folder, target):
    """(Largest difference of hidden states, equality of drafts) of definition and loaded drafter."""
    drafter = td.load_drafter(folder, target)
    generator = torch.Generator().manual_seed(4)
    features, anchor = torch.randn(CONTEXT, 64, generator=generator), 11
    hidden, drafts = drafted(folder, target, features, anchor)
    ids = torch.tensor([[anchor] + [MASK] * (BLOCK - 1)])
    noise = drafter.embed(ids, target.get_input_embeddings(), torch.float32)
    ours = drafter(noise, features[None], torch.arange(CONTEXT + BLOCK)[None]).last_hidden_state
    found = drafter.choose(ours, torch.tensor([anchor]), target.get_output_embeddings())
    return float((ours[0] - hidden).abs().max()), found[0].tolist() == drafts


@pytest.fixture(params=NAMES)
def published(request, tmp_path):
    target, drafter = pair(request.param)
    return request.param, publish(tmp_path, request.param, drafter), target


def test_hidden_states_and_drafts_are_the_definitions(published):
    name, folder, target = published
    difference, alike = compare(folder, target)
    assert difference < 1e-5 and alike
    config = td.load_drafter(folder).config
    assert config.sample_from_anchor and config.markov_rank == (0 if name == "deepspec_dflash" else 8)


def test_a_block_of_seven_gives_seven_drafts(published):
    _, folder, target = published
    engine = td.compile(target, td.load_drafter(folder, target), runtime="eager", max_length=32, batch_size=1)
    assert engine.plan.verify_width == BLOCK + 1


def test_pairs_turned_otherwise_are_seen(published, monkeypatch):
    """Neighbours read as halves, and halves read as neighbours, change the states."""
    name, folder, target = published
    config = json.loads((folder / "config.json").read_text())
    config["rope_is_neox_style"] = not config.get("rope_is_neox_style", True)
    before = compare(folder, target)[0]
    with monkeypatch.context() as patch:
        if name == "liquid_dspark":
            patch.setattr(TensorSlice, "read", lambda piece: piece.stored.read())
        else:
            patch.setattr("torch_dflash.proposers.checkpoint.files.turns_neighbours", lambda *_: True)
        assert compare(folder, target)[0] > 1e-3 > before


def test_a_saved_drafter_turns_halves_for_every_reader(tmp_path):
    target, drafter = pair("liquid_dspark")
    (tmp_path / "a").mkdir()
    loaded = td.load_drafter(publish(tmp_path / "a", "liquid_dspark", drafter), target)
    loaded.save_pretrained(tmp_path / "b")
    assert not set(rotary.FLAGS) & set(json.loads((tmp_path / "b/config.json").read_text()))
    again = td.load_drafter(tmp_path / "b", target)
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name


def test_a_partial_rotation_copied_of_the_target_is_not_deepspecs(tmp_path):
    """DeepSpec's network turns all of a head for any target; another network refuses the field."""
    rope = {"rope_theta": 1000000, "rope_type": "default", "partial_rotary_factor": 0.25}
    fields = {"rope_parameters": rope, "partial_rotary_factor": 0.25}
    target, drafter = pair("deepspec")
    assert compare(publish(tmp_path, "deepspec", drafter, **fields), target)[0] < 1e-5
    publish(tmp_path, "specforge_dspark", pair("specforge_dspark")[1], **fields)
    with pytest.raises(ValueError, match="partial_rotary_factor=0.25"):
        td.load_drafter(tmp_path)


@pytest.mark.parametrize(
    ("block", "proposed", "field", "anchored"),
    [
        (8, 8, None, True), (8, 7, None, False), (8, None, None, True), (8, 7, True, True),
        (8, 8, False, False),
    ],
)  # fmt: skip
def test_speculators_rows_are_told_by_the_field_or_by_the_number_of_proposals(
    block, proposed, field, anchored, tmp_path
):
    """Older drafters, without the field, propose one token fewer than a block has rows."""
    methods = [] if proposed is None else [{"proposal_type": "greedy", "speculative_tokens": proposed}]
    config, _ = fixture("speculators_dspark")
    given = {"block_size": block, "speculators_config": {"proposal_methods": methods}}
    given["sample_from_anchor"] = ... if field is None else field
    publish(tmp_path, "speculators_dspark", pair("speculators_dspark")[1], **given)
    assert td.load_drafter(tmp_path).config.sample_from_anchor is anchored
