"""A client's connection to the proxy: reads its request, and sends the answer."""

import asyncio
import contextlib
import io
import json
import re
from collections.abc import Coroutine
from http import HTTPStatus
from http.client import HTTPException, parse_headers
from typing import Any, TypeVar

from .listener import MAX_BODY, SOCKET_SECONDS
from .refusal import Refusal

__all__ = ["MAX_HEAD", "ClientGone", "ProxyClient", "unless_gone"]

MAX_HEAD = 1 << 16  # bytes of a request's line and headers
_READ_BYTES = 1 << 16
_UNREAD_SECONDS = 1.0  # a connection that is closed with input unread takes the answer with it

_Result = TypeVar("_Result")


class ClientGone(Exception):
    """The client has closed its connection, or does not send or read any more."""


class ProxyClient:
    """A client's connection, with one request.

    Attributes:
        arrived: when the request arrived, in the time of the event loop.
        path: the path of the request.
        streams: whether the headers of a stream have been sent.
        has_output: whether some of the answer has been sent, so that the request cannot be tried again.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.arrived = asyncio.get_running_loop().time()
        self.path = b""
        self.streams = self.has_output = False
        self._request = bytearray()
        self._has_length = False  # else rank 0 refuses it without its body
        self._missing = 0  # bytes of the body that have not come

    async def read_head(self) -> None:
        """Reads the line and the headers of the request.

        Raises:
            Refusal: the headers are malformed or too long.
        """
        try:
            async with asyncio.timeout(SOCKET_SECONDS):
                while not re.search(rb"\n\r?\n\Z", self._request[-3:]):
                    line = await self._reader.readline()
                    self._request += line
                    if not line:
                        raise ClientGone
                    if len(self._request) > MAX_HEAD:
                        raise ValueError
        except ValueError:  # that of readline, too
            raise Refusal(f"the headers must have at most {MAX_HEAD} bytes", 431) from None
        except (OSError, TimeoutError):
            raise ClientGone from None
        line, _, rest = bytes(self._request).partition(b"\n")
        if not re.fullmatch(rb"[A-Z]+ [!-~]+ HTTP/1\.[01]\r?", line):
            raise Refusal("this is no request of HTTP/1.0 or 1.1")
        self.path = line.split()[1]
        try:
            headers = parse_headers(io.BytesIO(rest))  # as rank 0 does
        except HTTPException as error:
            raise Refusal(f"the headers cannot be read: {error}", 431) from None
        length = headers.get("Content-Length", "" if line.startswith(b"POST ") else "0")
        is_number = re.fullmatch("[0-9]{1,18}", length, re.ASCII) and "Transfer-Encoding" not in headers
        if is_number and int(length) <= MAX_BODY:
            self._has_length, self._missing = True, int(length)

    async def forward(self, upstream: asyncio.StreamWriter) -> None:
        """Sends the request to rank 0, the body as it arrives. Returns when the client has gone."""
        with contextlib.suppress(OSError):  # rank 0 has gone, or has answered without the body
            upstream.write(bytes(self._request))
            if not self._has_length:
                upstream.write_eof()
            while self._missing:
                upstream.write(await self._read_body())
                await upstream.drain()
        await self.gone()

    async def gone(self) -> None:
        """Returns when the client has gone. Reads the rest of the body; bytes after the request are dropped."""
        with contextlib.suppress(OSError, TimeoutError, ClientGone):
            while self._missing:
                await self._read_body()
            while await self._reader.read(_READ_BYTES):
                continue

    async def _read_body(self) -> bytes:
        async with asyncio.timeout(SOCKET_SECONDS):
            data = await self._reader.read(min(self._missing, _READ_BYTES))
        if not data:
            raise ClientGone
        self._missing -= len(data)
        self._request += data
        return data

    async def send(self, data: bytes, is_output: bool = False) -> None:
        """Sends bytes to the client. Raises ClientGone: the client does not take them."""
        # The request is kept only for another try, which output rules out.
        if is_output and not self.has_output:
            self.has_output = True
            self._request.clear()
        try:
            self._writer.write(data)
            if self._writer.transport.get_write_buffer_size():  # else it has gone out: a timer costs more than that
                async with asyncio.timeout(SOCKET_SECONDS):
                    await self._writer.drain()
        except (OSError, TimeoutError):
            raise ClientGone from None

    async def answer(self, status: int, body: Any, retry_after: int | None = None) -> None:
        """Sends the proxy's own answer, as JSON; as an event, if the headers of a stream have been sent."""
        text = json.dumps(body).encode()
        if self.streams:
            await self.send(b"data: " + text + b"\n\n")
            return
        fields = {"Server": "mlxdist", "Content-Type": "application/json", "Content-Length": len(text)}
        fields |= {} if retry_after is None else {"Retry-After": retry_after}
        lines = [f"HTTP/1.0 {status} {HTTPStatus(status).phrase}", *(f"{k}: {v}" for k, v in fields.items()), "", ""]
        await self.send("\r\n".join(lines).encode() + text)

    async def close(self) -> None:
        """Closes the connection after the whole answer. Raises ClientGone: the client does not take it."""
        try:
            self._writer.write_eof()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_UNREAD_SECONDS):
                    while (self._missing or not self._has_length) and await self._reader.read(_READ_BYTES):
                        continue
            self._writer.close()
            async with asyncio.timeout(SOCKET_SECONDS):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            raise ClientGone from None

    def abort(self) -> None:
        """Ends the connection, and drops bytes that are not sent yet."""
        self._writer.transport.abort()


async def unless_gone(wanted: Coroutine[Any, Any, _Result], gone: Coroutine[Any, Any, None]) -> _Result:
    """Runs both until one ends, and returns the result of ``wanted``.

    Raises:
        ClientGone: ``gone`` ended first.
    """
    tasks = asyncio.create_task(wanted), asyncio.create_task(gone)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientGone
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
