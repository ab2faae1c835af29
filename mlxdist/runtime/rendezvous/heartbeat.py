"""Heartbeats: once a second every rank sends rank 0 its position, and rank 0 sends all ranks the positions of all.

    rank -> rank 0   HEARTBEAT     text
    rank 0 -> rank   PEER_STATUS   JSON, for each rank what rank 0 knows of it

A rank that is stopped, or whose machine is overloaded, is silent while its connection stays open: that is no failure
by itself, and frames that it has missed are still there when it continues. A dead rank closes its connection; a network
that is away ends one, too (outage.py).
"""

import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from mlxdist.base.environment import MAX_RANKS
from mlxdist.base.json_reader import parse_json
from mlxdist.base.validation import checked, fields_of, flag, list_of, number, object_of, or_null, printable, text
from mlxdist.base.validation import seconds as duration

from .event_loop import Connection, EventLoop
from .protocol import Kind, ProtocolError, pack_json

__all__ = ["Heartbeat", "PeerStatus", "guarded", "pack_peer_status", "pack_position", "unpack_peer_status"]

HEARTBEAT_SECONDS = 1.0
# A rank counts as silent from then on. Python may block a thread while the program is in C code for long.
SILENT_SECONDS = 5.0
MAX_POSITION = 256  # in UTF-8


@dataclass(frozen=True)
class PeerStatus:
    """The status of a rank, as rank 0 knows it. ``age``: seconds since its last heartbeat; None where it sends none."""

    rank: int = checked(number(0, MAX_RANKS - 1))
    host: str = checked(text())
    pid: int = checked(number(0, 2**31 - 1))
    age: float | None = checked(or_null(duration))
    position: str = checked(text(MAX_POSITION))
    is_gone: bool = checked(flag)  # has left or died

    @property
    def is_silent(self) -> bool:
        return self.age is None or self.age >= SILENT_SECONDS

    def describe(self, since: float = 0.0) -> str:
        """The position of the rank, in words that follow its number; ``since``: seconds since rank 0 sent this."""
        if self.is_gone:
            return "has left the group or died"
        if self.age is None:
            return "has not returned from mlxdist.init()"
        age = self.age + since
        if age < SILENT_SECONDS:
            return self.position
        if self.rank == 0 or since < SILENT_SECONDS:
            text = f"silent for {age:.0f} s: stopped, overloaded, or cut off from rank 0"
        else:
            text = f"no heartbeat for {age:.0f} s: rank 0, which forwards them, is silent itself"
        return f"{text}; before that {self.position}" if self.position else text


def pack_position(position: str) -> bytes:
    return position.encode()[:MAX_POSITION]


def unpack_position(payload: bytes) -> str:
    """The text of a HEARTBEAT.

    Raises:
        ProtocolError: it is too long.
    """
    if len(payload) > MAX_POSITION:
        raise ProtocolError(f"a position of {len(payload)} bytes")
    return printable(payload.decode(errors="replace"))


def pack_peer_status(peers: list[PeerStatus], size: int, requested: Collection[int] = ()) -> bytes:
    """Packs the status of all. ``requested``: the ranks from which rank 0 has requested a status for an observer."""
    return pack_json(size=size, peers=[vars(peer) for peer in peers], requested=sorted(requested))


def unpack_peer_status(payload: bytes) -> tuple[dict[int, PeerStatus], int, set[int]]:
    """The status that ``pack_peer_status`` has packed.

    Raises:
        ProtocolError: it is malformed, or names a rank that does not exist.
    """
    try:
        fields = fields_of(_PEER_STATUS, parse_json(payload))
    except ValueError as error:
        raise ProtocolError(f"a malformed peer status: {error}") from None
    peers = {peer.rank: peer for peer in fields["peers"]}
    if max(peers, default=0) >= fields["size"]:
        raise ProtocolError(f"a frame about rank {max(peers)} of {fields['size']}")
    return peers, fields["size"], set(fields["requested"])


_PEER_STATUS = {
    "size": number(1, MAX_RANKS),
    "peers": list_of(object_of(PeerStatus), MAX_RANKS),
    "requested": list_of(number(0, MAX_RANKS - 1), MAX_RANKS),
}


class Heartbeat:
    """A rank's heartbeat, and the last status of its peers. All methods but ``stop`` belong to the loop's thread."""

    def __init__(self, loop: EventLoop, connection: Connection, rank: int, size: int) -> None:
        self._loop = loop
        self.connection = connection
        self._rank = rank
        self._size = size
        self._position: Callable[[], str] | None = None
        self._on_peer_status: Callable[[int, str], None] | None = None
        self._next = 0.0
        self._peers: dict[int, PeerStatus] = {}
        self._received_at = 0.0

    def start(self, position: Callable[[], str], on_peer_status: Callable[[int, str], None] | None) -> None:
        if self._position is None:
            self._loop.add_timer(self._beat)
        self._position, self._on_peer_status = position, on_peer_status
        self._received_at = time.monotonic()

    @property
    def is_running(self) -> bool:
        return self._position is not None

    def stop(self) -> None:
        self._position = self._on_peer_status = None

    def receive(self, payload: bytes) -> None:
        """Takes the payload of a PEER_STATUS."""
        peers, size, _ = unpack_peer_status(payload)
        if size != self._size:
            raise ProtocolError(f"the status of {size} ranks in a job of {self._size}")
        self._peers, self._received_at = peers, time.monotonic()
        self._report()

    def _beat(self) -> float | None:
        position = self._position  # another thread may call stop()
        if position is None:
            return None
        now = time.monotonic()
        if now >= self._next:
            silent = now - self._received_at > SILENT_SECONDS
            # Rank 0 sends nothing to a silent rank; but while rank 0 is stopped, heartbeats pile up there.
            self._next = now + (SILENT_SECONDS / 2 if silent else HEARTBEAT_SECONDS)
            if not self.connection.unsent:
                self.connection.send(Kind.HEARTBEAT, pack_position(guarded(position) or ""))
            if silent:
                self._report()
        return self._next - now

    def _report(self) -> None:
        since, on_peer_status = time.monotonic() - self._received_at, self._on_peer_status
        for peer in self._peers.values():
            if on_peer_status is not None and peer.rank != self._rank and peer.age is not None and not peer.is_gone:
                guarded(on_peer_status, peer.rank, peer.describe(since))


def guarded(callback: Callable, *arguments: object) -> Any:
    """Calls ``callback`` in the loop's thread, which no error in it must end: the thread watches the ranks."""
    try:
        return callback(*arguments)
    except Exception:
        sys.excepthook(*sys.exc_info())  # the caller's mistake must be seen
        return None
