"""Which configurations of vLLM the plug-in takes, leaves alone or refuses; vLLM itself is not here."""

import sys
from importlib.metadata import PackageNotFoundError
from types import ModuleType, SimpleNamespace

import pytest

from torch_dflash.integrations.vllm import plugin
from torch_dflash.integrations.vllm.refusals import refuse


def config(**changed):
    """What the plug-in reads of vLLM's configuration; ``part__field`` changes one field."""
    parts = {
        "speculative_config": {
            "method": "dflash",
            "num_speculative_tokens_per_batch_size": None,
            "draft_model_config": SimpleNamespace(
                hf_config=SimpleNamespace(layer_types=["full_attention", "sliding_attention"]),
                model_arch_config=SimpleNamespace(architectures=["DFlash2DraftModel"]),
            ),
        },
        "model_config": {"use_mla": False, "is_hybrid": False, "uses_mrope": False},
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
    "speculative_config__method": "dspark",
    "parallel_config__pipeline_parallel_size": 2,
    "parallel_config__decode_context_parallel_size": 2,
    "parallel_config__prefill_context_parallel_size": 2,
    "parallel_config__data_parallel_size": 2,
    "sharding_config__total_dp_size": 2,
    "cache_config__cache_dtype": "fp8",
    "lora_config": SimpleNamespace(),
    "model_config__use_mla": True,
    "model_config__is_hybrid": True,
    "model_config__uses_mrope": True,
    "model_config__is_multimodal_model": True,
    "kv_transfer_config": SimpleNamespace(),
    "additional_config": {"enable_continue_decode": True},
    "speculative_config__num_speculative_tokens_per_batch_size": [(1, 2)],
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_was_not_tested_is_refused_by_name(field):
    with pytest.raises(ValueError, match=field.rpartition("__")[2]) as error:
        refuse(config(**{field: REFUSED[field]}))
    assert "does not support it; " in str(error.value)


def test_what_was_tested_is_not():
    refuse(config())
    refuse(config(cache_config__cache_dtype="bfloat16"))


@pytest.fixture
def vllm(monkeypatch):
    """vLLM with a platform that counts configurations; ``versions`` and ``impl`` may be changed."""

    class Platform:
        seen = []

        @classmethod
        def check_and_update_config(cls, vllm_config):
            cls.seen.append(vllm_config)

    found = SimpleNamespace(
        platform=Platform, impl="vllm", versions={"tpu-inference": "0.32.0", "vllm-tpu": "0.32.0+local"}
    )
    modules = {
        "vllm": {},
        "vllm.platforms": {"current_platform": Platform()},
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
    assert drafter.hf_config.layer_types is None  # for which vLLM's own runner would refuse the drafter
    assert drafter.model_arch_config.architectures == ["DFlashDraftModel"]


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


def test_an_unknown_release_is_named(vllm):
    vllm.versions["tpu-inference"] = "0.33.0"
    with pytest.raises(ValueError, match=r"tpu-inference 0.33.0: .* knows tpu-inference 0.32.0; install"):
        checked(vllm, config())
    vllm.platform.seen.clear()
    assert checked(vllm, config(speculative_config=None)) == "theirs"


def test_without_tpu_inference_nothing_is_touched(vllm):
    del vllm.versions["tpu-inference"]
    assert checked(vllm, config()) == "theirs"
