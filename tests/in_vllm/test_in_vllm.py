"""Our drafter in vLLM on CPUs gives the texts of plain decoding, and the drafts of a replay.

The replay (`replay.py`) reads the emitted text alone. A draft that saw another request's pages, a rejected
row or another tap differs from the replay's draft, though the text stays right.
"""

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import broken
import huggingface_hub
import numpy as np
import pair
import pytest
import torch
from engine import OPTIONS
from support import DRAFTS, FROM_THE_BLOCK, drafts_of, options_of, replay_of, run
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.sampling_params import StructuredOutputsParams

from jax_bridge.vllm.patches import mask_rows
from jax_bridge.vllm.proposer import Proposer
from jax_bridge.vllm.steps import Steps, rows_for
from jax_bridge.vllm.worker import Runner, Worker
from torch_dflash.integrations.vllm import plugin

TOKENS, NEAR = 48, 0.25  # bfloat16 logits of these targets are up to 20, in steps of 0.125
PROMPTS = pair.prompts(10)
LONG = [[*pair.prompts(1, 7, 70)[0], *one] for one in pair.prompts(4, 9, 100)]
SHARED = [[*(pair.prompts(1, 5)[0] * 3)[:70], *one] for one in pair.prompts(6, 11, 20)]


def batch(prompts, **params):
    return [(prompt, {"max_tokens": TOKENS} | params) for prompt in prompts]


BATCHES = [batch(PROMPTS), batch(LONG), batch(SHARED[:1]), batch(SHARED)]
EXACT = [batch(PROMPTS[:6], max_tokens=32)]
OWN_PAGES = {"tied": [True], "groups": [True, True, False], "groups of two shapes": [False, False, True]}
SHORT = [batch(pair.prompts(24, 3, 4), max_tokens=8)]
CROWDED = [*BATCHES[1:], batch(PROMPTS[:5], max_tokens=140)]

FEW_PAGES = {"max_num_batched_tokens": 32, "num_gpu_blocks_override": 24, "enable_prefix_caching": True}


def check_texts(replay, batches, plain, drafted):
    """Asserts that greedy texts with and without drafting differ rarely, at near-ties; counts those."""
    parted = 0
    for given, ones, others in zip(batches, plain.texts, drafted.texts, strict=True):
        for (prompt, _), texts, drawn in zip(given, ones, others, strict=True):
            for text, other in zip(texts, drawn, strict=True):
                parted += text != other
                assert replay.parts_at_a_tie(prompt, text, other, NEAR)
    return parted


def counts(replay, answer, chosen=lambda request: True):
    """Sums of `Replay.compare` over the requests that are ``chosen``."""
    found = [replay.compare(request, replay.drafts) for request in answer.requests if chosen(request)]
    return [sum(column) for column in zip([0] * 6, *found, strict=True)]


def check_replay(found, least=1):
    drafts, accepted, replayed, alike, drafted, same = found
    assert drafts >= least
    assert same >= 0.9 * drafted, found
    assert alike >= 0.93 * drafts, found
    assert abs(accepted - replayed) <= 0.05 * max(replayed, 200), found


def test_texts_and_drafts_of_requests_beside_each_other():
    plain, drafted = run("tied", BATCHES, drafted=False), run("tied", BATCHES)
    assert check_texts(replay_of("tied"), BATCHES, plain, drafted) <= 2
    found = counts(replay_of("tied"), drafted)
    check_replay(found, 200)
    assert found[1] > 0.25 * found[0]  # the pair agrees, so that a wrong draft shows
    metrics = drafted.metrics
    assert metrics["vllm:spec_decode_num_drafts"] == found[0]
    assert metrics["vllm:spec_decode_num_accepted_tokens"] == found[1]
    moved = counts(replay_of("tied"), drafted, lambda request: request["moved"])
    check_replay(moved, 10)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_chunks_preemption_and_prefix_hits(async_scheduling):
    """Drafts stay right with prompts in chunks of 32, preempted requests and shared pages."""
    plain = run("tied", CROWDED, drafted=False)
    drafted = run("tied", CROWDED, async_scheduling=async_scheduling, **FEW_PAGES)
    assert check_texts(replay_of("tied"), CROWDED, plain, drafted) <= 4
    groups = {
        "preempted": lambda request: request["preempted"] > 0,
        "prefix hits": lambda request: request["cached"] > 0 and not request["preempted"],
        "moved": lambda request: request["moved"],
        "rest": lambda request: not request["cached"] and not request["preempted"] and not request["moved"],
    }
    for name, chosen in groups.items():
        found = counts(replay_of("tied"), drafted, chosen)
        assert found[0] >= 10, name
        check_replay(found)


def test_a_thousand_drafts_in_bfloat16():
    """The runs above together, within one token in twenty."""
    answers = run("tied", BATCHES), run("tied", CROWDED, async_scheduling=False, **FEW_PAGES)
    requests = [request for answer in answers for request in answer.requests]
    drafts, accepted, replayed, *_ = counts(replay_of("tied"), SimpleNamespace(requests=requests))
    assert drafts >= 1000
    assert abs(accepted - replayed) <= 0.05 * replayed


def test_several_answers_of_a_request():
    batches = [batch(PROMPTS[:3], n=2, temperature=1.0, top_k=1)]  # vLLM takes n > 1 with sampling alone
    plain = run("tied", [batch(PROMPTS[:3])], drafted=False)
    twice = [[[*texts, *texts] for texts in ones] for ones in plain.texts]
    drafted = run("tied", batches)
    check_texts(replay_of("tied"), batches, SimpleNamespace(texts=twice), drafted)
    check_replay(counts(replay_of("tied"), drafted))


FLOAT32 = {"dtype": "float32", "max_num_batched_tokens": 64, "max_model_len": 128}


def check_each(name, drafted, least=100):
    """Asserts that every draft is the replay's, and every text the float32 target's greedy one."""
    found = [0] * 6
    for request in drafted.requests:
        own = drafts, accepted, replayed, alike, tokens, same = replay_of(name).compare(
            request, drafts_of(name)
        )
        assert accepted == replayed and alike == drafts and same == tokens
        text = [token for *_, gained in request["steps"] for token in gained]
        assert replay_of(name).says_greedily(request["prompt"], text, 1e-3)
        found = [sum(both) for both in zip(found, own, strict=True)]
    assert found[0] + found[1] > least
    return found


@pytest.mark.parametrize("name", ["thirds", "narrow", "windows of 11", "heads of 64"])
def test_each_draft_of_pairs_of_other_shapes(name):
    drafts, accepted, *_ = check_each(name, run(name, EXACT, **FLOAT32))
    assert accepted > 0.2 * drafts


@pytest.mark.parametrize("name", ["dspark", "dspark of specforge", "dspark of speculators"])
def test_each_draft_of_dspark(name):
    """Each row drafts the next token, the anchor's first; no option names the number of drafts."""
    drafted = run(name, EXACT, **FLOAT32)
    drafts, accepted, *_, tokens, _ = check_each(name, drafted)
    assert tokens == pair.BLOCK * drafts and accepted > 0.2 * drafts
    plain = run(name, EXACT, drafted=False, **FLOAT32)
    assert plain.texts == drafted.texts


@pytest.mark.parametrize("name", pair.IMAGES)
def test_each_draft_of_targets_whose_config_has_images(name):
    """Read as text: with ``--language-model-only``, without which such a target is refused."""
    drafted = run(name, EXACT, **FLOAT32)
    drafts, accepted, *_ = check_each(name, drafted)
    assert accepted > 0.2 * drafts
    plain = run(name, EXACT, drafted=False, **FLOAT32)
    assert plain.texts == drafted.texts
    with pytest.raises(ValueError, match="is_multimodal_model=True.* pass --language-model-only"):
        config_of(name=name, language_model_only=False)


def test_a_target_in_fp8():
    """Its greedy texts are those without drafting; no replay rounds activations as it does."""
    plain, drafted = run("fp8", EXACT, drafted=False), run("fp8", EXACT)
    assert plain.texts == drafted.texts
    drafts, accepted, *_ = counts(replay_of("fp8"), drafted)
    assert accepted > 0.2 * drafts > 10


@pytest.mark.parametrize("name", ["groups of two shapes", "groups", "tied"])
def test_each_draft_in_float32_is_the_replays(name):
    """Each single draft agrees; two pairs have several groups of pages, one pair speculators' layout."""
    drafted = run(name, EXACT, **FLOAT32)
    check_each(name, drafted)
    own = [any(layer.startswith("draft_layer") for layer in group) for group in drafted.groups]
    assert own == OWN_PAGES[name]


@pytest.mark.parametrize("name", ["untied", "windows", "dflash2"])
def test_other_pairs(name):
    plain, drafted = run(name, BATCHES[:2], drafted=False), run(name, BATCHES[:2])
    check_texts(replay_of(name), BATCHES[:2], plain, drafted)
    check_replay(counts(replay_of(name), drafted), 50)


def test_drafts_start_from_the_raw_embedding(monkeypatch):
    """Some targets' own methods scale what they look up; drafters read the stored rows."""
    embed = Qwen3ForCausalLM.embed_input_ids
    monkeypatch.setattr(Qwen3ForCausalLM, "embed_input_ids", lambda self, *args: 8 * embed(self, *args))
    found = counts(replay_of("tied"), run("tied", BATCHES[1:2], keep=False))
    check_replay(found, 50)


def test_two_devices():
    """Tensor parallelism: one key/value head of the drafter on two devices, and two of the target's."""
    drafted = run("tied", BATCHES[:2], tensor_parallel_size=2)
    plain = run("tied", BATCHES[:2], drafted=False)
    check_texts(replay_of("tied"), BATCHES[:2], plain, drafted)
    check_replay(counts(replay_of("tied"), drafted), 50)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_nothing_is_compiled_after_the_start(monkeypatch, async_scheduling):
    """With tpu-inference's warm-up, as on a TPU; its own guard raises on a later compilation.

    The guard does not see what masks rows for grammars.
    """
    monkeypatch.setenv("SKIP_JAX_PRECOMPILE", "0")
    monkeypatch.setenv("VLLM_XLA_CHECK_RECOMPILATION", "1")
    capture, masks = Runner.capture_model, []

    def captured(self):
        capture(self)
        masks.append(mask_rows._cache_size())

    monkeypatch.setattr(Runner, "capture_model", captured)
    options = {"max_num_batched_tokens": 16, "max_model_len": 128, "max_num_seqs": 2}
    grammar = StructuredOutputsParams(regex="(w1|w2|w3|w4)+")
    batches = [batch(PROMPTS[:2], max_tokens=8), batch(PROMPTS[:2], max_tokens=8, structured_outputs=grammar)]
    run("tied", batches, async_scheduling=async_scheduling, skip_tokenizer_init=False, **options)
    assert mask_rows._cache_size() == masks[0] > 0


def test_sampled_tokens_have_the_target_distribution():
    """The second token after a prompt, a verified draft, follows the exact probabilities."""
    prompt, times = PROMPTS[0], 400
    given = [batch([prompt] * times, max_tokens=3, temperature=1.0)]
    answer = run("tied", given, max_num_seqs=64, num_gpu_blocks_override=512)
    texts = [texts[0] for texts in answer.texts[0]]
    first = Counter(text[0] for text in texts).most_common(1)[0][0]
    chosen = [text for text in texts if text[0] == first]
    _, logits = replay_of("tied").read([*prompt, first])
    expected = torch.softmax(logits[-1], -1)
    top = expected.argmax().item()
    share, wanted = sum(text[1] == top for text in chosen) / len(chosen), expected[top].item()
    spread = (wanted * (1 - wanted) / len(chosen)) ** 0.5
    assert abs(share - wanted) < 4 * spread + 0.01, (share, wanted, len(chosen))


BROKEN_PAIR = {
    "window_left_out": "windows",
    "head_that_is_the_embedding": "untied",
    "last_group_in_place_of_the_drafts": "groups",
    "head_dim_by_division": "groups",  # the one pair whose quotient is another
    "rejected_rows_kept_as_context": "apart",
    "block_that_is_causal": "apart",
    "anchor_row_that_drafts_nothing": "dspark",
}


def check_short(answer):
    """Checks short contexts, where one row weighs much; bfloat16 changes some drafts from all tokens."""
    *_, drafted, same = found = counts(replay_of("apart"), answer)
    assert same >= 0.85 * drafted > 0, found


def test_drafts_from_all_tokens():
    check_short(run("apart", SHORT))


def watch_pages(patch):
    """Collects rows of the drafter's pages that a step changed and must not write."""
    prepare, propose = Proposer.prepare_inputs, Proposer.propose
    strange, step = [], []

    def preparing(self, metadata, *args):
        *_, rejected, live = args
        starts, lengths, rejected = map(np.asarray, (metadata.query_start_loc, metadata.seq_lens, rejected))
        table, size = self.runner.input_batch.block_table, self.runner.cache_config.block_size
        before = {index: np.array(self.runner.kv_caches[index]) for _, index in self.places()}
        may = {index: set() for index in before}
        for request in range(int(np.asarray(live)[0])):
            ends = lengths[request], lengths[request] - rejected[request]
            for p in range(ends[0] - (starts[request + 1] - starts[request]), ends[1]):
                for group, index in self.places():
                    may[index].add((table[group].get_cpu_tensor()[request, p // size], p % size))
        step[:] = before, may
        return prepare(self, metadata, *args)

    def watching(self, **named):
        kept, drafts = propose(self, **named)
        for index, before in step[0].items():
            differ = (np.array(kept[index]) != before).reshape(*before.shape[:2], -1).any(-1)
            strange.extend(set(map(tuple, np.argwhere(differ))) - step[1][index])
        return kept, drafts

    patch.setattr(Proposer, "prepare_inputs", preparing)
    patch.setattr(Proposer, "propose", watching)
    return strange


@pytest.mark.parametrize("written", [False, True])
def test_rows_of_a_block_are_never_written(monkeypatch, written):
    """vLLM reserves room for accepted rows: rows behind them may be another request's."""
    if written:
        broken.ALL["block_rows_written"](monkeypatch)
    strange = watch_pages(monkeypatch)
    answer = run("tied", SHORT, keep=False)
    assert sum(len(request["steps"]) for request in answer.requests) > 50
    assert bool(strange) == written


@pytest.mark.parametrize("broke", [False, True])
def test_a_step_pays_for_requests_that_live(monkeypatch, broke):
    """It drafts for the next power of two of rows, and rows of no request read no page."""
    if broke:
        broken.ALL["dead_rows_with_a_length"](monkeypatch)
    draft, sizes, dead = Steps.draft_step, [], []
    propose = Proposer.propose

    def watching(self, attn_metadata, **named):
        live = self.runner.input_batch.num_reqs
        lengths = np.asarray(attn_metadata.seq_lens)
        dead.append(lengths[live:].any())
        assert lengths[:live].all()
        kept, drafts = propose(self, attn_metadata=attn_metadata, **named)
        assert drafts.shape == (len(lengths), DRAFTS) and not np.asarray(drafts)[rows_for(live) :].any()
        return kept, drafts

    def counted(self, *args, rows, **named):
        sizes.append(rows)
        return draft(self, *args, rows=rows, **named)

    monkeypatch.setattr(Steps, "draft_step", counted)
    monkeypatch.setattr(Proposer, "propose", watching)
    run("tied", [batch(PROMPTS[:11], max_tokens=6)], keep=False, max_num_seqs=16)
    assert any(dead) == broke
    assert set(sizes) <= {1, 2, 4, 8, 16} and 16 in sizes and len(sizes) == len(set(sizes))


UNSEEN = {"block_rows_written", "dead_rows_with_a_length"}
"""What the replay cannot see; tests of their own do."""


@pytest.mark.parametrize("what", sorted(broken.ALL.keys() - UNSEEN))
def test_what_is_broken_on_purpose_is_noticed(monkeypatch, what):
    name = BROKEN_PAIR.get(what, "tied")
    broken.ALL[what](monkeypatch)
    if name == "apart":
        with pytest.raises(AssertionError):
            check_short(run(name, SHORT, keep=False))
        return
    with pytest.raises((AssertionError, ValueError)) as told:  # rows of another width fit no page
        found = counts(replay_of(name), run(name, BATCHES[:2], keep=False))
        print(what, found)  # the figures of a fault that no check notices
        check_replay(found)
    print(told.value)


@pytest.mark.parametrize(
    "field, value", [("pipeline_parallel_size", 2), ("kv_cache_dtype", "fp8"), ("enable_lora", True)]
)
def test_vllms_own_configuration_is_refused_before_a_model_loads(monkeypatch, field, value):
    monkeypatch.setattr(Worker, "load_model", None)
    with pytest.raises(ValueError, match="does not support it"):
        run("tied", [], **{field: value})


def config_of(speculative=(), name="tied", **options):
    """vLLM's own configuration for a pair, with further options of its drafts."""
    given = OPTIONS | options_of(name) | options
    given["speculative_config"] = given["speculative_config"] | dict(speculative)
    return EngineArgs(**given).create_engine_config()


@pytest.mark.parametrize(
    "field, value",
    [
        ("draft_tensor_parallel_size", 1), ("kv_cache_dtype", "fp8"), ("quantization", "fp8"),
        ("max_model_len", 64), ("draft_sample_method", "probabilistic"), ("rejection_sample_method", "block"),
        ("enable_adaptive_verification", True), ("dspark_draft_topk", 4),
        ("attention_backend", "FLASH_ATTN"), ("draft_load_config", {"load_format": "auto"}),
    ],
)  # fmt: skip
def test_vllms_options_of_drafts_that_nothing_follows_are_refused(field, value):
    name = "dspark" if field in ("enable_adaptive_verification", "dspark_draft_topk") else "tied"
    with pytest.raises(ValueError, match=rf"speculative_config.{field}=.* does not support it; leave it"):
        config_of({field: value}, name, tensor_parallel_size=2)


def test_a_target_whose_class_hands_out_no_layers_is_refused(tmp_path):
    """Before a model loads; tpu-inference would say so after it has loaded one."""
    options = options_of("tied")
    shutil.copytree(options["model"], tmp_path / "target")
    pair.rewrite(tmp_path / "target", lambda config: config | {"architectures": ["StableLmForCausalLM"]})
    with pytest.raises(ValueError, match="architectures=.'StableLmForCausalLM'.* hands out no layers"):
        EngineArgs(**(OPTIONS | options | {"model": str(tmp_path / "target")})).create_engine_config()


@pytest.mark.parametrize("name", FROM_THE_BLOCK)
def test_drafters_tell_the_number_of_drafts(name):
    """By the drafter's block where no option says it; a number of the user's stays."""
    found = EngineArgs(**(OPTIONS | options_of(name))).create_engine_config()
    told = found.speculative_config
    assert (told.method, told.num_speculative_tokens) == ("dflash", drafts_of(name))
    assert found.parallel_config.worker_cls == plugin.WORKER
    assert config_of({"num_speculative_tokens": 3}, name).speculative_config.num_speculative_tokens == 3
    with pytest.raises(ValueError, match="num_speculative_tokens=10: this drafter drafts 1 to"):
        config_of({"num_speculative_tokens": 10}, name)


def test_flags_and_paths_tell_the_method_and_the_number_too(tmp_path):
    drafter = tmp_path / "a-dflash-drafter"
    drafter.symlink_to(options_of("thirds")["speculative_config"]["model"])
    model = {"model": options_of("thirds", drafted=False)["model"]}
    for given in ({"spec_model": str(drafter)}, {"speculative_config": {"model": str(drafter)}}):
        told = EngineArgs(**(OPTIONS | model | given)).create_engine_config().speculative_config
        assert (told.method, told.num_speculative_tokens) == ("dflash", 8)


def test_the_number_of_drafts_is_no_matter_of_ours_for_other_targets(monkeypatch):
    """vLLM's own words, for a target in JAX."""
    monkeypatch.setenv("MODEL_IMPL_TYPE", "flax_nnx")
    with pytest.raises(ValueError, match="`num_speculative_tokens` was not provided"):
        EngineArgs(**(OPTIONS | options_of("thirds"))).create_engine_config()


@pytest.mark.parametrize("name", ["groups of two shapes", "dspark of speculators"])
def test_a_model_in_the_layout_of_speculators_finds_its_target_and_itself(name, tmp_path, monkeypatch):
    """vLLM takes the target's hub id from the drafter's config; no other option is needed."""
    folder = tmp_path / "models--them--target"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    (folder / "snapshots").mkdir()
    (folder / "snapshots" / ("0" * 40)).symlink_to(options_of(name)["model"])
    drafter = tmp_path / "drafter"
    shutil.copytree(options_of(name)["speculative_config"]["model"], drafter)

    def renamed(config):
        config["speculators_config"]["verifier"]["name_or_path"] = "them/target"
        return config

    pair.rewrite(drafter, renamed)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    found = EngineArgs(**OPTIONS, model=str(drafter)).create_engine_config()
    assert found.model_config.model == "them/target" and found.speculative_config.model == str(drafter)
    assert found.speculative_config.num_speculative_tokens == drafts_of(name)
    assert found.parallel_config.worker_cls == plugin.WORKER


def test_the_lines_for_ray_serve_lead_to_our_worker(monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    lines = page.split("```text\n")[1].split("```")[0]
    options = options_of("tied")
    for name, own in (
        ("Qwen/Qwen3-8B", options["model"]),
        ("z-lab/Qwen3-8B-DFlash-b16", options["speculative_config"]["model"]),
        ('"tensor_parallel_size": 16', '"tensor_parallel_size": 2'),  # the devices that there are
        ('"num_speculative_tokens": 15', f'"num_speculative_tokens": {DRAFTS}'),
    ):
        assert name in lines
        lines = lines.replace(name, own)
    apps, names = [], {}
    monkeypatch.setattr("ray.serve.run", apps.append)
    exec(lines, names)
    assert len(apps) == 1
    engine = names["config"].get_engine_config()
    for name, value in engine.get_runtime_env_with_local_env_vars()["env_vars"].items():
        monkeypatch.setenv(name, value)
    assert os.environ["MODEL_IMPL_TYPE"] == "vllm"
    found = AsyncEngineArgs(**engine.get_initialization_kwargs()).create_engine_config()
    assert found.parallel_config.worker_cls == plugin.WORKER
    assert "Ray" in found.parallel_config.distributed_executor_backend.__name__


def test_an_unknown_release_may_be_tried_or_run_without_the_plug_in(monkeypatch):
    """The message names both ways, and both work."""
    monkeypatch.setattr(plugin, "version", lambda package: "0.33.0")
    with pytest.raises(ValueError, match="--additional-config .* set VLLM_PLUGINS .* register_layers"):
        config_of()
    tried = config_of(additional_config={plugin.ANY_RELEASE: True})
    assert tried.parallel_config.worker_cls == plugin.WORKER
    code = "from test_in_vllm import config_of; print('worker', config_of().parallel_config.worker_cls)"
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ["PYTHONPATH"]])
    own = os.environ | {"PYTHONPATH": paths, "VLLM_PLUGINS": "register_layers"}
    done = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True, check=False)
    said = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("worker ")]
    assert said and said[0] != plugin.WORKER, done.stderr[-4000:]
