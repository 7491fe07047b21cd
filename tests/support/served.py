"""A server around a tiny pair, called inside of the process, and its answers."""

import asyncio
import json
import threading
from contextlib import contextmanager

import httpx2
import uvicorn

import torch_dflash as td
from support.tiny import correlate, make_drafter, make_target
from support.tokenizers import TEMPLATE, byte_tokenizer
from torch_dflash.server.app import KEEP_ALIVE

RULES = "repetition_penalty", "presence_penalty", "sequence_bias", "min_new_tokens", "grammar"
SHAPE = {"max_length": 160, "batch_size": 4, "rounds_per_chunk": 3, "prefill_chunk_size": 16}


def spelling_pair(**config):
    """A pair whose target has every id of the byte tokenizer, and stops at its </s>."""
    target = make_target("qwen3", vocab_size=288, num_hidden_layers=2, eos_token_id=0, **config)
    drafter = make_drafter(target, num_hidden_layers=1, target_layer_ids=[0, 1])
    correlate(target, drafter, 6.0)
    return target, drafter


def served(pair=None, tokenizer=None, engine=None, **options):
    """The application of a tiny pair with all parts, eager unless ``engine`` says otherwise."""
    made = {"runtime": "eager", "processors": RULES, "outputs": ("output_logprobs",), "top_logprobs": 5}
    compiled = td.compile(*(pair or spelling_pair()), **SHAPE | made | (engine or {}))
    return td.asgi_app(compiled, tokenizer or byte_tokenizer(TEMPLATE), name="tiny", **options)


def client(app, **options):
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx2.AsyncClient(transport=transport, base_url="http://here", timeout=60, **options)


def ask(app, *bodies, path="/v1/chat/completions", **options):
    """The responses to bodies that are sent at once."""

    async def all_of_them():
        async with client(app, **options) as http, asyncio.timeout(100):
            return await asyncio.gather(*(http.post(path, json=body) for body in bodies))

    return asyncio.run(all_of_them())


def body_of(text="Hello", **fields):
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 12} | fields


def said(response):
    """The texts of an answer's choices, streamed or not."""
    assert response.status_code == 200, response.text
    if "event-stream" not in response.headers["content-type"]:
        return [one.get("text", one.get("message", {}).get("content")) for one in response.json()["choices"]]
    texts = {}
    for event in events(response.text):
        for one in event["choices"]:
            piece = one.get("text") or one.get("delta", {}).get("content") or ""
            texts[one["index"]] = texts.get(one["index"], "") + piece
    return [texts[at] for at in sorted(texts)]


def events(text):
    """The JSON of a stream's events, whose last is [DONE]."""
    lines = text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@contextmanager
def listening(app):
    """The address of a uvicorn of this process that serves ``app``."""
    options = {"port": 0, "log_level": "critical", "timeout_keep_alive": KEEP_ALIVE}
    server = uvicorn.Server(uvicorn.Config(app, **options))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            thread.join(0.02)
            assert thread.is_alive()
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


async def call(app, body, path="/v1/chat/completions", leave=None, take=lambda message: asyncio.sleep(0)):
    """The messages that an application sends, by the bare protocol.

    ``leave``: an event; the client leaves when it is set. ``take``: what the client does with a message.
    """
    data = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
    }
    scope |= {"raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http"}
    scope |= {
        "headers": [(b"content-type", b"application/json")],
        "server": ("here", 80),
        "client": ("me", 1),
    }
    sent = []

    async def receive():
        if data:
            return data.pop()
        await (leave or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)
        await take(message)

    await app(scope, receive, send)
    return sent


async def idle(app):
    """Wait until no row is in use."""
    slots = app.state.server.slots
    async with asyncio.timeout(30):
        while slots.running or slots.waiting:
            await asyncio.sleep(0.01)
