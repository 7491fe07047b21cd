"""The entry point: after vLLM's platform has read a configuration, name our worker or refuse."""

# pyright: reportMissingImports=false
from __future__ import annotations

import logging
import re
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

from torch_dflash.integrations.vllm.drafter import check_drafts, check_logits, most_drafts
from torch_dflash.integrations.vllm.refusals import FIELDS, refuse
from torch_dflash.proposers.checkpoints import load_drafter_config

KNOWN = {"tpu-inference": ("0.32.0",), "vllm-tpu": ("0.32.0",)}
"""The releases whose inner classes the plug-in extends; each was tested (`make test-vllm`)."""
ANY_RELEASE = "torch_dflash_any_release"
"""The key of vLLM's ``additional_config`` that admits other releases, such as nightlies."""
WORKER = "jax_bridge.vllm.worker.Worker"
METHODS = "dflash", "dspark"
"""vLLM's methods whose drafters we load."""
_MARK = "__torch_dflash__"


def register() -> None:
    """Watch the configurations of vLLM on TPU; without tpu-inference do nothing. May run many times.

    A configuration is ours if a PyTorch target (``MODEL_IMPL_TYPE=vllm``) drafts by one of `METHODS`. vLLM
    then builds our worker in place of its own, and the process refuses requests with `FIELDS`. Any other
    configuration stays as it is.
    """
    try:
        version("tpu-inference")
    except PackageNotFoundError:
        return
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    platform: Any = type(current_platform)
    update, validate = platform.check_and_update_config, platform.validate_request
    if hasattr(update.__func__, _MARK):
        return

    @wraps(update.__func__)
    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        update.__func__(cls, vllm_config)
        if is_ours(vllm_config):
            if not vllm_config.additional_config.get(ANY_RELEASE):
                check_releases()
            refuse(vllm_config)
            config = drafter_config(vllm_config.speculative_config.draft_model_config)
            check_drafts(config, vllm_config.speculative_config.num_speculative_tokens)
            check_logits(config, vllm_config.model_config.hf_text_config)
            take_over(vllm_config)
            cls.validate_request = classmethod(validate_request)

    @wraps(validate.__func__)
    def validate_request(cls: Any, processed_inputs: Any, params: Any) -> None:
        from vllm.exceptions import VLLMValidationError  # status 400

        for field, words in FIELDS.items():
            if (value := getattr(params, field, None)) is not None:
                raise VLLMValidationError(f"{field}={value}: {words}; leave it out.", parameter=field)
        validate.__func__(cls, processed_inputs, params)

    create = EngineArgs.create_speculative_config

    @wraps(create)
    def create_speculative_config(self: Any, target_model_config: Any, *args: Any, **kwargs: Any) -> Any:
        fill_in(self, target_model_config)
        return create(self, target_model_config, *args, **kwargs)

    setattr(check_and_update_config, _MARK, True)
    platform.check_and_update_config = classmethod(check_and_update_config)
    EngineArgs.create_speculative_config = create_speculative_config


def fill_in(given: Any, target: Any) -> None:
    """Put the number of drafts of the drafter's block where ``EngineArgs`` of ours leave it out."""
    from tpu_inference.models.common.model_loader import resolve_model_impl_type

    named = {name.replace("-", "_"): value for name, value in (given.speculative_config or {}).items()}
    model, method = named.get("model", given.spec_model), named.get("method", given.spec_method)
    if model is None or named.get("num_speculative_tokens", given.spec_tokens) is not None:
        return
    config = SimpleNamespace(model_config=target, load_config=SimpleNamespace(load_format=given.load_format))
    if method is None:  # vLLM derives it from the path
        method = next((one for one in METHODS if one in model.lower()), None)
    if method in METHODS and resolve_model_impl_type(config) == "vllm":
        config = drafter_config(SimpleNamespace(model=model, revision=named.get("revision")))
        drafts = most_drafts(config)
        given.speculative_config = (given.speculative_config or {}) | {"num_speculative_tokens": drafts}


def drafter_config(named: Any) -> Any:
    """The config of the drafter that vLLM's draft model names."""
    revision = {"revision": named.revision} if named.revision else {}
    return load_drafter_config(named.model, **revision)


def take_over(vllm_config: Any) -> None:
    """Name our worker, and hide from vLLM's checks of its own runners what only our proposer drafts with.

    vLLM refuses windows in a part of a drafter's layers, and DFlash2's selector. We read the drafter's
    ``config.json`` ourselves. tpu-inference has no way for DSpark, whose steps are DFlash's.
    """
    vllm_config.parallel_config.worker_cls = WORKER
    vllm_config.speculative_config.method = "dflash"
    drafter = vllm_config.speculative_config.draft_model_config
    drafter.hf_config.layer_types = None
    drafter.model_arch_config.architectures = ["DFlashDraftModel"]
    logging.getLogger("vllm.torch_dflash").info("torch-dflash drafts with %s", drafter.model)


def is_ours(vllm_config: Any) -> bool:
    """Whether a PyTorch target drafts by DFlash or DSpark."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method not in METHODS:
        return False
    from tpu_inference.models.common.model_loader import resolve_model_impl_type

    return resolve_model_impl_type(vllm_config) == "vllm"


def check_releases() -> None:
    """Raise ``ValueError`` on releases whose inner classes nobody compared with ours; .postN is none."""
    for package, known in KNOWN.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            continue  # vLLM may be built from source, under its own name
        if re.sub(r"(\.post\d+)?(\+.*)?$", "", found) not in known:
            raise ValueError(
                f"{package} {found}: torch-dflash's plug-in knows {package} {', '.join(known)}; install "
                f'"{package}=={known[-1]}", try this one with --additional-config '
                f"'{{\"{ANY_RELEASE}\": true}}', or start vLLM without the plug-in: set VLLM_PLUGINS to the "
                "names of the other plug-ins, of which tpu-inference needs register_layers."
            )
