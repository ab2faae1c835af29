"""Rank 0: mlx-lm's HTTP API, with limits, keys, /health and /metrics."""

import contextlib
import hmac
import io
import json
import re
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

from mlx_lm.server import APIHandler, GenerationContext, Response, get_system_fingerprint

from .frontend import Frontend
from .grammar import grammar_of
from .limits import check_fields, check_parameters, parse_body, sentence
from .listener import MAX_BODY, MAX_CONNECTIONS, SOCKET_SECONDS, address_of
from .refusal import Refusal
from .scheduler import say

__all__ = ["Handler", "HttpServer"]

_PATHS = ("/v1/completions", "/v1/chat/completions", "/chat/completions")  # mlx-lm's
_ENDING = 64  # connections that the proxy has ended, and this side not yet
_FAREWELL = 2.0  # seconds that /health has the reason of a failure, and streams the time to send it
_LAST_SECONDS = 2.0  # for what connections still write when the server ends


class Handler(APIHandler):
    """mlx-lm's handler of one connection. Checks first what mlx-lm would take or do without a limit."""

    timeout = SOCKET_SECONDS
    server_version, sys_version = "mlxdist", ""

    def __init__(self, frontend: Frontend, *arguments: Any, **keywords: Any) -> None:
        self._frontend = frontend
        self._is_unread = False  # the body
        self._streams = False  # the answer, whose headers are sent
        self._priority = 0
        self._grammar = ""
        self._unsent: list[Response] = []  # tokens that no part of a stream has had
        generator: Any = SimpleNamespace(cli_args=frontend.cli_args, generate=self._generate)
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
            check_fields(body, "chat" in self.path, self._frontend.served, self._frontend.adapters)
            self._grammar = grammar_of(body)
            # OpenAI's clients write null for a field that is not given, and mlx-lm reads null as a value.
            body = {name: value for name, value in body.items() if value is not None}
            if "stream_options" in body:
                body["stream_options"] = {"include_usage": bool(body["stream_options"].get("include_usage"))}
            self._priority = body.pop("priority", 0)
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
        frontend = self._frontend
        model = {"id": frontend.served[0], "object": "model", "created": self.created, "owned_by": "you"}
        models = {name: model | {"id": name, "parent": model["id"]} for name in frontend.adapters}
        models |= dict.fromkeys(frontend.served, model)
        try:
            self._authorize()
            if path == "/metrics":
                self._send(frontend.metrics.text(frontend.gauges()), "text/plain; version=0.0.4")
            elif path == "/v1/models":
                data = [model, *(models[name] for name in frontend.adapters)]
                self._send(json.dumps({"object": "list", "data": data}))
            elif (name := path.removeprefix("/v1/models/")) in models:
                self._send(json.dumps(models[name]))
            else:
                raise Refusal("there is nothing of this name", 404)
        except Refusal as refusal:
            self._refuse(refusal)

    def handle_health_check(self) -> None:
        """Responds with 200, or with 503 and the reason."""
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

    def _noted(self, answer: Iterator[Response]) -> Iterator[Response]:
        for response in answer:
            self._unsent.append(response)
            yield response

    def generate_response(self, *arguments: Any, **keywords: Any) -> dict:
        """mlx-lm's response, to which it adds the logprobs of the tokens in each event of a stream."""
        if self.stream:
            keywords["tokens"] = [response.token for response in self._unsent]
            if self.logprobs:
                keywords["token_logprobs"] = [response.logprob for response in self._unsent]
            if self.top_logprobs > 0:
                keywords["top_tokens"] = [response.top_tokens for response in self._unsent]
            self._unsent.clear()
        return super().generate_response(*arguments, **keywords)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Does nothing: the scheduler logs requests."""

    def _generate(self, *arguments: Any, **keywords: Any) -> tuple[GenerationContext, Iterator[Response]]:
        keywords |= {"is_connected": self._is_connected, "priority": self._priority, "grammar": self._grammar}
        context, answer = self._frontend.generate(*arguments, **keywords)
        return context, self._noted(answer)

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
        # Not by ==, whose duration depends on how many of the first characters are right.
        if key and not hmac.compare_digest(given.encode(errors="replace"), f"Bearer {key}".encode()):
            raise Refusal("the API key is missing or wrong; send it as Authorization: Bearer KEY", 401)
        # A browser sends requests, with Origin, for any web page that the user of this machine opens.
        origin, allowed = self.headers.get("Origin"), self._frontend.cli_args.allowed_origins
        if origin is not None and not {"*", origin} & set(allowed):
            raise Refusal("web pages of this origin may not use the model; --allowed-origins names those that may", 403)

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


class HttpServer(ThreadingHTTPServer):
    """Answers on ``listener``, at most MAX_CONNECTIONS connections at a time.

    Args:
        proxy: the address of the proxy in front of this server; empty for none.

    Attributes:
        address: the address for clients.
    """

    def __init__(self, listener: socket.socket, frontend: Frontend, proxy: str = "") -> None:
        self.address = proxy or address_of(listener)
        self._is_behind_proxy, self._last_seconds = bool(proxy), _LAST_SECONDS
        self._limit = MAX_CONNECTIONS + (_ENDING if proxy else 0)
        self._frontend = frontend
        self._free = threading.BoundedSemaphore(self._limit)
        handler = partial(Handler, frontend, system_fingerprint=get_system_fingerprint())
        super().__init__(listener.getsockname(), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """A context that serves. At its exit, connections get some time to write the rest of their answers."""
        thread = threading.Thread(target=self.serve_forever, args=(0.05,), name="mlxdist serve", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.shutdown()
            self.server_close()
            deadline = time.monotonic() + self._last_seconds
            for _ in range(self._limit):
                self._free.acquire(timeout=max(deadline - time.monotonic(), 0))

    def ready(self, name: str, ranks: int, layout: str) -> None:
        say(f"{name} is ready at {self.address}, ranks: {ranks}, {layout}")

    def interrupt(self) -> None:
        assert self._frontend.scheduler is not None
        self._frontend.scheduler.stop()

    def failed(self) -> None:
        if self._is_behind_proxy:  # which has the requests, and says why: the sooner this ends, the better
            self._last_seconds = 0.0
        else:
            time.sleep(_FAREWELL)

    def log(self, text: str) -> None:
        say(text)

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
