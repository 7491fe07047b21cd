"""Asks conversations turn by turn in batches; each answer joins the next question's conversation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch_dflash.storage.files import StageError
from torch_dflash.train.answers.data import Messages, Prompt, encode_conversation


@dataclass(frozen=True)
class Exchange:
    """A question with its conversation, as messages and ids, and the answer's ids."""

    source: str
    messages: Messages
    ids: list[int]
    response: list[int]


def converse(
    tokenizer: Any,
    prompts: list[Prompt],
    answer: Callable[[list[list[int]]], list[list[int]]],
    *,
    batch_size: int,
    longest: int,
    template: dict[str, Any] | None = None,
) -> Iterator[list[Exchange]]:
    """Ask every prompt's turns in order; yields the exchanges batch by batch.

    A conversation ends early when its next question is beyond ``longest`` tokens.

    Args:
        answer: ids of a batch of prompts to ids of their answers.
        template: further variables of the chat template.
    """
    talks: list[tuple[Prompt, Messages]] = [(prompt, []) for prompt in prompts]
    turn = 0
    while talks:
        questions = []
        for prompt, messages in talks:
            messages = [*messages, {"role": "user", "content": prompt.turns[turn]}]
            ids = encode_conversation(tokenizer, messages, template)
            if len(ids) <= longest:
                questions.append((prompt, messages, ids))
        questions.sort(key=lambda item: len(item[2]))  # batches of like lengths pad least
        talks, turn = [], turn + 1
        for start in range(0, len(questions), batch_size):
            batch = questions[start : start + batch_size]
            responses = answer([ids for _, _, ids in batch])
            exchanges = []
            for (prompt, messages, ids), response in zip(batch, responses, strict=True):
                exchanges.append(Exchange(prompt.source, messages, ids, response))
                if turn < len(prompt.turns):
                    text = tokenizer.decode(response, skip_special_tokens=True)
                    talks.append((prompt, [*messages, {"role": "assistant", "content": text}]))
            yield exchanges


def check_turns(tokenizer: Any, prompts: list[Prompt]) -> None:
    """Raise `StageError` for prompts of several turns without a chat template to join them."""
    # Checked before decoding: the first turns' answers may take hours.
    several = [prompt for prompt in prompts if len(prompt.turns) > 1]
    if several and getattr(tokenizer, "chat_template", None) is None:
        raise StageError(
            f"{len(several)} prompts have several turns (source {several[0].source}), but the tokenizer has "
            "no chat template to join them; leave them out, or give the tokenizer a template."
        )


def check_some_fit(
    tokenizer: Any, prompts: list[Prompt], longest: int, template: dict[str, Any] | None = None
) -> None:
    """Raise ``ValueError`` unless some first question is at most ``longest`` tokens long."""
    if not prompts:
        raise ValueError("prompts=[]: pass at least one.")
    for prompt in prompts:
        ids = encode_conversation(tokenizer, [{"role": "user", "content": prompt.turns[0]}], template)
        if len(ids) <= longest:
            return
    raise ValueError(
        f"prompts: none of the {len(prompts)} is at most {longest} tokens long, the room that max_new_tokens "
        "and max_prompt_tokens leave; lower max_new_tokens or pass shorter prompts."
    )
