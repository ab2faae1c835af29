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

from mlx_lm.server import APIHandler, get_system_fingerprint

from .frontend import Frontend
from .limits import Refusal, check_fields, check_parameters, parse_body, sentence
from .listener import MAX_BODY, MAX_CONNECTIONS, SOCKET_SECONDS, address_of

__all__ = ["Handler", "Server"]

_PATHS = ("/v1/completions", "/v1/chat/completions", "/chat/completions")  # mlx-lm's
_ENDING = 64  # connections that the proxy has ended, and this side not yet
_LAST_SECONDS = 2.0  # for what connections still write when the server ends


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
        frontend = self._frontend
        model = {"id": frontend.served[0], "object": "model", "created": self.created, "owned_by": "you"}
        try:
            self._authorize()
            if path == "/metrics":
                self._send(frontend.metrics.text(frontend.gauges()), "text/plain; version=0.0.4")
            elif path == "/v1/models":
                self._send(json.dumps({"object": "list", "data": [model]}))
            elif path.removeprefix("/v1/models/") in frontend.served:
                self._send(json.dumps(model))
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
        # A browser sends it for any page that the user of this machine looks at.
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


class Server(ThreadingHTTPServer):
    """Answers on ``listener``, at most MAX_CONNECTIONS connections at a time.

    Attributes:
        address: where clients find it: the listener's, or that of the proxy before it.
        last_seconds: for what connections still write in the end.
    """

    def __init__(self, listener: socket.socket, frontend: Frontend, address: str = "") -> None:
        self.address, self.last_seconds = address or address_of(listener), _LAST_SECONDS
        self._limit = MAX_CONNECTIONS + (_ENDING if listener.family == socket.AF_UNIX else 0)
        self._free = threading.BoundedSemaphore(self._limit)
        handler = partial(Handler, frontend, system_fingerprint=get_system_fingerprint())
        super().__init__(listener.getsockname(), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener

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
            deadline = time.monotonic() + self.last_seconds
            for _ in range(self._limit):
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
