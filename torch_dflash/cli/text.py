"""Prompts to ids, and ids to text on stdout as they come, never half a character."""

from __future__ import annotations

import sys
from typing import Any

import torch

from torch_dflash.cli.errors import UserError, one_line
from torch_dflash.pieces import TextStream

GREEN, RESET = "\033[32m", "\033[0m"


class Printer:
    """Writes an answer to stdout piece by piece.

    With ``colour``, accepted drafts are green; the target's own tokens are not.
    """

    def __init__(self, tokenizer: Any, colour: bool = False):
        self._text, self._colour = TextStream(tokenizer), colour

    def __call__(self, piece: list[int], drafted: list[bool] | None = None) -> None:
        """Show tokens; ``drafted``: of each, whether it was drafted (all but the last of a pass)."""
        drafted = [True] * (len(piece) - 1) + [False] if drafted is None else drafted
        for token, accepted in zip(piece, drafted, strict=False):
            text = self._text.push([token])
            sys.stdout.write(f"{GREEN}{text}{RESET}" if text and accepted and self._colour else text)
        sys.stdout.flush()

    def end(self) -> None:
        """Show the rest of the text, and end the line."""
        print(self._text.push([], final=True), flush=True)


class StdoutStreamer(Printer):
    """A `Printer` that is a streamer of transformers, whose first ``put`` brings the prompt."""

    _prompt_seen = False

    def put(self, ids: torch.Tensor) -> None:
        """Show new ids; the prompt is not shown."""
        if self._prompt_seen:
            self(ids.flatten().tolist())
        self._prompt_seen = True


def asks(messages: list[dict[str, str]]) -> bool:
    """Whether a message of a user holds a word."""
    return any(str(message["content"]).strip() for message in messages if message["role"] == "user")


def encode(
    tokenizer: Any,
    messages: list[dict[str, str]],
    *,
    raw: bool = False,
    template_options: dict[str, Any] | None = None,
) -> list[int]:
    """Prompt ids of a conversation, through the chat template if the tokenizer has one.

    Args:
        messages: chat messages; without a template, exactly one message, whose text is sent as it is.
        raw: send the text as it is even though there is a template.
        template_options: extra variables of the template, such as ``enable_thinking``.

    Raises:
        UserError: an empty prompt, or messages that only a template could join.
    """
    if not asks(messages):
        raise UserError("prompt='': it is empty; give at least one word.")
    if getattr(tokenizer, "chat_template", None) is None or raw:
        if len(messages) > 1:
            why = "--raw sends text as it is" if raw else "the tokenizer has no chat template"
            raise UserError(
                f"{len(messages)} messages (system: {messages[0]['role'] == 'system'}), but {why}; "
                "send one prompt without --system."
            )
        ids = tokenizer(messages[0]["content"])["input_ids"]
    else:
        try:
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True, **(template_options or {})
            )["input_ids"]
        except Exception as error:  # a template may raise anything, by jinja's raise_exception too
            raise UserError(
                f"messages: the tokenizer's chat template refuses them ({one_line(error)})."
            ) from None
    if not ids:
        raise UserError("prompt: the tokenizer makes no token of it; give some text.")
    return list(ids)
