"""Observers of a job: `mlxdist top` and `mlxdist dump` read from rank 0 what it knows of all ranks.

Rank 0 writes its address and a secret for observers to a file in its private directory. An observer authenticates with
that secret, as a rank does with the job's. Rank 0 sends it PEER_STATUS, forwards a STATUS of each rank that responds,
and closes the connection. An observer sends nothing after HELLO, and what it can read cannot make it a rank.
"""

import contextlib
import json
import socket
import struct
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxdist.base import logger
from mlxdist.base.atomic_file import replace_file
from mlxdist.base.environment import Environment
from mlxdist.base.errors import ranks_have
from mlxdist.base.json_reader import parse_json

from ..diagnostics.flight_records import rank_directory
from .authentication import Refused, authenticate, observer_secret, read_frame
from .event_loop import Connection
from .heartbeat import PeerStatus, pack_peer_status, unpack_peer_status
from .member import Member
from .protocol import STATUS, Kind, ProtocolError

__all__ = ["Observation", "Observers", "observe", "publish"]

MAX_OBSERVERS = 4
OBSERVER_SECONDS = 10.0  # for its connection
CONNECT_SECONDS = 1.0  # where rank 0 takes longer, it is stopped or overloaded
_FILE = ".mlxdist-rendezvous"


def publish(environment: Environment, listener: socket.socket) -> Path | None:
    """Lets this user's commands find the rendezvous of rank 0. Returns the file, None without a launcher."""
    directory = rank_directory(environment.first_rank)
    if directory is None:
        return None
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    fields = {"host": host, "port": port, "secret": observer_secret(environment.secret).hex()}
    try:
        replace_file(directory / _FILE, json.dumps(fields), 0o600)
    except OSError as error:
        logger.warn("rendezvous", f"`mlxdist top` will not find the rendezvous: {error}")
    return directory / _FILE


# On rank 0. All methods belong to the loop's thread.


@dataclass
class _Observer:
    connection: Connection
    deadline: float
    waiting_on: set[int]


class Observers:
    def __init__(self) -> None:
        self._observers: list[_Observer] = []

    @property
    def is_full(self) -> bool:
        return len(self._observers) >= MAX_OBSERVERS

    def admit(self, connection: Connection, size: int, members: Collection[Member]) -> None:
        """Sends it what is known, and requests a status of each rank that is likely to respond.

        A silent rank gets no request: they would pile up there.
        """
        requested = [member for member in members if member.is_here and not member.status().is_silent]
        observer = _Observer(connection, time.monotonic() + OBSERVER_SECONDS, {member.rank for member in requested})
        self._observers.append(observer)
        connection.on_frame = self._reject
        connection.on_lost = lambda error: self._remove(observer)
        peers = [member.status() for member in members]
        connection.send(Kind.PEER_STATUS, pack_peer_status(peers, size, observer.waiting_on))
        for member in requested:
            if not member.has_request:
                member.has_request = True
                member.connection.send(Kind.STATUS_REQUEST)
        self.forward(-1, b"")  # where there is nothing to wait for

    def forward(self, rank: int, status: bytes) -> None:
        """Forwards the status of ``rank`` to observers. ``status``: empty where the rank has none, or has gone."""
        for observer in list(self._observers):
            if rank in observer.waiting_on:
                observer.connection.send(Kind.STATUS, STATUS.pack(rank) + status)
            observer.waiting_on.discard(rank)
            if not observer.waiting_on:
                observer.connection.close(when_sent=True)
            if not observer.connection.is_open:
                self._observers.remove(observer)

    def expire(self, now: float) -> float | None:
        """Closes connections whose time is over. Returns when the next one's will be."""
        for observer in [one for one in self._observers if now >= one.deadline or not one.connection.is_open]:
            self._remove(observer)
        return self._observers[0].deadline if self._observers else None

    def _remove(self, observer: _Observer) -> None:
        observer.connection.close()
        if observer in self._observers:
            self._observers.remove(observer)

    def _reject(self, kind: int, payload: bytes) -> None:
        raise ProtocolError(f"a frame of kind {kind}")


# In the command that observes.


@dataclass
class Observation:
    """``records``: flight records as JSON, unchecked, with times of day of this host's clock."""

    members: dict[int, PeerStatus]
    size: int
    requested: set[int]
    records: dict[int, Any] = field(default_factory=dict)

    def notes(self, seconds: float) -> list[str]:
        """Which ranks have sent no record within ``seconds``, but for what ``members`` says of them."""
        notes = []
        if absent := sorted(rank for rank in range(self.size) if rank not in self.members):
            notes.append(f"{ranks_have(absent)} not reached mlxdist.init()")
        if late := sorted(self.requested - self.records.keys()):
            notes.append(
                f"{ranks_have(late)} not responded for {seconds:g} s: stopped, or blocked in a call that holds the GIL"
            )
        return notes


def observe(directory: Path, seconds: float) -> Observation | None:
    """Reads rank 0's view of the job, from rank 0's private directory; None: no response. Takes at most ``seconds``."""
    begin = time.monotonic()
    try:
        file = parse_json((directory / _FILE).read_text())
        address, secret = (str(file["host"]), int(file["port"])), bytes.fromhex(file["secret"])
        limit = min(seconds, CONNECT_SECONDS)
        with socket.create_connection(address, limit) as sock:
            framing, _ = authenticate(sock, secret, "observer", b"{}", begin + limit)
            first, requested_ns = read_frame(sock, framing, begin + limit), time.time_ns()
            found = Observation(*unpack_peer_status(first[1]))
            with contextlib.suppress(OSError):  # all have responded and rank 0 has closed it, or the time is over
                while found.requested - found.records.keys():
                    kind, payload = read_frame(sock, framing, begin + seconds)
                    rank = STATUS.unpack_from(payload)[0]
                    if len(payload) == STATUS.size:
                        found.requested.discard(rank)
                        continue
                    record = parse_json(payload[STATUS.size :])
                    # It was written between the request and the response. Another host's clock may differ.
                    record["wall_ns"] = min(max(record["wall_ns"], requested_ns), time.time_ns())
                    found.records[rank] = record
            return found
    except (OSError, ValueError, LookupError, TypeError, struct.error, ProtocolError, Refused) as error:
        logger.info("rendezvous", f"rank 0 does not respond to an observer: {error}")
        return None
