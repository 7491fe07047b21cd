"""Engines of this process, and records of vLLM's scheduler while they decode."""

import gc
from dataclasses import dataclass

import vllm
from vllm.v1.core.sched.scheduler import Scheduler

OPTIONS = {
    "skip_tokenizer_init": True, "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256,
    "block_size": 16, "num_gpu_blocks_override": 128, "disable_log_stats": False,
    "enable_prefix_caching": False, "async_scheduling": False, "dtype": "bfloat16",
}  # fmt: skip
GREEDY = {"temperature": 0, "ignore_eos": True, "detokenize": False}


@dataclass
class Answer:
    """``texts``: for each batch, request and copy the ids; ``requests``: `Recorder.requests`.

    ``groups``: the layers of each group of pages. ``logprobs``: for each batch, request and token, by id.
    """

    texts: list
    requests: list
    metrics: dict
    groups: list
    logprobs: list


def run(batches, **options):
    """Decode batches of ``(prompt, params)`` one after the other in a new engine."""
    recorder = Recorder()
    update = Scheduler.update_from_output

    def recorded(scheduler, scheduled, output):
        recorder.listen(scheduler, scheduled, output)
        return update(scheduler, scheduled, output)

    Scheduler.update_from_output = recorded
    try:
        llm = vllm.LLM(**(OPTIONS | options))
        texts, logprobs = [], []
        for batch in batches:
            prompts = [{"prompt_token_ids": prompt} for prompt, _ in batch]
            params = [vllm.SamplingParams(**(GREEDY | given)) for _, given in batch]
            done = llm.generate(prompts, params, use_tqdm=False)
            texts.append([[list(out.token_ids) for out in one.outputs] for one in done])
            logprobs.append([by_id(one.outputs[0].logprobs) for one in done])
        metrics = {one.name: one.value for one in llm.get_metrics() if hasattr(one, "value")}
    finally:
        Scheduler.update_from_output = update
        llm = None
        gc.collect()
    return Answer(texts, list(recorder.requests.values()), metrics, recorder.groups, logprobs)


def by_id(steps):
    return [{token: found.logprob for token, found in step.items()} for step in steps or ()]


class Recorder:
    """``requests``: by id, ``{"prompt", "steps", "cached", "preempted", "moved"}``.

    A step is (position of the anchor, drafted ids or placeholders, ids that the step brought). A request has
    moved if its row in the batch changed: a request before it ended.
    """

    def __init__(self):
        self.requests, self.places, self.cached, self.groups = {}, {}, {}, []

    def listen(self, scheduler, scheduled, output):
        self.groups = [group.layer_names for group in scheduler.kv_cache_config.kv_cache_groups]
        for new in scheduled.scheduled_new_reqs:
            self.cached[new.req_id] = new.num_computed_tokens
        for name in scheduled.num_scheduled_tokens:
            request = scheduler.requests.get(name)
            at = output.req_id_to_index.get(name)
            if request is None or at is None or not output.sampled_token_ids:
                continue
            new = {"prompt": list(request.prompt_token_ids), "steps": [], "cached": 0, "moved": False}
            own = self.requests.setdefault(name, new)
            own["moved"] |= self.places.setdefault(name, at) != at
            self.places[name] = at
            own["cached"] = self.cached.get(name, 0)
            own["preempted"] = request.num_preemptions
            gained = list(map(int, output.sampled_token_ids[at]))
            if gained:
                drafts = list(scheduled.scheduled_spec_decode_tokens.get(name, ()))
                own["steps"].append((request.num_tokens - 1, drafts, gained))
