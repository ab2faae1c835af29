"""A connection of HTTP: uvicorn's, with bounds on its time, on what is read, and on the number of connections."""

import asyncio
import json
import socket
import ssl
import sys
import time
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.server import ServerState

from .listener import MAX_REQUESTS
from .refusal import Refusal

__all__ = ["MAX_HEAD", "HttpConnection"]

MAX_HEAD = 1 << 16  # bytes of a request's line and headers
_HEAD_SECONDS = 10.0  # from the connection, or the first byte, to the end of the headers; and for the handshake of TLS
_FIRST_SECONDS = 0.1  # in which what a connection has sent is read: many are accepted before any is read
_STALLED_SECONDS = 60.0  # for which a client takes no byte of its answer
_LINGER_SECONDS = 10.0  # for which input is dropped: a connection closed with input unread takes the answer with it
_READ_BYTES = 1 << 14  # at a time; others wait while they are parsed
_PART_BYTES, _PARTS = 64, 1024  # bytes, and how many parts of a body, chunks or packets, may have fewer
_PROBE_SECONDS = 10.0  # between two interim responses to a client that has closed its side


class _Transport:
    """A transport that stays after ``close``, without its output, while the client may still be sending."""

    def __init__(self, transport: asyncio.Transport, connection: "HttpConnection") -> None:
        self._transport, self._connection = transport, connection
        self.closed: float | None = None  # when it was, if it stays

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self.closed is not None or self._transport.is_closing()

    def close(self) -> None:
        if self._connection.has_read_all:
            self._transport.close()
        elif not self.is_closing():
            self.closed = time.monotonic()
            if self._transport.can_write_eof():  # not with TLS
                self._transport.write_eof()
            self._transport.resume_reading()


class _Parser(h11.Connection):
    """h11's parser, which refuses bodies in tiny parts: each costs it as much time as 16 KiB in one."""

    def __init__(self, max_incomplete_event_size: int) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size)
        self._credit = _PART_BYTES * _PARTS

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._credit = _PART_BYTES * _PARTS
        elif isinstance(event, h11.Data):
            self._credit += len(event.data) - _PART_BYTES
            if self._credit < 0:
                raise h11.RemoteProtocolError(f"the parts of the body have less than {_PART_BYTES} bytes", 413)
        return event


class HttpConnection(H11Protocol):
    """A connection of a client. The server calls :meth:`tick` several times a second.

    Args:
        tls: the context of TLS; None for plain HTTP.
        most: the number of connections from which on new ones end at once.

    Attributes:
        idle_since: when it was made, or its last request was answered.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        tls: ssl.SSLContext | None = None,
        most: int,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = _Parser(MAX_HEAD)
        self._tls, self._most = tls, most
        self._outer: Any = None  # the transport, that of TCP until the handshake is over
        self._early: bytearray | None = None  # what comes before ``connection_made`` of TLS
        self._unsent = 0  # bytes
        self._is_half_closed = self._has_waited = False
        self._probed = 0.0
        self.idle_since = self._progress = time.monotonic()
        self._head_since: float | None = self.idle_since

    @property
    def is_busy(self) -> bool:
        """Whether a request is in progress, whose headers have come."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def has_read_all(self) -> bool:
        """Whether all that the client has sent is read, and no body is missing."""
        read = (h11.IDLE, h11.DONE, h11.MUST_CLOSE, h11.CLOSED)
        return self.conn.their_state in read and not self.conn.trailing_data[0]

    @property
    def has_sent_all(self) -> bool:
        """Whether no request is in progress, and the client has taken the answer to the last one."""
        return not self.is_busy and not self._outer.get_write_buffer_size()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._outer = transport
        self.connections.add(self)
        # asyncio does it only for sockets whose protocol is not 0. A body after its headers would wait 40 ms for an
        # acknowledgment.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.max_size = _READ_BYTES  # type: ignore[attr-defined]
        if self._tls is None:
            self._begin(transport)
        else:
            self._early = bytearray()
            self._handshake = self.loop.create_task(self._start_tls(transport, self._tls))
        self.loop.call_later(_FIRST_SECONDS, self._wait)
        self._make_room()

    def _begin(self, transport: asyncio.Transport) -> None:
        self._outer = _Transport(transport, self)
        super().connection_made(self._outer)

    async def _start_tls(self, transport: asyncio.Transport, tls: ssl.SSLContext) -> None:
        try:
            encrypted = await self.loop.start_tls(
                transport, self, tls, server_side=True, ssl_handshake_timeout=_HEAD_SECONDS
            )
        except (OSError, TimeoutError):  # those of ssl are, too
            encrypted = None
        early, self._early = self._early, None
        if encrypted is None:
            self.connections.discard(self)
            transport.abort()
            return
        self._begin(encrypted)
        if early:
            self.data_received(bytes(early))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._early is None:
            super().connection_lost(exc)
        self.connections.discard(self)

    @property
    def can_leave(self) -> bool:
        """Whether no request of it has come as a whole, and it has had the time to send one."""
        return self._has_waited and (not self.is_busy or self.cycle.more_body)

    def _wait(self) -> None:
        # A timer, and not the clock: its function is called after what has come before that has been read, however long
        # the loop takes.
        self._has_waited = True
        self._make_room()

    def _make_room(self) -> None:
        """Ends, of too many connections, the oldest one that can leave; this one if there are far too many."""
        connections: set[Any] = self.connections
        if len(connections) <= MAX_REQUESTS:
            return
        idle = [each for each in connections if each.can_leave]
        if idle:
            min(idle, key=lambda each: each.idle_since).abort()
        elif len(connections) > self._most:
            self.abort()

    def abort(self) -> None:
        """Ends the connection, and drops bytes that are not sent yet."""
        self.connections.discard(self)
        self._outer.abort()

    def data_received(self, data: bytes) -> None:
        if self._early is not None:
            self._early += data[: MAX_HEAD - len(self._early)]
        elif not self.transport.is_closing():
            super().data_received(data)
            if self.is_busy:
                self._head_since = None
            elif self._head_since is None:
                self._head_since = time.monotonic()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Called when the client has closed its side. Returns whether it still gets an answer.

        With TLS it has closed the connection. Otherwise it may have, or only its side: a TCP peer that has gone
        answers what it is sent with a reset.
        """
        if self._tls is not None or not self.is_busy or self.cycle.more_body or self.transport.is_closing():
            return False
        self._is_half_closed = True
        self._probe(time.monotonic())
        return True

    def on_response_complete(self) -> None:
        self.idle_since, self._head_since = time.monotonic(), None
        if self.conn.their_state is h11.SEND_BODY:  # refused before its body has come
            self.transport.close()
        super().on_response_complete()
        if self._is_half_closed and not self.is_busy:  # nor has it sent a further request before that
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Refuses what is no request, or has too long headers. h11's exception is being handled."""
        error = sys.exception()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.abort()
            return
        if self.is_busy:  # its body is malformed
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        if status == 431:
            self._refuse(Refusal(f"the headers must have at most {MAX_HEAD} bytes", 431))
        elif status == 413:
            self._refuse(Refusal(str(error), 413))
        else:
            self._refuse(Refusal(f"this is no request of HTTP/1.0 or 1.1: {error!s:.100}"))

    def _refuse(self, refusal: Refusal) -> None:
        body = json.dumps(refusal.error).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        head = h11.Response(status_code=refusal.status, headers=headers, reason=STATUS_PHRASES[refusal.status])
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def shutdown(self) -> None:
        if self._early is not None or self.transport.is_closing():
            self.abort()
        else:
            super().shutdown()

    def tick(self, now: float) -> None:
        """Ends the connection if one of its times is over, or if the client has gone."""
        if self._early is not None:  # the handshake has a time of its own
            return
        unsent = self._outer.get_write_buffer_size()
        if not unsent or unsent < self._unsent:
            self._progress = now
        self._unsent = unsent
        is_late = self._head_since is not None and now - self._head_since > _HEAD_SECONDS
        has_lingered = self._outer.closed is not None and now - self._outer.closed > _LINGER_SECONDS
        if is_late or has_lingered or now - self._progress > _STALLED_SECONDS:
            self.abort()
        elif self.is_busy and (self._is_half_closed or self.flow.read_paused):
            if self._outer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self.abort()
            elif self._is_half_closed and now - self._probed > _PROBE_SECONDS:
                self._probe(now)

    def resume_writing(self) -> None:
        self._progress = time.monotonic()
        super().resume_writing()

    def _probe(self, now: float) -> None:
        """Sends what a client drops: of a stream a comment, else "100 Continue", as some know no other 1xx."""
        self._probed = now
        if self.cycle.response_started:
            if self.scope["state"].get("streams"):
                self.transport.write(self.conn.send(h11.Data(data=b": keepalive\n\n")) or b"")
        elif self.scope["http_version"] == "1.1":
            interim = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self.conn.send(interim) or b"")
