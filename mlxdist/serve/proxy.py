"""The address of a server whose ranks `mlxdist serve` starts: a reverse proxy in the launcher, before rank 0.

It outlives the ranks. When a rank has died, /health has the reason until they are ready again. Requests that have not
had any output are sent to rank 0 once more, and other answers end with an error.

Rank 0 checks keys, origins and parameters of requests. HTTP is as there: 1.0, one request per connection.
"""

import asyncio
import contextlib
import math
import re
import socket
import threading
import time
from pathlib import Path
from typing import cast

from mlxdist.base.json_reader import parse_json

from .listener import MAX_CONNECTIONS, SOCKET, SOCKET_SECONDS, address_of
from .proxy_client import MAX_HEAD, ClientGone, ProxyClient, unless_gone
from .refusal import Refusal

__all__ = ["Proxy"]

_MAX_EVENT = 1 << 18  # bytes of an event that is sent as a whole; twice as many wait for a client that reads slowly
_LOOK_PAUSE = 0.1  # seconds between two looks at whether rank 0 is ready
_LOOK_SECONDS = 5.0  # that rank 0 may take to say so
_LAST_SECONDS = 2.0  # for what clients have still to take in the end
_MAX_RETRY_AFTER = 600  # seconds
_ERROR, _DONE = b'data: {"error"', b"data: [DONE]"


class _Outage:
    """A period in which rank 0 does not serve, until it is ready again, or for good.

    Attributes:
        reason: why rank 0 does not serve, in words.
        is_explained: the launcher has given the reason, or the outage is over.
        is_over: rank 0 is ready again, or never will be.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.is_explained, self.is_over = asyncio.Event(), asyncio.Event()

    def end(self) -> None:
        self.is_explained.set()
        self.is_over.set()


class Proxy:
    """A context manager that answers clients until its exit, in a thread of its own.

    The launcher's thread calls :meth:`starting`, :meth:`seconds_ready` and :meth:`failed`; see
    `mlxdist.launch.restarts.Follower`.

    Args:
        listener: a TCP socket that listens. The proxy closes it.
        request_timeout: the maximum duration in seconds of a request that is tried again, from its arrival.
    """

    def __init__(self, listener: socket.socket, request_timeout: float) -> None:
        self.address = address_of(listener)
        self._listener, self._request_timeout = listener, request_timeout
        self._socket: Path | None = None  # rank 0's
        self._outage: _Outage | None = None
        self._is_last = False  # no outage follows, and this one has no end
        self._connections: set[asyncio.Task] = set()
        self._leaving: set[asyncio.Task] = set()  # connections to rank 0 that it has not closed yet
        self._started = self._ready = self._expected = 0.0  # when this start began, was and will be ready; 0: not yet
        self._load_seconds = 0.0  # of the last start that became ready
        self._listens = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="mlxdist proxy", daemon=True)

    def __enter__(self) -> "Proxy":
        self._thread.start()
        self._listens.wait()
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._stops.set)
        self._thread.join()

    def starting(self, temporary: Path) -> None:
        self._loop.call_soon_threadsafe(self._begin, temporary / SOCKET)

    def seconds_ready(self) -> float:
        return time.monotonic() - self._ready if self._ready else 0.0

    def failed(self, reason: str, pause: float | None) -> None:
        self._loop.call_soon_threadsafe(self._explain, f"the server has failed: {reason}", pause)

    async def _run(self) -> None:
        self._loop, self._stops = asyncio.get_running_loop(), asyncio.Event()
        self._lose("the model is being loaded").is_explained.set()
        backlog, limit = MAX_CONNECTIONS, MAX_HEAD
        server = await asyncio.start_server(self._connected, sock=self._listener, backlog=backlog, limit=limit)
        self._listens.set()
        await self._stops.wait()
        server.close()
        outage = self._lose("")
        outage.reason = outage.reason if self._is_last else "the server stops"
        self._is_last = True
        outage.end()
        if tasks := self._connections | self._leaving:
            await asyncio.wait(tasks, timeout=_LAST_SECONDS)

    def _begin(self, path: Path) -> None:
        self._socket, self._started, self._ready = path, time.monotonic(), 0.0
        self._expected = self._started + self._load_seconds

    def _explain(self, reason: str, pause: float | None) -> None:
        outage = self._lose(reason)
        outage.reason, self._is_last = reason, pause is None
        outage.is_explained.set()
        self._expected = time.monotonic() + (pause or 0.0) + self._load_seconds

    def _lose(self, reason: str) -> _Outage:
        """The current outage; begins one if there is none."""
        if self._outage is None:
            self._outage = _Outage(reason)
            self._expected = time.monotonic() + self._load_seconds
            self._watching = asyncio.create_task(self._watch(self._outage))
        return self._outage

    async def _watch(self, outage: _Outage) -> None:
        while not outage.is_over.is_set():
            await self._look()
            await asyncio.sleep(_LOOK_PAUSE)

    async def _look(self) -> _Outage | None:
        """Requests /health of rank 0. Returns the outage, or None if rank 0 is ready."""
        asked = self._socket, self._outage
        try:
            if self._is_last or self._socket is None:
                raise ConnectionRefusedError
            async with asyncio.timeout(_LOOK_SECONDS):
                reader, writer = await asyncio.open_unix_connection(self._socket)
                with contextlib.closing(writer):
                    writer.write(b"GET /health HTTP/1.0\r\n\r\n")
                    reason = parse_json((await reader.read()).partition(b"\r\n\r\n")[2]).get("reason", "")
        except (OSError, TimeoutError, ValueError):
            reason = "rank 0 does not answer"
        if asked != (self._socket, self._outage):  # an answer of the ranks before
            return self._outage
        if reason:
            outage = self._lose(reason)
            outage.reason = outage.reason if outage.is_explained.is_set() else reason
        elif self._outage is not None:
            self._outage.end()
            self._outage = None
            if not self._ready:
                self._ready = time.monotonic()
                self._load_seconds = self._ready - self._started
        return self._outage

    def _unavailable(self, outage: _Outage) -> Refusal:
        seconds = math.ceil(self._expected - time.monotonic())
        is_known = self._load_seconds and not self._is_last
        return Refusal(outage.reason, 503, min(max(seconds, 1), _MAX_RETRY_AFTER) if is_known else None)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = ProxyClient(reader, writer)
        try:
            if len(self._connections) >= MAX_CONNECTIONS:
                await client.answer(503, Refusal("too many connections are open", 503).error, retry_after=1)
                return
            _keep(cast(asyncio.Task, asyncio.current_task()), self._connections)
            try:
                await client.read_head()
                await self._answer(client)
            except Refusal as refusal:
                is_health = client.path == b"/health" and refusal.status == 503
                body = {"status": "unavailable", "reason": str(refusal)} if is_health else refusal.error
                await client.answer(refusal.status, body, refusal.retry_after)
            await client.close()
        except (ClientGone, asyncio.CancelledError):  # cancelled in the end
            return
        finally:
            client.abort()

    async def _answer(self, client: ProxyClient) -> None:
        """Answers a client from rank 0. Raises Refusal: rank 0 has not answered, or not completely."""
        if self._outage is not None and (outage := await self._look()):
            raise self._unavailable(outage)
        try:
            async with asyncio.timeout(None) as limit:
                for is_again in (False, True):
                    if await self._exchange(client):
                        return
                    outage = await self._look()
                    if outage is None:
                        raise Refusal("rank 0 has closed the connection before the end of the answer", 502)
                    limit.reschedule(client.arrived + self._request_timeout)
                    is_final = is_again or client.has_output
                    if client.path != b"/health":
                        event = outage.is_explained if is_final else outage.is_over
                        await unless_gone(event.wait(), client.gone())
                    if is_final or self._is_last or client.path == b"/health":
                        raise self._unavailable(outage)
        except TimeoutError:
            raise Refusal("the request has taken too long", 504) from None

    async def _exchange(self, client: ProxyClient) -> bool:
        """Sends the request to rank 0 and its answer to the client. Returns False if rank 0 failed before its end."""
        try:
            reader, writer = await asyncio.open_unix_connection(self._socket, limit=_MAX_EVENT)
        except OSError:
            return False
        try:
            return await unless_gone(self._relay(reader, client), client.forward(writer))
        except (EOFError, OSError):
            return False
        finally:
            # Not awaited: rank 0 may need time to close the connection, and the client already has its answer.
            _keep(asyncio.create_task(_leave(reader, writer)), self._leaving)

    async def _relay(self, upstream: asyncio.StreamReader, client: ProxyClient) -> bool:
        head = await upstream.readuntil(b"\r\n\r\n")
        if re.search(rb"(?i)\r\ncontent-type: text/event-stream", head):
            return await self._relay_events(head, upstream, client)
        body = await upstream.read()
        length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
        if length is not None and len(body) < int(length[1]):
            return False
        if head.split()[1] >= b"500" and await self._look():
            return False
        # Rank 0 may reject the second try of a stream: the client already has headers, so the error becomes an event.
        await client.send(b"data: " + body + b"\n\n" if client.streams else head + body, is_output=True)
        return True

    async def _relay_events(self, head: bytes, upstream: asyncio.StreamReader, client: ProxyClient) -> bool:
        """Relays complete events, because an event with an error must be able to follow each of them."""
        if not client.streams:
            client.streams = True
            await client.send(head)
        while True:
            try:
                event = await upstream.readuntil(b"\n\n")
            except asyncio.LimitOverrunError as error:  # a tool call with very long arguments
                event = await upstream.readexactly(error.consumed)
            if event.startswith(_ERROR) and await self._look():
                return False
            await client.send(event, is_output=event.startswith(b"data:"))
            if event.startswith((_ERROR, _DONE)):
                return True


def _keep(task: asyncio.Task, tasks: set[asyncio.Task]) -> None:
    """Keeps a reference to a task until it has ended: asyncio keeps a weak one, and the task could be collected."""
    tasks.add(task)
    task.add_done_callback(tasks.discard)


async def _leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Closes a connection to rank 0, which cancels a request that still runs. Waits until rank 0 has closed it, too."""
    with contextlib.suppress(OSError, TimeoutError):
        writer.write_eof()
        async with asyncio.timeout(SOCKET_SECONDS):
            while await reader.read(1 << 16):
                continue
    writer.close()
