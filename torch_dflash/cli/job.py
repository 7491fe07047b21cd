"""Loads the pair and builds engines for every command that decodes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

import torch_dflash as td
from torch_dflash.cli.arguments import NEUTRAL, PENALTIES, longest_prompt, plainly, template_options
from torch_dflash.cli.errors import UserError, refusing
from torch_dflash.cli.loading import Loaded, load_named
from torch_dflash.cli.text import encode
from torch_dflash.progress import print_status
from torch_dflash.requests.options import LARGEST_CHUNK
from torch_dflash.requests.prompts import bucket
from torch_dflash.requests.read import read_request
from torch_dflash.requests.row_values import default_stop_ids, stop_ids
from torch_dflash.requests.rules import of_the_model
from torch_dflash.runtime_kinds import RUNTIMES

STREAMED_ROUNDS = 4  # rounds between two pieces of streamed text; fewer cost more host reads


@dataclass(frozen=True)
class Job:
    """A loaded pair, the ``options`` of every call, and the most tokens of a prompt."""

    arguments: SimpleNamespace
    loaded: Loaded
    options: dict[str, Any]
    longest_prompt: int

    @classmethod
    def load(cls, arguments: SimpleNamespace, **further: Any) -> Job:
        """Load the pair that ``arguments`` name; ``further`` options join those of every call."""
        if arguments.drafter is None:
            print_status(plainly(arguments.target, f"torch-dflash {arguments.command}"))
        options = {name: getattr(arguments, name) for name in ("dtype", "device", "block_size")}
        loaded = load_named(arguments.target, arguments.drafter, **options)
        loaded = replace(loaded, drafter=composed(arguments, loaded.drafter))
        longest = longest_prompt(arguments.max_new_tokens, loaded.target)
        options = call_options(arguments, loaded) | {name: value for name, value in further.items() if value}
        return cls(arguments, loaded, options, longest)

    def encode(self, messages: list[dict]) -> list[int]:
        """Prompt ids of ``messages`` behind the --system message."""
        if self.arguments.system is not None:
            messages = [{"role": "system", "content": self.arguments.system}, *messages]
        template = template_options(self.arguments)
        return encode(self.loaded.tokenizer, messages, raw=self.arguments.raw, template_options=template)

    def own_processors(self) -> tuple:
        """The logits rules of the model's own generation config."""
        target = self.loaded.target
        slots = max(8, *map(len, stop_ids(self.options["eos_token_id"], 1)))
        return of_the_model(target.generation_config, slots, target.get_input_embeddings().weight.shape[0])

    @property
    def streamed_rounds(self) -> int | None:
        """Rounds of a chunk when text is streamed; None: the runtime's default."""
        return STREAMED_ROUNDS if RUNTIMES[self.arguments.runtime].compiles else None

    def engine(
        self, length: int, batch_size: int, rounds_per_chunk: int | None, replicas: int = 1
    ) -> td.Engine:
        """An engine for prompts of up to ``length`` tokens; `UserError` if the options do not fit."""
        arguments, row = self.arguments, torch.zeros(1, length, dtype=torch.long)
        options = self.options | {"seed": arguments.seed, "return_dict_in_generate": True}
        with refusing(TypeError, ValueError):
            request = read_request(self.loaded.target, row, torch.ones_like(row), options)
            return td.compile(
                self.loaded.target,
                self.loaded.drafter,
                runtime=arguments.runtime,
                max_length=length + arguments.max_new_tokens,
                batch_size=batch_size,
                # A proposer that was made here has its width already.
                block_size=None if arguments.drafter == "ngram" else arguments.block_size,
                verify_width=arguments.verify_width,
                rounds_per_chunk=rounds_per_chunk,
                stop_slots=max(8, *(len(row.stop_ids) for row in request.rows)),
                filters=any(row.filters for row in request.rows),
                # Rules of other lines, too: a shorter line may need a rule that the longest does not.
                processors=(*request.processors, *self.own_processors()),
                outputs=request.logprobs.outputs,
                top_logprobs=request.logprobs.top_logprobs,
                mesh=arguments.mesh,
                replicas=replicas,
                cache=arguments.cache,
                verify=arguments.verify,
                prefill_chunk_size=min(LARGEST_CHUNK, bucket(length)),
            )


def composed(arguments: SimpleNamespace, drafter: Any) -> Any:
    """``drafter``, or the proposer that --union and --rows make of it."""
    rows, flag = arguments.rows, "--union" if arguments.union else f"--rows {arguments.rows}"
    if not arguments.union and rows is None:
        return drafter
    if not isinstance(drafter, td.DFlashDraftModel | td.Eagle3DraftModel | td.MedusaDraftModel):
        raise UserError(f"{flag}: it goes with a drafter; give a directory, a hub id or demo as --drafter.")
    if arguments.union:
        return td.Union(td.NGramProposer(), drafter, rows=rows)
    return td.TreeProposer(drafter, rows=rows)


def call_options(arguments: SimpleNamespace, loaded: Loaded) -> dict[str, Any]:
    """The options of every call but its seed."""
    options: dict[str, Any] = {
        "max_new_tokens": arguments.max_new_tokens,
        "do_sample": arguments.temperature != 0,
        "eos_token_id": [] if arguments.ignore_eos else default_stop_ids(loaded.target, loaded.tokenizer),
    }
    if options["do_sample"]:
        for name in ("temperature", *NEUTRAL):
            options[name] = getattr(arguments, name)
    options |= {name: getattr(arguments, name) for name in PENALTIES}
    if arguments.stop:
        options |= {"stop_strings": arguments.stop, "tokenizer": loaded.tokenizer}
    return {name: value for name, value in options.items() if value is not None}
