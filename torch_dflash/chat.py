"""`Chat`: answers a conversation; a turn reads only its new tokens."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch_dflash.checks import check_loaded
from torch_dflash.engine.engine import Engine
from torch_dflash.engine.outputs import DecodeStats
from torch_dflash.guards.processes import OfOneProcess
from torch_dflash.pieces import Piece, TextStream, pieces

Message = dict[str, Any]
Tools = Sequence[Mapping[str, Any] | Callable]
OURS = ("tokenize", "return_tensors", "return_dict", "add_generation_prompt", "continue_final_message")
"""Arguments of ``apply_chat_template`` that are not variables of a template."""


class Chat(OfOneProcess):
    """Answers conversations, each of which begins like the last one.

    Every call takes the whole conversation. Tokens that the state holds already are not read again;
    ``stats.prefilled`` counts those that were read. So an appended answer costs nothing, and an edit of an
    earlier message goes back to that message. The text is that of ``engine.generate`` on the whole
    conversation, through the tokenizer's chat template. One chat is for one thread.

    Args:
        engine: of `torch_dflash.compile`, on either runtime; one of its rows is used.
        tokenizer: the target's, with a chat template.
        template_options: extra variables of the template, such as ``{"enable_thinking": False}``.
        **options: of every answer, as in `torch_dflash.generate`. Without a length, an answer may fill the
            engine's ``max_length``.

    Attributes:
        message: the last answer, or its part so far; None before the first.
        stats: its `DecodeStats`.

    Raises:
        TypeError: ``engine`` or ``tokenizer`` is of another type. ValueError: the tokenizer has no chat
            template, or ``template_options`` holds a name of `OURS`.

    ```python
    chat = td.Chat(engine, tokenizer, do_sample=False)
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    messages.append(chat(messages))
    ```
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        *,
        template_options: Mapping[str, Any] | None = None,
        **options: Any,
    ):
        check_loaded("tokenizer", tokenizer, "AutoTokenizer.from_pretrained({})")
        if not isinstance(engine, Engine):
            raise TypeError(
                f"engine={type(engine).__name__}: pass what torch_dflash.compile(target, drafter) gives."
            )
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError(
                f"tokenizer={type(tokenizer).__name__} has no chat template; set tokenizer.chat_template, or "
                "call engine.generate with ids."
            )
        self._engine, self._tokenizer, self._options = engine, tokenizer, options
        self._template = dict(template_options or {})
        for name in OURS:
            if name in self._template:
                raise ValueError(
                    f"template_options holds {name!r}, which the chat itself says; leave it out."
                )
        self._session = engine.session()
        self.message: Message | None = None

    @property
    def stats(self) -> DecodeStats | None:
        """Statistics of the last answer."""
        return self._session.stats

    def __call__(self, messages: Sequence[Message], tools: Tools | None = None, **options: Any) -> Message:
        """The answer to ``messages``, as a message that may be appended to them; arguments as in `stream`."""
        for _ in self.stream(messages, tools, **options):
            pass
        assert self.message is not None
        return self.message

    def stream(
        self, messages: Sequence[Message], tools: Tools | None = None, **options: Any
    ) -> Iterator[Piece]:
        """Yield the answer piece by piece. It may be left at any point; ``message`` is the part so far.

        Args:
            messages: the whole conversation, each with ``role`` and ``content`` as its template reads them.
            tools: functions or JSON schemas, for the template. A tokenizer with a ``response_template`` finds
                the calls in the answer. Without one, or with a warning if the answer cannot be parsed, they
                stay in its ``content``.
            **options: override those of the chat.

        Raises:
            TypeError, ValueError: an option is not supported, or the conversation does not fit into
                ``max_length``. Raised by this call; the state of the chat does not change.
        """
        prompt = self._render(messages, tools, add_generation_prompt=True)
        options = self._options | options
        if not _has_length(options):
            options["max_new_tokens"] = self._remaining(len(prompt))
        options.setdefault("tokenizer", self._tokenizer)  # for stop strings and formats
        settled = _shared(prompt, self._render(messages, tools, add_generation_prompt=False))
        gains = self._session.gains(prompt, settled, **options)
        answer = pieces(([gain] for gain in gains), [TextStream(self._tokenizer)])
        return self._kept(answer, prompt, tools)

    def _kept(self, answer: Iterator[list[Piece]], prompt: list[int], tools: Tools | None) -> Iterator[Piece]:
        seen: list[Piece] = []
        self.message = {"role": "assistant", "content": ""}
        for (piece,) in answer:
            seen.append(piece)
            self.message = {"role": "assistant", "content": "".join(piece.text for piece in seen)}
            if piece.done and getattr(self._tokenizer, "response_template", None) is not None:
                ids = [token for piece in seen for token in piece.tokens]
                try:
                    self.message = self._tokenizer.parse_response(ids, prefix=prompt, tools=tools)
                except Exception as error:  # the answer was cut, or its JSON is invalid
                    warnings.warn(f"the answer cannot be parsed and stays text ({error})", stacklevel=2)
            yield piece

    def _render(self, messages: Sequence[Message], tools: Tools | None, **options: bool) -> list[int]:
        if not messages or not all(isinstance(one, Mapping) and "role" in one for one in messages):
            raise TypeError('messages: pass a list of {"role": ..., "content": ...}, at least one.')
        given = {"tools": None if tools is None else list(tools)} | self._template | options
        try:
            out = self._tokenizer.apply_chat_template(
                list(messages), return_tensors="pt", return_dict=True, **given
            )
        except Exception as error:  # a template may raise anything, by jinja's raise_exception too
            raise ValueError(f"messages: the tokenizer's chat template refuses them ({error}).") from error
        ids = out["input_ids"].flatten().tolist()
        if not ids:
            raise ValueError("messages: the tokenizer's chat template makes no token of them; mend either.")
        return ids

    def _remaining(self, length: int) -> int:
        remaining = self._engine.plan.capacity - length
        if remaining < 1:
            raise ValueError(
                f"messages: {length} tokens leave no room for an answer in max_length="
                f"{self._engine.plan.capacity}; leave messages out, or compile with a larger max_length."
            )
        return remaining


def _has_length(options: Mapping[str, Any]) -> bool:
    """Whether the options of a call limit the length of an answer."""
    config = options.get("generation_config")
    return any(
        value is not None
        for name in ("max_new_tokens", "max_length")
        for value in (options.get(name), getattr(config, name, None))
    )


def _shared(first: list[int], second: list[int]) -> int:
    """The number of ids that both begin with."""
    pairs = zip(first, second, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
