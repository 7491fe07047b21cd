"""Drafters equal transformers' class and the formulas of other vendors; broken ones differ."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from support.layouts import pair, publish
from support.tiny import MASK, ragged_prompts
from transformers import DynamicCache
from transformers.cache_utils import DFlashCache
from transformers.models.muse_glimmer_assistant import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

import torch_dflash as td
from torch_dflash.proposers.dflash import model as network
from torch_dflash.proposers.dflash.vocabulary import DraftVocabulary
from torch_dflash.proposers.layouts import assistant, speculators

EXACT, SEEN = 1e-5, 1e-2
NEW_ROWS = (9, 3, 1, 6, 2, 4)  # new features of each pass; the window is 9


def assistant_gap(folder):
    """Largest difference from transformers' class over passes with a cache that is cropped between them."""
    theirs = MuseGlimmerAssistantModel.from_pretrained(folder).eval()
    ours, generator = td.load_drafter(folder), torch.Generator().manual_seed(1)
    kept, own, at, gap = DFlashCache(config=theirs.config), DynamicCache(), 0, 0.0
    if hasattr(kept, "activate_past_recording"):
        kept.activate_past_recording()
    known = inspect.signature(MuseGlimmerAssistantModel.forward).parameters
    name = "cache" if "cache" in known else "past_key_values"  # as before 5.24
    for rows in NEW_ROWS:
        features = torch.randn(1, rows, 64, generator=generator)
        noise = torch.randn(1, 6, 32, generator=generator)
        position = torch.arange(at, at + rows + 6)[None]
        kept.set_previous_accepted_tokens(rows)
        with torch.no_grad():
            wanted = theirs(noise, features, position_ids=position, **{name: kept}).last_hidden_state
            found = ours(noise, features, position, cache=own).last_hidden_state
        kept.crop(-6)
        own.crop(-6)
        at, gap = at + rows, max(gap, float((wanted - found).abs().max()))
    return gap


def test_an_assistants_states_are_transformers_own(tmp_path, monkeypatch):
    assert MuseGlimmerAssistantConfig.model_type == assistant.KIND
    publish(tmp_path, "assistant", pair("assistant")[1])
    assert assistant_gap(tmp_path) < EXACT
    original = network.visible
    for broken in (
        lambda query, key, window, causal: original(query, key, window - 1, causal),  # z-lab's window
        lambda query, key, window, causal: original(query, key, window, True),
        lambda query, key, window, causal: original(query, key, None, causal),
    ):
        monkeypatch.setattr(network, "visible", broken)
        assert assistant_gap(tmp_path) > SEEN


def by_hand(drafter, noise, features):
    """One layer's pass without a cache, written out from vLLM's model files."""
    layer, parts = drafter.layers[0], features.chunk(2, dim=-1)
    attention, rows = layer.self_attn, features.shape[1]

    def norm(values, weight):
        return values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + 1e-6) * weight

    if drafter.config.aux_hidden_norms:
        parts = [norm(part, own.weight) for part, own in zip(parts, drafter.aux_hidden_norms, strict=True)]
    context = norm(F.linear(torch.cat(parts, -1), drafter.fc.weight), drafter.hidden_norm.weight)
    if drafter.config.context_layernorm:
        context = norm(context, layer.input_layernorm.weight)
    block = norm(noise, layer.input_layernorm.weight)
    both, cos, sin = torch.cat([context, block], 1), *drafter.rotary_emb(noise, torch.arange(rows + 6)[None])

    def heads(part, own):
        values = part(both).unflatten(-1, (-1, 16))
        if own is None:
            return values[0].transpose(0, 1)
        values = norm(values, own.weight)[0].transpose(0, 1)
        turned = torch.cat([-values[..., 8:], values[..., :8]], -1)
        return values * cos[0] + turned * sin[0]

    query = heads(attention.q_proj, attention.q_norm)[:, rows:]
    key = heads(attention.k_proj, attention.k_norm).repeat_interleave(2, 0)
    value = heads(attention.v_proj, None).repeat_interleave(2, 0)
    gap = (torch.arange(rows, rows + 6)[:, None] - torch.arange(rows + 6)).float()
    seen = (gap.abs() < 9) & ((gap >= 0) | torch.tensor(not attention.causal))
    scores = (query @ key.transpose(1, 2) / 4).masked_fill(~seen, float("-inf"))
    if attention.attention_sink_bias is not None:
        sinks = attention.attention_sink_bias[:, None, None].expand(4, 6, 1)
        scores = torch.cat([scores, sinks], -1)
    mixed = scores.softmax(-1)[..., : rows + 6] @ value
    if attention.g_proj is not None:
        mixed = mixed * F.softplus(F.linear(block[0], attention.g_proj.weight)).T[..., None]
    noise = noise + attention.o_proj(mixed.transpose(0, 1).flatten(1))
    return noise + layer.mlp(norm(noise, layer.post_attention_layernorm.weight))


def hand_gap(drafter, whole):
    """Largest difference of ``drafter``'s first layer from `by_hand` for ``whole``."""
    generator = torch.Generator().manual_seed(2)
    noise, features = torch.randn(1, 6, 32, generator=generator), torch.randn(1, 11, 64, generator=generator)
    found: list = []
    hook = drafter.layers[0].register_forward_hook(lambda module, given, out: found.append(out))
    with torch.no_grad():
        drafter(noise, features, torch.arange(17)[None])
        hook.remove()
        return float((found[0] - by_hand(whole, noise, features)).abs().max())


@pytest.mark.parametrize(
    ("name", "parts"),
    [("laguna", ["g_proj", "norms_context", "aux_hidden_norms"]), ("mimo", ["attention_sink_bias"])],
)
def test_gates_norms_and_sinks_are_the_vendors(name, parts, tmp_path):
    publish(tmp_path, name, pair(name)[1])
    whole = td.load_drafter(tmp_path)
    assert hand_gap(whole, whole) < EXACT
    for part in parts:
        broken = td.load_drafter(tmp_path)
        layer = broken.layers[0]
        where = next(one for one in (broken, layer, layer.self_attn) if hasattr(one, part))
        nothing = {"norms_context": False, "aux_hidden_norms": torch.nn.ModuleList()}
        setattr(where, part, nothing.get(part))
        assert hand_gap(broken, whole) > SEEN, part


def accepted(target, drafter):
    engine = td.compile(target, drafter, runtime="eager", max_length=64, batch_size=3)
    asked = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    return engine.generate(*ragged_prompts(3), **asked).stats.acceptance_lengths


def without_d2t(self, hidden, anchor, head, *_):
    return torch.argmax(self.logits(hidden, head), dim=-1).to(torch.int32)


def absolute_d2t(self, hidden, anchor, head, *_):
    return self.d2t[torch.argmax(self.logits(hidden, head), dim=-1)].to(torch.int32)


def next_d2t(self, hidden, anchor, head, *_):
    best = torch.argmax(self.logits(hidden, head), dim=-1)
    return (best + self.d2t.roll(1)[best] + 1).to(torch.int32)


def targets_head(self, hidden, head):
    return head(hidden)[..., : self.config.draft_vocab_size or None]


def targets_embedding(self, ids, embed, dtype):
    return embed(ids).to(dtype)


def wrong_embedding(self, ids, embed, dtype):
    return self.embed_tokens(ids.clamp(max=MASK - 1) + 1).to(dtype)


BROKEN = [("speculators", "choose", without_d2t), ("speculators", "choose", absolute_d2t)]
BROKEN += [("speculators", "choose", next_d2t), ("speculators", "logits", targets_head)]
BROKEN += [("speculators", "embed", wrong_embedding), ("mimo", "embed", targets_embedding)]


@pytest.mark.parametrize(("name", "method", "broken"), BROKEN)
def test_own_tables_that_are_misread_draft_otherwise(name, method, broken, monkeypatch):
    target, drafter = pair(name)
    right = accepted(target, drafter)
    assert max(sum(right, [])) > 2
    monkeypatch.setattr(DraftVocabulary, method, broken)
    assert accepted(target, drafter) != right


def test_an_anchor_row_that_is_dropped_drafts_otherwise(monkeypatch):
    target, drafter = pair("speculators_anchor")
    right = accepted(target, drafter)
    drafter.config.sample_from_anchor = False
    assert accepted(target, drafter) != right


def test_taps_of_speculators_are_one_higher(tmp_path, monkeypatch):
    target, own = pair("speculators")
    publish(tmp_path, "speculators", own)
    right = accepted(target, own)
    assert accepted(target, td.load_drafter(tmp_path)) == right
    monkeypatch.setattr(speculators, "taps", lambda config, where: config["aux_hidden_state_layer_ids"])
    assert accepted(target, td.load_drafter(tmp_path)) != right
