"""The ASGI application: endpoints, what protects them, and a request's way through the slots."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, suppress
from secrets import compare_digest, randbits
from types import FrameType
from typing import Any

import torch
import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from torch_dflash._version import __version__
from torch_dflash.checks import check_loaded
from torch_dflash.engine.engine import Engine
from torch_dflash.engine.slots import QueueFull
from torch_dflash.requests.request import Request as Asked
from torch_dflash.server.answers import Answers
from torch_dflash.server.bodies import ChatBody, Model, Refused, TextBody, check_body, refusal
from torch_dflash.server.metrics import Metrics
from torch_dflash.storage.json_text import parse_json

log = logging.getLogger("torch_dflash")
MOST_CHOICES = 128
MOST_BYTES = 4 << 20
"""Of a body."""
PATIENCE = 60.0
"""Seconds for a client to send its body, and to take the next piece of a stream."""
KEEP_ALIVE = 75
"""Seconds that an idle connection stays open: longer than clients keep theirs, or a request that is
sent as the server closes would be lost."""


def asgi_app(
    engine: Engine,
    tokenizer: Any,
    *,
    name: str = "torch-dflash",
    queue: int = 256,
    api_keys: Sequence[str] = (),
    metrics_prefix: str = "torch_dflash",
    template_options: Mapping[str, Any] | None = None,
) -> FastAPI:
    """An application that answers OpenAI's clients, for uvicorn, gunicorn or Ray Serve.

    It needs the extra ``serve``. A field whose rule the engine was compiled without is refused by name; the
    command ``torch-dflash serve`` compiles all of them. While it compiles, ``/health`` is 503.

    Args:
        engine: of `torch_dflash.compile`, of one process.
        tokenizer: the target's.
        name: of the model, in bodies and answers.
        queue: most requests that wait for a row; more are told to come again.
        api_keys: any of them opens ``/v1`` and ``/tokenize``; none: everybody may call.
        metrics_prefix: of the names at ``/metrics``; ``"vllm"`` for dashboards and routers of vLLM.
        template_options: variables of the chat template, under those of a request.

    Raises:
        TypeError: ``engine``, ``tokenizer`` or ``api_keys`` is of another type. ValueError: ``queue`` is no
            number of at least 1, a key is empty, the engine is one of several processes, or the model's
            ``generation_config`` asks for what no request of the engine can have.
    """
    check_loaded("tokenizer", tokenizer, "AutoTokenizer.from_pretrained({})")
    if not isinstance(engine, Engine):
        raise TypeError(f"engine={type(engine).__name__}: pass what torch_dflash.compile(...) gives.")
    if isinstance(api_keys, str):
        raise TypeError("api_keys: is a text, of which each letter would be a key; pass a list of keys.")
    if not all(api_keys):
        raise ValueError("api_keys: an empty key opens nothing; leave it out.")
    options = template_options or {}
    before = tokenizer("a", add_special_tokens=False)["input_ids"]
    model = Model(name, tokenizer, engine.plan.capacity, lambda: engine._models.target, options, before)
    server = Server(engine, model, queue, metrics_prefix, api_keys)
    server.check_config()
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=server.lifespan)
    app.state.server = server
    guarded: dict[str, Any] = {"dependencies": [Depends(server.check_key)], "response_model": None}
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
        app.post(path, **guarded)(server.tokenize if path == "/tokenize" else server.answer)
    for path in ("/v1/models", "/v1/models/{name:path}"):
        app.get(path, **guarded)(server.models)
    for path in ("/health", "/version", "/metrics"):
        app.get(path, response_model=None)(getattr(server, path[1:]))
    for kind in (Refused, HTTPException, Exception):
        app.add_exception_handler(kind, _failed)
    return app


class Server:
    """The slots of an engine, and the requests that are under way.

    Attributes:
        closed: "", or why no request is taken now.
        draining: whether none will be. failed: what ended the warm-up.
    """

    def __init__(self, engine: Engine, model: Model, queue: int, prefix: str, keys: Sequence[str]):
        self.engine, self.model, self._queue = engine, model, queue
        self.slots, self._keys = engine.slots(queue), [key.encode() for key in keys]
        self.closed, self.draining, self.failed = "", False, None
        self.active: set[Answers] = set()
        self._reading = 0
        self._reader = ThreadPoolExecutor(1, "requests")  # a tokenizer is not for several threads
        plan = engine.plan
        rows, length = plan.batch_size, plan.capacity
        if plan.pool_pages is not None:
            rows, length = plan.pool_pages, plan.page_size
        room = rows * length * self.slots.replicas
        self._metrics = Metrics(prefix, model.name)
        self._metrics.show("num_requests_running", lambda: self.slots.running)
        self._metrics.show("num_requests_waiting", lambda: self.slots.waiting)
        held = lambda: sum(one.positions for one in list(self.active))  # noqa: E731
        self._metrics.show("kv_cache_usage_perc", lambda: held() / room)

    def check_config(self) -> None:
        """Raise ``ValueError`` if a body that asks for nothing would be refused."""
        row = torch.zeros(1, 1, dtype=torch.long)
        try:
            self.slots.read(row, torch.ones_like(row), None, self.model.options({}, 1, 1))
        except (TypeError, ValueError, Refused) as error:
            message = f"the model's generation_config: {error} All requests would be refused."
            raise ValueError(message) from None

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Compile while requests are told to come again; at the end give up what is left."""
        self.closed = "the model is loading"
        warm = asyncio.get_running_loop().run_in_executor(self._reader, self._warm_up)
        warm.add_done_callback(self._open)
        yield
        for answers in list(self.active):
            answers.cancel()

    def _warm_up(self) -> None:
        self.engine.warmup(progress=False, slots=True)
        with suppress(Refused):  # no library for formats, no template
            self.model.prompts({"prompt": "a"})
            self.model.options({"response_format": {"type": "json_object"}}, 1, 1)

    def _open(self, warm: asyncio.Future) -> None:
        self.failed = None if warm.cancelled() else warm.exception()
        if self.failed is not None:
            log.error("the warm-up failed", exc_info=self.failed)
            self.closed = f"the warm-up failed: {type(self.failed).__name__}"
        elif not self.draining:
            self.closed = ""

    def drain(self) -> None:
        """Take no further request; those under way go on."""
        self.draining, self.closed = True, "the server is shutting down"

    @property
    def over(self) -> bool:
        """Whether nothing is left to wait for."""
        return self.failed is not None or self.draining and not (self.active or self._reading)

    async def check_key(self, request: Request) -> None:
        """Raise `Refused` for a wrong key, and while no request is taken."""
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        given = given.strip().encode("latin-1")
        known = [compare_digest(given, key) for key in self._keys]  # all of them: the time tells nothing
        if known and not (kind.lower() == "bearer" and any(known)):
            raise Refused("the API key is missing or wrong", code="invalid_api_key", status=401)
        await self.health()

    async def health(self) -> Response:
        """An answer if requests are taken; else 503."""
        if self.closed:
            raise Refused(f"{self.closed}; come again", status=503)
        return JSONResponse({"status": "ok"})

    async def version(self) -> Response:
        """The version of this library."""
        return JSONResponse({"version": __version__})

    async def metrics(self) -> Response:
        """All metrics."""
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self, name: str | None = None) -> Response:
        """The list of the one model, or the model."""
        card = {"id": self._checked(name or self.model.name), "object": "model", "created": 0}
        card |= {"owned_by": "torch-dflash", "max_model_len": self.model.capacity}
        return JSONResponse({"object": "list", "data": [card]} if name is None else card)

    def _checked(self, name: str) -> str:
        if name != self.model.name:
            served = f"{name!r} is not served here; {self.model.name!r} is"
            raise Refused(served, "model", "model_not_found", 404)
        return name

    async def tokenize(self, request: Request) -> Response:
        """The ids of a prompt or of a conversation."""
        ids = (await self._read(self.model.prompts, await self._body(request)))[0]
        return JSONResponse({"count": len(ids), "max_model_len": self.model.capacity, "tokens": ids})

    async def answer(self, request: Request) -> Response:
        """The response to a chat or a completion."""
        body = await self._body(request, ChatBody if "/chat/" in request.url.path else TextBody)
        full = Refused("the queue is full; come again", code="queue_full", status=429)
        if self.slots.waiting + self._reading >= self._queue:
            raise full
        prompts, requests = await self._read(self._requests, body)
        answers = Answers(body, self.model, prompts, self._metrics)
        try:
            answers.handles = await self._read(lambda: self.slots.enqueue(requests, listen=answers.listen))
        except QueueFull:
            raise full from None
        self.active.add(answers)
        if body.get("stream"):
            return Events(self, answers)
        watch = asyncio.create_task(_left(request.receive, answers))
        try:
            return Response(await answers.whole(), media_type="application/json")
        finally:
            watch.cancel()
            self.active.discard(answers)

    def _requests(self, body: dict[str, Any]) -> tuple[list[list[int]], list[Asked]]:
        """The ids and the engine's request of each choice: a prompt's choices follow each other."""
        prompts, count = self.model.prompts(body), body.get("n", 1)
        if not 1 <= count <= MOST_CHOICES:
            raise Refused(f"n={count}: must be 1 to {MOST_CHOICES}", "n")
        if (wanted := count * len(prompts)) > self._queue:
            param = "prompt" if len(prompts) > count else "n"
            raise Refused(
                f"{param}: {wanted} answers, and this server queues {self._queue}; ask for less", param
            )
        seed, found = body.get("seed", randbits(63)), []  # each process draws others
        limit = None if "messages" in body else 16  # OpenAI's, of a completion
        try:
            for ids in prompts:
                row, options = torch.tensor([ids]), self.model.options(body, len(ids), limit)
                for _ in range(count):
                    own = options | {"seed": seed + len(found)}
                    found.append(self.slots.read(row, torch.ones_like(row), None, own))
        except (TypeError, ValueError) as error:
            raise refusal(error, body) from None
        return [ids for ids in prompts for _ in range(count)], found

    async def _read(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self._reading += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._reader, function, *arguments)
        finally:
            self._reading -= 1

    async def _body(self, request: Request, kind: Any = None) -> dict[str, Any]:
        """The body, read and checked; ``kind``: its type, None: as its fields say."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refused("the body must be application/json", status=415)  # pages of others send no such
        found = bytearray()
        try:
            async with asyncio.timeout(PATIENCE):
                async for piece in request.stream():
                    found += piece
                    if len(found) > MOST_BYTES:
                        raise Refused(f"the body has more than {MOST_BYTES} bytes", status=413)
            body = parse_json(found.decode())
        except (TimeoutError, ClientDisconnect):
            raise Refused("the body did not come", status=408) from None
        except ValueError as error:
            raise Refused(f"the body is no JSON: {error}") from None
        told = ChatBody if isinstance(body, dict) and "messages" in body else TextBody
        body = check_body(kind or told, body)
        self._checked(body["model"])
        if "stream_options" in body and not body.get("stream"):
            raise Refused("stream_options: is for stream=true", "stream_options")
        return body


class Events(Response):
    """A stream of server-sent events. It ends when its reader leaves, or takes nothing for a while."""

    def __init__(self, server: Server, answers: Answers):
        kept = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=kept, media_type="text/event-stream")
        del self.headers["content-length"]
        self._server, self._answers = server, answers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the events, and give the request up if nobody reads them."""
        watch = asyncio.create_task(_left(receive, self._answers))
        part = {"type": "http.response.body", "more_body": True}
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with aclosing(self._answers.events()) as events:
                async for event in events:
                    async with asyncio.timeout(PATIENCE):
                        await send({**part, "body": event.encode()})
            await send({"type": "http.response.body", "body": b""})
        except (TimeoutError, OSError):
            pass
        finally:
            watch.cancel()
            self._answers.cancel()
            self._server.active.discard(self._answers)


async def _left(receive: Any, answers: Answers) -> None:
    """Give a request up when its client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
    answers.cancel()


async def _failed(request: Request, error: Exception) -> Response:
    """An error in OpenAI's shape."""
    if isinstance(error, HTTPException):
        error = Refused(f"{request.url.path}: {error.detail}", status=error.status_code)
    elif not isinstance(error, Refused):
        error = Refused(f"{type(error).__name__} in the server", status=500)
    again = {"Retry-After": "1"} if error.status in (429, 503) else None
    return JSONResponse(error.body, error.status, headers=again)


class Draining(uvicorn.Server):
    """Ends when the requests under way have ended; a second signal does not wait for them."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take no further request; at the second signal end at once."""
        own: Server = self.config.app.state.server  # pyright: ignore
        self.should_exit |= own.draining
        own.drain()

    async def on_tick(self, counter: int) -> bool:
        """Whether to end."""
        return await super().on_tick(counter) or self.config.app.state.server.over  # pyright: ignore


def bound(host: str, port: int) -> socket.socket:
    """A socket at an address; nobody is listened to yet.

    Raises:
        OSError: the address is taken, or none of this machine's.
    """
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind((host, port))
    return found


def serve(app: FastAPI, at: socket.socket) -> int:
    """Serve ``app`` at the address of ``at`` until a signal; returns the exit status."""
    quiet: Any = {"log_level": "warning", "access_log": False}
    config = uvicorn.Config(app, timeout_keep_alive=KEEP_ALIVE, **quiet)
    config.timeout_graceful_shutdown = 1
    Draining(config).run(sockets=[at])
    return 0 if app.state.server.failed is None else 1
