"""The application of HTTP: OpenAI's and Anthropic's APIs, /health, /metrics and the page, by calls to rank 0.

It imports neither MLX nor mlx-lm: it runs in the launcher, or beside rank 0 in a thread.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from functools import partial
from typing import Any, Protocol, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from mlxdist.version import __version__

from .api import (
    ApiAnswer,
    ChatRequest,
    CompletionRequest,
    CountTokensRequest,
    DetokenizeRequest,
    MessagesRequest,
    ResponsesRequest,
    ResponseStore,
    TokenizeRequest,
    model_object,
    models_list,
    parse,
)
from .cluster import Cluster, cluster_route
from .http_checks import AfterCors, BeforeCors, record_of, refused
from .http_options import HttpOptions
from .listener import MAX_BODY, MAX_REQUESTS
from .log import RequestRecord
from .metrics import CONTENT_TYPE, HttpMetrics
from .page import page_routes
from .protocol import Admitted, Event, Failed, Finished, Generate, Progress, Result
from .rank_zero import RankZero
from .refusal import Refusal

__all__ = ["application", "checked"]

_BODY_SECONDS = 60.0  # that a client may take to send all of a body
_LARGE = 128 << 10  # bytes of a body whose check may take longer than a step; millions of small items take seconds
_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect events
]

_Question = TokenizeRequest | DetokenizeRequest | CountTokensRequest
_Body = TypeVar("_Body", bound=ChatRequest | CompletionRequest | MessagesRequest | ResponsesRequest | _Question)
_Headed = TypeVar("_Headed", MessagesRequest, CountTokensRequest)
_Result = TypeVar("_Result")
_Take = Callable[[ApiAnswer, int, Event], Awaitable[None]]


class _Generation(Protocol):
    """A request for an answer, of any API."""

    @property
    def stream(self) -> bool: ...

    def calls(self) -> list[Generate]: ...

    def answer(self, request_id: str, created: int) -> ApiAnswer: ...


def application(rank_zero: RankZero, options: HttpOptions, is_loopback: bool) -> Starlette:
    """The application, which calls rank 0. ``is_loopback``: whether the server listens there."""
    api = _Api(rank_zero, options)
    return checked(api.routes, options, api.http_metrics, is_loopback)


def checked(routes: list[Route], options: HttpOptions, metrics: HttpMetrics, is_loopback: bool) -> Starlette:
    """An application of these routes, with all checks of hosts, origins and keys. ``metrics`` count its answers."""
    cors = Middleware(
        CORSMiddleware,
        allow_origins=options.allowed_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],  # those that the page asks for are named: OpenAI's client sends more than Authorization
        allow_private_network=True,
        expose_headers=["X-Request-Id", "Retry-After"],
    )
    first = Middleware(BeforeCors, options=options, metrics=metrics, is_loopback=is_loopback)
    return Starlette(
        routes=routes,
        middleware=[first, cors, Middleware(AfterCors, options=options)],
        exception_handlers={HTTPException: _not_routed},
    )


async def _not_routed(request: Request, error: Exception) -> Response:
    """404 and 405. OPTIONS, which no route has, gets the methods of its path."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405 and request.method == "OPTIONS":
        return Response(status_code=204, headers=error.headers)
    is_known = error.status_code == 405
    text = f"{request.method} is not for this path" if is_known else "there is nothing of this name"
    response = refused(Refusal(text, error.status_code), request.url.path)
    response.headers.update(error.headers or {})
    return response


class _Api:
    """The endpoints of the application.

    Attributes:
        routes: their paths and methods.
        http_metrics: counters of the answers.
    """

    def __init__(self, rank_zero: RankZero, options: HttpOptions) -> None:
        self._rank_zero, self._options = rank_zero, options
        self._created = int(time.time())
        self._responses = ResponseStore()
        self.routes = [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/responses", self.responses, methods=["POST"]),
            Route("/v1/messages", self.messages, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/version", self.version),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            cluster_route(Cluster(rank_zero).view),
            *(page_routes(has_key=bool(options.api_key), has_chat=True) if options.page else ()),
        ]
        self.http_metrics = HttpMetrics([route.path for route in self.routes])
        self._running = 0  # requests in progress
        # Of large bodies one is checked at a time: Python runs one thread at a time, and the loop needs its turns.
        self._large = asyncio.Lock()

    async def chat(self, request: Request) -> ASGIApp:
        return self._answering(await self._parsed(request, ChatRequest))

    async def completions(self, request: Request) -> ASGIApp:
        return self._answering(await self._parsed(request, CompletionRequest))

    async def responses(self, request: Request) -> ASGIApp:
        return self._answering((await self._parsed(request, ResponsesRequest)).turn(self._responses))

    async def messages(self, request: Request) -> ASGIApp:
        return self._answering(self._stable(request, await self._parsed(request, MessagesRequest)))

    async def count_tokens(self, request: Request) -> ASGIApp:
        return partial(self._ask, self._stable(request, await self._parsed(request, CountTokensRequest)))

    async def tokenize(self, request: Request) -> ASGIApp:
        return partial(self._ask, await self._parsed(request, TokenizeRequest))

    async def detokenize(self, request: Request) -> ASGIApp:
        return partial(self._ask, await self._parsed(request, DetokenizeRequest))

    async def models(self, request: Request) -> Response:
        status = await self._rank_zero.status()
        return JSONResponse(models_list(status["models"], status["adapters"], self._created))

    async def model(self, request: Request) -> Response:
        status, name = await self._rank_zero.status(), request.path_params["name"]
        return JSONResponse(model_object(name, status["models"], status["adapters"], self._created))

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def health(self, request: Request) -> Response:
        try:
            await self._rank_zero.check()
        except Refusal as refusal:
            return refused(refusal, request.url.path, {"status": "unavailable", "reason": str(refusal)})
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        status = await self._rank_zero.status(metrics=True)
        return Response(status["metrics"] + self.http_metrics.text(), media_type=CONTENT_TYPE)

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        """A place among the requests in progress, whose bodies have come. Raises Refusal: there is none."""
        if self._running >= MAX_REQUESTS:
            raise Refusal(f"{MAX_REQUESTS} requests are in progress; try again later", 503, retry_after=1)
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    async def _parsed(self, request: Request, kind: type[_Body]) -> _Body:
        body = await _body(request)
        parsed = partial(parse, body, kind, ignore_unknown=self._options.ignore_unknown_fields)
        if len(body) < _LARGE:
            return parsed()
        async with self._large:
            return await asyncio.to_thread(parsed)

    def _stable(self, request: Request, parsed: _Headed) -> _Headed:
        """The request, for the prefix cache."""
        if not self._options.normalize_heads:
            return parsed
        stable, record_of(request.scope).normalized = parsed.with_stable_head()
        return stable

    def _answering(self, request: _Generation) -> ASGIApp:
        return partial(self._stream if request.stream else self._whole, request)

    async def _ask(self, request: _Question, scope: Scope, receive: Receive, send: Send) -> None:
        with self._place():
            value = await _unless_gone(receive, self._rank_zero.ask(request.call()))
        await JSONResponse(request.answer(value))(scope, receive, send)

    async def _whole(self, request: _Generation, scope: Scope, receive: Receive, send: Send) -> None:
        async def add(answer: ApiAnswer, choice: int, event: Event) -> None:
            answer.add(choice, event)

        attempt = partial(self._attempt, request, record_of(scope), add)
        with self._place():
            answer = await _unless_gone(receive, self._rank_zero.answered(attempt, lambda: False))
        await JSONResponse(answer.whole())(scope, receive, send)

    async def _stream(self, request: _Generation, scope: Scope, receive: Receive, send: Send) -> None:
        stream = _EventStream(send)
        scope["state"]["streams"] = True  # events, between which the connection may send comments
        attempt = partial(self._attempt, request, record_of(scope), stream.add)
        with self._place():
            try:
                answer = await _unless_gone(receive, self._rank_zero.answered(attempt, lambda: stream.has_output))
                last = answer.encode(answer.last()) + answer.stream_end
            except Refusal as refusal:
                if stream.answer is None:
                    raise
                record_of(scope).fail(refusal)
                last = stream.answer.encode(stream.answer.failed(refusal))
            await stream.close(last)

    async def _attempt(self, request: _Generation, record: RequestRecord, take: _Take) -> ApiAnswer:
        """Asks rank 0 for an answer. ``take``: gets each event, with the number of its choice, and adds it."""
        record.answer = answer = request.answer(record.id, int(time.time()))
        async with contextlib.aclosing(_events(self._rank_zero, request.calls())) as events:
            async for choice, event in events:
                await take(answer, choice, event)
        return answer


class _EventStream:
    """An answer of server-sent events.

    Attributes:
        answer: that of the last event; None until the headers are sent, after which an error is an event.
        has_output: whether some of the answer is sent, so that the request cannot be tried again.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.answer: ApiAnswer | None = None
        self.has_output = False

    async def add(self, answer: ApiAnswer, choice: int, event: Event) -> None:
        """Sends the chunks that an event of rank 0 makes. Returns once the client has taken enough of them."""
        chunks = answer.add(choice, event)
        self.has_output |= bool(chunks)
        alive = f": keepalive {event.processed}/{event.total}\n\n" if isinstance(event, Progress) else ""
        is_first, self.answer = self.answer is None, answer
        if is_first:
            await self._send({"type": "http.response.start", "status": 200, "headers": _STREAM})
        if text := alive + answer.encode(chunks):
            await self._send({"type": "http.response.body", "body": text.encode(), "more_body": True})

    async def close(self, text: str) -> None:
        """Sends the last events."""
        await self._send({"type": "http.response.body", "body": text.encode(), "more_body": False})


async def _body(request: Request) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY:  # of which no length was declared
                    raise Refusal(f"the body must have at most {MAX_BODY} bytes", 413)
    except TimeoutError:
        raise Refusal(f"the body has not come within {_BODY_SECONDS:g} seconds", 408) from None
    return bytes(body)


async def _unless_gone(receive: Receive, wanted: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of ``wanted``, which is cancelled when the client leaves. Raises ClientDisconnect: it has left."""

    async def leave() -> None:
        while (await receive())["type"] != "http.disconnect":
            continue

    tasks = asyncio.create_task(wanted), asyncio.create_task(leave())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _events(rank_zero: RankZero, calls: list[Generate]) -> AsyncGenerator[tuple[int, Event], None]:
    """Events of all calls, with the number of the choice, from when all choices are admitted.

    Events that come before that are kept: a choice may wait until another has ended. If one is refused, the others are
    cancelled.

    Raises:
        Refusal: a call is refused, or fails.
    """
    choices, admitted = sum(call.n for call in calls), 0
    kept: list[tuple[int, Event]] = []
    # Most requests have one call: with a queue and a task the loop would run 30 callbacks for each, and not 21.
    merged = _numbered(rank_zero, calls[0], 0) if len(calls) == 1 else _merged(rank_zero, calls)
    async with contextlib.aclosing(merged) as events:
        async for each in events:
            admitted += isinstance(each[1], Admitted)
            kept.append(each)
            if admitted == choices:
                for one in kept:
                    yield one
                kept.clear()


async def _numbered(rank_zero: RankZero, call: Generate, first: int) -> AsyncGenerator[tuple[int, Event], None]:
    """Events of a call, with the number of the choice. ``first``: that of its first one."""
    async with contextlib.aclosing(rank_zero.generate(call)) as events:
        async for event in events:
            assert not isinstance(event, Failed | Result)  # of an answer
            yield first + event.choice, event


async def _merged(rank_zero: RankZero, calls: list[Generate]) -> AsyncGenerator[tuple[int, Event], None]:
    """Events of several calls as they come. Ends the others when one raises."""
    queue: asyncio.Queue[tuple[int, Event] | Exception] = asyncio.Queue(1)
    left = choices = sum(call.n for call in calls)

    async def pass_on(first: int, call: Generate) -> None:
        try:
            async with contextlib.aclosing(_numbered(rank_zero, call, first)) as events:
                async for each in events:
                    await queue.put(each)
        except Exception as error:  # whatever it is: the request must not wait for more
            await queue.put(error)

    firsts = range(0, choices, choices // len(calls))
    tasks = [asyncio.create_task(pass_on(first, call)) for first, call in zip(firsts, calls)]
    try:
        while left:
            each = await queue.get()
            if isinstance(each, Exception):
                raise each
            left -= isinstance(each[1], Finished)
            yield each
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
