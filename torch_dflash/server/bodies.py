"""Bodies of requests: OpenAI's own types with our fields, each used, without effect, or refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Annotated, Any, Literal, Required, TypeAlias

from openai.types import chat as theirs
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as TextParams
from pydantic import ConfigDict, FailFast, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from torch_dflash.grammars.grammar import Grammar
from torch_dflash.requests.request import SAMPLING
from torch_dflash.requests.row_values import default_stop_ids

strict = with_config(ConfigDict(extra="forbid"))
MOST_STOPS = 64
GREEDY = 1e-5
"""Temperatures below this are greedy, as vLLM has it: logits divided by them leave float32."""
KINDS = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}


class FirstFault(FailFast):
    """The first fault of a list is told alone: a million of them would take half a minute."""

    def __hash__(self) -> int:  # unions hash their arms
        return id(self)


class Refused(Exception):
    """An answer in OpenAI's shape of errors: ``status``, and the ``body``."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        kind = KINDS.get(status, "invalid_request_error")
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@strict
class Message(TypedDict, total=False):
    """A message; OpenAI's own is a union of six, which tells twelve errors for one fault.

    A client may send back what it got of an answer, its empty fields, too.
    """

    role: Required[Literal["system", "developer", "user", "assistant", "tool"]]
    content: str | list[theirs.ChatCompletionContentPartTextParam] | None
    name: str
    tool_calls: list[theirs.ChatCompletionMessageFunctionToolCallParam] | None
    tool_call_id: str
    refusal: None
    annotations: None
    audio: None
    function_call: None
    parsed: Any  # the content once more, of openai's `parse`
    reasoning: str | None
    reasoning_content: str | None
    thinking: str | None


@strict
class StreamOptions(TypedDict, total=False):
    """Parts of a stream besides text."""

    include_usage: bool | None
    include_obfuscation: bool | None


Texts: TypeAlias = Annotated[list[str], FirstFault()]
Ids: TypeAlias = Annotated[list[int], FirstFault()]


class Ours(TypedDict, total=False):
    """Fields that vLLM has, too, and those of OpenAI's whose types are read otherwise here."""

    model: Required[str]
    stream: bool | None
    stream_options: StreamOptions | None
    stop: str | Texts | None
    logit_bias: dict[str, float] | None
    response_format: dict[str, Any] | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    min_tokens: int | None
    ignore_eos: bool | None
    stop_token_ids: Ids | None
    add_special_tokens: bool | None


@strict
class ChatBody(ChatParams, Ours, total=False):  # pyright: ignore
    """The body of a chat."""

    messages: Required[Annotated[list[Message], FirstFault()]]  # pyright: ignore
    tools: list[theirs.ChatCompletionFunctionToolParam] | None  # pyright: ignore
    tool_choice: str | theirs.ChatCompletionNamedToolChoiceParam | None  # pyright: ignore
    parallel_tool_calls: bool | None  # pyright: ignore
    chat_template_kwargs: dict[str, Any] | None


@strict
class TextBody(TextParams, Ours, total=False):  # pyright: ignore
    """The body of a completion."""

    prompt: Required[str | Texts | Ids | Annotated[list[Ids], FirstFault()]]  # pyright: ignore


SAME = ("frequency_penalty", "presence_penalty", "repetition_penalty")
"""Fields that are options under the same name."""
FILTERS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Fields that ask for sampling, and their values that ask for nothing."""
VARIABLES = {"documents"}
"""Arguments of transformers' ``apply_chat_template`` that are variables of a template."""
USED = {*SAME, *FILTERS, *Ours.__annotations__, *"messages prompt seed temperature n logprobs".split()}
USED |= {*"max_tokens max_completion_tokens top_logprobs tools tool_choice parallel_tool_calls".split()}
USED |= {"chat_template_kwargs"}
IDLE = {*"user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_options".split()}
IDLE |= {"prompt_cache_retention"}
"""Fields that change no text."""
REFUSED: dict[str, Any] = {"best_of": 1, "echo": False, "suffix": "", "modalities": ["text"]}
REFUSED |= {"functions": [], "function_call": "none", "audio": None, "moderation": None, "prediction": None}
REFUSED |= {"reasoning_effort": None, "verbosity": None, "web_search_options": None}
"""Fields that are refused by name, and their values besides null that ask for nothing."""
OPTIONS = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sequence_bias": "logit_bias"}
OPTIONS |= {"output_logprobs": "logprobs", "eos_token_id": "stop_token_ids", "grammar": "response_format"}
OPTIONS |= {"top_logprobs": "logprobs", "input_ids": "prompt"}
"""Options in the engine's messages, and the fields that they stand for."""
PLAIN = {"type": "text"}
"""The format of any text."""
_READERS = {kind: TypeAdapter(kind) for kind in (ChatBody, TextBody)}


def check_body(kind: Any, body: Any) -> dict[str, Any]:
    """``body`` without its nulls.

    Raises:
        Refused: an unknown or refused field, or a value of a wrong type; with the field's path.
    """
    if isinstance(body, dict):
        body = {name: value for name, value in body.items() if value is not None}
        for name in body.keys() & REFUSED.keys():
            if body[name] != REFUSED[name]:
                raise Refused(f"{name}: this server does not have it; leave it out", name)
    try:
        _READERS[kind].validate_python(body, strict=True)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        found = [(_path(body, one["loc"]), one["msg"]) for one in faults]
        where, fault = max(found, key=lambda one: len(one[0]))
        raise Refused(f"{where or 'body'}: {fault}", where or None) from None
    return body


def _path(value: Any, places: tuple[Any, ...]) -> str:
    """A field's path; pydantic's also has the arms of unions."""
    found: list[str] = []
    for place in places:
        inside = isinstance(value, list) and isinstance(place, int)  # an index, and no arm
        if inside or isinstance(value, dict) and (place in value or place == places[-1]):
            found.append(str(place))
            value = value[place] if inside or place in value else None  # missing
    return ".".join(found)


@dataclass(frozen=True)
class Model:
    """The target as bodies see it.

    ``capacity``: positions of a row. ``target``: gives the live model. ``before``: ids of any text, behind
    which a token is named.
    """

    name: str
    tokenizer: Any
    capacity: int
    target: Callable[[], Any]
    template_options: Mapping[str, Any]
    before: Sequence[int] = ()

    def prompts(self, body: Mapping[str, Any]) -> list[list[int]]:
        """The ids of a conversation, or of each prompt of a completion.

        Raises:
            Refused: the chat template or the tokenizer does not take it.
        """
        param, special = "messages" if "messages" in body else "prompt", body.get("add_special_tokens", True)
        given, mode = body[param], calling(body)[0]
        each = given if isinstance(given, list) and isinstance([*given, 0][0], str | list) else [given]
        ids = lambda text: self.tokenizer(text, add_special_tokens=special)["input_ids"]  # noqa: E731
        try:
            if param == "messages":
                found = [self._render(body, mode)]
            else:
                found = [ids(one) if isinstance(one, str) else one for one in each]
        except Exception as error:  # a template may raise anything, by jinja's raise_exception too
            raise Refused(f"{param}: the model's template or tokenizer refuses it: {error}", param) from None
        if not all(found):
            raise Refused(f"{param}: it holds no token; give some text", param)
        if not all(0 <= min(ids) and max(ids) < 2**31 for ids in found):
            raise Refused(f"{param}: it holds what is no token id", param)
        return found

    def _render(self, body: Mapping[str, Any], mode: str) -> list[int]:
        own = dict.fromkeys(("add_generation_prompt", "return_dict", "tokenize"), True)
        own |= {"tools": body["tools"] if mode else None}
        options = {**self.template_options, **body.get("chat_template_kwargs", {})}
        if barred := options.keys() & {*signature(self.tokenizer.apply_chat_template).parameters} - VARIABLES:
            raise ValueError(f"chat_template_kwargs: {min(barred)} is no variable of a template")
        messages = [_for_template(message) for message in body["messages"]]
        return self.tokenizer.apply_chat_template(messages, **options, **own)["input_ids"]

    def options(self, body: Mapping[str, Any], length: int, limit: int | None) -> dict[str, Any]:
        """The engine's options for a prompt of ``length`` tokens.

        ``limit``: new tokens where the body says nothing; None: as many as fit.

        Raises:
            Refused, ValueError: a value out of range, or fields that contradict each other.
        """
        config = self.target().generation_config
        options = {name: body[name] for name in SAME if name in body} | _sampling(body, config)
        options["max_new_tokens"] = most = self._length(body, length, limit)
        least, bias = body.get("min_tokens", 0), body.get("logit_bias", {})
        ends = [] if body.get("ignore_eos") else default_stop_ids(self.target(), self.tokenizer)
        ends = [*ends, *body.get("stop_token_ids", []), *self.stops(body)[1]]
        options["eos_token_id"] = list(dict.fromkeys(ends))
        if least > most:
            raise Refused(f"min_tokens={least}: must be at most {most}, the most tokens", "min_tokens")
        if not all(re.fullmatch("[0-9]{1,10}", token) for token in bias):
            raise Refused("logit_bias: its keys must be token ids", "logit_bias")
        biases, count = {(int(one),): float(value) for one, value in bias.items()}, top_logprobs(body)
        more = {"min_new_tokens": least, "sequence_bias": biases, "output_logprobs": count is not None}
        more |= {"top_logprobs": count, "grammar": self._grammar(body)}
        if more["grammar"] is not None and not options["eos_token_id"]:
            raise Refused("ignore_eos: a format must be able to end; leave one out", "ignore_eos")
        return options | {name: value for name, value in more.items() if value}

    def _length(self, body: Mapping[str, Any], length: int, limit: int | None) -> int:
        name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
        room = self.capacity - length
        wanted = body.get(name, room if limit is None else min(limit, room))
        if room < 1 or wanted > room:
            asked = f" and {name}={wanted}" if name in body else ""
            message = f"a prompt of {length} tokens{asked} exceed this server's {self.capacity} positions"
            param = "prompt" if "prompt" in body else "messages"
            raise Refused(message, param, "context_length_exceeded")
        if wanted < 1:
            raise Refused(f"{name}={wanted}: must be at least 1", name)
        return wanted

    def stops(self, body: Mapping[str, Any]) -> tuple[list[str], list[int]]:
        """The strings that end an answer, and the ids of those that are special tokens: no text has them."""
        given = body.get("stop", [])
        strings = [given] if isinstance(given, str) else given
        if not all(strings) or len(strings) > MOST_STOPS:
            raise Refused(f"stop: must be at most {MOST_STOPS} strings of at least a character", "stop")
        added = self.tokenizer.added_tokens_decoder
        special = {token.content: number for number, token in added.items() if token.special}
        texts = [one for one in strings if one not in special]
        return texts, [special[one] for one in strings if one in special]

    def _grammar(self, body: Mapping[str, Any]) -> Grammar | None:
        """The texts that an answer may be; None: any."""
        mode, schema = calling(body)
        given = body.get("response_format", PLAIN)
        name = "tool_choice" if mode else "response_format"
        if mode == "auto" and getattr(self.tokenizer, "response_template", None) is None:
            why = "this model's tokenizer has no response_template, which finds calls in an answer"
            raise Refused(f"tool_choice: {why}; name a function, or say required or none", name)
        if mode and given != PLAIN:
            raise Refused("tool_choice: leaves no room for response_format", name)
        try:
            if schema is not None:
                return Grammar.json_schema(schema, self.tokenizer)
            return Grammar.of_response_format(given, self.tokenizer)
        except (ValueError, TypeError, ImportError) as error:
            raise Refused(f"{name}: {error}", name) from None


def _sampling(body: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Greedy or sampled: as ``temperature`` says, else as a filter asks, else as the model's config."""
    asked = {name: body[name] for name in FILTERS if name in body}
    asked |= {"top_k": 0} if asked.get("top_k") == -1 else {}
    temperature = body.get("temperature")
    if temperature is None:
        sample = config.do_sample or any(asked[name] != FILTERS[name] for name in asked)
        temperature = (config.temperature or 1.0) if sample else 0
    for name, value in {**asked, "temperature": temperature}.items():
        SAMPLING[name].check(value)
    if temperature < GREEDY:
        return {"do_sample": False}
    own = {name: getattr(config, name, None) for name in FILTERS}
    own = {name: off if own[name] is None else own[name] for name, off in FILTERS.items()}
    return own | asked | {"do_sample": True, "temperature": temperature}


def top_logprobs(body: Mapping[str, Any]) -> int | None:
    """The likeliest ids that are asked for beside each token; None: no log-probabilities."""
    asked = body.get("logprobs", False)  # a chat's is a flag, a completion's a number
    if "top_logprobs" in body and asked is False:
        raise Refused("top_logprobs: is for logprobs=true", "top_logprobs")
    return asked if not isinstance(asked, bool) else body.get("top_logprobs", 0) if asked else None


def calling(body: Mapping[str, Any]) -> tuple[str, dict[str, Any] | None]:
    """The way in which an answer may call tools, and its schema if it has to.

    The way is "auto", "required", "=" and the name of a function, or "" for not at all.
    """
    functions = [tool["function"] for tool in body.get("tools", ())]
    schemas = {one["name"]: one.get("parameters") or {"type": "object"} for one in functions}
    choice = body.get("tool_choice", "auto" if schemas else "none")
    if choice == "none":
        return "", None
    if choice == "auto" and schemas:
        return "auto", None
    if choice == "required" and schemas:
        form = {"type": "object", "required": ["name", "arguments"], "additionalProperties": False}
        calls = [{"name": {"const": name}, "arguments": schema} for name, schema in schemas.items()]
        return "required", {"anyOf": [form | {"properties": one} for one in calls]}
    name = choice["function"]["name"] if isinstance(choice, dict) else None
    if name not in schemas:
        raise Refused("tool_choice: must be none, auto, required or one of tools", "tool_choice")
    return f"={name}", schemas[name]


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates read it: its text in one piece, the arguments of its calls as objects."""
    given = {name: value for name, value in message.items() if value is not None and name != "parsed"}
    found: dict[str, Any] = {"content": "", **given}
    if isinstance(found["content"], list):
        found["content"] = "\n".join(part["text"] for part in found["content"])
    if found["role"] == "developer":  # OpenAI's later name
        found["role"] = "system"
    if calls := found.pop("tool_calls", None):
        functions = [call["function"] for call in calls]
        read = [one | {"arguments": json.loads(one["arguments"] or "{}")} for one in functions]
        found["tool_calls"] = [call | {"function": one} for call, one in zip(calls, read, strict=True)]
    elif "content" not in message:
        raise ValueError("content is missing")
    return found


def refusal(error: Exception, body: Mapping[str, Any]) -> Refused:
    """An error of the engine about a body, with the field that it names."""
    names = re.findall(r"[a-z_]+", message := str(error))
    known = [field for name in names for field in (name, OPTIONS.get(name)) if field in body]
    return Refused(message, known[0] if known else None)
