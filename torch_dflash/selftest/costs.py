"""Hidden costs: compilations after warm-up, more than one host read a chunk, copied buffers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torch_dflash.engine.outputs import GenerateOutput
from torch_dflash.requests.prompts import pad_rows
from torch_dflash.runtime_kinds import RUNTIMES
from torch_dflash.selftest.backend import CHUNK, Backend, Case, prompts
from torch_dflash.selftest.report import NOT_APPLICABLE, Check, judged

# All options that a request may change without a new program.
REQUESTS: list[tuple[list[int], dict[str, Any]]] = [
    ([1], {"max_new_tokens": 5}),
    ([17, 3], {"max_new_tokens": [3, 20]}),
    ([60, 33, 16], {"max_new_tokens": 30}),
    ([9, 9, 9], {"do_sample": True, "temperature": [0.0, 0.5, 2.0], "seed": [1, -2, 2**63]}),
    ([12], {"do_sample": True, "top_k": 4, "top_p": 0.7, "min_p": 0.1, "seed": 3}),
    ([20, 5], {"eos_token_id": [[5], [6, 7, 8]]}),
]


def hidden_costs(case: Case, backend: Backend) -> Iterator[Check]:
    """Warm an engine up, send requests of every kind, and count compilations and host reads."""
    engine = case.engine("agreeing", len(prompts())).warmup()
    compiled = expected = counted = 0
    with backend.watch_reads() as reads:
        for lengths, options in REQUESTS:
            options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None} | options
            ids, mask = pad_rows([_prompt(length) for length in lengths])
            out = engine.generate(ids, mask, return_dict_in_generate=True, pad_token_id=0, **options)
            assert isinstance(out, GenerateOutput) and out.stats is not None
            compiled += out.stats.compilations
            counted += out.stats.host_reads
            expected += 1 + -(-out.stats.rounds // CHUNK)
    name = "no compilation after warm-up"
    if not RUNTIMES[backend.runtime].compiles:
        yield Check(name, NOT_APPLICABLE, "eager PyTorch compiles nothing")
    else:
        detail = f"{compiled} programs in {len(REQUESTS)} requests of other lengths, options and stop ids"
        yield judged(name, compiled == 0, detail, compilations=compiled)
    seen = counted if reads.count is None else reads.count
    yield judged(
        "one host read a chunk",
        seen == counted == expected,
        f"{seen} reads, {expected} expected (after prefill and after every {CHUNK} rounds); {reads.how}",
        reads=seen,
        expected=expected,
    )
    state = engine.start(*pad_rows(prompts()), max_new_tokens=40, do_sample=False, eos_token_id=None)
    reused, detail = backend.reuse(engine, state)
    name = "donated buffers are reused"
    yield Check(name, NOT_APPLICABLE, detail) if reused is None else judged(name, reused, detail)


def _prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, 96, (length,), generator=generator).tolist()
