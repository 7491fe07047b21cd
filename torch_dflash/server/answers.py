"""Answers in OpenAI's form: the text of rows without stop strings, log-probabilities, calls, usage."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from itertools import accumulate
from typing import Any
from uuid import uuid4

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from torch_dflash.engine.outputs import acceptance_lengths
from torch_dflash.engine.slots import Handle
from torch_dflash.pieces import TextStream
from torch_dflash.runtime import RowDelta
from torch_dflash.server.bodies import Model, Refused, calling, refusal, top_logprobs
from torch_dflash.server.metrics import Metrics

log = logging.getLogger("torch_dflash")
LEAST = -9999.0
"""The logarithm that stands for that of 0, as vLLM has it: JSON has no infinity."""


class Choice:
    """One answer on its way.

    Args:
        index: its number among the choices of its request.
        prompt: the ids before it. tokenizer: the model's.
        stops: strings that end it, after ``least`` tokens.
    """

    def __init__(self, index: int, prompt: list[int], tokenizer: Any, stops: list[str], least: int):
        self.index, self.prompt, self._stops, self._least = index, prompt, stops, least
        self._stream, self._held = TextStream(tokenizer), ""
        self.tokens: list[int] = []
        self.scores: list[tuple[float, list[tuple[int, float]]]] = []
        self._rounds: list[int] = []
        self.text, self.finish, self.cut = "", "", False
        self.shown = self.scored = 0  # characters and log-probabilities that a stream has sent
        self.changed = time.perf_counter()

    def take(self, delta: RowDelta, stop_ids: tuple[int, ...]) -> int:
        """Add new tokens to ``tokens`` and ``text``; return how many they are."""
        before = len(self.tokens)
        for group in [[token] for token in delta.tokens] if self._stops else [delta.tokens]:
            self.tokens += group
            self._add(self._stream.push(group))
            if self.finish:
                break
        count = len(self.tokens) - before
        self.scores += list(zip(delta.logprobs or [], delta.top or [[]] * count, strict=False))[:count]
        self._rounds += delta.rounds
        if delta.done and not self.finish:
            self._add(self._stream.push([], final=True))
            self.text += self._held
            self.finish = self.finish or ("stop" if self.tokens[-1] in stop_ids else "length")
        return count

    def _add(self, piece: str) -> None:
        """Add text; a stop string ends it, and what may begin one waits."""
        before, held, self._held = len(self._held), self._held + piece, ""
        may, stops = len(self.tokens) >= self._least, self._stops  # a stop may begin before the least tokens
        begins = lambda one: held.find(one, max(0, before - len(one) + 1))  # noqa: E731
        if found := [at for one in stops if may and (at := begins(one)) >= 0]:
            self.finish, self.cut, held = "stop", True, held[: min(found)]
        else:
            sizes = [(one, size) for one in stops for size in range(1, min(len(one), len(held) + 1))]
            cut = len(held) - max((size for one, size in sizes if held.endswith(one[:size])), default=0)
            held, self._held = held[:cut], held[cut:]
        self.text += held

    def without_stops(self, text: str) -> str:
        """A part of the answer as far as the stop string that has ended it."""
        found = [at for one in self._stops if self.cut and (at := text.find(one)) >= 0]
        return text[: min(found, default=None)]

    @property
    def kept(self) -> list[int]:
        """The tokens that each round has kept, the rounds behind the end left out."""
        return acceptance_lengths(self._rounds, len(self.tokens) - 1)[0]

    def drafted(self, handle: Handle) -> int:
        """Tokens that were drafted in the rounds of `kept`."""
        widths = dict(handle.service.progress.widths) if handle.service else {}  # another thread may add one
        drafts = sum((width - 1) * count for width, count in widths.items())
        kept = self.kept
        return max(round(drafts * len(kept) / max(sum(widths.values()), 1)), sum(kept) - len(kept))


class Answers:
    """All choices of one request; made in the event loop.

    Args:
        body: the request's, checked. model: whose answers.
        prompts: ids, each as often as its choices.
    """

    def __init__(self, body: Mapping[str, Any], model: Model, prompts: list[list[int]], metrics: Metrics):
        self._body, self._tokenizer, self._metrics = body, model.tokenizer, metrics
        self._loop, self._queue = asyncio.get_running_loop(), asyncio.Queue()
        self._chat, self._mode, self._top = "messages" in body, calling(body)[0], top_logprobs(body)
        stops, least = model.stops(body)[0], body.get("min_tokens", 0)
        self.choices = [Choice(at, ids, model.tokenizer, stops, least) for at, ids in enumerate(prompts)]
        self._prompt = sum({id(ids): len(ids) for ids in prompts}.values())
        self.handles: list[Handle] = []
        self._names: dict[int, str] = {}
        self._before = model.before
        self._arrived = time.perf_counter()
        ident = f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid4().hex}"
        self._head = {"id": ident, "created": int(time.time()), "model": model.name}

    def listen(self, number: int, delta: RowDelta | None) -> None:
        """Take a row's news, in the thread that decodes."""
        self._loop.call_soon_threadsafe(self._queue.put_nowait, (number, delta, time.perf_counter()))

    def cancel(self) -> None:
        """Give all choices up that have not ended."""
        for handle in self.handles:
            handle.cancel()

    @property
    def positions(self) -> int:
        """Positions that its rows fill."""
        rows = zip(self.choices, self.handles, strict=False)
        live = [one for one, handle in rows if handle.service and not handle.done()]
        return sum(len(one.prompt) + len(one.tokens) for one in live)

    async def _reads(self) -> AsyncGenerator[Choice, None]:
        """Yield a choice that has gained something, until all have ended.

        Raises:
            Refused: a row has failed, or was given up.
        """
        self._metrics.add(prompt_tokens=self._prompt)
        while not all(choice.finish for choice in self.choices):
            number, delta, now = await self._queue.get()
            choice, handle = self.choices[number], self.handles[number]
            if choice.finish:
                continue
            if delta is None:
                raise _failure(handle, self._body)
            if count := choice.take(delta, handle.row.stop_ids):
                self._metrics.gained(count, now - choice.changed, first=count == len(choice.tokens))
                choice.changed = now
            if choice.finish:
                handle.cancel()  # at a stop string the row would go on
                drafted = choice.drafted(handle)
                self._metrics.ended(choice.finish, now - self._arrived, choice.kept, drafted)
            yield choice

    async def whole(self) -> str:
        """The whole answer, as JSON."""
        try:
            async for _ in self._reads():
                pass
        finally:
            self.cancel()
        made = [{"index": one.index, "logprobs": self._logprobs(one)} for one in self.choices]
        choices = [head | self._end(one) for head, one in zip(made, self.choices, strict=True)]
        kind, name = (ChatCompletion, "chat.completion") if self._chat else (Completion, "text_completion")
        return self._json(kind, object=name, choices=choices, usage=self._usage())

    async def events(self) -> AsyncGenerator[str, None]:
        """The answer as server-sent events; an error is one, too."""
        usage = self._body.get("stream_options", {}).get("include_usage")
        kind, name = ChatCompletionChunk if self._chat else Completion, "text_completion"
        more: dict[str, Any] = {"object": "chat.completion.chunk" if self._chat else name}
        more |= {"usage": None} if usage else {}
        try:
            async for choice in self._reads():
                for part in self._parts(choice):
                    yield self._event(kind, **more, choices=[{"index": choice.index} | part])
            if usage:
                yield self._event(kind, **more | {"usage": self._usage()}, choices=[])
        except Exception as error:  # the status is sent already
            if not isinstance(error, Refused):
                log.error("an answer failed", exc_info=error)
                error = Refused(f"{type(error).__name__} in the server", status=500)
            yield f"data: {json.dumps(error.body)}\n\n"
        yield "data: [DONE]\n\n"

    def _parts(self, choice: Choice) -> list[dict[str, Any]]:
        """The choices of the next chunks; calls are found in whole answers, which wait for their end."""
        if self._mode and not choice.finish:
            return []
        begins, piece = not choice.shown and not choice.scored, choice.text[choice.shown :]
        logprobs = self._logprobs(choice, choice.scored)
        choice.shown, choice.scored = len(choice.text), len(choice.scores)
        if self._mode:
            end = self._end(choice)
            calls = [{"index": at} | call for at, call in enumerate(end["message"].get("tool_calls", ()))]
            delta = end["message"] | ({"tool_calls": calls} if calls else {})
            return [{"delta": delta, "logprobs": logprobs, "finish_reason": end["finish_reason"]}]
        if not self._chat:
            part = {"text": piece, "logprobs": logprobs, "finish_reason": choice.finish or None}
            return [part] if piece or logprobs or choice.finish else []
        role, found = {"role": "assistant"} if begins else {}, []
        if piece or logprobs:
            found.append({"delta": role | {"content": piece}, "logprobs": logprobs, "finish_reason": None})
            role = {}
        return found + ([{"delta": role, "finish_reason": choice.finish}] if choice.finish else [])

    def _end(self, choice: Choice) -> dict[str, Any]:
        """The text or the message of an answer, the calls in it found, and why it ended."""
        if not self._chat:
            return {"text": choice.text, "finish_reason": choice.finish}
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        try:
            calls, more = self._calls(choice)
        except Exception:  # the answer was cut, or holds no call
            calls, more = [], {}
        message |= more
        if self._body.get("parallel_tool_calls") is False:
            calls = calls[:1]
        if calls:
            made = [{"name": name, "arguments": given} for name, given in calls]
            made = [{"id": f"call_{uuid4().hex}", "type": "function", "function": one} for one in made]
            message |= {"content": more.get("content"), "tool_calls": made}
        named = self._mode.startswith("=") or choice.finish == "length"  # OpenAI says "stop" of a named one
        return {"message": message, "finish_reason": "tool_calls" if calls and not named else choice.finish}

    def _calls(self, choice: Choice) -> tuple[list[tuple[str, str]], dict[str, Any]]:
        """(name, arguments as JSON) of each call, and what else the message holds."""
        if not self._mode:
            return [], {}
        if self._mode.startswith("="):
            return [(self._mode[1:], choice.text)], {}
        if self._mode == "required":
            found = json.loads(choice.text)
            return [(found["name"], json.dumps(found["arguments"]))], {}
        options = {"prefix": choice.prompt, "tools": self._body["tools"]}
        message = dict(self._tokenizer.parse_response(choice.tokens, **options))
        if isinstance(content := message.get("content"), str):
            message["content"] = choice.without_stops(content)
        functions = [call["function"] for call in message.pop("tool_calls", None) or ()]
        return [(one["name"], json.dumps(one["arguments"])) for one in functions], message

    def _name(self, token: int) -> str:
        """A token's text within a text: at the begin of one some tokenizers leave a space out."""
        if token not in self._names:
            before = self._tokenizer.decode(self._before)
            text = self._tokenizer.decode([*self._before, token])
            alone = text.startswith(before)
            self._names[token] = text[len(before) :] if alone else self._tokenizer.decode([token])
        return self._names[token]

    def _logprobs(self, choice: Choice, since: int = 0) -> dict[str, Any] | None:
        """The log-probabilities of tokens from ``since`` on; None: nobody asked, or there are none."""
        if self._top is None or since >= len(choice.tokens):
            return None
        name, rows = self._name, list(zip(choice.tokens[since:], choice.scores[since:], strict=True))
        if self._chat:
            tops = [[_entry(name(one), q) for one, q in top[: self._top]] for _, (_, top) in rows]
            entries = [_entry(name(token), p) for token, (p, _) in rows]
            content = [one | {"top_logprobs": top} for one, top in zip(entries, tops, strict=True)]
            return {"content": content, "refusal": None}
        names = [name(token) for token in choice.tokens]
        likely: list[dict[str, float]] = [{} for _ in rows]
        for found, (_, (_, top)) in zip(likely, rows, strict=True):
            for one, q in top[: self._top]:  # parts of characters share a name
                found.setdefault(name(one) if name(one) not in found else f"token_id:{one}", max(q, LEAST))
        offsets = [*accumulate(map(len, names[:-1]), initial=0)][since:]
        found = {"tokens": names[since:], "token_logprobs": [max(p, LEAST) for _, (p, _) in rows]}
        return found | {"top_logprobs": likely if self._top else None, "text_offset": offsets}

    def _usage(self) -> dict[str, Any]:
        rows = zip(self.choices, self.handles, strict=True)
        new = sum(len(one.tokens) for one in self.choices)
        accepted = sum(sum(one.kept) - len(one.kept) for one in self.choices)
        details = {"accepted_prediction_tokens": accepted}
        details["rejected_prediction_tokens"] = sum(one.drafted(handle) for one, handle in rows) - accepted
        usage = {"prompt_tokens": self._prompt, "completion_tokens": new, "total_tokens": self._prompt + new}
        return {**usage, "completion_tokens_details": details}

    def _event(self, kind: Any, **fields: Any) -> str:
        return f"data: {self._json(kind, **fields)}\n\n"

    def _json(self, kind: Any, **fields: Any) -> str:
        return kind.construct(**self._head, **fields).model_dump_json(exclude_unset=True, warnings=False)


def _entry(name: str, p: float) -> dict[str, Any]:
    whole = "\ufffd" not in name  # of a part of a character the bytes are not told
    return {"token": name, "logprob": max(p, LEAST), "bytes": list(name.encode()) if whole else None}


def _failure(handle: Handle, body: Mapping[str, Any]) -> Refused:
    """Why a row ended without an end of its text."""
    error = None if handle.cancelled() else handle.exception()
    if isinstance(error, ValueError):  # no token was left to pick
        return refusal(error, body)
    if error is None:
        return Refused("the request was given up", status=503)
    return Refused(f"decoding failed: {type(error).__name__}", status=500)
