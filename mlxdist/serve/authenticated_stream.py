"""Streams between two hosts, whose ends have proven to each other that they have the job's secret.

The handshake and the frames are those of the rendezvous (`mlxdist.runtime.rendezvous.authentication`), with a role of
their own: a proof of a rank is worth nothing here, nor one of here to the rendezvous. After the handshake each frame
has a tag, by a key of this connection and a counter. Nothing is encrypted.
"""

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from mlxdist.base.descriptors import MAX_DESCRIPTORS, raise_limit
from mlxdist.runtime.rendezvous.authentication import ClientHandshake, ServerHandshake
from mlxdist.runtime.rendezvous.protocol import Framing, Kind, ProtocolError
from mlxdist.runtime.rendezvous.server import HANDSHAKE_SECONDS, keep_alive

__all__ = ["AuthenticatedServer", "connect"]

_ROLE = "application"
_PIECE = 1 << 16  # bytes of a frame, which may have a MiB
_MAX_PENDING = 1024  # connections in their handshake: a burst of requests has one for each choice
_CONNECT_SECONDS = 5.0  # until TCP is connected; that of Linux tries for two minutes
_ATTEMPTS, _PAUSE = 20, 0.05  # seconds; of a connection that has made room for another in its handshake

_Connected = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


async def connect(host: str, port: int, secret: bytes, limit: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A stream to an :class:`AuthenticatedServer`. ``limit``: bytes that are read ahead, as of asyncio's streams.

    Once TCP is connected there is no limit of time: the server's process may be busy, and a host that has no power any
    more is noticed by the kernel.

    Raises:
        OSError: there is no connection; ConnectionRefusedError also where the server does not have the secret.
    """
    loop = asyncio.get_running_loop()
    for _ in range(_ATTEMPTS):
        async with asyncio.timeout(_CONNECT_SECONDS):
            _, stream = await loop.create_connection(lambda: _Client(secret, limit), host, port)
        try:
            await stream.is_welcome
            return stream.reader, stream.writer
        except ConnectionResetError:
            await asyncio.sleep(_PAUSE)
        except BaseException:
            stream.transport.abort()
            raise
    raise ConnectionResetError(f"{host} has closed {_ATTEMPTS} connections before their handshakes ended")


class AuthenticatedServer:
    """Accepts streams of clients that have the secret. Others have some seconds, and delay none of them.

    Args:
        connected: called with each stream, in a task of its own.
        limit: bytes that are read ahead.
    """

    def __init__(self, connected: _Connected, secret: bytes, limit: int) -> None:
        self.connected, self.secret, self.limit = connected, secret, limit
        self._most = min(_MAX_PENDING, raise_limit(MAX_DESCRIPTORS) // 4)
        self._pending: dict[_Accepted, None] = {}
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket, backlog: int) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Accepted(self), sock=listener, backlog=backlog)

    def close(self) -> None:
        """Accepts no more, and ends the connections that are in their handshake. Streams go on."""
        if self._server is not None:
            self._server.close()
        for stream in self._pending:
            stream.transport.abort()

    def add(self, stream: "_Accepted") -> None:
        """Adds a connection. If there are too many, the oldest leaves; one that has knocked only when all have."""
        if len(self._pending) >= self._most:
            oldest = next((one for one in self._pending if not one.has_knocked), next(iter(self._pending)))
            del self._pending[oldest]
            oldest.transport.abort()
        self._pending[stream] = None

    def remove(self, stream: "_Accepted") -> None:
        self._pending.pop(stream, None)


class _Writer(asyncio.StreamWriter):
    def __init__(self, framing: Framing, *parts: Any) -> None:
        super().__init__(*parts)
        self._framing = framing

    def write(self, data: bytes) -> None:  # type: ignore[override]
        for begin in range(0, len(data), _PIECE):
            super().write(self._framing.frame(Kind.STREAM, data[begin : begin + _PIECE]))


class _Stream(asyncio.StreamReaderProtocol):
    """A connection whose bytes are frames: of a handshake, then of a stream, with ``reader`` and ``writer``.

    It decodes below asyncio's streams and not above them: their limits, pauses and ends are then those of any other
    connection for calls.
    """

    transport: asyncio.Transport
    writer: asyncio.StreamWriter

    def __init__(self, limit: int) -> None:
        self.framing, self.reader = Framing(), asyncio.StreamReader(limit)
        super().__init__(self.reader)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert isinstance(transport, asyncio.Transport)
        keep_alive(transport.get_extra_info("socket"))
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.framing.feed(data)
        try:
            while not self.transport.is_closing() and (frame := self.framing.next_frame()) is not None:
                kind, payload = frame
                if not self.framing.is_secure:
                    self.take(kind, payload)
                elif kind == Kind.STREAM:
                    super().data_received(payload)
                else:
                    raise ProtocolError(f"a frame of kind {kind}")
        except ProtocolError as error:
            self.fail(error)

    def eof_received(self) -> bool | None:
        return super().eof_received() if self.framing.is_secure else False  # False: the transport closes itself

    def take(self, kind: int, payload: bytes) -> None:
        """Takes a frame of the handshake. Raises ProtocolError: it is none that can come now."""
        raise NotImplementedError

    def fail(self, error: ProtocolError) -> None:
        self.transport.abort()

    def send(self, kind: Kind, payload: bytes) -> None:
        self.transport.write(self.framing.frame(kind, payload))

    def begin(self, send_key: bytes, receive_key: bytes) -> None:
        """Ends the handshake."""
        self.framing.secure(send_key, receive_key)
        self.writer = _Writer(self.framing, self.transport, self, self.reader, asyncio.get_running_loop())


class _Client(_Stream):
    """``is_welcome``: done at the end of the handshake."""

    def __init__(self, secret: bytes, limit: int) -> None:
        super().__init__(limit)
        self._handshake = ClientHandshake(secret, _ROLE)
        self.is_welcome = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.send(Kind.KNOCK, self._handshake.knock())

    def take(self, kind: int, payload: bytes) -> None:
        if kind == Kind.CHALLENGE:
            self.send(Kind.HELLO, self._handshake.hello(payload, b"{}"))
            return
        self._handshake.verify(payload if kind == Kind.WELCOME else b"")
        to_server, from_server = self._handshake.session_keys()
        self.begin(to_server, from_server)
        if not self.is_welcome.done():
            self.is_welcome.set_result(None)

    def fail(self, error: ProtocolError) -> None:
        if not self.is_welcome.done():
            self.is_welcome.set_exception(ConnectionRefusedError(f"what answers is not rank 0 of this job: {error}"))
        super().fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.is_welcome.done():
            self.is_welcome.set_exception(ConnectionResetError("connection closed during the handshake"))
        super().connection_lost(exc)


class _Accepted(_Stream):
    """``has_knocked``: with the secret; None before its first frame."""

    def __init__(self, server: AuthenticatedServer) -> None:
        super().__init__(server.limit)
        self._server, self._handshake = server, ServerHandshake({_ROLE: server.secret})
        self.has_knocked: bool | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._timer = asyncio.get_running_loop().call_later(HANDSHAKE_SECONDS, self.transport.abort)
        self._server.add(self)
        self.send(Kind.CHALLENGE, self._handshake.challenge())

    def take(self, kind: int, payload: bytes) -> None:
        if kind == Kind.KNOCK and self.has_knocked is None:
            self.has_knocked = self._handshake.is_knock(payload)
            return
        if kind != Kind.HELLO:
            raise ProtocolError(f"a frame of kind {kind} in its handshake")
        if self._handshake.verify(payload) is None:
            self.send(Kind.REFUSED, b"the secret is wrong")
            self.transport.close()
            return
        self.send(Kind.WELCOME, self._handshake.welcome(b"{}"))
        to_server, from_server = self._handshake.session_keys()
        self.begin(from_server, to_server)
        self._end_handshake()
        # `Endpoint` keeps the task.
        asyncio.get_running_loop().create_task(self._server.connected(self.reader, self.writer))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_handshake()
        super().connection_lost(exc)

    def _end_handshake(self) -> None:
        self._timer.cancel()
        self._server.remove(self)
