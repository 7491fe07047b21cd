"""Each convention broken on purpose leaves the text right, and fails the parity checks.

Acceptance alone would not show it: several of these cost a real pair only 5-25 % of its acceptance length,
and this random pair gains or loses by chance.
"""

from dataclasses import replace

import pytest
import torch
from support.authors import CHUNK, EXACT, LOOP, MIXED, Case, around, engine_runs, loop_gap, network_gap

from torch_dflash import eager
from torch_dflash.ops import block_attention
from torch_dflash.proposers import DFlashProposer
from torch_dflash.proposers.dflash import model as drafter
from torch_dflash.proposers.dflash.model import DFlashDraftModel, DFlashLayer
from torch_dflash.targets import blocks
from torch_dflash.targets.adapter import Target

SEEN = 1e-3


def sight(**change):
    """Mutation: another mask, in the growing-cache pass and in the static pass."""

    def mutate(patch):
        right = drafter.visible

        def wrong(query, key, window, causal):
            given = {"window": window, "causal": causal}
            return right(query, key, **(given | {name: new(given[name]) for name, new in change.items()}))

        patch.setattr(drafter, "visible", wrong)
        patch.setattr(block_attention, "visible", wrong)

    return mutate


def config(**change):
    """Mutation: another config of the drafter that decodes; the user's drafter is not touched."""

    def init(original, self, *args, **kwargs):
        original(self, *args, **kwargs)
        for name, new in change.items():
            setattr(self.drafter.config, name, new(getattr(self.drafter.config, name)))

    return around(DFlashProposer, "__init__", init)


def anchor_row_is_a_draft(original, self, *args):
    return original(self, *args).roll(1, dims=1)  # rows 0..W-2 come to stand where 1..W-1 are read


def features_after_the_final_norm(original, self, *args, **kwargs):
    out = original(self, *args, **kwargs)
    if out.features is None:
        return out
    norm = self.model.get_decoder().norm
    parts = out.features.split(self.hidden_size, dim=-1)
    return replace(out, features=torch.cat([norm(part) for part in parts], dim=-1))


def without_final_norm(original, self, noise, context, position, memory):
    rope = self.rotary_emb(noise, position)
    block_rope = tuple(table[:, context.shape[1] :] for table in rope)
    for layer in self.layers:
        noise = layer(noise, context, rope, block_rope, memory)
    return noise


def context_normed_twice(original, self, block, context, *args):
    return original(self, block, self.input_layernorm(context), *args)


def context_rope_from_the_buffer_index(original, self, noise, context, position, memory):
    rows = context.shape[1]
    index = torch.arange(rows, dtype=position.dtype).expand(position.shape[0], -1)
    return original(self, noise, context, torch.cat([index, position[:, rows:]], dim=1), memory)


def one_rejected_draft_counted(original, self, pstate, features, ids, next_ids, count):
    count = (count + 1).clamp(max=features.shape[1])
    return original(self, pstate, features, ids, next_ids, count)


def only_the_last_chunk(original, self, pstate, features, ids, next_ids, count):
    keep = (count == 0)[:, None, None, None]  # rows whose prompt has ended already
    layers = (replace(layer, key=layer.key * keep, value=layer.value * keep) for layer in pstate.layers)
    pstate = replace(pstate, layers=tuple(layers))
    return original(self, pstate, features, ids, next_ids, count)


def right_padding_leaks(patch):
    """Rows see K/V of the prompt's padding, up to the end of the first chunk, like context."""
    attend = block_attention.grouped_attention

    def propose(original, self, pstate, anchor, length, embed, head, request=None):
        def leaking(query, parts, scale, sinks, softcap=None):
            context, block = parts
            slot = torch.arange(context.key.shape[2])
            padding = (slot >= length[:, None]) & (slot < CHUNK)
            context = context._replace(mask=context.mask | padding[:, None, None])
            return attend(query, [context, block], scale, sinks)

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(block_attention, "grouped_attention", leaking)
            return original(self, pstate, anchor, length, embed, head, request)

    around(DFlashProposer, "propose", propose)(patch)


# Broken in the network, so that the pinned `forward` must show it too.
IN_THE_NETWORK = {
    "anchor row used as a draft": around(DFlashDraftModel, "block", anchor_row_is_a_draft),
    "causal mask inside the block": sight(causal=lambda causal: True),
    "no causal mask in the sliding layer": sight(causal=lambda causal: False),
    "window ignored": sight(window=lambda window: None),
    "window one wider": sight(window=lambda window: window and window + 1),
    "window one narrower": sight(window=lambda window: window and window - 1),
    "hidden_norm skipped": around(DFlashDraftModel, "project", lambda _, self, rows: self.fc(rows)),
    "final norm skipped": around(DFlashDraftModel, "block", without_final_norm),
    "final norm twice": around(
        DFlashDraftModel, "block", lambda block, self, *args: self.norm(block(self, *args))
    ),
    "context layer-normed twice": around(DFlashLayer, "forward", context_normed_twice),
    "context RoPE from the buffer index": around(
        DFlashDraftModel, "block", context_rope_from_the_buffer_index
    ),
}
# Broken around the network: only the loop can show the fault.
IN_THE_LOOP = {
    "tap one too high": around(blocks, "block_of", lambda block, model, at, tap: block(model, at, tap + 1)),
    "tap one too low": around(blocks, "block_of", lambda block, model, at, tap: block(model, at, tap - 1)),
    "features after the final norm": around(Target, "forward", features_after_the_final_norm),
    "wrong mask token": config(mask_token_id=lambda token: token - 1),
    "embedding scaled twice": config(input_embedding_scale=lambda scale: scale**2),
    "embedding not scaled": config(input_embedding_scale=lambda scale: 1.0),
    "only the last chunk of the prompt": around(DFlashProposer, "ingest", only_the_last_chunk),
    "right padding leaking": right_padding_leaks,
}


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """A pair in which every mutation can matter; without a mutation the pair passes both checks."""
    switches = {"input_embedding_scale": 1.7, "target_layer_ids": [1, 2], "attention_bias": True}
    built = Case(tmp_path_factory.mktemp("drafter"), "llama", MIXED | switches)
    assert loop_gap(built) < LOOP
    assert network_gap(built) < EXACT
    return built


@pytest.mark.parametrize("name", IN_THE_NETWORK | IN_THE_LOOP)
def test_the_loop_shows_it(case, monkeypatch, name):
    (IN_THE_NETWORK | IN_THE_LOOP)[name](monkeypatch)
    assert loop_gap(case) > SEEN


@pytest.mark.parametrize("name", IN_THE_NETWORK)
def test_forward_shows_it(case, monkeypatch, name):
    IN_THE_NETWORK[name](monkeypatch)
    assert network_gap(case) > SEEN


def test_inflated_lengths_stop_an_eager_round(case, monkeypatch):
    around(DFlashProposer, "observe", one_rejected_draft_counted)(monkeypatch)
    with pytest.raises(AssertionError, match="proposer has read"):
        engine_runs(case)


def test_inflated_lengths_show_without_the_assertion(case, monkeypatch):
    monkeypatch.setattr(eager, "_checked", lambda state: state)
    around(DFlashProposer, "observe", one_rejected_draft_counted)(monkeypatch)
    assert loop_gap(case) > SEEN
