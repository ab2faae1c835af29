"""The protocol between a rank and rank 0: frames of bounded size, their kinds and their payloads.

    frame       length (4 bytes, big-endian: of payload and tag), kind (1 byte), payload, tag (16 bytes)

Before authentication (authentication.py) a frame has at most 4 KiB and no tag. From then on every frame carries a tag
made with a key of this connection and a counter. Frames of the kinds in ``RELIABLE`` are kept until the receiver has
acknowledged them by RECEIVED, and are retransmitted where a connection replaces one that was lost. Nothing is
unpickled: payloads are text, JSON or the caller's bytes.
"""

import enum
import hashlib
import hmac
import json
import struct
from typing import Any

from mlxdist.base.errors import InvalidArgument
from mlxdist.base.json_reader import parse_json

__all__ = ["RELIABLE", "Framing", "Kind", "ProtocolError", "pack_json", "pack_message", "unpack_json", "unpack_message"]

MAGIC = b"mlxdist rendezvous 1"
TAG_BYTES = 16
MAX_UNAUTHENTICATED_FRAME = 4 * 1024
MAX_FRAME = 1024 * 1024
MAX_GATHER_BYTES = MAX_FRAME - 1024  # leaves space for the name of the step and the tag
MAX_TEXT = 16 * 1024
MAX_MESSAGE_BYTES = 64 * 1024
MAX_TAG = 256  # of a message, in UTF-8
MAX_STATUS_BYTES = 256 * 1024
HEADER = struct.Struct(">IB")

# Payload of GATHER: step, length of its name; of GATHERED: step, rank; of STATUS to an observer: rank; of MESSAGE: the
# other rank, length of the tag; of RECEIVED: reliable frames that the sender has processed.
GATHER = struct.Struct(">IH")
GATHERED = struct.Struct(">II")
STATUS = struct.Struct(">I")
RECEIVED = struct.Struct(">Q")
_MESSAGE = struct.Struct(">IH")


class Kind(enum.IntEnum):
    CHALLENGE = 1
    HELLO = 2
    WELCOME = 3
    REFUSED = 4
    FORMED = 5  # rank 0 -> all: every rank has joined
    GATHER = 6  # rank -> rank 0: step, its name, data
    GATHERED = 7  # rank 0 -> all: step, rank, data; one frame per rank
    REPORT_FAILURE = 8  # rank -> rank 0: its failure, JSON: class of mlxdist.base.errors, text
    FAILURE = 9  # rank 0 -> all: the first failure
    GOODBYE = 10  # rank -> rank 0: it leaves
    DEPARTED = 11  # rank 0 -> all: a rank has left
    ACK = 12  # rank 0 -> rank: GOODBYE or REPORT_FAILURE is received and forwarded
    MESSAGE = 13  # rank -> rank 0: for another rank; rank 0 -> rank: from another rank
    HEARTBEAT = 14  # rank -> rank 0: its position (heartbeat.py)
    PEER_STATUS = 15  # rank 0 -> all, and to an observer: the positions of all
    KNOCK = 16  # rank -> rank 0: before all else
    STATUS_REQUEST = 17  # rank 0 -> rank: an observer requests its status
    STATUS = 18  # rank -> rank 0: a flight record, or nothing; rank 0 -> observer: rank, the same
    STREAM = 19  # not in the rendezvous: bytes of a stream of `mlxdist serve`, which has the same frames
    RECEIVED = 20  # both ways: how many reliable frames have been processed, over all connections of this rank


# What is left out is superseded by the next of its kind, or belongs to one connection.
RELIABLE = frozenset(
    {
        Kind.FORMED,
        Kind.GATHER,
        Kind.GATHERED,
        Kind.REPORT_FAILURE,
        Kind.FAILURE,
        Kind.GOODBYE,
        Kind.DEPARTED,
        Kind.ACK,
        Kind.MESSAGE,
    }
)


class ProtocolError(Exception):
    """The peer sent what it may not send."""


def pack_json(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def unpack_json(payload: bytes, **types: type) -> dict[str, Any]:
    """The fields of a payload, each of exactly the type named for it; text can be encoded, and numbers are finite.

    Raises:
        ProtocolError: it is not JSON, or a field is missing or of another type.
    """
    try:
        fields = parse_json(payload)
    except ValueError as error:
        raise ProtocolError(f"a frame with malformed JSON: {error}") from None
    if not isinstance(fields, dict) or any(type(fields.get(name)) is not kind for name, kind in types.items()):
        raise ProtocolError(f"a frame without the fields {', '.join(types)}")
    if not all(_is_plain(fields[name]) for name in types):
        raise ProtocolError("a frame with a field that is no text")
    return fields


def _is_plain(value: Any) -> bool:
    """JSON has escapes for half a character."""
    return not isinstance(value, str) or value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value)


def pack_message(rank: int, tag: str, data: bytes) -> bytes:
    """A payload of MESSAGE: to rank 0, ``rank`` is the receiver, and from rank 0 the sender.

    Raises:
        InvalidArgument: ``tag`` or ``data`` is too long.
    """
    name, content = tag.encode(), memoryview(data)
    if len(name) > MAX_TAG or content.nbytes > MAX_MESSAGE_BYTES:
        raise InvalidArgument(
            f"rendezvous: a message with a tag of {len(name)} and data of {content.nbytes} bytes cannot be sent; they "
            f"have at most {MAX_TAG} and {MAX_MESSAGE_BYTES}"
        )
    return _MESSAGE.pack(rank, len(name)) + name + content.tobytes()


def unpack_message(payload: bytes) -> tuple[int, str, bytes]:
    """The rank, the tag and the data of a payload of MESSAGE.

    Raises:
        ProtocolError: it is not a message, or one that ``pack_message`` rejects.
    """
    if len(payload) < _MESSAGE.size:
        raise ProtocolError("a truncated message")
    rank, length = _MESSAGE.unpack_from(payload)
    name, data = payload[_MESSAGE.size : _MESSAGE.size + length], payload[_MESSAGE.size + length :]
    if len(name) < length:
        raise ProtocolError("a message with a truncated tag")
    if length > MAX_TAG or len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message with a tag of {length} and data of {len(data)} bytes")
    try:
        return rank, name.decode(), data
    except UnicodeDecodeError:
        raise ProtocolError("a message whose tag is no text") from None


class Framing:
    """Splits a stream of bytes into frames and builds them. It needs neither sockets nor threads."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._limit = MAX_UNAUTHENTICATED_FRAME
        self._send_key = self._receive_key = b""
        self._sent_frames = self._received_frames = 0

    def secure(self, send_key: bytes, receive_key: bytes) -> None:
        """Allows larger frames, each with a tag, once both sides are authenticated."""
        self._limit = MAX_FRAME
        self._send_key, self._receive_key = send_key, receive_key

    @property
    def is_secure(self) -> bool:
        return bool(self._receive_key)

    def feed(self, data: bytes) -> None:
        self._received += data

    def next_frame(self) -> tuple[int, bytes] | None:
        """The next complete frame, or None.

        Raises:
            ProtocolError: it is too long, which is checked before its payload arrives, or its tag is wrong.
        """
        if len(self._received) < HEADER.size:
            return None
        length, kind = HEADER.unpack_from(self._received)
        if length > self._limit:
            raise ProtocolError(f"a frame of {length} bytes where at most {self._limit} are allowed")
        if len(self._received) < HEADER.size + length:
            return None
        payload = bytes(self._received[HEADER.size : HEADER.size + length])
        del self._received[: HEADER.size + length]
        if not self._receive_key:
            return kind, payload
        payload, tag = payload[:-TAG_BYTES], payload[-TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(self._receive_key, self._received_frames, kind, payload)):
            raise ProtocolError("a frame that another party has altered or inserted")
        self._received_frames += 1
        return kind, payload

    def frame(self, kind: Kind, payload: bytes) -> bytes:
        if not self._send_key:
            return HEADER.pack(len(payload), kind) + payload
        tag = self._tag(self._send_key, self._sent_frames, kind, payload)
        self._sent_frames += 1
        return HEADER.pack(len(payload) + TAG_BYTES, kind) + payload + tag

    @staticmethod
    def _tag(key: bytes, number: int, kind: int, payload: bytes) -> bytes:
        return hmac.digest(key, struct.pack(">QB", number, kind) + payload, hashlib.sha256)[:TAG_BYTES]
