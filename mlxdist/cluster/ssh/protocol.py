"""The protocol between a command and the server process that it starts on a host, over the streams of one connection.

The server greets with the number of the protocol; a shell may print anything before that. Then both sides send frames:
a kind, a number, and a payload of known length. A plain call is one CALL and its RESULT or ERROR. A call with streams,
such as that between the launcher and its agent, has frames of its own kinds, numbered by the rank they are about.

Payloads are JSON, or bytes for a stream. Their size is checked before they are read, and nothing is unpickled.
"""

import json
import re
import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

from mlxdist.base.json_reader import parse_json

__all__ = [
    "FIRST_STREAM_KIND",
    "GREETING",
    "MAX_NOISE",
    "MAX_PAYLOAD",
    "FrameError",
    "Frames",
    "Kind",
    "after_greeting",
    "pack",
    "pack_json",
    "unpack_json",
]

_PROTOCOL = 1
GREETING = b"\nmlxdist protocol %d\n" % _PROTOCOL
_GREETING = re.compile(rb"\nmlxdist protocol (\d{1,9})\n")
MAX_NOISE = 1 << 16  # what the start files of a shell may print before the greeting
MAX_PAYLOAD = 64 << 20
_HEADER = struct.Struct("!BHI")


class Kind(IntEnum):
    HELLO = 1  # server, after the greeting: JSON, facts about the host
    CALL = 2  # client: JSON, {"call": name, "arguments": {...}}
    RESULT = 3  # server: JSON, {"result": ...}
    ERROR = 4  # server: JSON, {"error": text}


FIRST_STREAM_KIND = 16  # calls with streams number their kinds from here


class FrameError(ValueError):
    """Bytes that are no frame, or a frame that does not belong here."""


def pack(kind: int, number: int = 0, payload: bytes = b"") -> bytes:
    return _HEADER.pack(kind, number, len(payload)) + payload


def pack_json(kind: int, fields: dict[str, Any], number: int = 0) -> bytes:
    return pack(kind, number, json.dumps(fields).encode())


def unpack_json(payload: bytes) -> dict[str, Any]:
    """The JSON object in a payload. Raises FrameError: the payload is no JSON object."""
    try:
        fields = parse_json(payload)
    except ValueError as error:
        raise FrameError(f"no JSON: {error}, in {payload[:80]!r}") from None
    if not isinstance(fields, dict):
        raise FrameError(f"no object of JSON: {payload[:80]!r}")
    return fields


def after_greeting(data: bytes) -> bytes | None:
    """The bytes after the greeting in all that a server has sent; None if the greeting has not arrived.

    Raises:
        FrameError: the server sends something else, or uses another protocol.
    """
    greeting = _GREETING.search(data)
    if greeting is None:
        if len(data) > MAX_NOISE:
            raise FrameError(f"more than {MAX_NOISE} bytes without a greeting, beginning with {data[:80]!r}")
        return None
    if (theirs := int(greeting[1])) != _PROTOCOL:
        raise FrameError(f"it has protocol {theirs}, and this machine {_PROTOCOL}; install the same version of mlxdist")
    return data[greeting.end() :]


class Frames:
    """Splits a stream of bytes into frames. Bytes of an incomplete frame stay for the next call."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, int, bytes]]:
        """Yields kind, number and payload of the frames that ``data`` completes.

        Raises:
            FrameError: a length that no frame has.
        """
        self._held += data
        while len(self._held) >= _HEADER.size:
            kind, number, length = _HEADER.unpack_from(self._held)
            if length > MAX_PAYLOAD:
                raise FrameError(f"no frame begins with {bytes(self._held[:16])!r}")
            end = _HEADER.size + length
            if len(self._held) < end:
                return
            payload = bytes(self._held[_HEADER.size : end])
            del self._held[:end]
            yield kind, number, payload
