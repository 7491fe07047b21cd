"""The plug-in of vLLM, and drafts over the pages of tpu-inference."""

import json
import re
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support import tiny
from transformers import DynamicCache

from jax_bridge.vllm.pages import ROWS_AT_ONCE, as_rows, attend_block, attend_in_turn, write_rows
from jax_bridge.vllm.patches import of_each_temperature
from jax_bridge.vllm.steps import rows_for
from torch_dflash.integrations.vllm import plugin
from torch_dflash.integrations.vllm.drafter import PagedDrafter, check_logits
from torch_dflash.integrations.vllm.refusals import refuse
from torch_dflash.ops.attention import KeyValue, grouped_attention, visible


def config(**changed):
    """The fields of vLLM's configuration that the plug-in reads; ``part__field`` changes one field."""
    parts = {
        "speculative_config": {
            "method": "dflash",
            "num_speculative_tokens": 5,
            "num_speculative_tokens_per_batch_size": None,
            "draft_model_config": SimpleNamespace(
                model="some/drafter",
                revision=None,
                hf_config=SimpleNamespace(layer_types=["full_attention", "sliding_attention"]),
                model_arch_config=SimpleNamespace(architectures=["DFlash2DraftModel"]),
            ),
        },
        "model_config": {"use_mla": False, "is_hybrid": False, "uses_mrope": False, "hf_text_config": None},
        "parallel_config": {"pipeline_parallel_size": 1, "worker_cls": "theirs"},
        "cache_config": {"cache_dtype": "auto"},
        "sharding_config": {"total_dp_size": 1},
    }
    for name, value in changed.items():
        part, _, field = name.partition("__")
        if field:
            parts[part][field] = value
    whole = {name: SimpleNamespace(**fields) for name, fields in parts.items()}
    whole |= {"lora_config": None, "kv_transfer_config": None, "additional_config": {}}
    return SimpleNamespace(**(whole | {name: value for name, value in changed.items() if "__" not in name}))


REFUSED = {
    "speculative_config__dspark_draft_topk": 4, "speculative_config__enable_adaptive_verification": True,
    "parallel_config__pipeline_parallel_size": 2,
    "parallel_config__decode_context_parallel_size": 2, "parallel_config__prefill_context_parallel_size": 2,
    "parallel_config__data_parallel_size": 2, "sharding_config__total_dp_size": 2,
    "cache_config__cache_dtype": "fp8", "lora_config": SimpleNamespace(), "model_config__use_mla": True,
    "model_config__is_hybrid": True, "model_config__uses_mrope": True,
    "model_config__is_multimodal_model": True, "kv_transfer_config": SimpleNamespace(),
    "additional_config": {"enable_continue_decode": True},
    "speculative_config__num_speculative_tokens_per_batch_size": [(1, 2)],
    "speculative_config__draft_tensor_parallel_size": 2,
    "speculative_config__draft_sample_method": "probabilistic",
    "speculative_config__rejection_sample_method": "synthetic", "speculative_config__kv_cache_dtype": "fp8",
    "speculative_config__quantization": "fp8", "speculative_config__max_model_len": 64,
    "speculative_config__attention_backend": "FLASH_ATTN",
    "speculative_config__draft_load_config": SimpleNamespace(),
    "model_config__logprobs_mode": "processed_logprobs", "model_config__enable_prompt_embeds": True,
    "model_config__max_logprobs": -1, "model_config__logits_processors": ["x:y"],
    "cache_config__kv_offloading_size": 0.1, "speculative_config__moe_backend": "triton",
    "speculative_config__code_revision": "x", "speculative_config__disable_padded_drafter_batch": True,
}  # fmt: skip


@pytest.mark.parametrize("field", REFUSED)
def test_what_was_not_tested_is_refused_by_name(field):
    with pytest.raises(ValueError, match=field.rpartition("__")[2]) as error:
        refuse(config(**{field: REFUSED[field]}))
    assert "does not support it; " in str(error.value)


def test_what_was_tested_is_not():
    refuse(config())
    refuse(config(cache_config__cache_dtype="bfloat16"))
    ranks = {"parallel_config__tensor_parallel_size": 4, "speculative_config__draft_tensor_parallel_size": 4}
    refuse(config(**ranks))


def test_targets_with_images_are_read_as_text_alone():
    images = {"model_config__is_multimodal_model": True}
    images |= {"model_config__hf_config": SimpleNamespace(model_type="gemma4")}
    with pytest.raises(ValueError, match="pass --language-model-only"):
        refuse(config(**images, model_config__multimodal_config=SimpleNamespace(language_model_only=False)))
    text = {"model_config__multimodal_config": SimpleNamespace(language_model_only=True)}
    refuse(config(**images | text))
    images |= {"model_config__hf_config": SimpleNamespace(model_type="muse_glimmer")}
    with pytest.raises(ValueError, match=r"model_type='muse_glimmer'.* were compared"):
        refuse(config(**images | text))


@pytest.mark.parametrize("adds", ["markov_rank", "selector_rank"])
def test_a_drafter_that_adds_to_logits_behind_the_targets_cap_is_refused(adds):
    capped, own = SimpleNamespace(final_logit_softcapping=30.0), {"markov_rank": 0, "own_head": False}
    with pytest.raises(ValueError, match="final_logit_softcapping=30.0 in the target: .* a head of its own"):
        check_logits(SimpleNamespace(**own | {adds: 8}), capped)
    check_logits(SimpleNamespace(**own), capped)
    check_logits(SimpleNamespace(**own | {adds: 8, "own_head": True}), capped)
    check_logits(SimpleNamespace(**own | {adds: 8}), SimpleNamespace(final_logit_softcapping=None))


@pytest.fixture
def vllm(monkeypatch):
    """vLLM with a platform that counts configurations; ``versions`` and ``impl`` may be changed."""

    class Platform:
        seen, asked = [], []

        @classmethod
        def check_and_update_config(cls, vllm_config):
            cls.seen.append(vllm_config)

        @classmethod
        def validate_request(cls, processed_inputs, params):
            cls.asked.append(params)

    class Refused(Exception):
        def __init__(self, message, parameter):
            super().__init__(message)
            self.parameter = parameter

    class EngineArgs:
        load_format, speculative_config = "auto", None
        spec_model = spec_method = spec_tokens = None

        def create_speculative_config(self, target_model_config, target_parallel_config):
            return self.speculative_config

    versions = {"tpu-inference": "0.32.0", "vllm-tpu": "0.32.0+local"}
    found = SimpleNamespace(
        args=EngineArgs, platform=Platform, refused=Refused, impl="vllm", versions=versions
    )
    modules = {
        "vllm": {},
        "vllm.engine": {},
        "vllm.engine.arg_utils": {"EngineArgs": EngineArgs},
        "vllm.platforms": {"current_platform": Platform()},
        "vllm.exceptions": {"VLLMValidationError": Refused},
        **dict.fromkeys(("tpu_inference", "tpu_inference.models", "tpu_inference.models.common"), {}),
        "tpu_inference.models.common.model_loader": {"resolve_model_impl_type": lambda config: found.impl},
    }
    for name, names in modules.items():
        module = ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)

    def version(package):
        if package not in found.versions:
            raise PackageNotFoundError(package)
        return found.versions[package]

    monkeypatch.setattr(plugin, "version", version)
    monkeypatch.setattr(plugin, "drafter_config", lambda named: tiny.make_pair()[1].config)
    return found


def checked(vllm, given):
    plugin.register()
    plugin.register()  # vLLM may load plug-ins several times
    vllm.platform.check_and_update_config(given)
    assert vllm.platform.seen == [given]
    return given.parallel_config.worker_cls


def test_a_torchax_target_with_dflash_gets_our_worker(vllm):
    given = config()
    assert checked(vllm, given) == "jax_bridge.vllm.worker.Worker"
    drafter = given.speculative_config.draft_model_config
    assert drafter.hf_config.layer_types is None  # vLLM's own runner would refuse the drafter for this one
    assert drafter.model_arch_config.architectures == ["DFlashDraftModel"]


def test_dspark_takes_the_way_of_dflash(vllm):
    given = config(speculative_config__method="dspark")
    assert checked(vllm, given) == plugin.WORKER and given.speculative_config.method == "dflash"


DASHED = {"model": "a/DFlash-b6", "num-speculative-tokens": 3}


@pytest.mark.parametrize(
    "given, impl, drafts",
    [
        ({"method": "dspark", "model": "some/drafter"}, "vllm", 5),
        ({"model": "a/DFlash-b6"}, "vllm", 5),
        (DASHED, "vllm", None),
        ({"model": "a/DFlash-b6"}, "flax_nnx", None),
        ({"model": "some/drafter"}, "vllm", None),
        ({"method": "ngram"}, "vllm", None),
        (None, "vllm", None),
    ],
)
def test_the_drafters_block_tells_the_number_of_drafts(vllm, given, impl, drafts):
    vllm.impl = impl
    plugin.register()
    args = vllm.args()
    args.speculative_config = given
    found = args.create_speculative_config(target_model_config=None, target_parallel_config=None)
    assert (found or {}).get("num_speculative_tokens") == drafts
    assert {name: value for name, value in (found or {}).items() if name != "num_speculative_tokens"} == (
        given or {}
    )


@pytest.mark.parametrize("live, rows", [(0, 1), (1, 1), (2, 2), (3, 4), (8, 8), (9, 16), (256, 256)])
def test_a_program_has_a_power_of_two_of_rows(live, rows):
    assert rows_for(live) == rows


@pytest.mark.parametrize(
    "given, impl",
    [
        (config(speculative_config=None), "vllm"),
        (config(speculative_config__method="eagle3"), "vllm"),
        (config(lora_config=SimpleNamespace(), speculative_config__method="ngram"), "vllm"),
        (config(), "flax_nnx"),
    ],
)
def test_any_other_configuration_stays_as_it_is(vllm, given, impl):
    vllm.impl = impl
    assert checked(vllm, given) == "theirs"


def test_the_log_says_that_the_plug_in_runs(vllm, caplog):
    with caplog.at_level("INFO", "vllm.torch_dflash"):
        checked(vllm, config(speculative_config=None))
        assert not caplog.messages
        vllm.platform.seen.clear()
        checked(vllm, config())
    assert caplog.messages == ["torch-dflash drafts with some/drafter"]


@pytest.mark.parametrize("field", ["prompt_logprobs", "allowed_token_ids", "seed"])
def test_a_request_that_would_end_the_engine_is_refused_by_its_field(vllm, field):
    bare = SimpleNamespace(prompt_logprobs=None, allowed_token_ids=None, seed=None)
    checked(vllm, config())
    vllm.platform.validate_request("prompt", bare)
    vllm.platform.validate_request("prompt", SimpleNamespace())  # of a model that generates nothing
    given = SimpleNamespace(**(vars(bare) | {field: 0}))
    with pytest.raises(vllm.refused, match=f"^{field}=0: .*; leave it out") as error:
        vllm.platform.validate_request("prompt", given)
    assert error.value.parameter == field
    assert vllm.platform.asked == [bare, SimpleNamespace()]  # vLLM's own check ran for each


def test_requests_of_any_other_configuration_are_vllms_alone(vllm):
    checked(vllm, config(speculative_config=None))
    given = SimpleNamespace(seed=1)
    vllm.platform.validate_request("prompt", given)
    assert vllm.platform.asked == [given]


@pytest.mark.parametrize("found", ["0.33.0", "0.32.0.dev20261001", "0.32.1"])
def test_an_unknown_release_is_named_and_may_be_tried(vllm, found):
    vllm.versions["tpu-inference"] = found
    words = rf"tpu-inference {found}: .* knows tpu-inference 0.32.0; install"
    with pytest.raises(ValueError, match=words) as error:
        checked(vllm, config())
    assert "register_layers" in str(error.value)  # tpu-inference needs the function for PyTorch targets
    said = re.search(r"--additional-config '(.*?)'", str(error.value))
    vllm.platform.seen.clear()
    assert said and checked(vllm, config(additional_config=json.loads(said[1]))) == plugin.WORKER
    vllm.platform.seen.clear()
    assert checked(vllm, config(speculative_config=None)) == "theirs"


def test_a_later_build_of_a_known_release_is_known(vllm):
    vllm.versions["tpu-inference"] = "0.32.0.post1"
    assert checked(vllm, config()) == plugin.WORKER


def test_without_tpu_inference_nothing_is_touched(vllm):
    del vllm.versions["tpu-inference"]
    assert checked(vllm, config()) == "theirs"


@jax.tree_util.register_dataclass
@dataclass
class Params:
    temperature: jax.Array


def test_each_verified_row_has_its_requests_temperature_before_what_filters_it():
    def filtered_first(logits, drafts, params):
        kept = jnp.where(jax.nn.softmax(logits) > 0.2, logits, -jnp.inf)
        owner = jnp.repeat(jnp.arange(len(drafts)), drafts, total_repeat_length=len(logits))
        return jax.nn.softmax(kept / params.temperature[owner][:, None])

    rows = np.log([[0.5, 0.3, 0.15, 0.05]] * 4).astype(np.float32)
    params = Params(jnp.array([0.5, -1.0, 2.0]))  # -1 stands for a greedy request
    found = of_each_temperature(filtered_first)(jnp.array(rows), jnp.array([1, 2, 1]), params)
    warm, hot = np.array([0.25, 0.09]) / 0.34, np.sqrt([0.5, 0.3, 0.15])  # the filter leaves two, and three
    # Of the last row's three the third has 0.387 of 1.866, which is over 0.2. No draft left out has 0.
    expected = [[*warm, -1, -1], [1, -1, -1, -1], [1, -1, -1, -1], [*hot / hot.sum(), -1]]
    np.testing.assert_allclose(found, expected, atol=1e-5)


GROUPS, HEADS, DIM, BLOCK = 2, 4, 16, 3
SHAPES = {"128 wide": (2 * GROUPS // 2, 2, 128), "64 wide": (GROUPS, 1, 128), "aligned": (3, 2, 128)}


def rows_of(generator, *shape):
    return generator.standard_normal(shape).astype(np.float32)


def written(pages, key, value, table, first, width):
    """``pages`` with rows at ``first`` and behind, of a sequence with the pages ``table``."""
    new = [(0, 0, as_rows(jnp.asarray(key), jnp.asarray(value), pages, width))]
    places = (jnp.array([one]) for one in (0, first, len(key)))
    return write_rows({0: pages}, new, {0: jnp.asarray(table)[None]}, *places)[0]


def paged(generator, lengths, size, shape, width):
    """Context rows of each sequence [G, L, D], and the same rows in pages in any order."""
    each = -(-max(lengths) // size) + 1
    table = generator.permutation(len(lengths) * each).reshape(len(lengths), each).astype(np.int32)
    pages = jnp.asarray(rows_of(generator, table.size, size, *shape))  # rows of other requests
    contexts = []
    for own, length in zip(table, lengths, strict=True):
        key, value = rows_of(generator, length, GROUPS, DIM), rows_of(generator, length, GROUPS, DIM)
        pages = written(pages, key, value, own, 0, width)
        contexts.append((key.swapaxes(0, 1), value.swapaxes(0, 1)))
    return pages, table, contexts


@pytest.mark.parametrize("window, causal", [(None, False), (None, True), (5, False), (5, True), (700, False)])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("attend", [attend_block, attend_in_turn])
def test_a_block_sees_its_own_pages_as_a_plain_cache(window, causal, sinks, attend):
    generator = np.random.default_rng(0)
    lengths, size, width = [9, 0, ROWS_AT_ONCE + 300, 1], 4, 128
    pages, table, contexts = paged(generator, lengths, size, SHAPES["128 wide"], width)
    query = rows_of(generator, len(lengths), HEADS, BLOCK, DIM)
    key, value = (rows_of(generator, len(lengths), GROUPS, BLOCK, DIM) for _ in range(2))
    sink = rows_of(generator, HEADS) if sinks else None
    found = jax.jit(
        lambda *args: attend(*args, scale=0.3, width=width, window=window, causal=causal, sinks=sink)
    )(query, key, value, pages, table, np.array(lengths, np.int32))
    for row, (past_key, past_value) in enumerate(contexts):
        at = torch.arange(lengths[row], lengths[row] + BLOCK)[None]
        all_at = torch.arange(lengths[row] + BLOCK)[None]
        both = [
            torch.from_numpy(np.concatenate([past, own[row]], axis=1))[None]
            for past, own in ((past_key, key), (past_value, value))
        ]
        part = KeyValue(*both, visible(at, all_at, window, causal))
        wanted = grouped_attention(
            torch.from_numpy(query[row])[None], [part], 0.3, None if sink is None else torch.from_numpy(sink)
        )
        np.testing.assert_allclose(found[row], wanted[0], atol=2e-5, err_msg=f"row {row}")


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_a_row_gives_back_what_was_written(shape):
    generator, width = np.random.default_rng(1), 64 if shape == "64 wide" else 128
    pages, table, contexts = paged(generator, [6], 4, SHAPES[shape], width)
    query = np.zeros((1, HEADS, 1, DIM), np.float32)  # all rows weigh alike
    own = np.zeros((1, GROUPS, 1, DIM), np.float32)
    found = attend_block(query, own, own, pages, table, np.array([6]), scale=1.0, width=width)
    wanted = np.repeat(contexts[0][1].sum(1) / 7, HEADS // GROUPS, axis=0)
    np.testing.assert_allclose(found[0, 0], wanted, atol=1e-5)


@pytest.mark.parametrize("size", [4, 16, 24])
def test_only_rows_that_count_are_written(size):
    """Two sequences stand side by side; the rest of each page stays as it was."""
    generator = np.random.default_rng(2)
    pages, table = jnp.ones((8, size, *SHAPES["128 wide"])), jnp.array([[3, 0, 6], [5, 1, 7]])
    rows = rows_of(generator, 11, GROUPS, DIM)
    new = [(0, 0, as_rows(jnp.asarray(rows), jnp.asarray(rows), pages, 128))]
    source, first, count = jnp.array([0, 6]), jnp.array([size - 2, 1]), jnp.array([4, 3])
    after = write_rows({0: pages}, new, {0: table}, source, first, count)[0]
    expected = np.array(pages)
    for sequence in range(2):
        for row in range(int(count[sequence])):
            at = int(first[sequence]) + row
            expected[table[sequence, at // size], at % size] = new[0][2][int(source[sequence]) + row]
    np.testing.assert_array_equal(after, expected)


def test_the_layout_is_that_of_the_target_kernel():
    """tpu-inference's ``merge_kv``: heads in order, each key before its value."""
    key, value = np.ones((1, GROUPS, 128), np.float32), np.full((1, GROUPS, 128), 2, np.float32)
    pages = written(jnp.zeros((1, 1, GROUPS * 2, 1, 128)), key, value, np.array([0]), 0, 128)
    assert pages[0, 0, :, 0, 0].tolist() == [1, 2, 1, 2]


@pytest.mark.parametrize("kind", ["plain", "windows", "dflash2", "dspark"])
@torch.no_grad()
def test_drafts_over_pages_are_those_of_a_growing_cache(kind):
    """Context rows come in two pieces, as in a chunked prefill; the growing cache gets them at once."""
    options = {
        "plain": {},
        "windows": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
        "dflash2": {"selector_rank": 8, "selector_top_k": 4, "conv_group_size": 8},
        "dspark": {"markov_rank": 4, "sample_from_anchor": True},
    }[kind]
    target, drafter = tiny.make_pair(agree=8.0, **options)
    module, count = PagedDrafter(drafter, 4), len(drafter.layers)
    ids, length, size, width = torch.randint(0, 90, (1, 11)), 10, 4, 128
    features = target(ids, output_hidden_states=True).hidden_states
    features = torch.cat([features[tap + 1] for tap in drafter.config.target_layer_ids], -1)[:, :length]
    pages, table = [jnp.zeros((4, size, 2, 2, width))] * count, np.array([[2, 0, 3]], np.int32)

    def write(layer, key, value):
        pages[layer] = written(pages[layer], key.numpy(), value.numpy(), table[0], int(at[0]), width)

    for at in torch.arange(length).split(7):
        module("remember", module("project", features[0, at]), at, write)

    def attend(attention, query, key, value, scale):
        own = (rows.numpy() for rows in (query, key, value))
        options = {"window": attention.window, "causal": attention.causal, "scale": scale, "width": width}
        out = attend_block(*own, pages[attention.index], table, np.array([length]), **options)
        return torch.from_numpy(np.array(out))

    anchor, embed, head = ids[:, -1], target.get_input_embeddings(), target.get_output_embeddings()
    found = module("draft", anchor, torch.tensor([length]), attend, embed, head)
    first = int(not drafter.config.sample_from_anchor)
    block = torch.cat([anchor[:, None], torch.full((1, 3 + first), drafter.config.mask_token_id)], 1)
    noise = drafter.embed(block, embed, torch.float32)
    at = torch.arange(length + block.shape[1])[None]
    hidden = drafter(noise, features, at, cache=DynamicCache()).last_hidden_state[:, first:]
    assert found.tolist() == drafter.choose(hidden, anchor, head).tolist()


@pytest.mark.parametrize("drafts", [0, 6])
def test_more_drafts_than_were_trained_are_refused(drafts):
    words = f"num_speculative_tokens={drafts}: this drafter drafts 1 to 5 tokens"
    with pytest.raises(ValueError, match=words):
        PagedDrafter(tiny.make_pair()[1], drafts)
