"""Messages from one rank to another: what rank 0 passes on, and what waits at the receiver until it is told."""

import collections
import struct

from mlxdist.base.errors import InvalidArgument

from .protocol import WireError

__all__ = ["MAX_DATA", "MAX_TAG", "MAX_WAITING", "Inbox", "pack_message", "unpack_message"]

MAX_DATA = 64 * 1024
MAX_TAG = 256  # in UTF-8
# Bytes of messages that wait at one place. They are meant to be few and small.
MAX_WAITING = 16 * 1024 * 1024

# Payload of MESSAGE: the other rank, length of the tag; then tag and data.
_HEAD = struct.Struct(">IH")


def pack_message(rank: int, tag: str, data: bytes) -> bytes:
    """A payload of MESSAGE: to rank 0, ``rank`` is the receiver, and from rank 0 the sender.

    Raises:
        InvalidArgument: ``tag`` or ``data`` is too long.
    """
    name, content = tag.encode(), memoryview(data)
    if len(name) > MAX_TAG or content.nbytes > MAX_DATA:
        raise InvalidArgument(
            f"rendezvous: a message with a tag of {len(name)} and data of {content.nbytes} bytes cannot be sent; they "
            f"have at most {MAX_TAG} and {MAX_DATA}"
        )
    return _HEAD.pack(rank, len(name)) + name + content.tobytes()


def unpack_message(payload: bytes) -> tuple[int, str, bytes]:
    """Rank, tag and data.

    Raises:
        WireError: it is none, or one that ``pack_message`` refuses.
    """
    if len(payload) < _HEAD.size:
        raise WireError("a truncated message")
    rank, length = _HEAD.unpack_from(payload)
    name, data = payload[_HEAD.size : _HEAD.size + length], payload[_HEAD.size + length :]
    if len(name) < length:
        raise WireError("a message with a truncated tag")
    if length > MAX_TAG or len(data) > MAX_DATA:
        raise WireError(f"a message with a tag of {length} and data of {len(data)} bytes")
    try:
        return rank, name.decode(), data
    except UnicodeDecodeError:
        raise WireError("a message whose tag is no text") from None


class Inbox:
    """Messages that have come and were not told yet, in order."""

    def __init__(self) -> None:
        self._messages: collections.deque[tuple[int, str, bytes]] = collections.deque()
        self._bytes = 0

    def add(self, rank: int, tag: str, data: bytes) -> None:
        self._messages.append((rank, tag, data))
        self._bytes += MAX_TAG + len(data)

    def take(self) -> tuple[int, str, bytes] | None:
        """The next message, or None."""
        if not self._messages:
            return None
        message = self._messages.popleft()
        self._bytes -= MAX_TAG + len(message[2])
        return message

    def is_full(self) -> bool:
        return self._bytes > MAX_WAITING
