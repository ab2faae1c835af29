"""The HTTP server: runs the application by uvicorn, in a thread of its own."""

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Self

import uvicorn
from starlette.types import ASGIApp

from mlxdist.base.descriptors import MAX_DESCRIPTORS, raise_limit
from mlxdist.base.errors import InvalidArgument

from .application import application
from .http_connection import HttpConnection
from .http_options import HttpOptions
from .listener import MAX_REQUESTS, address_of, is_local
from .log import say
from .rank_zero import RankZero

__all__ = ["HttpServer", "WebServer"]

_KEEP_ALIVE_SECONDS = 75
_MAX_CONNECTIONS = 2048
_LAST_SECONDS = 2.0  # for what clients have still to take in the end
_LOGGER = logging.getLogger("uvicorn.error")


class WebServer:
    """A context manager that answers clients by an application until its exit, in a thread of its own.

    Args:
        listener: a TCP socket that listens. The server closes it.
        options: those of TLS are for the server.
        application_of: makes the application. Its argument: whether the listener is on loopback.

    Attributes:
        address: the URL for clients.
        loop: the event loop, in the context.

    Raises:
        InvalidArgument: the certificate cannot be used, or there is only its key.
    """

    def __init__(
        self, listener: socket.socket, options: HttpOptions, application_of: Callable[[bool], ASGIApp]
    ) -> None:
        if options.ssl_keyfile and not options.ssl_certfile:
            raise InvalidArgument("serve: a private key for TLS needs its certificate: --ssl-certfile")
        tls = _tls(options.ssl_certfile, options.ssl_keyfile) if options.ssl_certfile else None
        self.address = address_of(listener, "http" if tls is None else "https")
        self._listener = listener
        # Many connections may come before the first of them can be read. A request has one to rank 0 for each choice.
        most = min(_MAX_CONNECTIONS, raise_limit(MAX_DESCRIPTORS) // 2)
        config = uvicorn.Config(
            application_of(is_local(self.address)),
            http=partial(HttpConnection, tls=tls, most=most),  # type: ignore[arg-type]
            loop="asyncio",
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            headers=[("server", "mlxdist")],
            backlog=2 * MAX_REQUESTS,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        )
        self._listens = threading.Event()
        self._server = _Server(config, self._listens)
        self._thread = threading.Thread(target=self._run, name="mlxdist http", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._listens.wait()
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(RuntimeError):  # the thread has failed
            self.loop.call_soon_threadsafe(self._stop)
        self._thread.join()

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._server.server_state.connections)

    def _open(self) -> None:
        """Begins, in the event loop, before the first request."""

    def _stop(self) -> None:
        """Ends, in the event loop."""
        self._server.should_exit = True

    def _run(self) -> None:
        async def serve() -> None:
            self.loop = asyncio.get_running_loop()
            self.loop.set_exception_handler(_say_exception)
            self._open()
            await self._server.serve([self._listener])

        handler = _SayHandler(logging.ERROR)
        _LOGGER.addHandler(handler)
        _LOGGER.propagate = False
        try:
            asyncio.run(serve())
        finally:
            _LOGGER.removeHandler(handler)
            self._listens.set()


class HttpServer(WebServer):
    """The server of a model.

    It is a `mlxdist.launch.restarts.Follower`, with the methods of its :class:`RankZero`.

    Args:
        listener: a TCP socket that listens. The server closes it.
        options: the options of the server and of the application.
        rank_zero: the client of rank 0.

    Raises:
        InvalidArgument: the certificate cannot be used, or there is only its key.
    """

    def __init__(self, listener: socket.socket, options: HttpOptions, rank_zero: RankZero) -> None:
        super().__init__(listener, options, partial(application, rank_zero, options))
        self._rank_zero = rank_zero

    def starting(self, place: Path | tuple[str, int], secret: str = "") -> None:
        self._rank_zero.starting(place, secret)

    def seconds_ready(self) -> float:
        return self._rank_zero.seconds_ready()

    def failed(self, reason: str, pause: float | None, rank: int | None = None) -> None:
        self._rank_zero.failed(reason, pause, rank)

    def _open(self) -> None:
        self._rank_zero.open()

    def _stop(self) -> None:
        self._rank_zero.close()
        super()._stop()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, listens: threading.Event) -> None:
        super().__init__(config)
        self._listens = listens

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listens.set()

    async def on_tick(self, counter: int) -> bool:
        now = time.monotonic()
        connections: Any = self.server_state.connections
        for connection in tuple(connections):
            connection.tick(now)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends as uvicorn does, but answers the requests that it ends, and waits for no connection that is idle."""
        for server in self.servers:
            server.close()
        connections: Any = self.server_state.connections
        for connection in tuple(connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_SECONDS):
                while not all(connection.has_sent_all for connection in connections):
                    await asyncio.sleep(0.02)
        if tasks := tuple(self.server_state.tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=1.0)
        for connection in tuple(connections):
            connection.abort()


class _SayHandler(logging.Handler):
    """Prints uvicorn's errors, one line each."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        cause = "" if error is None else f": {type(error).__name__}: {error}"
        say(f"http: {record.getMessage().strip()}{cause}")


def _say_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    error = context.get("exception")
    say(f"http: {context['message']}" + ("" if error is None else f": {type(error).__name__}: {error}"))


def _tls(certificate: str, key: str | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"serve: the certificate {certificate} cannot be used with its key: {error}") from None
    return context
