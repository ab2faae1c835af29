"""Fuzz targets: what arrives on a socket of the rendezvous, from strangers, from ranks of the job, and from rank 0.

Each target takes bytes and raises if something else happens than what the module under test documents.
"""

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from unittest import mock

from mlxdist.base.environment import Environment
from mlxdist.runtime.rendezvous import connect
from mlxdist.runtime.rendezvous.authentication import NONCE_BYTES, Refused, observer_secret, proof
from mlxdist.runtime.rendezvous.event_loop import Connection, EventLoop
from mlxdist.runtime.rendezvous.heartbeat import Heartbeat
from mlxdist.runtime.rendezvous.member import Member
from mlxdist.runtime.rendezvous.protocol import (
    MAGIC,
    Framing,
    Kind,
    ProtocolError,
    pack_message,
    unpack_json,
    unpack_message,
)
from mlxdist.runtime.rendezvous.rendezvous import Rendezvous
from mlxdist.runtime.rendezvous.server import RendezvousServer

__all__ = ["TARGETS"]

SECRET = b"\x5e" * 32
SIZE = 3
_LINGER_0 = struct.pack("ii", 1, 0)  # closing leaves no TIME_WAIT behind: there would soon be no port left


def frames(data: bytes) -> None:
    """However a stream is cut, it gives the same frames, and the same end."""
    secured, step = data[:1] > b"\x7f", 1 + data[1] % 32 if len(data) > 1 else 1
    outcomes = []
    for cut in (step, max(1, len(data))):
        framing, found = Framing(), []
        if secured:
            framing.secure(b"a", b"b")
        try:
            for start in range(2, len(data), cut):
                framing.feed(data[start : start + cut])
                while (frame := framing.next_frame()) is not None:
                    found.append(frame)
        except ProtocolError as error:
            found.append(str(error))
        outcomes.append(found)
    assert outcomes[0] == outcomes[1], outcomes
    _frames_survive(data)


def _frames_survive(data: bytes) -> None:
    sender, receiver = Framing(), Framing()
    sender.secure(b"a", b"b")
    receiver.secure(b"b", b"a")
    receiver.feed(sender.frame(Kind.REPORT_FAILURE, data) + sender.frame(Kind.GOODBYE, b""))
    assert [receiver.next_frame(), receiver.next_frame()] == [(Kind.REPORT_FAILURE, data), (Kind.GOODBYE, b"")]


class Meeting:
    """Rank 0's server, driven by hand: its loop is a real one whose thread is never started."""

    def __init__(self) -> None:
        self.loop = EventLoop(_crash)
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        environment = Environment(world_size=SIZE, rendezvous=self.address, secret=SECRET, job="test")
        self.own, server_side = socket.socketpair()
        self.own.setblocking(False)
        self.server = RendezvousServer(self.loop, listener, environment, server_side)
        self._framing = Framing()
        self._framing.secure(b"own", b"own")

    def join(self, rank: int) -> socket.socket:
        """A member that has proven itself. Returns its end."""
        end, server_side = socket.socketpair()
        end.setblocking(False)
        connection = Connection(self.loop, server_side, Framing())
        connection.framing.secure(b"from", b"to")
        self.server._join(Member(rank, "host", 1, connection))
        return end

    def turn(self) -> None:
        """What the loop's thread does, until there is nothing to do."""
        for _ in range(100):
            if not self.loop._poll(0):
                break
        self.loop._run_timers()

    def heard(self) -> list[tuple[int, bytes]]:
        """The frames that rank 0 itself was sent."""
        with contextlib.suppress(BlockingIOError):
            while data := self.own.recv(1 << 20):
                self._framing.feed(data)
        found = []
        while (frame := self._framing.next_frame()) is not None:
            found.append(frame)
        return found

    def close(self) -> None:
        _close_sockets(self.loop)
        self.own.close()


def _crash(error: BaseException) -> None:
    raise error


def _close_sockets(loop: EventLoop) -> None:
    for key in list(loop._selector.get_map().values()):
        key.fileobj.close()
    loop._wake_sender.close()


@contextlib.contextmanager
def meeting() -> Iterator[Meeting]:
    one = Meeting()
    try:
        yield one
    finally:
        one.close()


def stranger(data: bytes) -> None:
    """Bytes from anybody; with the first byte odd a greeting by a rank that has the secret, or by an observer."""
    with meeting() as here, socket.create_connection(here.address) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0)
        here.turn()
        framing = Framing()
        framing.feed(sock.recv(4096))
        server_nonce = framing.next_frame()[1][len(MAGIC) :]
        greeting = data[1:]
        if data[:1] and data[0] & 1:
            nonce = b"n" * NONCE_BYTES
            role, secret = ("observer", observer_secret(SECRET)) if data[0] & 0x40 else ("rank", SECRET)
            hello = nonce + proof(secret, role, server_nonce, nonce, greeting) + greeting
            greeting = framing.frame(Kind.HELLO, hello)
        with contextlib.suppress(OSError):  # the server has closed it
            sock.sendall(greeting)
        here.turn()
        for kind, payload in here.heard():
            _understand(kind, payload)


def member(data: bytes) -> None:
    """Frames from ranks that have proven themselves: kind, sender, length, payload; and at last bytes without a tag."""
    with meeting() as here:
        ends = [here.join(rank) for rank in range(1, SIZE)]
        framings = [Framing() for _ in ends]
        for framing in framings:
            framing.secure(b"to", b"from")
        while len(data) > 4:
            kind, who, length = struct.unpack_from(">BBH", data)
            payload, data = data[4 : 4 + length], data[4 + length :]
            # Half of them in an order that comes to something.
            kind = [Kind.GATHER, Kind.MESSAGE, Kind.REPORT_FAILURE, Kind.GOODBYE][kind % 4] if who & 2 else kind
            _send(ends[who & 1], framings[who & 1].frame(kind, payload))
            here.turn()
        _send(ends[0], data)
        here.turn()
        for kind, payload in here.heard():
            _understand(kind, payload)
        for end in ends:
            end.close()


def _send(sock: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):  # cut off, or not read
        sock.sendall(data)


def _understand(kind: int, payload: bytes) -> None:
    """What rank 0 sends must be what a rank understands."""
    if kind in (Kind.FAILURE, Kind.DEPARTED):
        unpack_json(payload, rank=int, text=str)["text"].encode()
    elif kind == Kind.MESSAGE:
        assert pack_message(*unpack_message(payload)) == payload
    else:
        assert kind in (Kind.FORMED, Kind.GATHERED), kind


def greeting(data: bytes) -> None:
    """What a rank reads from a process that listens at the address of rank 0; if the first byte is odd, with the
    secret."""
    ours, theirs = socket.socketpair()
    environment = Environment(rank=1, world_size=SIZE, rendezvous=("h", 1), secret=SECRET)
    with ours, theirs:
        if data[:1] and data[0] & 1:
            _welcome(theirs, data[1:])
        else:
            theirs.sendall(data[1:])
        theirs.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ProtocolError, Refused, OSError), mock.patch.object(os, "urandom", _nonce):
            _, fields = connect._authenticate(environment, ours, time.monotonic() + 5, epoch=0, received=0)
            assert 0 <= fields["seconds"] <= 1e9, fields


def _nonce(count: int) -> bytes:
    """A rank's, known before it has said it: all bytes for it are written at once."""
    return b"r" * count


def _welcome(sock: socket.socket, text: bytes) -> None:
    framing, server_nonce = Framing(), b"h" * NONCE_BYTES
    sock.sendall(framing.frame(Kind.CHALLENGE, MAGIC + server_nonce))
    sock.sendall(framing.frame(Kind.WELCOME, proof(SECRET, "rank 0", _nonce(NONCE_BYTES), server_nonce, text) + text))


def rank_0(data: bytes) -> None:
    """Frames from rank 0 to a rank: kind, length, payload."""
    with _a_rank() as rank:
        while len(data) > 3:
            kind, length = struct.unpack_from(">BH", data)
            payload, data = data[3 : 3 + length], data[3 + length :]
            with contextlib.suppress(ProtocolError):
                rank._frame(kind, payload)
    failure = rank.failure
    if failure is not None:
        str(failure).encode()


class _Unconnected(Rendezvous):
    def _open(self) -> None:
        pass


@contextlib.contextmanager
def _a_rank() -> Iterator[Rendezvous]:
    """Its loop does not run, so rank 0 reads nothing of what it sends."""
    rank, loop, (ours, theirs) = _Unconnected(Environment(secret=SECRET)), EventLoop(_crash), socket.socketpair()
    hear = rank._on_failure = rank._on_leave = rank._on_message = lambda *news: [str(part).encode() for part in news]
    rank._connection = Connection(loop, ours)
    rank._heartbeat = Heartbeat(loop, rank._connection, 0, SIZE)
    rank._heartbeat.start(str, hear)
    try:
        yield rank
    finally:
        _close_sockets(loop)
        theirs.close()


TARGETS: dict[str, Callable[[bytes], None]] = {
    "frames": frames,
    "stranger": stranger,
    "member": member,
    "greeting": greeting,
    "rank_0": rank_0,
}
