"""Stage 1, regenerate: the target answers the prompts, by plain batched decoding.

A drafter imitates its target, so it is trained on the target's own answers, not a dataset's (arXiv
2602.06036, section 4.1).
"""

from __future__ import annotations

import itertools
import random
import zlib
from pathlib import Path
from typing import Any

from torch_dflash.checks import context_of
from torch_dflash.generation import generate
from torch_dflash.progress import progress_bar
from torch_dflash.requests.prompts import pad_rows
from torch_dflash.requests.row_values import default_stop_ids
from torch_dflash.storage.files import write_json
from torch_dflash.train.answers.conversations import check_some_fit, check_turns, converse
from torch_dflash.train.answers.data import Answer, Prompt, count_answers, write_answers
from torch_dflash.train.features.tensorfiles import TargetFingerprint
from torch_dflash.train.options import RegenerateOptions
from torch_dflash.train.stages import open_stage


def regenerate(target, tokenizer, prompts: list[Prompt], directory: Path, options: RegenerateOptions) -> int:
    """Answer ``prompts`` into the missing shards under ``directory``; returns the number of new answers.

    Prompts are shuffled by ``options.seed``, so any shards are a fair sample. Greedy answers ignore the
    model's repetition penalty, sampled ones follow it. ``summary.json`` counts answers and left-out turns.

    Raises:
        ValueError: no prompts, or no room for an answer.
        StageError: turns that no template joins; as of `open_stage`; a damaged shard; a full disk.
    """
    check_turns(tokenizer, prompts)
    context = context_of(target)
    if options.max_new_tokens >= context:
        raise ValueError(
            f"max_new_tokens={options.max_new_tokens}: the target's context of {context} leaves no room for "
            "a prompt; lower it."
        )
    check_some_fit(tokenizer, prompts, _longest(target, options), options.chat_template_kwargs)
    fingerprint = TargetFingerprint.of(target)
    settings = {"stage": "regenerate", "target": fingerprint.name, "target_weights": fingerprint.weights}
    settings |= {"prompts": len(prompts), "prompts_checksum": zlib.crc32(repr(prompts).encode())}
    prompts = random.Random(options.seed).sample(prompts, len(prompts))
    with open_stage(directory, settings | vars(options), "answers-*"):
        return _answer_shards(target, tokenizer, prompts, directory, options)


def _longest(target, options: RegenerateOptions) -> int:
    """Tokens of the longest allowed prompt."""
    return min(options.max_prompt_tokens, context_of(target) - options.max_new_tokens)


def _answer_shards(target, tokenizer, prompts: list[Prompt], directory: Path, options) -> int:
    starts = range(0, len(prompts), options.shard_size)
    made, answers, turns = 0, 0, 0
    with progress_bar(True, total=len(prompts), desc="regenerate", unit="prompt", smoothing=0.05) as bar:
        for index, start in enumerate(starts):
            shard = prompts[start : start + options.shard_size]
            path = directory / f"answers-{index:05}-of-{len(starts):05}.jsonl.gz"
            if path.exists():
                answers += count_answers(path)
            else:
                found = _answer_shard(target, tokenizer, shard, options, index)
                write_answers(path, found)
                made, answers = made + len(found), answers + len(found)
            turns += sum(len(prompt.turns) for prompt in shard)
            bar.update(len(shard))
            bar.set_postfix(answers=answers, left_out=turns - answers)
    write_json(directory / "summary.json", {"answers": answers, "left_out": turns - answers})
    return made


def _answer_shard(target, tokenizer, prompts: list[Prompt], options, shard: int) -> list[Answer]:
    seed = itertools.count(options.seed + shard * options.shard_size, options.batch_size)
    stops, template = default_stop_ids(target, tokenizer), options.chat_template_kwargs or {}
    batches = converse(
        tokenizer,
        prompts,
        lambda rows: answer_batch(target, rows, options, next(seed), stops),
        batch_size=options.batch_size,
        longest=_longest(target, options),
        template=template,
    )
    return [
        Answer(item.source, item.messages, item.response, template) for batch in batches for item in batch
    ]


def answer_batch(
    target, rows: list[list[int]], options: RegenerateOptions, seed: int, stops: list[int]
) -> list[list[int]]:
    """The target's answers to ragged prompts, without padding; the stop id is part of an answer."""
    ids, mask = pad_rows(rows)
    sampling: Any = {} if options.sampled else {"do_sample": False, "repetition_penalty": 1.0}
    output: Any = generate(
        target,
        None,
        ids,
        mask,
        max_new_tokens=options.max_new_tokens,
        seed=seed,
        eos_token_id=stops,
        runtime=options.runtime,
        return_dict_in_generate=True,
        **sampling,
    )
    return output.new_tokens
