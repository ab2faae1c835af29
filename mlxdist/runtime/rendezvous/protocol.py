"""What travels between a rank and rank 0: frames of bounded size, and who may send them.

    frame       length (4 bytes, big-endian: of payload and tag), kind (1 byte), payload, tag (16 bytes)

    connection  rank -> rank 0   KNOCK      nonce, proof
                rank 0 -> rank   CHALLENGE  magic, nonce
                rank -> rank 0   HELLO      nonce, proof, JSON: rank, world size, job, version, host, pid
                rank 0 -> rank   WELCOME    proof, JSON: host, pid, seconds left to form the group
                            or   REFUSED    text

A proof is HMAC-SHA256 with the secret of the job over a label, both nonces and the text that goes with it, so
neither side can be replayed or reflected, and nothing in HELLO can be altered. KNOCK proves less, since no nonce of
rank 0 is in it: the connection need not make room for those of strangers, and nothing is let in by it. Before a proof
was checked a frame has at most 4 KiB and no tag; from then on every frame carries a tag made with a key of this
connection and a counter. Nothing is unpickled: payloads are text, JSON or the caller's bytes.
"""

import enum
import hashlib
import hmac
import json
import math
import socket
import struct
from collections.abc import Callable
from typing import Any

from .event_loop import Loop

__all__ = [
    "GATHER",
    "GATHERED",
    "MAGIC",
    "MAX_BLOB",
    "MAX_FRAME",
    "MAX_PIECES",
    "MAX_TEXT",
    "NONCE_BYTES",
    "PROOF_BYTES",
    "Connection",
    "Framing",
    "Kind",
    "WireError",
    "knock",
    "pack_json",
    "proof",
    "session_keys",
    "unpack_json",
]

MAGIC = b"mlxdist rendezvous 1"
NONCE_BYTES = 32
PROOF_BYTES = 32
TAG_BYTES = 16
MAX_UNPROVEN = 4 * 1024
# What a rank sends before it has proven itself comes in two or three. Each piece is work for rank 0's thread.
MAX_PIECES = 64
MAX_FRAME = 1024 * 1024
MAX_BLOB = MAX_FRAME - 1024  # leaves room for the name of the step and the tag
MAX_TEXT = 16 * 1024
HEADER = struct.Struct(">IB")


# Payload of GATHER: step, length of its name; of GATHERED: step, rank.
GATHER = struct.Struct(">IH")
GATHERED = struct.Struct(">II")


class Kind(enum.IntEnum):
    CHALLENGE = 1
    HELLO = 2
    WELCOME = 3
    REFUSED = 4
    FORMED = 5  # rank 0 -> all: every rank is here
    GATHER = 6  # rank -> rank 0: step, its name, blob
    GATHERED = 7  # rank 0 -> all: step, rank, blob; one frame per rank
    ANNOUNCE = 8  # rank -> rank 0: its failure, JSON: class of mlxdist.base.errors, text
    FAILURE = 9  # rank 0 -> all: the first failure
    GOODBYE = 10  # rank -> rank 0: it leaves
    LEFT = 11  # rank 0 -> all: a rank has left
    TAKEN = 12  # rank 0 -> rank: GOODBYE or ANNOUNCE is taken and passed on
    MESSAGE = 13  # rank -> rank 0: for another rank; rank 0 -> rank: from another rank (messages.py)
    PULSE = 14  # rank -> rank 0: where it is (pulse.py)
    NEWS = 15  # rank 0 -> all: where everyone is
    KNOCK = 16  # rank -> rank 0: before all else


class WireError(Exception):
    """The peer sent what it may not send."""


def proof(secret: bytes, side: str, *parts: bytes) -> bytes:
    message = b"".join((MAGIC, side.encode(), *parts))
    return hmac.digest(secret, message, hashlib.sha256)


def knock(secret: bytes, nonce: bytes) -> bytes:
    return nonce + proof(secret, "knock", nonce)


def session_keys(secret: bytes, hub_nonce: bytes, rank_nonce: bytes) -> tuple[bytes, bytes]:
    """The keys of the tags: to rank 0, and from rank 0."""
    return (
        proof(secret, "frames to rank 0", hub_nonce, rank_nonce),
        proof(secret, "frames from rank 0", hub_nonce, rank_nonce),
    )


def pack_json(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def unpack_json(payload: bytes, **types: type) -> dict[str, Any]:
    """The fields of a payload, each of exactly the type named for it; text can be encoded, and numbers are finite.

    Raises:
        WireError: it is not JSON, or a field is missing or of another type.
    """
    try:
        fields = json.loads(payload)
    except (ValueError, RecursionError):
        raise WireError("a frame with malformed JSON") from None
    if not isinstance(fields, dict) or any(type(fields.get(name)) is not kind for name, kind in types.items()):
        raise WireError(f"a frame without the fields {', '.join(types)}")
    if not all(_is_plain(fields[name]) for name in types):
        raise WireError("a frame with a field that is no text, or no number")
    return fields


def _is_plain(value: Any) -> bool:
    """JSON has escapes for half a character, and Python reads NaN and 1e999."""
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, str) or value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value)


class Framing:
    """Cuts a stream of bytes into frames and builds them. Knows neither sockets nor threads."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._limit = MAX_UNPROVEN
        self._send_key = self._receive_key = b""
        self._sent_frames = self._received_frames = 0

    def secure(self, send_key: bytes, receive_key: bytes) -> None:
        """Both sides have proven to know the secret: larger frames, each with a tag."""
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
            WireError: too long, or its tag is wrong. The length is checked before any of it is waited for.
        """
        if len(self._received) < HEADER.size:
            return None
        length, kind = HEADER.unpack_from(self._received)
        if length > self._limit:
            raise WireError(f"a frame of {length} bytes where at most {self._limit} are allowed")
        if len(self._received) < HEADER.size + length:
            return None
        payload = bytes(self._received[HEADER.size : HEADER.size + length])
        del self._received[: HEADER.size + length]
        if not self._receive_key:
            return kind, payload
        payload, tag = payload[:-TAG_BYTES], payload[-TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(self._receive_key, self._received_frames, kind, payload)):
            raise WireError("a frame that another party has altered or inserted")
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


class Connection:
    """A socket in a loop. All methods belong to the loop's thread.

    The owner sets ``on_frame(kind, payload)``, which may raise WireError, and ``on_lost(text)``, which is called once,
    unless ``close`` came first.
    """

    on_frame: Callable[[int, bytes], None]
    on_lost: Callable[[str], None]

    def __init__(self, loop: Loop, sock: socket.socket, framing: Framing) -> None:
        self.framing = framing
        self._loop = loop
        self._sock = sock
        self._unsent = bytearray()
        self._open = True
        self._close_when_sent = False
        self._pieces = 0
        sock.setblocking(False)
        loop.watch(sock, self._ready)

    @property
    def is_open(self) -> bool:
        return self._open

    @property
    def unsent(self) -> int:
        """Bytes that the peer has not taken yet. Any thread may ask."""
        return len(self._unsent)

    def resume(self) -> None:
        """Takes the frames that came right behind the handshake: they are read already, no event will tell of them."""
        self._receive(b"")

    def look(self) -> None:
        """Takes what has come already, without waiting for the event that tells of it."""
        self._ready(0)

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Sends now what the socket takes, the rest when it takes more: a stopped peer holds up nobody else."""
        if self._open and not self._close_when_sent:
            self._unsent += self.framing.frame(kind, payload)
            self._flush()

    def close(self, when_sent: bool = False) -> None:
        """``when_sent``: first sends what is waiting; the owner still has to close it after some time."""
        if when_sent and self._unsent:
            self._close_when_sent = True
        elif self._open:
            self._open = False
            self._loop.forget(self._sock)
            self._sock.close()

    def _lose(self, text: str) -> None:
        if self._open:
            self.close()
            self.on_lost(text)

    def _ready(self, events: int) -> None:
        try:
            data = self._sock.recv(65536)
        except BlockingIOError:
            self._flush()
            return
        except OSError as error:
            self._lose(error.strerror or str(error))
            return
        if not data:
            self._lose("connection closed")
            return
        self._receive(data)
        self._flush()

    def _receive(self, data: bytes) -> None:
        if self._close_when_sent:
            return  # refused: what else it sends is not kept
        self.framing.feed(data)
        self._pieces += 1
        try:
            while self._open and not self._close_when_sent and (frame := self.framing.next_frame()):
                self.on_frame(*frame)
            if self._pieces > MAX_PIECES and not self.framing.is_secure:
                raise WireError(f"its greeting in more than {MAX_PIECES} pieces")
        except WireError as error:
            self._lose(f"it sent {error}")

    def _flush(self) -> None:
        if not self._open:
            return
        try:
            while self._unsent:
                del self._unsent[: self._sock.send(bytes(self._unsent[:65536]))]
        except BlockingIOError:
            self._loop.watch(self._sock, self._ready, write=True)
            return
        except OSError:
            # Not lost here: what the peer sent before it went away is still to be read, and reading ends in _lose.
            self._unsent.clear()
            if self._close_when_sent:
                self.close()
            return
        if self._close_when_sent:
            self.close()
        else:
            self._loop.watch(self._sock, self._ready)
