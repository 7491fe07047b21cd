"""Faults of the vLLM integration on purpose: a test makes each and expects the replay to notice."""

import jax.numpy as jnp
import torch
from torchax.interop import jax_view, torch_view
from tpu_inference.utils import get_padded_head_dim

from jax_bridge.vllm import proposer, worker
from jax_bridge.vllm.pages import write_rows
from jax_bridge.vllm.proposer import Proposer
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


@replaces(Proposer, "_prepare_step")
def rejected_rows_in_place_of_accepted_ones(step):
    def kept(self, weights, starts, lengths, rejected, *rest):
        found = step(self, weights, starts, lengths, rejected, *rest)
        (context, starts, at), *others = found
        return (jnp.roll(context, 1, axis=0), starts, at), *others

    return kept


@replaces(proposer, "attend_block")
def rejected_rows_kept_as_context(attend):
    def longer(query, key, value, pages, table, length, **options):
        return attend(query, key, value, pages, table, length + 1, **options)

    return longer


@replaces(proposer, "attend_block")
def window_left_out(attend):
    return lambda *args, **options: attend(*args, **(options | {"window": None}))


@replaces(proposer, "attend_block")
def block_that_is_causal(attend):
    return lambda *args, **options: attend(*args, **(options | {"causal": True}))


@replaces(proposer, "attend_block")
def pages_of_the_request_beside(attend):
    def shifted(query, key, value, pages, table, *rest, **options):
        return attend(query, key, value, pages, jnp.roll(table, 1, axis=0), *rest, **options)

    return shifted


@replaces(Proposer, "propose")
def tables_of_the_step_before(propose):
    """Requests that moved in the batch, or got a page, read and write pages of others."""
    tables = []

    def stale(self, *args, **named):
        table = self.runner.input_batch.block_table[0].get_cpu_tensor()
        now = table.copy()
        if tables:
            table[...] = tables[-1]
        try:
            return propose(self, *args, **named)
        finally:
            table[...] = now
            tables.append(now)

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


@replaces(proposer, "write_rows")
def context_not_written(write):
    return lambda pages, *rest: pages


@replaces(Proposer, "__init__")
def head_dim_by_division(init):
    def divided(self, *args):
        init(self, *args)
        self.width = get_padded_head_dim(self.config.hidden_size // self.config.num_attention_heads)

    return divided


@replaces(PagedDrafter, "draft")
def block_rows_written(draft):
    """Only `watch_pages` shows these rows: accepted rows are written again, so no later draft reads them."""

    def writing(self, anchor, length, attend, embed, head):
        inner = [cell.cell_contents for cell in attend.__closure__]
        own = dict(zip(attend.__code__.co_freevars, inner, strict=True))

        def attending(attention, query, key, value, scale):
            group, index = own["places"][attention.index]
            pages, table = own["pages"], own["tables"][group]
            at = own["lengths"][:, None] + jnp.arange(key.shape[2])
            page = jnp.take_along_axis(table, at // pages[index].shape[1], axis=1).reshape(-1)
            rows = (
                jax_view(one).transpose(0, 2, 1, 3).reshape(page.size, *key.shape[1::2])
                for one in (key, value)
            )
            row, width = at.reshape(-1) % pages[index].shape[1], own["self"].width
            pages[index] = write_rows(pages[index], *rows, page, row, width)
            return attend(attention, query, key, value, scale)

        return draft(self, anchor, length, attending, embed, head)

    return writing
