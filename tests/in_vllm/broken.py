"""Faults of the vLLM integration on purpose: a test makes each and expects the replay to notice."""

import jax.numpy as jnp
import torch
from torchax.interop import torch_view
from tpu_inference.utils import get_padded_head_dim

from jax_bridge.vllm import proposer, steps, worker
from jax_bridge.vllm.proposer import Proposer
from jax_bridge.vllm.steps import Steps
from torch_dflash.integrations.vllm.drafter import PagedDrafter

ALL = {}


def replaces(owner, name):
    """Registers ``broken(original) -> replacement`` for the attribute ``name``."""

    def listed(broken):
        ALL[broken.__name__] = lambda patch: patch.setattr(owner, name, broken(getattr(owner, name)))
        return broken

    return listed


@replaces(worker, "tapped")
def taps_off_by_one(tapped):
    return lambda config, taps: tapped(config, [tap + 1 for tap in taps])


@replaces(Steps, "prepare_step")
def rejected_rows_in_place_of_accepted_ones(step):
    def kept(self, *args, **named):
        *given, features, sampled, following, prefilling = args
        features = [jnp.roll(one, 1, axis=0) for one in features]
        return step(self, *given, features, sampled, following, prefilling, **named)

    return kept


@replaces(proposer, "rows_for")
def bucket_one_row_too_small(rows_for):
    return lambda live: rows_for(max(live - 1, 1))


@replaces(Steps, "prepare_step")
def dead_rows_with_a_length(step):
    """They cost pages and change no text; `watch_lengths` sees them."""

    def longer(self, *args, **named):
        pages, anchors, lengths = step(self, *args, **named)
        return pages, anchors, jnp.where(lengths == 0, lengths.max(), lengths)

    return longer


@replaces(PagedDrafter, "__init__")
def anchor_row_that_drafts_nothing(init):
    def silent(self, drafter, drafts):
        init(self, drafter, drafts)
        self.first_row, self.rows = 1, drafts + 1

    return silent


@replaces(steps, "attend_in_turn")
def rejected_rows_kept_as_context(attend):
    def longer(query, key, value, pages, table, length, **options):
        return attend(query, key, value, pages, table, length + 1, **options)

    return longer


@replaces(steps, "attend_in_turn")
def window_left_out(attend):
    return lambda *args, **options: attend(*args, **(options | {"window": None}))


@replaces(steps, "attend_in_turn")
def block_that_is_causal(attend):
    return lambda *args, **options: attend(*args, **(options | {"causal": True}))


@replaces(steps, "attend_in_turn")
def pages_of_the_request_beside(attend):
    def shifted(query, key, value, pages, table, *rest, **options):
        return attend(query, key, value, pages, jnp.roll(table, 1, axis=0), *rest, **options)

    return shifted


@replaces(Proposer, "tables")
def tables_of_the_step_before(tables):
    """Requests that moved in the batch, or got a page, read and write pages of others."""
    known = []

    def stale(self, places):
        known.append(tables(self, places))
        return known[max(len(known) - 3, 0)]  # each step asks twice

    return stale


@replaces(Proposer, "_logits")
def head_that_is_the_embedding(logits):
    def tied(self, target, hidden):
        name = next(name for name in target if name.endswith("embed_tokens.weight"))
        return torch.matmul(hidden, torch_view(target[name]).T)

    return tied


@replaces(Proposer, "places")
def last_group_in_place_of_the_drafts(places):
    def last(self):
        group = len(self.runner.kv_cache_config.kv_cache_groups) - 1
        return tuple((group, index) for _, index in places(self))

    return last


@replaces(PagedDrafter, "remember")
def positions_off_by_one(remember):
    return lambda self, context, at, write: remember(self, context, at + 1, write)


@replaces(steps, "write_rows")
def context_not_written(write):
    return lambda pages, *rest: pages


@replaces(steps, "write_rows")
def first_row_of_a_window_left_as_it_was(write):
    def shorter(pages, new, tables, source, first, count):
        kept = first % 16 != 0
        first, source = (jnp.where(kept, one, one + 1) for one in (first, source))
        return write(pages, new, tables, source, first, jnp.where(kept, count, jnp.maximum(count - 1, 0)))

    return shorter


@replaces(Proposer, "__init__")
def head_dim_by_division(init):
    def divided(self, *args):
        init(self, *args)
        self.width = get_padded_head_dim(self.config.hidden_size // self.config.num_attention_heads)

    return divided


@replaces(Proposer, "propose")
def block_rows_written(propose):
    """Only `watch_pages` shows these rows: accepted rows are written again, so no later draft reads them."""

    def writing(self, kv_caches, attn_metadata, **named):
        kept, drafts = propose(self, kv_caches=kv_caches, attn_metadata=attn_metadata, **named)
        kept, places = list(kept), self.places()
        for group, index in places:
            at = attn_metadata.seq_lens[:, None] + jnp.arange(2)
            size = kept[index].shape[1]
            page = jnp.take_along_axis(self.tables(places)[group], at // size, axis=1)
            page = jnp.where(attn_metadata.seq_lens[:, None] > 0, page, len(kept[index]))
            kept[index] = kept[index].at[page, at % size].set(7, mode="drop")
        return kept, drafts

    return writing
