"""Diagnoses a pair on the target's own answers to prompts, under two settings of the chat template."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torch_dflash.checks import check_counts
from torch_dflash.demo.questions import QUESTIONS
from torch_dflash.doctor.changes import Change
from torch_dflash.doctor.diagnosis import Diagnosis, check_judged, judge_texts
from torch_dflash.doctor.judge import Answered
from torch_dflash.doctor.tried import SURE, WEAK, Tried
from torch_dflash.generation import generate
from torch_dflash.proposers.dflash.model import DFlashDraftModel
from torch_dflash.proposers.notes import Finding
from torch_dflash.requests.prompts import pad_rows
from torch_dflash.train.answers.data import encode_conversation

SPARE = 3
"""Number of ids past the tokenizer's own that are tried as the mask."""
VARIABLES = ("enable_thinking", "thinking")
"""Names that chat templates have for the variable that turns thinking on or off."""
LONGER = 1.5
"""Factor on the acceptance length that the other answers must reach: other texts may be easier."""


def diagnose(
    target: Any,
    drafter: DFlashDraftModel,
    tokenizer: Any,
    prompts: Sequence[str] | None = None,
    *,
    template_options: dict[str, Any] | None = None,
    max_new_tokens: int = 128,
    blocks: int = 256,
) -> Diagnosis:
    """Explain why few drafts of a pair are accepted: `judge_texts` on the target's greedy answers.

    Args:
        target: a live transformers causal LM; not changed.
        drafter: a `DFlashDraftModel`; not changed.
        tokenizer: the target's; its chat template, if any, makes the prompts' ids.
        prompts: questions such as the pair will serve; unset: one each of maths, code and chat.
        template_options: further variables of the chat template. If the template reads ``enable_thinking``,
            the answers under its other value are judged too, by every convention.
        max_new_tokens: most tokens of each answer.
        blocks: number of blocks that each convention drafts.

    Raises:
        TypeError, ValueError: the pair does not fit, so it cannot draft, or there is no text.
    """
    check_judged(target, drafter)
    check_counts(max_new_tokens=max_new_tokens, blocks=blocks)
    questions = _check_prompts(list(QUESTIONS.values()) if prompts is None else prompts)
    options = dict(template_options or {})

    def ids(template: dict[str, Any]) -> list[list[int]]:
        return encoded(tokenizer, questions, template)

    def judged(template: dict[str, Any]) -> Diagnosis:
        texts = answer(target, ids(template), max_new_tokens, tokenizer)
        masks = likely_masks(target, tokenizer, texts)
        return judge_texts(target, drafter, texts, masks=masks, blocks=blocks)

    found, other = judged(options), other_way(ids, options)
    return with_other_way(found, judged(options | other), other) if other else found


def _check_prompts(prompts: Iterable[str]) -> list[str]:
    many = isinstance(prompts, Iterable) and not isinstance(prompts, str)
    questions = list(prompts) if many else []  # a generator gives its items once
    if not questions or not all(isinstance(one, str) for one in questions):
        raise TypeError(f"prompts={prompts!r}: pass a list of questions, each a str, at least one.")
    return questions


def encoded(tokenizer: Any, prompts: Sequence[str], template: dict[str, Any]) -> list[list[int]]:
    """Ids of each prompt as a user's question; ``ValueError`` if the tokenizer or template refuses one."""
    turns = ([{"role": "user", "content": prompt}] for prompt in prompts)
    try:
        return [encode_conversation(tokenizer, turn, template) for turn in turns]
    except Exception as error:  # a template may raise any class, also by jinja's raise_exception
        raise ValueError(f"prompts: the tokenizer cannot make ids of them ({error}).") from error


def answer(
    target: Any, prompts: list[list[int]], max_new_tokens: int, tokenizer: Any = None
) -> list[Answered]:
    """The target's own greedy continuation of each prompt, without the model's own penalties.

    ``tokenizer`` serves the model's own stop strings.
    """
    ids, mask = (tensor.to(target.device) for tensor in pad_rows(prompts))
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False, "tokenizer": tokenizer}
    options |= {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "return_dict_in_generate": True}
    out: Any = generate(target, None, ids, mask, runtime="eager", **options)
    pairs = zip(prompts, out.new_tokens, strict=True)
    return [Answered(torch.tensor([*prompt, *new]), len(prompt)) for prompt, new in pairs]


def likely_masks(target: Any, tokenizer: Any, texts: Sequence[Answered]) -> list[int]:
    """Ids that may be the mask: ids with "mask" in their name, unused or special ids, if no text has them."""
    in_texts = {token for text in texts for token in text.ids.tolist()}
    rows = target.get_input_embeddings().weight.shape[0]
    special = {**getattr(tokenizer, "added_tokens_encoder", {})}
    special |= dict.fromkeys(map(str, getattr(tokenizer, "all_special_tokens", ())))
    ids = {name: tokenizer.convert_tokens_to_ids(name) if at is None else at for name, at in special.items()}
    named = [at for name, at in ids.items() if "mask" in name.lower()]
    size = len(tokenizer)
    spare = [*range(size, min(rows, size + SPARE)), *([rows - 1] if rows > size else [])]
    found = dict.fromkeys([*named, *spare, *ids.values()])
    return [at for at in found if at is not None and 0 <= at < rows and at not in in_texts]


def other_way(encode: Callable[[dict[str, Any]], Any], options: dict[str, Any]) -> dict[str, Any]:
    """The variable of `VARIABLES` with a value at which ``encode(options)`` makes other prompts, or {}.

    A value that the template refuses is skipped.
    """
    own = encode(options)
    for name in VARIABLES:
        for value in (False, True):
            with suppress(ValueError):
                if encode(options | {name: value}) != own:
                    return {name: value}
    return {}


def with_other_way(here: Diagnosis, there: Diagnosis, other: dict[str, Any]) -> Diagnosis:
    """``here``, or the verdict of ``there`` on answers under ``other`` if their drafts are better.

    All conventions judged both, so a template and a field may be wrong at once.
    """
    ((name, value),) = other.items()
    mine, best = _chosen(here), _chosen(there)
    if best.length < max(WEAK, LONGER * mine.length) or not _surely_longer(best, mine):
        words = f"answers with {name}={value} come to {there.length:.2f}; ask as in training."
        note = Finding("acceptance length", f"{here.length:.2f}", words)
        return replace(here, findings=[*here.findings, note])
    change = Change(
        kind="template",
        name=f"{name}={value}",
        words=f"the drafter drafts answers with {name}={value} at {best.length:.2f} tokens a pass, and these "
        f"at {mine.length:.2f}: it was trained on such",
        fix=f"ask with {name}={value}, or train the drafter on answers like these.",
    )
    tried = [Tried((change, *one.changes), one.drafted) for one in there.tried]
    return replace(
        here,
        verdict="broken",
        changes=(change, *there.changes),
        better=there.better,
        tried=sorted([*here.tried, *tried], key=lambda one: -one.nats),
    )


def _chosen(found: Diagnosis) -> Tried:
    return next(one for one in found.tried if one.changes == found.changes)


def _surely_longer(one: Tried, other: Tried) -> bool:
    # Welch's standard error, for the blocks are of different texts.

    def error(accepted: Tensor) -> float:
        return float(accepted.double().var() / max(1, len(accepted))) if len(accepted) > 1 else float("inf")

    noise = (error(one.drafted.accepted) + error(other.drafted.accepted)) ** 0.5
    return one.length - other.length >= SURE * noise and one.length > other.length
