"""The client of rank 0: sends calls, yields events, and knows whether rank 0 serves.

In the launcher it outlives the ranks. When one has died, an outage begins, which lasts until the ranks are ready again.
Requests of whose answer nothing has been sent are then computed once more, and others end with the launcher's reason.
"""

import asyncio
import contextlib
import errno
import math
import socket
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from mlxdist.base.environment import format_address
from mlxdist.base.local_network import hint

from .authenticated_stream import connect
from .listener import SOCKET
from .log import say
from .protocol import EVENT, MAX_LINE, Call, Event, Failed, Finished, Generate, Result, Status
from .refusal import Refusal

__all__ = ["RankZero"]

_READ_AHEAD = 1 << 16  # bytes of events that wait for a client that reads slowly; asyncio reads twice as many
_LOOK_PAUSE = 0.1  # seconds between two looks at whether rank 0 is ready
_LOOK_SECONDS = 5.0  # that rank 0 may take to say so
_HEALTH_SECONDS = 0.5  # that /health waits for it
_CONNECT_PAUSE = 0.01  # seconds between two attempts to connect, while its queue of connections is full
_REFUSED_SECONDS = 0.2 if sys.platform == "darwin" else 0.0  # for which macOS refuses a connection for that reason
_MAX_RETRY_AFTER = 600  # seconds

_SILENT = "rank 0 does not answer"

_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_Answer = TypeVar("_Answer")


class _Lost(Refusal):
    """Rank 0 has not answered, or not completely."""

    def __init__(self) -> None:
        super().__init__("rank 0 has closed the connection before the end of the answer", 502)


class _Outage:
    """A period in which rank 0 does not serve, until it is ready again, or for good.

    Attributes:
        reason: why rank 0 does not serve, in words.
        is_explained: the launcher has given the reason, or the outage is over.
        is_over: rank 0 is ready again, or never will be.
        rank: the one that failed first; None where that is not known, or it was none.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.rank: int | None = None
        self.is_explained, self.is_over = asyncio.Event(), asyncio.Event()

    def end(self) -> None:
        self.is_explained.set()
        self.is_over.set()


class RankZero:
    """The client of rank 0. Its methods are for the event loop of the HTTP server.

    :meth:`starting`, :meth:`seconds_ready` and :meth:`failed` are for the launcher's thread; see
    `mlxdist.launch.restarts.Follower`.

    Args:
        connect: connects to rank 0 in this process; None in the launcher, which says where rank 0 is.
        request_timeout: the maximum duration in seconds of a request that is tried again, from its arrival.
    """

    def __init__(
        self, connect: Callable[[], Awaitable[_Connection]] | None = None, request_timeout: float = 600.0
    ) -> None:
        self._connect, self._request_timeout = connect, request_timeout
        self._is_in_launcher = connect is None
        self._place: Path | tuple[str, int] | None = None
        self._secret = b""
        self._has_said = False  # that TCP does not reach rank 0, in this start
        self._outage: _Outage | None = None
        self._is_last = False  # no outage follows, and this one has no end
        self._started = self._ready = self._expected = 0.0  # when this start began, was and will be ready; 0: not yet
        self._load_seconds = 0.0  # of the last start that became ready
        self._status: asyncio.Task[dict[str, Any]] | None = None
        self._answered = -math.inf  # when rank 0 last sent an event

    def starting(self, place: Path | tuple[str, int], secret: str = "") -> None:
        self._loop.call_soon_threadsafe(self._begin, place, bytes.fromhex(secret))

    def seconds_ready(self) -> float:
        return time.monotonic() - self._ready if self._ready else 0.0

    def failed(self, reason: str, pause: float | None, rank: int | None = None) -> None:
        self._loop.call_soon_threadsafe(self._explain, f"the server has failed: {reason}", pause, rank)

    @property
    def failed_rank(self) -> int | None:
        """The rank that has failed first, while the ranks are not ready again; None where there is none."""
        return None if self._outage is None else self._outage.rank

    def open(self) -> None:
        """Begins to look for rank 0, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        if self._is_in_launcher:
            self._lose("the model is being loaded").is_explained.set()

    def close(self) -> None:
        """Refuses the requests that wait for rank 0, and those that follow. In rank 0 these are the endpoint's."""
        if self._is_in_launcher:
            outage = self._lose("")
            outage.reason = outage.reason if self._is_last else "the server stops"
            self._is_last = True
            outage.end()

    async def generate(self, call: Call) -> AsyncGenerator[Event, None]:
        """Sends a call. Yields events up to the last one; to close the iterator is to cancel the request.

        Raises:
            Refusal: rank 0 refuses it, or fails.
        """
        try:
            reader, writer = await self._connected()
        except OSError:
            raise _Lost from None
        try:
            writer.write(call.model_dump_json().encode() + b"\n")
            with contextlib.suppress(OSError):  # rank 0 may have refused a part of it: its answer says why
                await writer.drain()
            left = call.n if isinstance(call, Generate) else 1
            while left:
                event: Event = EVENT.validate_json(await _read_line(reader))
                if isinstance(event, Failed):
                    raise event.refusal
                self._answered = time.monotonic()
                yield event
                left -= isinstance(event, Finished | Result)
        except (EOFError, OSError, ValidationError):
            raise _Lost from None
        finally:
            writer.transport.abort()

    async def ask(self, call: Call) -> Any:
        """The value of the :class:`Result` of a call. Raises Refusal: rank 0 refuses it, or does not serve."""
        return await self.answered(lambda: self._result(call), lambda: False)

    async def answered(self, attempt: Callable[[], Awaitable[_Answer]], has_output: Callable[[], bool]) -> _Answer:
        """The result of ``attempt``, which asks rank 0; of a second one after an outage.

        Args:
            attempt: sends calls by :meth:`generate`.
            has_output: whether some of the answer has been sent to the client, so that there is no second attempt.

        Raises:
            Refusal: rank 0 refuses a call, or does not serve.
        """
        arrived = asyncio.get_running_loop().time()
        if self._outage is not None and (outage := await self._look()):
            raise self._unavailable(outage)
        try:
            async with asyncio.timeout(None) as limit:
                for is_again in (False, True):
                    start = self._place
                    try:
                        return await attempt()
                    except Refusal as refusal:
                        # With a time to come again rank 0 goes on: it is busy, or lets its last requests end.
                        is_failure = self._is_in_launcher and refusal.status >= 500 and refusal.retry_after is None
                        outage = await self._look() if is_failure else None
                        # Without an outage these are other ranks, if the one before is over already.
                        is_final = is_again or has_output()
                        if outage is None and (is_final or not is_failure or self._place == start):
                            raise
                    limit.reschedule(arrived + self._request_timeout)
                    if outage is not None:
                        await (outage.is_explained if is_final else outage.is_over).wait()
                        if is_final or self._is_last:
                            raise self._unavailable(outage)
        except TimeoutError:
            raise Refusal("the request has taken too long", 504) from None
        raise AssertionError("the second attempt is the last")

    async def status(self, metrics: bool = False, cluster: bool = False) -> dict[str, Any]:
        """The value of :class:`Status`, with ``metrics`` also their text, and with ``cluster`` the state of all ranks.

        Raises:
            Refusal: rank 0 does not serve.
        """
        # Who reads that the server is ready may ask before the next look.
        if self._outage is not None and (outage := await self._look()):
            raise self._unavailable(outage)
        if metrics or cluster:
            status = await self._ask_status(metrics, cluster)
        else:
            if self._status is None or self._status.done():
                self._status = asyncio.create_task(self._ask_status())  # one for all who want to know
            status = await asyncio.shield(self._status)
        if status["reason"]:
            raise Refusal(status["reason"], 503)
        return status

    async def check(self) -> None:
        """Checks in less than a second that rank 0 serves, or did seconds ago and is busy.

        Raises:
            Refusal: it does not.
        """
        try:
            async with asyncio.timeout(_HEALTH_SECONDS):
                await self.status()
        except TimeoutError:
            if self._outage is not None:
                raise self._unavailable(self._outage) from None
            if time.monotonic() - self._answered > _LOOK_SECONDS:
                raise Refusal(_SILENT, 503) from None

    def _begin(self, place: Path | tuple[str, int], secret: bytes) -> None:
        self._place, self._secret, self._has_said = place, secret, False
        self._started, self._ready, self._status = time.monotonic(), 0.0, None
        self._expected = self._started + self._load_seconds

    def _explain(self, reason: str, pause: float | None, rank: int | None) -> None:
        outage = self._lose(reason)
        outage.rank = rank
        outage.reason, self._is_last = reason, pause is None
        self._place, self._ready = None, 0.0  # they have ended; on a host that is lost they may not know it yet
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
        """Asks rank 0 for its status. Returns the outage, or None if rank 0 is ready."""
        asked = self._place, self._outage
        reason = _SILENT if self._is_last else (await self._ask_status())["reason"]
        if asked != (self._place, self._outage):  # an answer of the ranks before
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

    async def _ask_status(self, metrics: bool = False, cluster: bool = False) -> dict[str, Any]:
        try:
            async with asyncio.timeout(_LOOK_SECONDS):
                return await self._result(Status(metrics=metrics, cluster=cluster))
        except (Refusal, TimeoutError):
            return {"reason": _SILENT}

    async def _result(self, call: Call) -> Any:
        async with contextlib.aclosing(self.generate(call)) as events:
            async for event in events:
                if isinstance(event, Result):
                    return event.value
        raise _Lost

    def _unavailable(self, outage: _Outage) -> Refusal:
        seconds = math.ceil(self._expected - time.monotonic())
        is_known = self._load_seconds and not self._is_last
        return Refusal(outage.reason, 503, min(max(seconds, 1), _MAX_RETRY_AFTER) if is_known else None)

    async def _connected(self) -> _Connection:
        if self._connect is not None:
            return await self._connect()
        if self._place is None:
            raise ConnectionRefusedError
        return await self._reached(self._place)

    async def _reached(self, place: Path | tuple[str, int]) -> _Connection:
        """A connection to rank 0. Waits while its queue of connections is full, or no descriptor is free.

        That is so when many requests of many choices come at once.
        """
        refused_until = time.monotonic() + (_REFUSED_SECONDS if isinstance(place, Path) else 0.0)
        while True:
            try:
                if isinstance(place, Path):
                    connection = _connected_at_once(place / SOCKET)
                    return await asyncio.open_unix_connection(sock=connection, limit=_READ_AHEAD)
                return await connect(*place, self._secret, _READ_AHEAD)
            except ConnectionRefusedError:
                if time.monotonic() >= refused_until:
                    raise
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EMFILE, errno.ENFILE):
                    self._say_unreachable(place, error)
                    raise
            await asyncio.sleep(_CONNECT_PAUSE)

    def _say_unreachable(self, place: Path | tuple[str, int], error: OSError) -> None:
        """Says once in a start that TCP does not reach rank 0's host, though ssh does: else it would only be silent."""
        if isinstance(place, Path) or self._has_said or isinstance(error, ConnectionResetError):
            return
        self._has_said = True
        problem = (error.strerror or "no response") + hint(error)
        say(
            f"rank 0 cannot be reached by TCP at {format_address(*place)}: {problem}; if a firewall is on the way, let "
            "it pass; if ssh goes through another machine, give --max-restarts 0: then rank 0 listens for clients"
        )


def _connected_at_once(path: Path) -> socket.socket:
    """A socket of a Unix domain, which has its connection now or not at all: asyncio takes EAGAIN, a full queue, for
    one."""
    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    try:
        connection.connect(str(path))
    except BaseException:
        connection.close()
        raise
    return connection


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    """A line, which may be longer than what is read ahead. Raises EOFError, OSError."""
    line = bytearray()
    while len(line) < MAX_LINE:
        try:
            return bytes(line + await reader.readuntil(b"\n"))
        except asyncio.LimitOverrunError as error:
            line += await reader.readexactly(error.consumed)
    raise EOFError
