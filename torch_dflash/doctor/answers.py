"""From a pair and prompts to a diagnosis: the target answers, and conventions are judged on its answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from torch_dflash.checks import check_counts
from torch_dflash.demo.questions import QUESTIONS
from torch_dflash.doctor.diagnosis import Diagnosis, check_judged, judge_texts
from torch_dflash.doctor.judge import Text
from torch_dflash.doctor.template import other_way, with_other_way
from torch_dflash.generation import generate
from torch_dflash.proposers.dflash.model import DFlashDraftModel
from torch_dflash.requests.prompts import pad_rows
from torch_dflash.train.answers.data import encode_conversation

SPARE = 3
"""Ids past the tokenizer's own that are tried as masks."""


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
    """Why few drafts of a pair are accepted, if few are: `judge_texts` on the target's greedy answers.

    Args:
        target: a live transformers causal LM.
        drafter: a `DFlashDraftModel`; neither is changed.
        tokenizer: the target's; with a chat template, prompts go through it.
        prompts: questions such as the pair will serve; unset: one of maths, of code and of chat.
        template_options: further variables of the chat template. Where it knows ``enable_thinking``, the
            answers to the other value are judged too, by every convention.
        max_new_tokens: of each answer.
        blocks: how many are drafted by each convention.

    Raises:
        TypeError, ValueError: the pair does not fit, so that nothing could be drafted, or there is no text.
    """
    check_judged(target, drafter)
    check_counts(max_new_tokens=max_new_tokens, blocks=blocks)
    asked = _check_prompts(list(QUESTIONS.values()) if prompts is None else prompts)
    options = dict(template_options or {})

    def ids(template: dict[str, Any]) -> list[list[int]]:
        return encoded(tokenizer, asked, template)

    def judged(template: dict[str, Any]) -> Diagnosis:
        texts = answer(target, ids(template), max_new_tokens, tokenizer)
        masks = likely_masks(target, tokenizer, texts)
        return judge_texts(target, drafter, texts, masks=masks, blocks=blocks)

    found, other = judged(options), other_way(ids, options)
    return with_other_way(found, judged(options | other), other) if other else found


def _check_prompts(prompts: Iterable[str]) -> list[str]:
    many = isinstance(prompts, Iterable) and not isinstance(prompts, str)
    asked = list(prompts) if many else []  # once: a generator has them once
    if not asked or not all(isinstance(one, str) for one in asked):
        raise TypeError(f"prompts={prompts!r}: pass a list of questions, each a str, at least one.")
    return asked


def encoded(tokenizer: Any, prompts: Sequence[str], template: dict[str, Any]) -> list[list[int]]:
    """Ids of each prompt as a user's question; ``ValueError`` where the tokenizer or its template refuses."""
    turns = ([{"role": "user", "content": prompt}] for prompt in prompts)
    try:
        return [encode_conversation(tokenizer, turn, template) for turn in turns]
    except Exception as error:  # a template may raise anything, by jinja's raise_exception too
        raise ValueError(f"prompts: the tokenizer cannot make ids of them ({error}).") from error


def answer(target: Any, prompts: list[list[int]], max_new_tokens: int, tokenizer: Any = None) -> list[Text]:
    """The target's own greedy continuation of each prompt, without the penalties that a model may ask for.

    ``tokenizer`` is for the stop strings that it may ask for.
    """
    ids, mask = pad_rows(prompts)
    place = target.device
    out: Any = generate(
        target,
        None,
        ids.to(place),
        mask.to(place),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        tokenizer=tokenizer,
        runtime="eager",
        return_dict_in_generate=True,
    )
    return [
        Text(torch.tensor([*prompt, *new]), len(prompt))
        for prompt, new in zip(prompts, out.new_tokens, strict=True)
    ]


def likely_masks(target: Any, tokenizer: Any, texts: Sequence[Text]) -> list[int]:
    """Ids that may have stood for a token to be drafted: called so, unused, or special, and in no text."""
    said = {token for text in texts for token in text.ids.tolist()}
    rows = target.get_input_embeddings().weight.shape[0]
    special = {**getattr(tokenizer, "added_tokens_encoder", {})}
    special |= dict.fromkeys(map(str, getattr(tokenizer, "all_special_tokens", ())))
    ids = {name: tokenizer.convert_tokens_to_ids(name) if at is None else at for name, at in special.items()}
    named = [at for name, at in ids.items() if "mask" in name.lower()]
    size = len(tokenizer)
    spare = [*range(size, min(rows, size + SPARE)), *([rows - 1] if rows > size else [])]
    found = dict.fromkeys([*named, *spare, *ids.values()])
    return [at for at in found if at is not None and 0 <= at < rows and at not in said]
