"""The clients of rank 0 over HTTP: by an application in this process, or by that of the launcher."""

import contextlib
import socket
import time
from collections.abc import Iterator

from mlxdist.base.environment import Environment

from .endpoint import Endpoint
from .http_server import HttpServer
from .listener import is_local, listen, listen_for_application
from .log import say
from .options import ServeOptions
from .rank_zero import RankZero

__all__ = ["HttpClients"]

_FAREWELL = 2.0  # seconds that /health has the reason of a failure, and streams the time to send it


class HttpClients:
    """The source of requests of `mlxdist serve`.

    Attributes:
        address: the address for clients.

    Raises:
        InvalidArgument: nothing can listen at the address.
    """

    def __init__(self, endpoint: Endpoint, options: ServeOptions) -> None:
        self._endpoint, http = endpoint, options.http
        self._listener: socket.socket | None = None
        self._server: HttpServer | None = None
        self._is_elsewhere = False  # the application is, and its address
        if options.application:
            self._listener, self.address = listen_for_application(), options.application
            self._is_elsewhere = self._listener.family != socket.AF_UNIX
        else:
            rank_zero = RankZero(endpoint.connect, http.request_timeout)
            self._server = HttpServer(listen(http.host, http.port), http, rank_zero)
            self.address = self._server.address
        if not http.api_key and not is_local(self.address):
            say(f"all who reach {self.address} can use the model; MLXDIST_API_KEY sets a key")

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """A context that serves. At its exit, connections get some time to write the rest of their answers."""
        with contextlib.ExitStack() as parts:
            parts.enter_context(self._endpoint.running(self._listener, Environment.read().secret))
            if self._server is not None:
                parts.enter_context(self._server)
            yield

    def ready(self, name: str, ranks: int, layout: str) -> None:
        where = " on the launcher's host" if self._is_elsewhere else ""
        say(f"{name} is ready at {self.address}{where}, ranks: {ranks}, {layout}")

    def interrupt(self) -> None:
        assert self._endpoint.scheduler is not None
        self._endpoint.scheduler.stop()

    def failed(self) -> None:
        if self._server is not None:  # the launcher's has the requests, and says why: the sooner this ends, the better
            time.sleep(_FAREWELL)
