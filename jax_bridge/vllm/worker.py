"""tpu-inference's worker and runner with our proposer, for configurations that name it."""

# pyright: reportMissingImports=false
from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from tpu_inference import envs
from tpu_inference.layers.common.sharding import ShardingAxisName
from tpu_inference.layers.jax.sample import rejection_sampler
from tpu_inference.runner import tpu_runner
from tpu_inference.runner.input_batch import InputBatch
from tpu_inference.worker import tpu_worker
from vllm.v1.outputs import DraftTokenIds

from jax_bridge.vllm.patches import bits_of_rows, mask_rows, of_each_temperature, of_undrafted_steps
from jax_bridge.vllm.proposer import Proposer

# Upstream calls the functions by these names.
tpu_runner._jax_logprobs_materialize = of_undrafted_steps(tpu_runner._jax_logprobs_materialize)
rejection_sampler._compute_probs = of_each_temperature(rejection_sampler._compute_probs)
# Upstream computes none where every request asks only for the chosen token's, which is the number 0.
InputBatch.max_num_logprobs = property(
    lambda batch: max(1, *batch.num_logprobs.values()) if batch.num_logprobs else None
)


class Worker(tpu_worker.TPUWorker):
    """tpu-inference's worker with a `Runner`."""

    def init_device(self, *args: Any, **kwargs: Any) -> None:
        with patch.object(tpu_worker, "TPUModelRunner", Runner):  # which upstream's method names
            super().init_device(*args, **kwargs)


class Runner(tpu_runner.TPUModelRunner):
    """tpu-inference's runner with our proposer, its pages and the target's taps."""

    def _init_speculative_decoding(self) -> None:
        super()._init_speculative_decoding()
        self.drafter = Proposer(self.vllm_config, self)

    def load_model(self) -> None:
        own = self.vllm_config
        self.vllm_config = tapped(own, self.drafter.config.target_layer_ids)
        try:
            super().load_model()
        finally:
            vars(own).update(vars(self.vllm_config) | {"speculative_config": own.speculative_config})
            self.vllm_config = own

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if self.scheduler_config.async_scheduling:
            self._take_back(scheduler_output.scheduled_cached_reqs)
        return super().execute_model(scheduler_output, *args, **kwargs)

    def _take_back(self, cached: Any) -> None:
        """Fix requests that resume after a preemption with async scheduling.

        Such a request recomputes its prompt and its text in chunks. The text is the scheduler's: this
        runner's copy has zeros for tokens that were in flight when the request left. Upstream takes tokens
        after the prompt for samples of the previous step, and fails on their number.
        """
        for name, tokens in cached.all_token_ids.items():
            request = self.requests[name]
            request.output_token_ids[:] = tokens[request.num_prompt_tokens :]
        before = self._pre_async_results
        if before is not None:
            names = {before.req_ids[at] for at in before.discard_sampled_tokens_req_indices}
            for name in names | cached.resumed_req_ids:
                before.placeholder_req_id_to_index.pop(name, None)

    def capture_model(self) -> None:
        self.drafter.warming = True
        try:
            super().capture_model()
        finally:
            self.drafter.warming = False
        if envs.SKIP_JAX_PRECOMPILE or self.model_config.enforce_eager:
            return
        words = -(-self.vocab_size // 32)
        where = NamedSharding(
            self.mesh, PartitionSpec(ShardingAxisName.MLP_DATA, ShardingAxisName.MLP_TENSOR)
        )
        for rows in self.num_logits_paddings:
            size, dtype = (rows, self.vocab_size), self.model_config.dtype
            logits = self.compilation_manager._create_dummy_tensor(size, dtype, where)
            self._mask(logits, np.zeros((rows, words), np.int32))

    def sample_tokens(self, grammar_output: Any) -> Any:
        state = self.execute_model_state
        if grammar_output is not None and state is not None:
            rows, drafts = len(state.logits), np.zeros(self.input_batch.num_reqs, np.int32)
            if state.spec_decode_metadata is not None:
                drafts = state.spec_decode_metadata.draft_lengths_cpu
            scheduled = state.scheduler_output.scheduled_spec_decode_tokens
            index = self.input_batch.req_id_to_index
            state.logits = self._mask(
                state.logits, bits_of_rows(grammar_output, scheduled, index, drafts, rows)
            )
        return super().sample_tokens(None)

    def _mask(self, logits: jax.Array, bits: np.ndarray) -> jax.Array:
        return mask_rows(logits, jax.device_put(bits, NamedSharding(self.mesh, PartitionSpec())))

    def take_draft_token_ids(self) -> Any:
        """Drafts for the scheduler's grammars; with async scheduling, of the previous step.

        Upstream then returns device arrays, in the order of a batch that has been condensed since.
        """
        manager, before = self.speculative_decoding_manager, self._pre_async_results
        if not self.scheduler_config.async_scheduling or manager._draft_token_ids is None:
            return super().take_draft_token_ids()
        drafts, manager._draft_token_ids = np.asarray(manager._draft_token_ids).tolist(), None
        return DraftTokenIds(list(before.spec_decode_metadata.req_ids_dp[0]), drafts)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return padded_page_specs(super().get_kv_cache_spec() | self.drafter.kv_cache_spec())


def padded_page_specs(specs: dict[str, Any]) -> dict[str, Any]:
    """Page specifications by layer for which vLLM counts tpu-inference's memory.

    With windows in some layers vLLM makes several groups, and a page holds a layer of each. tpu-inference
    allocates one array per shape of layers, so a page takes as much as all shapes together.
    """
    shapes = {(spec.num_kv_heads, spec.head_size): spec.page_size_bytes for spec in specs.values()}
    if len(shapes) == 1 or len({type(spec) for spec in specs.values()}) == 1:
        return specs
    size = sum(shapes.values())
    return {name: replace(spec, page_size_padded=size) for name, spec in specs.items()}


def tapped(vllm_config: Any, taps: Any) -> Any:
    """A copy for the target's wrapper, which returns features only for the method "eagle3".

    ``taps``: 0-based layers whose outputs are the features. vLLM names a layer's output by the next layer.
    """
    given, speculative = copy.copy(vllm_config), copy.copy(vllm_config.speculative_config)
    speculative.method = "eagle3"
    speculative.draft_model_config = copy.copy(speculative.draft_model_config)
    drafter = copy.copy(speculative.draft_model_config.hf_config)
    drafter.eagle_aux_hidden_state_layer_ids = [tap + 1 for tap in taps]
    speculative.draft_model_config.hf_config = drafter
    given.speculative_config = speculative
    return given
