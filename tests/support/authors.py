"""Records of the drafts of the authors' loop, transformers' own loop and ours, for comparison."""

import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import dflash.model as authors
import torch

import torch_dflash as td
from support.scripted import pad
from support.states import look
from support.tiny import MASK, make_pair, randomise
from torch_dflash.requests.prompts import prompt_chunks
from torch_dflash.requests.request import row_requests

NEW = 26
CHUNK = 16
EXACT = 1e-5  # the same computation on the same inputs
# Over a whole run each side computes the target's features itself, and random weights that let the choice of
# a token depend on the whole context also let rounding grow. A broken convention is off by more than 1e-3.
LOOP = 1e-4
PROMPTS = (37, 9, 21)  # three chunks, one, two; each with padding on the right

SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 7}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    }
}
SECOND = {"selector_rank": 12, "selector_top_k": 4, "conv_group_size": 8}
CASES = {
    "full, tied head": ("qwen3", {}),
    "full, head of its own": ("llama", {}),
    "one tap, one layer": ("qwen3", {"target_layer_ids": [1], "num_hidden_layers": 1}),
    "causal in every layer": ("llama", {"is_causal": True}),
    "sliding": ("llama", SLIDING),
    "sliding, symmetric": ("qwen3", SLIDING | {"is_causal": False}),
    "mixed": ("qwen3", MIXED),
    "mixed, symmetric, yarn": ("qwen2", MIXED | YARN | {"is_causal": False}),
    "embedding scale": ("qwen2", {"input_embedding_scale": 1.7}),
    "attention bias": ("gpt_oss", {"attention_bias": True}),
    "yarn": ("gpt_oss", YARN),
    "dflash2": ("qwen3", SECOND),
    "dflash2, sliding": ("llama", SECOND | SLIDING | {"is_causal": False}),
    "dflash2, everything": (
        "qwen2",
        SECOND
        | MIXED
        | {"is_causal": False, "conv_group_size": 16, "conv_kernel_size": 3, "selector_top_k": 7}
        | {"output_multiplier": 0.3, "final_logit_softcapping": 20.0, "input_embedding_scale": 1.7},
    ),
    "everything": (
        "llama",
        MIXED | YARN | {"attention_bias": True, "input_embedding_scale": 1.7, "num_key_value_heads": 1},
    ),
}


class Pass(NamedTuple):  # the inputs of one draft pass of one row, with the batch dimension
    noise: torch.Tensor
    context: torch.Tensor
    position: torch.Tensor


@dataclass
class Run:
    """One row's generation: tokens after the prompt, acceptance lengths, and by each round's first position
    the hidden states that drafted [W-1, H] and the drafts [W-1]. ``passes``: see `Pass`."""

    text: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    drafts: dict[int, list[int]] = field(default_factory=dict)
    passes: list[Pass] = field(default_factory=list)


def prompts() -> list[list[int]]:
    # A seed that keeps the two best logits far apart in all cases, so that no other rounding flips a
    # choice: 0.03 in the targets; in the drafts 50 times the difference between the loops.
    generator = torch.Generator().manual_seed(6)
    return [torch.randint(0, MASK, (length,), generator=generator).tolist() for length in PROMPTS]


class Case:  # a pair, the authors' drafter read from what ours saved, and the authors' runs on every prompt
    def __init__(self, folder, family: str, overrides: dict):
        self.target, self.drafter = make_pair(family, agree=8.0, **overrides)
        randomise(self.drafter, seed=1, gain=1.2)  # so that its own rounding does not grow beyond EXACT
        self.drafter.save_pretrained(folder)
        self.folder = folder
        self.theirs = getattr(authors, type(self.drafter).__name__).from_pretrained(folder).eval()
        self.runs = [authors_run(self, prompt, NEW) for prompt in prompts()]


def authors_run(case: Case, prompt: list[int], new: int) -> Run:
    """``dflash_generate`` on one prompt. Where the cap narrows its block, the pass is not recorded."""
    run, model, width = Run(), case.theirs, case.drafter.config.block_size

    def record(module, args, kwargs, hidden):
        position = kwargs["position_ids"]
        if kwargs["noise_embedding"].shape[1] == width:
            run.hidden[int(position[0, -width])] = hidden[0, 1:].clone()
            run.passes.append(Pass(kwargs["noise_embedding"], kwargs["target_hidden"], position))

    def compute_logits(hidden, head):
        logits = type(model).compute_logits(model, hidden, head)
        if hidden.shape[1] == width - 1:
            run.drafts[max(run.hidden)] = logits[0].argmax(dim=-1).tolist()
        return logits

    def propose(hidden, *given):
        tokens, *rest = type(model).propose(model, hidden, *given)
        if hidden.shape[1] == width - 1:
            run.drafts[max(run.hidden)] = tokens[0].tolist()
        return tokens, *rest

    hook = model.register_forward_hook(record, with_kwargs=True)
    model.compute_logits = compute_logits
    if isinstance(model, authors.DFlash2DraftModel):
        model.propose = propose
    timer, authors._cuda_time = authors._cuda_time, lambda: 0.0
    try:
        ids = torch.tensor([prompt])
        with as_before_5_24():
            out = authors.dflash_generate(
                model, case.target, ids, new, stop_token_ids=None, return_stats=True
            )
    finally:
        authors._cuda_time = timer
        for name in {"compute_logits", "propose"} & vars(model).keys():
            delattr(model, name)
        hook.remove()
    run.text = out.output_ids[0, len(prompt) :].tolist()
    run.accepted = out.acceptance_lengths
    return run


@contextmanager
def as_before_5_24():
    """Lets the authors' loop call a cache by the older interface of transformers."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".past_key_values. is deprecated", FutureWarning)
        yield


def native_run(case: Case, prompt: list[int], new: int) -> Run:
    """transformers' own DFlash loop, with our drafter as its assistant."""
    run, width = Run(), case.drafter.config.block_size

    def record(module, args, kwargs, output):
        start = int(kwargs["position_ids"][0, -width])
        run.hidden[start] = output.last_hidden_state[0, 1:].clone()

    hook = case.drafter.register_forward_hook(record, with_kwargs=True)
    try:
        ids = torch.tensor([prompt])
        options = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": new}
        options |= {"do_sample": False, "assistant_model": case.drafter, "speculation_type": "dflash"}
        options |= {"pad_token_id": 0}
        out = case.target.generate(**options)
    finally:
        hook.remove()
    run.text = out[0, len(prompt) :].tolist()
    return run


@torch.no_grad()
def replay(case: Case, run: Run) -> dict[int, torch.Tensor]:
    """Our drafter's ``forward`` on a run's passes, on a growing cache cropped as the authors crop theirs."""
    cache, found = authors._make_cache(case.drafter.config), {}
    for noise, context, position in run.passes:
        start = int(position[0, -noise.shape[1]])
        out = case.drafter(
            noise_embeds=noise, context_hidden_states=context, position_ids=position, past_key_values=cache
        )
        authors._crop_to(cache, start)
        found[start] = out.last_hidden_state[0, 1:]
    return found


@torch.no_grad()
def authors_replay(case: Case, run: Run) -> dict[int, torch.Tensor]:
    cache, found = authors._make_cache(case.theirs.config), {}
    for noise, context, position in run.passes:
        start = int(position[0, -noise.shape[1]])
        given = {"noise_embedding": noise, "target_hidden": context, "position_ids": position}
        hidden = case.theirs(**given, past_key_values=cache, use_cache=True)
        authors._crop_to(cache, start)
        found[start] = hidden[0, 1:]
    return found


def _drafting(pair, state):
    """Hidden states before the head [B, W-1, H] and drafts [B, W-1] of the next round."""
    seen = []

    def head(hidden):
        seen.append(hidden)
        return pair.target.head(hidden)

    anchor = state.tokens.gather(1, state.length[:, None].long())[:, 0]
    draft, _ = pair.proposer.propose(state.proposer, anchor, state.length, pair.target.embed, head)
    return seen[0], draft.tokens


def _lowered(engine):
    """`_drafting` as one XLA program: ``(params, state) -> (hidden, drafts)``."""
    import jax

    import jax_bridge as jb
    from jax_bridge.programs.lower import lower, tracing

    step = jax.jit(lower(partial(engine.pair.run, _drafting)))

    def look(params, state):
        with tracing(engine.plan.matmul_precision):
            return jb.to_torch(step(params, state))

    return look


def make_engine(case: Case, runtime: str):
    """An engine for all prompts as one ragged batch, that reads after every round."""
    options = {"runtime": runtime, "batch_size": len(PROMPTS), "max_length": 96, "rounds_per_chunk": 1}
    options |= {"prefill_chunk_size": CHUNK, "filters": False}
    return td.compile(case.target, case.drafter, **options)


class Features:  # per row, the target features that the proposer got since the last reading
    def __init__(self, proposer, rows: int):
        self.rows = [[] for _ in range(rows)]
        for name in ("ingest", "observe"):
            setattr(proposer, name, self._seen(getattr(proposer, name)))

    def _seen(self, method):
        def noted(pstate, features, ids, next_ids, count):
            for row, kept in enumerate(self.rows):
                kept.append(features[row, : int(count[row])].clone())
            return method(pstate, features, ids, next_ids, count)

        return noted

    def take(self, row: int) -> torch.Tensor:
        kept, self.rows[row] = self.rows[row], []
        return torch.cat(kept)[None]


def engine_runs(case: Case, runtime: str = "eager", new: int = NEW) -> list[Run]:
    """Our loop, observed before each round. Eager runs have ``passes``: the inputs of a network with the
    features that our target computed. XLA's runs have no ``passes``, but before each round the
    state is brought to torch and gives the same drafts there."""
    engine = make_engine(case, runtime)
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None}
    request = engine.read(*pad(prompts()), options)
    rows = [row.prompt for row in request.rows]
    tensors, steps = engine.tensors(), engine.runtime
    lowered = _lowered(engine) if runtime == "xla" else None
    features = None if lowered else Features(engine.pair.proposer, len(rows))
    params = steps.refresh(tensors)
    state = steps.begin(params, row_requests(request.rows, engine.plan))
    for chunk in prompt_chunks(rows, len(rows), CHUNK, engine.plan.slots):
        state = steps.prefill(params, state, chunk)
    runs = [Run() for _ in rows]
    while not (before := look(steps, state)).done.all():
        hidden, drafts = engine.pair.run(_drafting, tensors, _in_torch(state))
        if lowered:
            found, same = lowered(params, state)
            apart, size = (found - hidden).abs().max(), hidden.abs().max()  # XLA's sums have another order
            assert apart < EXACT * size and torch.equal(same, drafts)
            hidden = found
        for row, run in enumerate(runs):
            if not before.done[row]:
                start = int(before.length[row])
                run.hidden[start], run.drafts[start] = hidden[row].clone(), drafts[row].tolist()
                if features:
                    anchor = int(before.tokens[row, start])
                    run.passes.append(_pass(case, features.take(row), anchor, start))
        state = steps.advance(params, state)
        after = look(steps, state)
        for row, run in enumerate(runs):
            if not before.done[row]:
                run.accepted.append(int(after.length[row] - before.length[row]))
    for row, run in enumerate(runs):
        run.text = after.tokens[row, len(rows[row]) : after.length[row] + 1].tolist()
    return runs


def _in_torch(state):
    if isinstance(state.length, torch.Tensor):
        return state
    import jax_bridge as jb

    return jb.state_to_torch(state)


def _pass(case: Case, context: torch.Tensor, anchor: int, start: int) -> Pass:
    config = case.drafter.config
    ids = torch.tensor([[anchor, *[config.mask_token_id] * (config.block_size - 1)]])
    noise = authors._raw_input_embeddings(case.target, ids, config.input_embedding_scale)
    position = torch.arange(start - context.shape[1], start + config.block_size)[None]
    return Pass(noise.detach(), context, position)


def gap(found: dict[int, torch.Tensor], expected: dict[int, torch.Tensor]) -> float:
    """Largest difference of hidden states of rounds that begin at the same position, relative above one."""
    common = found.keys() & expected.keys()
    assert common, "no round begins where one of the other run does"
    size = {start: expected[start].abs().clamp(min=1) for start in common}
    return max(float(((found[start] - expected[start]).abs() / size[start]).max()) for start in common)


def whole(run: Run, first: int, new: int, width: int) -> list[int]:
    """The acceptance lengths of rounds that the cap could not cut."""
    kept, start = [], first
    for length in run.accepted:
        if start + width <= first + new:
            kept.append(length)
        start += length
    return kept


def around(owner, name, wrapper):
    """Mutation: ``owner.name(...)`` becomes ``wrapper(original, ...)``."""

    def mutate(patch):
        original = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))

    return mutate


def loop_gap(case) -> float:
    """Check 1: our loop against the authors', in rounds that begin at the same position. Texts are equal."""
    runs = engine_runs(case)
    assert [run.text for run in runs] == [run.text for run in case.runs]
    return max(gap(run.hidden, theirs.hidden) for run, theirs in zip(runs, case.runs, strict=True))


def network_gap(case) -> float:
    """Check 2: our pinned `forward` on the inputs of the authors' network."""
    return max(gap(replay(case, run), run.hidden) for run in case.runs)
