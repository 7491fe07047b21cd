"""The proposer: tpu-inference's contract for DFlash, with our drafter over vLLM's own pages.

`Proposer.prepare_inputs` projects the target's features and writes the context's keys and values;
`Proposer.propose` drafts for the requests that live. Each is one compiled call (`steps.py`) without host
reads. The proposer keeps no state of requests: their keys and values are in pages that vLLM's scheduler
allocates, shares and frees.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec
from torchax.interop import jax_view, torch_view
from torchax.ops.mappings import t2j
from tpu_inference.layers.common.sharding import ShardingAxisName
from tpu_inference.models.vllm.vllm_model_wrapper_context import set_vllm_model_wrapper_context
from tpu_inference.spec_decode.jax.dflash import DFlashProposer
from tpu_inference.utils import get_mesh_shape_product, get_padded_head_dim
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from jax_bridge.vllm.steps import Places, Steps, rows_for
from torch_dflash.integrations.vllm.drafter import PagedDrafter, check_drafts
from torch_dflash.proposers.checkpoints import load_drafter, load_drafter_config
from torch_dflash.proposers.pair import check_pair

LAYER = "draft_layer.{}"
"""The name of a drafter's layer among vLLM's layers."""
_CUT = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "gate_proj": 0, "up_proj": 0, "down_proj": 1}


class Proposer(DFlashProposer):
    """Drafts for a PyTorch target with a drafter of any layout that `torch_dflash.load_drafter` reads.

    Args:
        vllm_config, runner: as for tpu-inference's own proposer.
    """

    def __init__(self, vllm_config: Any, runner: Any):
        super().__init__(vllm_config, runner)
        revision = self.draft_model_config.revision
        self.source = {"revision": revision} if revision else {}
        self.config = load_drafter_config(self.draft_model_config.model, **self.source)
        check_drafts(self.config, self.num_speculative_tokens)
        check_pair(vllm_config.model_config.hf_text_config, self.config)
        self.block_size = 1  # ids per request in tpu-inference's warm-up: the anchor alone
        read = self.draft_model_config.hf_config  # that warm-up reads it in z-lab's layout
        taps = {"target_layer_ids": list(self.config.target_layer_ids)}
        read.dflash_config = (getattr(read, "dflash_config", None) or {}) | taps
        ways = get_mesh_shape_product(self.mesh, ShardingAxisName.KV_HEAD)
        groups = self.config.num_key_value_heads
        if max(groups, ways) % min(groups, ways):
            raise ValueError(
                f"tensor_parallel_size={ways}: the drafter's {groups} key/value heads can be neither cut nor "
                "repeated over so many chips; pass a divisor or a multiple of them."
            )
        self.groups, self.width = max(groups, ways), get_padded_head_dim(self.config.head_dim)
        self.cut = ways > 1 and groups % ways == 0
        self.warming, self._uploaded = False, {}

    def load_model(self, target_model: Any) -> None:
        """Load the drafter; ``target_model`` is unused: the runner holds it."""
        target = copy(self.vllm_config.model_config.hf_text_config)
        target.dtype = self.vllm_config.model_config.dtype  # vLLM computes in it, whatever the files hold
        drafter: Any = load_drafter(self.draft_model_config.model, target, target.dtype, **self.source)
        module = PagedDrafter(drafter.eval(), self.num_speculative_tokens)
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self.state_leaves = {
            name: jax.device_put(t2j(tensor.detach()), NamedSharding(self.mesh, self._spec(name, tensor)))
            for name, tensor in named.items()
        }
        self.steps = Steps(module.to("meta"), self.groups, self.width, self._embed, self._logits)

    def _spec(self, name: str, tensor: torch.Tensor) -> PartitionSpec:
        """A weight's spec: cut by heads and by columns of the MLP like the target's, or whole."""
        axis = _CUT.get(name.split(".")[-2])
        if not self.cut or axis is None or tensor.ndim < axis + 1:
            return PartitionSpec()
        return PartitionSpec(*[None] * axis, ShardingAxisName.KV_HEAD)

    def kv_cache_spec(self) -> dict[str, Any]:
        """vLLM's specification of the drafter's pages, by layer name.

        Layers with a window also keep whole sequences: vLLM then needs no second group of pages.
        """
        manager, size = self.runner.kv_cache_manager, self.runner.cache_config.block_size
        spec = manager._create_attention_spec(size, self.groups, self.width)
        return {LAYER.format(at): spec for at in range(self.config.num_hidden_layers)}

    def places(self) -> Places:
        """The group of pages and the page array of each layer of the drafter, by its name."""
        groups = self.runner.kv_cache_config.kv_cache_groups
        names = map(LAYER.format, range(self.config.num_hidden_layers))
        return tuple(
            (
                next(at for at, group in enumerate(groups) if name in group.layer_names),
                self.runner.layer_name_to_kvcache_index[name],
            )
            for name in names
        )

    def tables(self, places: Places) -> dict[int, jax.Array]:
        """The table of pages [S, P] of each group; only one that changed goes to the device."""
        for group in {group for group, _ in places}:
            now = self.runner.input_batch.block_table[group].get_cpu_tensor()
            known, _ = self._uploaded.get(group, (None, None))
            if known is None or not np.array_equal(known, now):
                self._uploaded[group] = (now.copy(), self._everywhere(now.copy()))
        return {group: self._uploaded[group][1] for group, _ in places}

    def prepare_inputs(
        self,
        attn_metadata: Any,
        input_ids: jax.Array,
        aux_hidden_states: Any,
        last_sampled_token_id: jax.Array,
        next_prompt_token_id: jax.Array,
        is_in_prefill: jax.Array,
        num_rejected_tokens: jax.Array,
        num_reqs_dp: jax.Array,
    ) -> tuple[Any, jax.Array, jax.Array, Any]:
        """Write keys and values of the accepted rows to the runner's pages.

        Returns:
            None, the anchors [S], again, and the metadata with accepted lengths [S].
        """
        given = (
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            num_rejected_tokens,
            num_reqs_dp,
            tuple(aux_hidden_states),
            last_sampled_token_id,
            next_prompt_token_id,
            is_in_prefill,
        )
        places, kept = self.places(), list(self.runner.kv_caches)
        pages = {index: kept[index] for _, index in places}
        pages, anchors, lengths = self.steps.prepare(
            self.state_leaves, pages, self.tables(places), *self._everywhere(given), places=places
        )
        for index, array in pages.items():
            kept[index] = array
        self.runner.kv_caches = kept
        return None, anchors, anchors, replace(attn_metadata, seq_lens=lengths)

    def propose(
        self,
        kv_caches: list[jax.Array],
        input_ids: jax.Array,
        attn_metadata: Any,
        last_token_indices: jax.Array,
        target_hidden_states: Any,
    ) -> tuple[list[jax.Array], jax.Array]:
        """(the page arrays as they are, drafts [S, K]); ``input_ids`` are the anchors."""
        places, live = self.places(), self.runner.input_batch.num_reqs
        rows = rows_for(live)
        while True:
            drafts = self.steps.draft(
                self.state_leaves,
                self.runner.state_leaves,
                {index: kv_caches[index] for _, index in places},
                self.tables(places),
                *self._everywhere((input_ids, attn_metadata.seq_lens)),
                places=places,
                rows=rows,
            )
            if not self.warming or rows >= len(input_ids):
                return kv_caches, drafts
            rows *= 2  # the warm-up compiles the program of every number of requests

    def _everywhere(self, given: Any) -> Any:
        """Arrays on every chip: tpu-inference's warm-up places some differently and would compile twice."""
        return jax.device_put(given, NamedSharding(self.mesh, PartitionSpec()))

    def _embed(self, target: Any, ids: torch.Tensor) -> torch.Tensor:
        """Stored rows of the target's embedding: methods of some targets scale them."""
        name, table = next(
            (name, module)
            for name, module in self.runner.model.model.named_modules()
            if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
        )
        weights = {key[len(name) + 1 :]: one for key, one in target.items() if key.startswith(f"{name}.")}
        with set_vllm_model_wrapper_context(kv_caches=[], mesh=self.mesh):
            return torch.func.functional_call(table, torch_view(weights), (ids,), tie_weights=False)

    def _logits(self, target: Any, hidden: torch.Tensor) -> torch.Tensor:
        """The target's logits from the runner's function; columns that pad the vocabulary are -inf."""
        rows = jax_view(hidden)
        logits = self.runner.compute_logits_fn(target, rows.reshape(-1, rows.shape[-1]), None)
        known = jnp.arange(logits.shape[-1]) < self.runner.model_config.get_vocab_size()
        logits = jnp.where(known, logits, -jnp.inf)
        return torch_view(logits.reshape(*rows.shape[:-1], -1))
