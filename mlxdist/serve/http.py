"""Rank 0: mlx-lm's HTTP API, in front of the scheduler."""

import contextlib
import hmac
import io
import ipaddress
import json
import re
import secrets
import select
import socket
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from http.server import ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

from mlx_lm.server import (
    APIHandler,
    CompletionRequest,
    GenerationArguments,
    GenerationContext,
    Response,
    ResponseGenerator,
    get_system_fingerprint,
)

from mlxdist.base.environment import format_address

from .decisions import MAX_STOP_TOKENS, Admission
from .limits import MAX_BODY, Refusal, check_fields, check_parameters, parse_body, sentence
from .metrics import Metrics
from .scheduler import Request, Scheduler

__all__ = ["Frontend", "Handler", "Server"]

_PATHS = ("/v1/completions", "/v1/chat/completions", "/chat/completions")  # mlx-lm's
MAX_CONNECTIONS = 256
SOCKET_SECONDS = 60.0  # that a client may take to send a part of its request, or to take a part of the answer
_LAST_SECONDS = 2.0  # for what connections still write when the server ends


class Frontend(ResponseGenerator):
    """What mlx-lm's handler calls: it tokenizes a request, queues it, and gives its answer.

    mlx-lm's ResponseGenerator in name, and in how it makes tokens of messages; it has no thread, model or ranks.

    Args:
        options: mlx-lm's of its server, as far as its handler and chat templates read them.
        served: the names of the model.
        timeout: seconds of a request.
        api_key: that clients send; empty for none.
    """

    def __init__(self, options: Namespace, served: tuple[str, ...], timeout: float, api_key: str) -> None:
        self.model_provider: Any = SimpleNamespace(cli_args=options, processor=None)
        self._state_machine_cache: dict[Any, Any] = {}
        self._tokenizing = threading.Lock()  # a tokenizer is for one thread at a time
        self._timeout = timeout
        self.served, self.api_key = served, api_key
        self.metrics = Metrics()
        self.scheduler: Scheduler | None = None
        self.tokenizer: Any = None
        self.vocabulary = self.context = 0
        self.gauges: Callable[[], dict[str, float]] = dict

    def open(
        self,
        scheduler: Scheduler,
        tokenizer: Any,
        vocabulary: int,
        context: int,
        gauges: Callable[[], dict[str, float]],
    ) -> None:
        """From now on requests are served: of up to ``context`` tokens with their answer, below ``vocabulary``."""
        self.tokenizer, self.vocabulary, self.context, self.gauges = tokenizer, vocabulary, context, gauges
        self.scheduler = scheduler

    @property
    def unavailable(self) -> str:
        """Why no request is served; empty if they are."""
        return "the model is being loaded" if self.scheduler is None else self.scheduler.unavailable

    def generate(
        self,
        request: CompletionRequest,
        generation_args: GenerationArguments,
        progress_callback: Callable[[int, int], None] | None = None,
        is_connected: Callable[[], bool] = lambda: True,
    ) -> tuple[GenerationContext, Iterator[Response]]:
        """The context and the answer, once the request has a place in the batch.

        Raises:
            Refusal: it cannot be served, or not now.
        """
        if self.scheduler is None:
            raise Refusal(self.unavailable, 503)
        with self._tokenizing:
            admission, context = self._prepare(request, generation_args)
            detokenizer = self.tokenizer.detokenizer
        top = generation_args.top_logprobs if generation_args.logprobs or generation_args.top_logprobs > 0 else None
        running = Request(admission, is_connected, timeout=self._timeout, top_logprobs=top)
        self.scheduler.submit(running)
        first = running.events.get()
        if isinstance(first, Refusal):
            raise first
        context.prompt_cache_count = running.cached
        vars(context)["stop"] = running.cancel
        return context, _answer(running, detokenizer, progress_callback)

    def _prepare(self, request: CompletionRequest, args: GenerationArguments) -> tuple[Admission, GenerationContext]:
        tokenizer = self.tokenizer
        try:
            prompt, parts, kinds, initial_state, _ = self._tokenize(tokenizer, request, args)
            stop = [tokenizer.encode(word, add_special_tokens=False) for word in args.stop_words]
            _, text_sm = self._make_state_machine(None, tokenizer, args.stop_words)
        except Exception as error:  # templates raise what they like
            raise Refusal(f"the request cannot be made into tokens: {sentence(error)}") from None
        if not prompt:
            raise Refusal("the prompt is empty")
        if len(prompt) >= self.context:
            raise Refusal(f"the prompt has {len(prompt)} tokens, and at most {self.context - 1} are served here")
        if not all(0 <= token < self.vocabulary for token in prompt):
            raise Refusal("the tokenizer gives tokens that the model does not have")
        if not all(stop) or sum(map(len, stop)) > MAX_STOP_TOKENS:
            raise Refusal(f"stop must have 1 to {MAX_STOP_TOKENS} tokens")
        admission = Admission(
            number=0,
            prompt=prompt,
            segments=[(kind, len(part)) for kind, part in zip(kinds, parts)],
            max_tokens=min(args.max_tokens, self.context - len(prompt)),
            seed=secrets.randbits(64) if args.seed is None else args.seed,
            sampling=args.sampling,
            logits=replace(args.logits, logit_bias=args.logits.logit_bias or None),
            stop=stop,
        )
        context = GenerationContext(
            has_tool_calling=tokenizer.has_tool_calling,
            has_thinking=tokenizer.has_thinking,
            tool_parser=tokenizer.tool_parser,
            text_sm=text_sm,
            initial_state=initial_state,
            prompt=prompt,
        )
        return admission, context


def _answer(request: Request, detokenizer: Any, progress: Callable[[int, int], None] | None) -> Iterator[Response]:
    """The tokens of a request as mlx-lm's handler takes them. Raises Refusal: it did not come to its end."""
    while True:
        event = request.events.get()
        if isinstance(event, Refusal):
            raise event
        if isinstance(event, tuple):
            if progress is not None:
                progress(*event)
            continue
        assert not isinstance(event, int)  # it has been admitted
        if event.finish_reason != "stop":  # the token that ends it is no text
            detokenizer.add_token(event.token)
        if event.finish_reason is not None:
            detokenizer.finalize()
        top: Any = event.top
        yield Response(detokenizer.last_segment, event.token, event.logprob, event.finish_reason, top)
        if event.finish_reason is not None:
            return


class Handler(APIHandler):
    """mlx-lm's handler of one connection. What it would take or do without a limit is refused first."""

    timeout = SOCKET_SECONDS
    server_version, sys_version = "mlxdist", ""

    def __init__(self, frontend: Frontend, *arguments: Any, **keywords: Any) -> None:
        self._frontend = frontend
        self._is_unread = False  # the body
        self._streams = False  # the answer, whose headers are sent
        generate = partial(frontend.generate, is_connected=self._is_connected)
        generator: Any = SimpleNamespace(cli_args=frontend.cli_args, generate=generate)
        super().__init__(generator, *arguments, **keywords)

    def do_POST(self) -> None:
        self._is_unread = True
        try:
            self._authorize()
            if self.path not in _PATHS:
                raise Refusal("there is nothing of this name", 404)
            body = parse_body(self._read())
            if self._frontend.unavailable:
                raise Refusal(self._frontend.unavailable, 503)
            check_fields(body, "chat" in self.path, self._frontend.served)
            # OpenAI's clients write null for what is not given, and mlx-lm reads that as a value.
            body = {name: value for name, value in body.items() if value is not None}
            if "stream_options" in body:
                body["stream_options"] = {"include_usage": bool(body["stream_options"].get("include_usage"))}
            checked = json.dumps(body).encode()
            self.headers.replace_header("Content-Length", str(len(checked)))
            self.rfile = io.BytesIO(checked)
            super().do_POST()
        except Refusal as refusal:
            self._refuse(refusal)

    def do_GET(self) -> None:
        path = unquote(self.path)
        if path == "/health":
            self.handle_health_check()
            return
        name = path.removeprefix("/v1/models").removeprefix("/")
        try:
            self._authorize()
            if path == "/metrics":
                frontend = self._frontend
                self._send(frontend.metrics.text(frontend.gauges()), "text/plain; version=0.0.4")
            elif path.startswith("/v1/models") and name in ("", *self._frontend.served):
                model = {"id": self._frontend.served[0], "object": "model", "created": self.created, "owned_by": "you"}
                self._send(json.dumps(model if name else {"object": "list", "data": [model]}))
            else:
                raise Refusal("there is nothing of this name", 404)
        except Refusal as refusal:
            self._refuse(refusal)

    def handle_health_check(self) -> None:
        """200, or 503 and the reason."""
        reason = self._frontend.unavailable
        status = {"status": "unavailable", "reason": reason} if reason else {"status": "ok"}
        self._send(json.dumps(status), status=503 if reason else 200)

    def validate_model_parameters(self) -> None:
        try:
            super().validate_model_parameters()
        except (ValueError, TypeError, OverflowError) as error:
            raise Refusal(sentence(error)) from None
        check_parameters(vars(self), self._frontend.vocabulary)

    def _set_stream_headers(self, status_code: int = 200) -> None:
        super()._set_stream_headers(status_code)
        self._streams = True

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: the scheduler logs requests."""

    def _refuse(self, refusal: Refusal) -> None:
        if self._streams:  # the headers are sent
            self.wfile.write(f"data: {json.dumps(refusal.error)}\n\n".encode())
            return
        if 400 <= refusal.status < 499:
            self._frontend.metrics.end("refused")
        self._headers_buffer: list[bytes] = []  # those of an answer that has not come to its end
        retry = {} if refusal.retry_after is None else {"Retry-After": str(refusal.retry_after)}
        bearer = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else {}
        self._send(json.dumps(refusal.error), status=refusal.status, **retry, **bearer)
        if self._is_unread:  # a connection that is closed with input unread takes the answer with it
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_WR)
                self.connection.settimeout(1.0)
                for _ in range(MAX_BODY >> 14):
                    if not self.connection.recv(1 << 16):
                        break

    def _send(self, text: str, kind: str = "application/json", status: int = 200, **headers: str) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self._set_cors_headers()
        self.end_headers()
        self.wfile.write(body)

    def _authorize(self) -> None:
        key, given = self._frontend.api_key, self.headers.get("Authorization", "")
        if key and not hmac.compare_digest(given.encode(errors="replace"), f"Bearer {key}".encode()):
            raise Refusal("the API key is missing or wrong; send it as Authorization: Bearer KEY", 401)

    def _read(self) -> bytes:
        length = self.headers.get("Content-Length")
        if length is None or "Transfer-Encoding" in self.headers:
            raise Refusal("Content-Length header is required", 411)
        if not re.fullmatch("[0-9]{1,18}", length, re.ASCII):
            raise Refusal("Invalid Content-Length header")
        if int(length) > MAX_BODY:
            raise Refusal(f"the body must have at most {MAX_BODY} bytes", 413)
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise ConnectionResetError
        self._is_unread = False
        return body

    def _is_connected(self) -> bool:
        try:
            poll = select.poll()
            poll.register(self.connection, select.POLLIN)
            return not poll.poll(0) or bool(self.connection.recv(1, socket.MSG_PEEK))
        except (OSError, ValueError):  # reset; closed
            return False


class Server(ThreadingHTTPServer):
    """Listens, with at most MAX_CONNECTIONS connections. Raises OSError: it cannot."""

    request_queue_size = 128

    def __init__(self, host: str, port: int, frontend: Frontend) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = found[0][0]
        address: Any = found[0][4]
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        fingerprint = get_system_fingerprint()
        super().__init__(address, partial(Handler, frontend, system_fingerprint=fingerprint))

    @property
    def address(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{format_address(str(host), port)}"

    @property
    def is_local(self) -> bool:
        return ipaddress.ip_address(str(self.server_address[0])).is_loopback

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Answers within. In the end connections get some time for what they still have to write."""
        thread = threading.Thread(target=self.serve_forever, args=(0.05,), name="mlxdist serve", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.shutdown()
            self.server_close()
            deadline = time.monotonic() + _LAST_SECONDS
            for _ in range(MAX_CONNECTIONS):
                self._free.acquire(timeout=max(deadline - time.monotonic(), 0))

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        with contextlib.suppress(OSError):
            request.settimeout(0)
            request.sendall(b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\n\r\n")
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # a client that has gone
            super().handle_error(request, client_address)
