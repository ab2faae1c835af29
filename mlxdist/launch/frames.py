"""What the launcher and its agent on another host say to each other, over the standard streams of one ssh connection.

A frame is its kind, a rank and a payload of known length. Payloads are bytes that ranks print, numbers, and JSON; their
size is checked before they are read, and nothing is unpickled.
"""

import json
import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

__all__ = ["GREETING", "MAX_PAYLOAD", "FrameError", "Frames", "Kind", "pack", "pack_json", "unpack_json"]

# Before the first frame of the agent: shells print what their start files print, whoever asks.
GREETING = b"\nmlxdist agent 1\n"
MAX_PAYLOAD = 16 << 20
_HEADER = struct.Struct("!BHI")


class Kind(IntEnum):
    # launcher to agent
    PREPARE = 1  # JSON: what the ranks of this host are given
    START = 2  # JSON: the address of rank 0
    SIGNAL = 3  # a number in one byte, to one rank
    INPUT = 4  # what the ranks read; empty: the end
    END = 5  # whatever is left of the job on this host is to be ended
    PING = 6  # JSON: the launcher lives; where so many seconds bring no frame any more, it is gone
    GONE = 7  # JSON: the exit status of a rank of another host
    # agent to launcher
    HELLO = 16  # JSON: who answers
    READY = 17  # JSON: the port at which rank 0 will listen, if it is here
    OUT = 18  # what a rank has printed; empty: it has closed the stream
    ERR = 19
    EXIT = 20  # JSON: the exit status of a rank, as a shell has it, and which rank failed first, if that is known here
    ENDED = 21  # JSON: nothing is left; where recordings are
    TAKEN = 22  # a rank has read its input as far as it was sent; not empty: none will read any more
    FAILED = 23  # JSON: the job cannot run here
    STOPPED = 24  # a number in one byte: a signal has told the agent to leave


_KINDS = frozenset(Kind)


class FrameError(ValueError):
    """Bytes that are no frame."""


def pack(kind: Kind, rank: int = 0, payload: bytes = b"") -> bytes:
    return _HEADER.pack(kind, rank, len(payload)) + payload


def pack_json(kind: Kind, fields: dict[str, Any], rank: int = 0) -> bytes:
    return pack(kind, rank, json.dumps(fields).encode())


def unpack_json(payload: bytes) -> dict[str, Any]:
    """Raises FrameError: it is no JSON object."""
    try:
        fields = json.loads(payload)
    except (ValueError, RecursionError):
        raise FrameError(f"no JSON: {payload[:80]!r}") from None
    if not isinstance(fields, dict):
        raise FrameError(f"no object of JSON: {payload[:80]!r}")
    return fields


class Frames:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Kind, int, bytes]]:
        """Kind, rank and payload of the frames that are complete with ``data``.

        Raises:
            FrameError: a kind or a length that does not exist.
        """
        self._held += data
        while len(self._held) >= _HEADER.size:
            number, rank, length = _HEADER.unpack_from(self._held)
            if length > MAX_PAYLOAD or number not in _KINDS:
                raise FrameError(f"no frame begins with {bytes(self._held[:16])!r}")
            end = _HEADER.size + length
            if len(self._held) < end:
                return
            payload = bytes(self._held[_HEADER.size : end])
            del self._held[:end]
            yield Kind(number), rank, payload
