"""A server says in a crowd what it says alone, in OpenAI's form, and takes nothing that it cannot hold."""

import asyncio
import json
import logging
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from functools import partial
from pathlib import Path

import httpx2
import openai
import pytest
import torch
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from support.refusals import refuses
from support.served import ask, body_of, call, client, events, idle, listening, said, served, spelling_pair
from support.shell import python
from support.tokenizers import GROWING, TEMPLATE, byte_tokenizer

import torch_dflash as td
from torch_dflash.server import answers as answers_module
from torch_dflash.server import app as app_module
from torch_dflash.server.answers import Answers
from torch_dflash.server.bodies import Model

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}
SCHEMA |= {"additionalProperties": False}
JSON = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
KINDS = {
    "plain": {},
    "hot": {"temperature": 1.5, "seed": 1, "top_k": 9},
    "cool": {"temperature": 0.3, "seed": 2, "top_p": 0.8},
    "two": {"n": 2, "temperature": 1, "seed": 5},
    "bias": {"logit_bias": {"40": 100}, "max_tokens": 5},
    "penalty": {"presence_penalty": 2, "repetition_penalty": 1.7},
    "min": {"logit_bias": {"0": 100}, "min_tokens": 7},
    "stop": {"stop": ["A", "*"], "temperature": 1, "seed": 3},
    "json": {"response_format": JSON, "max_tokens": 30},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "call": {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "max_tokens": 30,
    },
    "eos": {"ignore_eos": True, "stop_token_ids": [66], "temperature": 2, "seed": 9},
    "long": {"max_completion_tokens": 40},
}


@pytest.fixture(scope="module")
def app():
    return served()


def plain(response):
    """An answer without what differs from call to call."""
    return json.loads(re.sub(r'"(id|created)":("[^"]*"|\d+),?', "", response.text))


def test_each_kind_of_request_says_in_a_crowd_what_it_says_alone(app):
    bodies = [body_of(name, **kind) for name, kind in KINDS.items()]
    alone = [ask(app, body)[0] for body in bodies]
    texts = [said(one) for one in alone]
    crowd = ask(app, *bodies, *(body | {"stream": True} for body in bodies if "tools" not in body))
    assert [plain(one)["choices"] for one in crowd[: len(bodies)] if "tools" not in one.text] == [
        plain(one)["choices"] for one in alone if "tools" not in one.text
    ]
    streamed = [text for text, body in zip(texts, bodies, strict=True) if "tools" not in body]
    assert [said(one) for one in crowd[len(bodies) :]] == streamed
    assert len({str(text) for text in texts}) > len(texts) // 2
    for one in alone:
        ChatCompletion.model_validate(one.json())


def test_an_answer_is_what_the_engine_says(app):
    server, body = app.state.server, body_of("engine", temperature=0.9, seed=4, top_k=20)
    (ids,) = server.model.prompts(body)
    row = torch.tensor([ids])
    options = {"do_sample": True, "temperature": 0.9, "seed": 4, "top_k": 20, "max_new_tokens": 12}
    new = server.engine.generate(row, torch.ones_like(row), **options)[0, len(ids) :].tolist()
    (answer,) = ask(app, body)
    assert said(answer) == [server.model.tokenizer.decode(new, skip_special_tokens=True)]
    usage = answer.json()["usage"]
    assert usage["completion_tokens"] == len(new) and usage["prompt_tokens"] == len(ids)
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] > 0
    assert details["accepted_prediction_tokens"] < len(new)


def test_choices_have_seeds_that_follow_each_other(app):
    hot = {"temperature": 1.5}
    three, *each = ask(app, body_of(n=3, seed=7, **hot), *(body_of(seed=7 + at, **hot) for at in range(3)))
    assert said(three) == [said(one)[0] for one in each] and len(set(said(three))) == 3
    assert three.json()["usage"]["completion_tokens"] == 36


def test_unset_seeds_differ_whatever_torch_was_told(app):
    def once():
        torch.manual_seed(0)
        return said(ask(app, body_of(temperature=2))[0])

    before = torch.get_rng_state()
    assert once() != once()
    torch.manual_seed(0)
    state = torch.get_rng_state()
    ask(app, body_of(temperature=2, seed=3))
    assert torch.equal(torch.get_rng_state(), state)
    torch.set_rng_state(before)


def test_log_probabilities_are_as_many_as_asked_for_and_the_engines(app):
    chat, none, text, alone = ask(app, body_of(logprobs=True, top_logprobs=2), body_of(logprobs=True)) + ask(
        app,
        *({"model": "tiny", "prompt": "ab", "logprobs": count} for count in (4, 0)),
        path="/v1/completions",
    )
    content = chat.json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 12 and all(len(one["top_logprobs"]) == 2 for one in content)
    assert all(one["logprob"] == one["top_logprobs"][0]["logprob"] for one in content)  # greedy
    assert all(one["top_logprobs"] == [] for one in none.json()["choices"][0]["logprobs"]["content"])
    old = text.json()["choices"][0]["logprobs"]
    assert len(old["tokens"]) == 16 and old["text_offset"][0] == 0 and old["top_logprobs"]
    assert alone.json()["choices"][0]["logprobs"]["top_logprobs"] is None
    Completion.model_validate(text.json())
    (streamed,) = ask(app, body_of(logprobs=True, top_logprobs=2, stream=True))
    parts = [one["choices"][0].get("logprobs") for one in events(streamed.text)]
    assert sum((part["content"] for part in parts if part), []) == content


def test_a_stop_string_is_in_no_text(app):
    (whole,) = said(ask(app, body_of(max_tokens=40))[0])
    stop = whole[5:7]
    for stream in (False, True):
        (answer,) = ask(app, body_of(max_tokens=40, stop=[stop, "never"], stream=stream))
        assert said(answer) == [whole[: whole.index(stop)]]
    short, long = (ask(app, body_of(max_tokens=40, **more))[0].json() for more in ({"stop": stop}, {}))
    assert short["choices"][0]["finish_reason"] == "stop"
    assert short["usage"]["completion_tokens"] < long["usage"]["completion_tokens"]


def test_a_stop_string_may_begin_before_the_least_tokens(app):
    (whole,) = said(ask(app, body_of(max_tokens=40))[0])
    at = next(at for at in range(3, 37) if whole.index(whole[at : at + 3]) == at)
    for least, end in ((at + 2, at), (at + 3, at), (at + 4, None)):
        (answer,) = ask(app, body_of(max_tokens=40, stop=whole[at : at + 3], min_tokens=least))
        assert said(answer) == [whole[:end]], least


def test_a_stop_string_counts_in_the_answer_alone_and_may_be_a_special_token(app):
    tokenizer = app.state.server.model.tokenizer
    (whole,) = said(ask(app, body_of())[0])
    begins = ">" + whole[0]  # the prompt ends with ">"
    assert said(ask(app, body_of(stop=begins))[0]) == [whole]
    ended = ask(app, body_of(stop=[tokenizer.eos_token], ignore_eos=True, logit_bias={"0": 100}))[0]
    assert said(ended) == [""] and ended.json()["choices"][0]["finish_reason"] == "stop"


def test_a_format_parses_in_each_runtime_of_an_answer(app):
    plainly, streamed = ask(
        app,
        body_of(response_format=JSON, max_tokens=30),
        body_of(response_format=JSON, max_tokens=30, stream=True),
    )
    assert json.loads(said(plainly)[0])["a"] in (1, 22) and said(streamed) == said(plainly)
    assert plainly.json()["choices"][0]["finish_reason"] == "stop"


def test_forced_calls(app):
    named = {"tools": [TOOL], "tool_choice": KINDS["call"]["tool_choice"], "max_tokens": 60}
    for choice, why in ((named["tool_choice"], "stop"), ("required", "tool_calls")):
        whole, streamed = ask(
            app, *(body_of(**named | {"tool_choice": choice, "stream": on}) for on in (False, True))
        )
        found = whole.json()["choices"][0]
        (made,) = found["message"]["tool_calls"]
        assert made["function"]["name"] == "f" and json.loads(made["function"]["arguments"])["a"] in (1, 22)
        assert found["finish_reason"] == why and found["message"]["content"] is None
        (last,) = events(streamed.text)
        delta = ChatCompletionChunk.model_validate(last).choices[0].delta
        assert delta.tool_calls[0].index == 0
        assert json.loads(delta.tool_calls[0].function.arguments) == json.loads(made["function"]["arguments"])


def test_calls_that_a_response_template_finds():
    tokenizer = byte_tokenizer(GROWING)
    given = []

    def parse_response(ids, prefix, tools):
        given.append((ids, tokenizer.decode(prefix)))
        calls = [{"type": "function", "function": {"name": name, "arguments": {"a": 1}}} for name in "fg"]
        return {"role": "assistant", "content": "so", "tool_calls": calls}

    tokenizer.response_template, tokenizer.parse_response = {"anything": 1}, parse_response
    app = served(tokenizer=tokenizer)
    both, one = ask(app, body_of(tools=[TOOL]), body_of(tools=[TOOL], parallel_tool_calls=False))
    assert len(given[0][0]) == 12 and given[0][1] == "[f]<user>Hello</s><assistant>"
    message = both.json()["choices"][0]["message"]
    assert message["content"] == "so" and [one["function"] for one in message["tool_calls"]] == [
        {"name": "f", "arguments": '{"a": 1}'},
        {"name": "g", "arguments": '{"a": 1}'},
    ]
    assert len(one.json()["choices"][0]["message"]["tool_calls"]) == 1
    tokenizer.parse_response = lambda ids, **_: {"content": tokenizer.decode(ids)}
    (whole,) = said(ask(app, body_of(tools=[TOOL]))[0])
    for stream in (False, True):
        (cut,) = ask(app, body_of(tools=[TOOL], stop=whole[3:5], stream=stream))
        assert said(cut) == [whole[: whole.index(whole[3:5])]]
    tokenizer.parse_response = lambda *_, **__: 1 / 0
    (text,) = ask(app, body_of(tools=[TOOL]))
    (off,) = ask(app, body_of(tools=[TOOL], tool_choice="none"))
    assert text.json()["choices"][0]["message"]["content"] and said(off) != [None]


CHAT = """
data: {"id":"chatcmpl-7","choices":[{"delta":{"content":"é","role":"assistant"},"index":0,"finish_reason":\
null,"logprobs":null}],"created":1,"model":"tiny","object":"chat.completion.chunk","usage":null}

data: {"id":"chatcmpl-7","choices":[{"delta":{},"index":0,"finish_reason":"length"}],"created":1,\
"model":"tiny","object":"chat.completion.chunk","usage":null}

data: {"id":"chatcmpl-7","choices":[],"created":1,"model":"tiny","object":"chat.completion.chunk","usage":\
{"completion_tokens":1,"prompt_tokens":13,"total_tokens":14,"completion_tokens_details":\
{"accepted_prediction_tokens":0,"rejected_prediction_tokens":0}}}

data: [DONE]

"""
TEXT = """
data: {"id":"cmpl-7","choices":[{"finish_reason":"length","index":0,"logprobs":null,"text":"é"}],"created":1,\
"model":"tiny","object":"text_completion"}

data: [DONE]

"""


def test_streams_to_the_byte(app, monkeypatch):
    monkeypatch.setattr(answers_module, "uuid4", lambda: types.SimpleNamespace(hex="7"))
    monkeypatch.setattr(answers_module.time, "time", lambda: 1.0)
    monkeypatch.setattr(answers_module.Choice, "_add", lambda self, piece: setattr(self, "text", "é"))
    monkeypatch.setattr(answers_module.Choice, "drafted", lambda self, handle: 0)
    (chat,) = ask(app, body_of(max_tokens=1, stream=True, stream_options={"include_usage": True}))
    assert chat.content == CHAT[1:].encode()
    text = {"model": "tiny", "prompt": "ab", "max_tokens": 1, "stream": True}
    (text,) = ask(app, text, path="/v1/completions")
    assert text.content == TEXT[1:].encode()
    assert text.headers["content-type"] == "text/event-stream; charset=utf-8"


def test_completions_of_several_prompts(app):
    body = {"model": "tiny", "max_tokens": 4, "temperature": 0}
    prompts = ["ab", "cd"], [[66, 67], [68]], [66, 67], "ab"
    found = [ask(app, body | {"prompt": one}, path="/v1/completions")[0] for one in prompts]
    assert [len(said(one)) for one in found] == [2, 2, 1, 1]
    assert said(found[0])[0] == said(found[3])[0] and said(found[1])[0] == said(found[2])[0]
    (streamed,) = ask(app, body | {"prompt": ["ab", "cd"], "stream": True}, path="/v1/completions")
    assert said(streamed) == said(found[0])
    (bad,) = ask(app, body | {"prompt": [[2**40]]}, path="/v1/completions")
    assert bad.status_code == 400 and bad.json()["error"]["param"] == "prompt"
    assert (
        len(said(ask(app, {"model": "tiny", "prompt": "ab", "logprobs": 0}, path="/v1/completions")[0])) == 1
    )


def test_no_token_of_a_prompt_is_taken_for_padding():
    app = served(spelling_pair(pad_token_id=66))
    body = {"model": "tiny", "max_tokens": 4}
    found = ask(app, *(body | {"prompt": ids} for ids in ([66, 67], [67])), path="/v1/completions")
    assert [one.json()["usage"]["prompt_tokens"] for one in found] == [2, 1]
    row = torch.tensor([[66, 67]])
    with_pad, without = (
        app.state.server.engine.generate(row[:, at:], torch.ones_like(row[:, at:]), max_new_tokens=4)
        for at in (0, 1)
    )
    decode = app.state.server.model.tokenizer.decode
    assert [said(one)[0] for one in found] == [decode(with_pad[0, 2:]), decode(without[0, 1:])]
    assert said(found[0]) != said(found[1])


def test_tokens_models_version_and_strangers(app):
    async def run():
        async with client(app) as http:
            assert (await http.get("/health")).status_code == 200
            assert (await http.get("/version")).json() == {"version": td.__version__}
            listed = (await http.get("/v1/models")).json()["data"]
            assert [one["id"] for one in listed] == ["tiny"] and listed[0]["max_model_len"] == 160
            assert (await http.get("/v1/models/tiny")).json() == listed[0]
            assert (await http.get("/v1/models/a/b")).json()["error"]["code"] == "model_not_found"
            other = await http.post("/v1/chat/completions", json=body_of() | {"model": "gpt-9"})
            assert other.status_code == 404 and other.json()["error"]["code"] == "model_not_found"
            texts = {"model": "tiny", "prompt": "Hello"}, {"model": "tiny", "messages": body_of()["messages"]}
            plain, chat = [(await http.post("/tokenize", json=body)).json() for body in texts]
            assert plain["count"] == 5 and chat["count"] == 13 and chat["max_model_len"] == 160
            for path, method, status in (("/nowhere", "GET", 404), ("/v1/chat/completions", "GET", 405)):
                answer = await http.request(method, path)
                assert (
                    answer.status_code == status and answer.json()["error"]["type"] == "invalid_request_error"
                )
            for content, status in (
                (b"{", 400),
                (b"[1]", 400),
                (b"\xff", 400),
                (b"[" * 5000, 400),
                (b'{"n": NaN}', 400),
            ):
                answer = await http.post(
                    "/v1/completions", content=content, headers={"content-type": "application/json"}
                )
                assert answer.status_code == status and answer.json()["error"]["message"]
            assert (await http.post("/v1/completions", content=b"{}")).status_code == 415
            big = json.dumps(body_of("x" * (app_module.MOST_BYTES + 1)))
            answer = await http.post(
                "/v1/completions", content=big, headers={"content-type": "application/json"}
            )
            assert answer.status_code == 413 and answer.json()["error"]["message"]

    asyncio.run(run())


def test_metrics_by_vllms_names():
    app = served(metrics_prefix="vllm")
    asked = ask(app, body_of(), body_of(stream=True, max_tokens=20), body_of(logit_bias={"0": 100}))
    assert [one.status_code for one in asked] == [200] * 3

    async def text():
        await idle(app)
        async with client(app) as http:
            return (await http.get("/metrics")).text

    found = asyncio.run(text())
    value = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in found.splitlines()
        if line[0] != "#"
    }
    labels = 'engine="0",model_name="tiny"'
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert value[f"vllm:{name}{{{labels}}}"] == 0
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert value[f"vllm:{name}_count{{{labels}}}"] == 3
    assert value[f"vllm:inter_token_latency_seconds_count{{{labels}}}"] <= 33
    assert value[f"vllm:generation_tokens_total{{{labels}}}"] == 12 + 20 + 1
    drafts, drafted, accepted = (
        value[f"vllm:spec_decode_num_{name}_total{{{labels}}}"]
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    places = [count for name, count in value.items() if "accepted_tokens_per_pos_total" in name]
    assert sum(places) == accepted < drafted and drafts > 0 and places == sorted(places, reverse=True)
    ends = {
        re.search('reason="(\\w+)"', name)[1]: count
        for name, count in value.items()
        if "success_total" in name
    }
    assert ends == {"length": 2, "stop": 1}


def test_keys_are_compared_in_constant_time(app, monkeypatch):
    compared = []

    def compare(given, key):
        compared.append(key)
        return secrets.compare_digest(given, key)

    monkeypatch.setattr(app_module, "compare_digest", compare)
    guarded = td.asgi_app(
        app.state.server.engine, byte_tokenizer(TEMPLATE), name="tiny", api_keys=["ön", "two"]
    )
    for key, status in (("ön", 200), ("two", 200), ("tw", 401), ("", 401), (None, 401)):
        head = {} if key is None else {"Authorization": f"Bearer {key}".encode()}
        (answer,) = ask(guarded, body_of(max_tokens=1), headers=head)
        assert answer.status_code == status
        assert status == 200 or answer.json()["error"]["code"] == "invalid_api_key"
    assert compared == ["ön".encode(), b"two"] * 5

    async def open_ones():
        async with client(guarded) as http:
            found = [
                (await http.get(path)).status_code
                for path in ("/health", "/version", "/metrics", "/v1/models")
            ]
            return found, (await http.post("/tokenize", json={})).status_code

    assert asyncio.run(open_ones()) == ([200, 200, 200, 401], 401)
    with refuses(ValueError, "api_keys"):
        td.asgi_app(app.state.server.engine, byte_tokenizer(), api_keys=[""])


def test_a_full_queue_says_when_to_come_again(app):
    small = td.asgi_app(app.state.server.engine, byte_tokenizer(TEMPLATE), name="tiny", queue=2)
    found = ask(small, *(body_of(max_tokens=60) for _ in range(30)))
    full = [one for one in found if one.status_code == 429]
    assert full and all(one.headers["retry-after"] == "1" for one in full)
    assert {one.status_code for one in found} == {200, 429} and full[0].json()["error"][
        "code"
    ] == "queue_full"
    (many,) = ask(small, body_of(n=3, temperature=1))
    assert many.status_code == 400 and many.json()["error"]["param"] == "n"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_all_its_choices(app, stream):
    async def run():
        leave, metrics = asyncio.Event(), app.state.server._metrics
        before = metrics._counts["generation_tokens"]._value.get()
        task = asyncio.create_task(call(app, body_of(max_tokens=140, n=3, stream=stream), leave=leave))
        while metrics._counts["generation_tokens"]._value.get() == before:
            await asyncio.sleep(0.001)
        (answers,) = app.state.server.active
        leave.set()
        await task
        await idle(app)
        assert all(len(one.tokens) < 140 for one in answers.choices) and len(answers.handles) == 3
        assert all(handle.cancelled() for handle in answers.handles)
        assert not app.state.server.active

    asyncio.run(run())


def test_a_client_that_leaves_the_queue_never_gets_a_row(app):
    async def run():
        leave = asyncio.Event()
        others = [asyncio.create_task(call(app, body_of(max_tokens=100))) for _ in range(4)]
        while app.state.server.slots.running < 4:
            await asyncio.sleep(0.001)
        task = asyncio.create_task(call(app, body_of(stream=True), leave=leave))
        while len(app.state.server.active) < 5:
            await asyncio.sleep(0.001)
        (mine,) = [one for one in app.state.server.active if one._body.get("stream")]
        leave.set()
        await task
        assert mine.handles[0].service is None
        await asyncio.gather(*others)
        await idle(app)

    asyncio.run(run())


def test_a_stream_that_nobody_reads_is_given_up(app, monkeypatch):
    monkeypatch.setattr(app_module, "PATIENCE", 0.05)

    async def stuck(message):
        await asyncio.sleep(3600 if message["type"].endswith("body") else 0)

    async def run():
        sent = await call(app, body_of(max_tokens=140, stream=True), take=stuck)
        await idle(app)
        assert len(sent) == 2 and not app.state.server.active

    asyncio.run(run())


def test_a_body_that_does_not_come_is_told_so(app, monkeypatch):
    monkeypatch.setattr(app_module, "PATIENCE", 0.05)

    with listening(app) as address:
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as half:
            half.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n"
                b"Content-Type: application/json\r\n\r\n{"
            )
            assert half.recv(100).startswith(b"HTTP/1.1 408")


def test_an_error_while_decoding_is_an_event_and_no_500_for_a_body(app):
    """No token may follow "7": the grammar has to end there, and may not yet."""
    schema = {"type": "json_schema", "json_schema": {"schema": {"const": 7}}}
    body = body_of(response_format=schema, min_tokens=9, ignore_eos=True, stop_token_ids=[66])
    plain, streamed = ask(app, body, body | {"stream": True})
    assert plain.status_code == 400 and "allow" in plain.json()["error"]["message"], plain.text
    error = events(streamed.text)[-1]["error"]
    assert error["type"] == "invalid_request_error" and streamed.status_code == 200
    assert said(ask(app, body_of())[0])


def test_a_device_that_fails_is_500_and_the_next_request_is_served(monkeypatch):
    app = served()
    runtime = type(app.state.server.engine.runtime)
    fine, calls = runtime.advance, []

    def advance(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("the device is gone, and the prompt was SECRET")
        return fine(*arguments)

    monkeypatch.setattr(runtime, "advance", advance)
    plain, streamed = ask(app, body_of(max_tokens=60), body_of(max_tokens=60, stream=True))
    assert plain.status_code == 500 and plain.json()["error"]["type"] == "server_error"
    assert events(streamed.text)[-1]["error"]["type"] == "server_error"
    assert "SECRET" not in plain.text + streamed.text
    assert len(said(ask(app, body_of())[0])) == 1


def test_logs_hold_no_prompt(app, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    with listening(app) as address:
        for body in (
            body_of("SECRET"),
            body_of("SECRET", top_p=9),
            body_of("SECRET" * 99),
            body_of("SECRET", stream=True),
        ):
            httpx2.post(address + "/v1/chat/completions", json=body, timeout=60)
    own = [record for record in caplog.records if not record.name.startswith(("httpcore", "httpx"))]
    assert "SECRET" not in "".join(record.getMessage() for record in own) and "SECRET" not in str(
        capfd.readouterr()
    )


def test_unset_temperature_is_the_models_own_or_a_filters():
    config = types.SimpleNamespace(
        do_sample=False, temperature=None, top_k=None, top_p=None, min_p=None, eos_token_id=0
    )
    model = Model("m", byte_tokenizer(), 50, lambda: types.SimpleNamespace(generation_config=config), {})

    def options(**body):
        found = model.options(body, 1, 1)
        return found["do_sample"], found.get("temperature"), found.get("top_k"), found.get("top_p")

    assert (
        options()
        == options(temperature=0, top_p=0.5)
        == options(temperature=1e-9)
        == (False, None, None, None)
    )
    assert options(top_p=1, top_k=-1) == (False, None, None, None)
    assert options(top_p=0.5) == (True, 1.0, 0, 0.5) and options(temperature=0.7) == (True, 0.7, 0, 1.0)
    config.do_sample, config.temperature, config.top_k = True, 0.6, 20
    assert options() == (True, 0.6, 20, 1.0) and options(temperature=0)[0] is False
    assert options(temperature=0.9, top_k=-1) == (True, 0.9, 0, 1.0)


def test_while_it_loads_and_drains_it_is_closed():
    app = served()
    server = app.state.server

    async def run():
        async with client(app) as http, server.lifespan(app):
            assert (await http.get("/health")).status_code == 503
            closed = await http.post("/v1/chat/completions", json=body_of())
            assert closed.status_code == 503 and closed.headers["retry-after"]
            while server.closed:
                await asyncio.sleep(0.01)
            assert (await http.get("/health")).status_code == 200 and not server.over
            task = asyncio.create_task(http.post("/v1/chat/completions", json=body_of(max_tokens=100)))
            while not server.slots.running:
                await asyncio.sleep(0.001)
            server.drain()
            assert not server.over and (await http.get("/health")).status_code == 503
            assert (await task).status_code == 200 and server.over

    asyncio.run(run())


def test_a_warm_up_that_fails_ends_the_server(monkeypatch):
    app = served()
    server = app.state.server
    monkeypatch.setattr(server, "_warm_up", lambda: 1 / 0)

    async def run():
        async with server.lifespan(app):
            while server.failed is None:
                await asyncio.sleep(0.01)
            assert server.over and server.closed

    asyncio.run(run())


def test_what_is_no_engine_is_refused():
    with refuses(TypeError, "engine"):
        td.asgi_app(spelling_pair()[0], byte_tokenizer())
    with refuses(ValueError, "queue"):
        served(queue=0)
    with refuses(TypeError, "api_keys", "list"):
        served(api_keys="sk-secret")
    pair = spelling_pair()
    pair[0].generation_config.stop_strings = ["zz"]
    with refuses(ValueError, "generation_config", "stop_strings"):
        served(pair)


def test_a_port_that_is_taken_is_told_before_anything_loads():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = f"serve --target x --port {port}"
        done = python(f"import sys; from torch_dflash.cli import main; sys.exit(main('{words}'.split()))")
    assert done.returncode == 2 and f"--port {port}: " in done.stderr and "in use" in done.stderr


def test_names_of_tokens_hold_their_spaces_and_differ(app):
    class Strips:
        """As of Llama-2: a text loses its first space."""

        def __call__(self, text, add_special_tokens=True):
            return {"input_ids": [0]}

        def decode(self, ids):
            return "".join(["a", " cat", "s"][one] for one in ids).lstrip()

    found = object.__new__(Answers)
    found._tokenizer, found._names, found._before = Strips(), {}, [0]
    assert [found._name(one) for one in range(3)] == ["a", " cat", "s"]
    body = {"model": "tiny", "prompt": "ab", "max_tokens": 16, "logprobs": 5}
    (answer,) = ask(app, body, path="/v1/completions")
    assert {len(top) for top in answer.json()["choices"][0]["logprobs"]["top_logprobs"]} == {5}


def test_arrivals_at_random_say_what_they_say_alone(app):
    """Two hundred requests of all kinds through a socket: some leave, err, stop midway or read slowly."""
    crowd(app, 200, seed=1)


@pytest.mark.heavy
def test_two_thousand_arrivals_leave_nothing_behind():
    app = served(engine={"runtime": "xla", "cache": "paged", "page_size": 16, "pool_pages": 36})
    server = app.state.server
    server.engine.warmup(slots=True)
    crowd(app, 60, seed=2)
    compiled, files = server.slots.compilations, len(os.listdir("/proc/self/fd"))
    threads, held = threading.active_count(), rss()
    crowd(app, 2000, seed=3)
    assert server.slots.compilations == compiled and threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= files + 2 and rss() - held < 200 << 20
    assert all(lane._scheduler.ended.all() and lane._state is None for lane in server.slots._lanes)


def rss():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def crowd(app, count, seed):
    draw = random.Random(seed)
    names = [draw.choice([*KINDS]) for _ in range(count)]
    bodies = [body_of(f"{name} {draw.randrange(2)}", **{"max_tokens": 8} | KINDS[name]) for name in names]
    known = {}
    for body in bodies:
        known.setdefault(json.dumps(body), None)
    texts = asyncio.run(alone(app, [json.loads(body) for body in known]))
    known = dict(zip(known, texts, strict=True))

    async def one(http, body, kind):
        await asyncio.sleep(draw.random() * count / 100)
        if kind == "bad":
            return (await http.post("/v1/chat/completions", json=body | {"wrong": 1})).status_code
        if kind == "left":
            try:
                async with asyncio.timeout(draw.random() / 5):
                    await http.post("/v1/chat/completions", json=body | {"stream": draw.random() < 0.5})
            except (TimeoutError, httpx2.HTTPError):
                pass
            return None
        if kind == "half":
            _, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\nContent-Length: 99\r\n")
            writer.write(b'Content-Type: application/json\r\n\r\n{"model": "ti')
            await writer.drain()
            writer.close()
            return await writer.wait_closed()
        if kind == "slow":
            async with http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as answer:
                if answer.status_code == 200:
                    async for _ in answer.aiter_bytes(40):
                        await asyncio.sleep(0.01)
            return answer.status_code in (200, 429)
        stream = draw.random() < 0.5 and "tools" not in body
        while True:
            answer = await http.post("/v1/chat/completions", json=body | {"stream": stream})
            if answer.status_code != 429:
                return said(answer) == known[json.dumps(body)]
            await asyncio.sleep(float(answer.headers["retry-after"]))

    async def run(address):
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(base_url=address, timeout=600, limits=limits) as http:
            kinds = [draw.choice(["left", "left", "bad", "half", "slow", *["told"] * 5]) for _ in bodies]
            found = await asyncio.gather(
                *(one(http, body, kind) for body, kind in zip(bodies, kinds, strict=True))
            )
        return kinds, found

    with listening(app) as address:
        kinds, found = asyncio.run(run(address))
    assert {
        kind: {one for other, one in zip(kinds, found, strict=True) if other == kind} for kind in set(kinds)
    } == {
        "told": {True},
        "bad": {400},
        "left": {None},
        "half": {None},
        "slow": {True},
    }
    asyncio.run(idle(app))
    assert not app.state.server.active and not app.state.server._reading


async def alone(app, bodies):
    found = []
    async with client(app) as http:
        for body in bodies:
            found.append(said(await http.post("/v1/chat/completions", json=body)))
    return found


def test_the_official_client_reads_in_a_crowd_what_it_reads_alone(app):
    official(app, 8, 12)


@pytest.mark.heavy
@pytest.mark.network
def test_the_bundled_pair_in_a_crowd():
    *pair, tokenizer = td.load_demo_pair(progress=False)
    official(served(pair, tokenizer, {"runtime": "xla", "batch_size": 8, "verify_width": 4}), 20, 36)


def official(app, tokens, count):
    """Six prompts alone, then ``count`` at once: half are streamed, a quarter left after three events."""
    prompts = ["Name a river.", "17 times 23?", "A haiku about rain.", "5 - 2?", "Hello in French?", "Count."]

    async def ask_for(client, prompt, events=0):
        body = body_of(prompt, max_tokens=tokens, temperature=0, stream=bool(events))
        found = await client.chat.completions.create(**body)
        if not events:
            return found.choices[0].message.content
        text = ""
        async for event in found:
            text, events = text + (event.choices[0].delta.content or ""), events - 1
            if not events:
                return await found.close()
        return text

    async def run(address):
        options = {"base_url": address + "/v1", "api_key": "x", "timeout": 600, "max_retries": 0}
        async with openai.AsyncOpenAI(**options) as client:
            told = {prompt: await ask_for(client, prompt) for prompt in prompts}
            asked = [prompts[at % 6] for at in range(count)]
            events = [(0, -1, 0, 3)[(at + at // 6) % 4] for at in range(count)]
            texts = await asyncio.gather(*map(partial(ask_for, client), asked, events))
        for prompt, least, text in zip(asked, events, texts, strict=True):
            assert text == told[prompt] or least == 3 and text is None  # or it ended before three events
        assert len(set(told.values())) > 3 and None in texts

    with listening(app) as address:
        while app.state.server.closed:
            time.sleep(0.05)
        asyncio.run(run(address))
        asyncio.run(idle(app))


@pytest.mark.heavy
def test_the_command_serves_until_a_signal_and_drains(tmp_path):
    target, drafter = spelling_pair()
    target.save_pretrained(tmp_path), byte_tokenizer(TEMPLATE).save_pretrained(tmp_path)
    drafter.save_pretrained(tmp_path / "drafter")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["serve", "--target", str(tmp_path), "--drafter", str(tmp_path / "drafter"), "--port", str(port)]
    words += "--runtime eager --max-length 200 --served-model-name tiny --batch-size 2".split()
    code = f"import sys\nfrom torch_dflash.cli import main\nsys.exit(main({words!r}))"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            for _ in range(600):
                try:
                    if http.get("/health").status_code == 200:
                        break
                except httpx2.TransportError:
                    assert process.poll() is None
                time.sleep(0.1)
            with http.stream(
                "POST", "/v1/chat/completions", json=body_of(max_tokens=150, stream=True)
            ) as answer:
                lines = answer.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                assert [line for line in lines if line][-1] == "data: [DONE]"
            assert process.wait(30) == 0
    finally:
        process.kill()


def test_without_the_extra_the_command_names_the_packages():
    done = python(
        "import sys\nsys.modules['uvicorn'] = None\nfrom torch_dflash.cli import main\n"
        "sys.exit(main('serve --target demo'.split()))"
    )
    assert done.returncode == 2
    assert "uvicorn" in done.stderr and "pip install fastapi openai prometheus-client uvicorn" in done.stderr
