"""`dflash`, for the ``custom_generate`` of transformers' ``generate``."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import ForcedBOSTokenLogitsProcessor, GenerationConfig, PreTrainedModel

from torch_dflash.checks import check_blocks
from torch_dflash.engine.outputs import GenerateOutput
from torch_dflash.generation import generate
from torch_dflash.integrations.prepared import (
    OF_SAMPLES,
    OFF,
    check_scores,
    read_prepared_criteria,
    read_processors,
)
from torch_dflash.integrations.streaming import streamer_of_caller
from torch_dflash.processors.custom import BlockProcessor, HostProcessor
from torch_dflash.processors.endings import check_decay
from torch_dflash.processors.options import TransformersCall
from torch_dflash.proposers.choose import Missing, check_drafter
from torch_dflash.requests.aliases import meant
from torch_dflash.requests.arguments import is_cache
from torch_dflash.requests.logprobs import OF_LOGITS
from torch_dflash.requests.options import OF_A_CALL, EngineOptions
from torch_dflash.requests.read import new_tokens_below
from torch_dflash.requests.refusals import refuse_unsupported
from torch_dflash.requests.row_values import stop_ids

_BOUND = (*OF_A_CALL, "seed", "streamer", "tokenizer", *OF_LOGITS)


class dflash:  # noqa: N801 - reads as the keyword it is passed for
    """Block decoding for ``target.generate(..., custom_generate=dflash(drafter))``.

    A ``streamer`` may be given to ``target.generate``, to a pipeline's call, or bound here. A ``tokenizer``
    is dropped by transformers on its way to a custom generate: bind the one that a ``response_format`` needs.

    transformers' processors, warpers and criteria are honoured as it lists them. A user's own are asked on
    the host, token by token, with ``runtime="eager"``, where nothing is drafted then; a `BlockProcessor`
    runs inside of blocks, and a `HostProcessor` that is ``pure`` too.

    Args:
        drafter: as in `generate`.
        **bound: options of an engine that `generate` takes, ``seed``, ``streamer``,
            ``tokenizer``, ``output_logprobs``, ``top_logprobs``; a call's own go first.

    Raises:
        TypeError: another keyword; ``target.generate`` itself takes the options of generation. ValueError:
            a bound value that no call could honour.
    """

    def __init__(self, drafter: Any = Missing, *called: Any, **bound: Any):
        if called:  # as transformers calls what it is given
            raise TypeError("custom_generate=dflash: pass what it makes, dflash(drafter).")
        unknown = [name for name in bound if name not in _BOUND]
        if unknown:
            raise TypeError(
                f"dflash() takes {', '.join(_BOUND)}, not {unknown[0]!r}; pass it to target.generate."
                + meant(unknown[0])
            )
        check_drafter(drafter)
        engine = {name: value for name, value in bound.items() if name in OF_A_CALL}
        EngineOptions(**engine)  # a value that no call could honour is refused here
        check_blocks(drafter, **{name: engine.get(name) for name in ("block_size", "verify_width")})
        self.drafter = drafter
        self.bound = bound

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor=None,
        stopping_criteria=None,
        generation_config: GenerationConfig | None = None,
        seed: int | list[int] | None = None,
        output_logprobs: bool | None = None,
        top_logprobs: int | None = None,
        presence_penalty: Any = None,
        frequency_penalty: Any = None,
        grammar: Any = None,
        response_format: Any = None,
        **model_kwargs: Any,
    ) -> torch.LongTensor | GenerateOutput:
        """transformers' contract: prepared ids and a resolved ``generation_config``.

        What no ``GenerationConfig`` has (``seed`` to ``response_format``) may be given to ``target.generate``
        itself; the mask comes in ``model_kwargs``.
        """
        config = generation_config or model.generation_config
        refuse_unsupported(config)
        mask: Any = model_kwargs.get("attention_mask")
        mask = torch.ones_like(input_ids) if mask is None else mask  # None stands for "all real"
        # As transformers counts them for its own processors; with inputs_embeds there is no column.
        padding = tuple((mask.cumsum(dim=1) == 0).sum(dim=1).tolist())
        call = {"seed": seed, "output_logprobs": output_logprobs, "top_logprobs": top_logprobs}
        call |= {"presence_penalty": presence_penalty, "frequency_penalty": frequency_penalty}
        call |= {"grammar": grammar, "response_format": response_format}
        call |= {"streamer": streamer_of_caller(model)}
        kept = {
            "past_key_values" if name == "cache" and is_cache(value) else name: value
            for name, value in model_kwargs.items()
        }
        bound = self.bound | {name: value for name, value in call.items() if value is not None}
        return generate(
            model,
            self.drafter,
            input_ids,
            return_dict_in_generate=bool(config.return_dict_in_generate),
            generation_config=_without_rules(config) if logits_processor is not None else config,
            num_return_sequences=1,  # transformers has repeated the rows already
            **_prepared_options(config, logits_processor, stopping_criteria, input_ids, padding),
            **(kept | {"attention_mask": mask} | bound),
        )


def _prepared_options(
    config: GenerationConfig, processors: Any, criteria: Any, input_ids: Tensor, padding: tuple[int, ...]
) -> dict[str, Any]:
    """The arguments that transformers' prepared lists stand for; without lists, the config's own."""
    rows, width = input_ids.shape
    lengths, stops, others = read_prepared_criteria(criteria or ())
    length = min(lengths or [config.max_length])
    eos = config.eos_token_id if stops is None else stops
    if processors is None:
        options, own = (
            {name: getattr(config, name) for name in ("temperature", "top_k", "top_p", "min_p")},
            [],
        )
    else:
        check_decay(config.exponential_decay_length_penalty)  # by its own name, before what was made of it
        ids = frozenset(one for row in stop_ids(eos, 1) for one in row)
        forced = any(isinstance(item, ForcedBOSTokenLogitsProcessor) for item in processors)
        options, own = read_processors(processors, TransformersCall(width, length, ids, padding, forced))
        if config.output_scores and config.return_dict_in_generate:
            check_scores(processors, config)
        if not config.do_sample and options["typical_p"] < 1:
            raise ValueError(
                "logits_processor holds TypicalLogitsWarper in a greedy call, whose likeliest token it may "
                "remove; leave it out, or pass do_sample=True."
            )
    pad = config.pad_token_id
    if pad is None and config.eos_token_id is not None:  # as transformers, whatever a criterion adds
        pad = next((int(ids[0]) for ids in stop_ids(config.eos_token_id, rows) if ids), None)
    return {
        "max_new_tokens": new_tokens_below(length, width),
        "eos_token_id": eos,
        "pad_token_id": pad,
        # To transformers an unset do_sample is greedy by now, whatever the sampling options say.
        "do_sample": config.do_sample or False,
        "processors": tuple(_as_processor(one, pad) for one in own),
        "stopping_criteria": others,
    } | {name: value for name, value in options.items() if config.do_sample or name not in OF_SAMPLES}


def _without_rules(config: GenerationConfig) -> GenerationConfig:
    """``config`` without what transformers has made processors of: their list says what is asked for."""
    config = copy.deepcopy(config)
    for name, off in OFF.items():
        setattr(config, name, off)
    return config


def _as_processor(item: Any, pad: int | None) -> Any:
    known = isinstance(item, BlockProcessor | HostProcessor)
    return item if known else HostProcessor(item, pad_token_id=pad or 0)
