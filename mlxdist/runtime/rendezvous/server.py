"""Rank 0's side of the rendezvous: lets ranks in, passes blobs on, and tells everyone what became of the others."""

import collections
import contextlib
import hmac
import operator
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass

from mlxdist.base import logger
from mlxdist.base.environment import Environment, format_address, same_job
from mlxdist.base.errors import by_name, located, name_ranks
from mlxdist.version import __version__

from .event_loop import Loop
from .heartbeat import PULSE_SECONDS, SILENT_SECONDS, Pulse, pack_news, unpack_position
from .messages import MAX_WAITING, pack_message, unpack_message
from .protocol import (
    GATHER,
    GATHERED,
    MAGIC,
    MAX_FRAME,
    MAX_TEXT,
    NONCE_BYTES,
    PROOF_BYTES,
    Connection,
    Framing,
    Kind,
    WireError,
    knock,
    pack_json,
    proof,
    session_keys,
    unpack_json,
)

__all__ = ["Hub", "keep_alive", "status_noted"]

# A rank answers the challenge at once. Whoever takes longer is no rank, or a stopped one that will try again.
HANDSHAKE_SECONDS = 10.0
# Connections that have not proven anything yet, beyond one per rank.
MAX_STRANGERS = 128
# The same once the group is complete: none of them can be let in then, they are only told why.
MAX_LATE_STRANGERS = 8
# New connections between two looks at those that are there.
MAX_ACCEPTS = 64
# Once the group is complete, between one new connection and the next: rank 0's thread shares an interpreter with the
# program, and a flood of them must not take its time.
ACCEPT_SECONDS = 0.1

# While ranks are missing, between two looks at which of them the launcher has seen ending.
LOOK_SECONDS = 0.25


@dataclass
class Stranger:
    sock: socket.socket
    connection: Connection
    address: str
    nonce: bytes
    deadline: float
    has_knocked: bool = False  # with the job's secret


@dataclass
class Member:
    rank: int
    host: str
    pid: int
    connection: Connection
    left: bool = False
    lost: bool = False
    heard: float | None = None  # when its last heartbeat came; None for one that does not watch
    position: str = ""

    @property
    def is_here(self) -> bool:
        return not self.left and not self.lost

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"


class Hub:
    """All methods but the constructor belong to the loop's thread. ``deserted`` is set when only rank 0 is left."""

    def __init__(self, loop: Loop, listener: socket.socket, environment: Environment, own_side: socket.socket) -> None:
        self.deserted = threading.Event()
        self._loop = loop
        self._listener = listener
        self._environment = environment
        self._started = time.monotonic()
        self._forming_deadline: float | None = self._started + environment.rendezvous_timeout
        self._look_at = 0.0
        self._accept_again = 0.0
        self._strangers: list[Stranger] = []
        self._members: dict[int, Member] = {}
        self._refusals: collections.deque[str] = collections.deque(maxlen=4)
        self._failed = False
        self._step = 0
        self._gathered: dict[int, tuple[str, bytes]] = {}
        self._gather_deadline: float | None = None
        self._next_news: float | None = None

        listener.setblocking(False)
        loop.add_timer(self._timer)
        loop.watch(listener, self._accept)
        self._admit_own(own_side)

    @property
    def _is_complete(self) -> bool:
        return len(self._members) == self._environment.world_size

    # Strangers: connections that have yet to prove that they know the secret.

    def _accept(self, events: int) -> None:
        if self._is_complete:
            self._accept_one()
            self._rest()
            return
        for _ in range(MAX_ACCEPTS):
            if not self._accept_one():
                return

    def _accept_one(self) -> bool:
        """Whether more may be waiting."""
        try:
            sock, address = self._listener.accept()
        except BlockingIOError:
            return False
        except ConnectionAbortedError:
            return True
        except OSError:
            # No descriptor left, most likely, and the listener stays readable.
            if self._strangers:
                self._make_room()
            else:
                self._rest()
            return False
        most = MAX_LATE_STRANGERS if self._is_complete else MAX_STRANGERS + self._environment.world_size
        while len(self._strangers) >= most:
            self._make_room()
        self._greet(sock, format_address(*address[:2]))
        return True

    def _rest(self) -> None:
        self._accept_again = time.monotonic() + ACCEPT_SECONDS
        self._loop.rest(self._listener)

    def _make_room(self) -> None:
        """The oldest goes; one that has knocked only when all have: strangers do not displace a rank."""
        self._drop(next((one for one in self._strangers if not one.has_knocked), self._strangers[0]))

    def _greet(self, sock: socket.socket, address: str) -> None:
        nonce = os.urandom(NONCE_BYTES)
        connection = Connection(self._loop, sock, Framing())
        stranger = Stranger(sock, connection, address, nonce, time.monotonic() + HANDSHAKE_SECONDS)
        connection.on_frame = lambda kind, payload: self._hello(stranger, kind, payload)
        connection.on_lost = lambda text: self._lose_stranger(stranger, text)
        self._strangers.append(stranger)
        connection.send(Kind.CHALLENGE, MAGIC + nonce)
        connection.look()  # a rank has knocked by now, unless its machine is slow

    def _drop(self, stranger: Stranger) -> None:
        stranger.connection.close()
        self._strangers.remove(stranger)

    def _lose_stranger(self, stranger: Stranger, text: str) -> None:
        self._strangers.remove(stranger)
        if text.startswith("it sent"):
            self._note(f"a connection from {stranger.address} was closed: {text}")

    def _note(self, text: str) -> None:
        """Kept for the message about missing ranks: one of these may be the reason."""
        logger.info("rendezvous", text)
        if text not in self._refusals:
            self._refusals.append(text)

    def _refuse(self, stranger: Stranger, told: str, noted: str) -> None:
        """Stays in the list of strangers until the text is sent or its time is over."""
        self._note(noted)
        stranger.connection.send(Kind.REFUSED, told.encode()[:2048])
        stranger.connection.close(when_sent=True)

    def _hello(self, stranger: Stranger, kind: int, payload: bytes) -> None:
        if kind == Kind.KNOCK:  # a wrong one is no matter: its greeting will tell why
            nonce = payload[:NONCE_BYTES]
            stranger.has_knocked = hmac.compare_digest(payload, knock(self._environment.secret, nonce))
            return
        if kind != Kind.HELLO or len(payload) < NONCE_BYTES + PROOF_BYTES:
            raise WireError("something else than a rank's greeting")
        nonce = payload[:NONCE_BYTES]
        given = payload[NONCE_BYTES : NONCE_BYTES + PROOF_BYTES]
        greeting = payload[NONCE_BYTES + PROOF_BYTES :]
        secret = self._environment.secret
        # Before the greeting is parsed: its text is only looked at when it comes from someone with the secret.
        if not hmac.compare_digest(given, proof(secret, "rank", stranger.nonce, nonce, greeting)):
            self._refuse(
                stranger,
                "its MLXDIST_SECRET is not this job's; give every rank of a job the same one",
                f"a process at {stranger.address} was refused: its MLXDIST_SECRET is not this job's",
            )
            return
        fields = unpack_json(greeting, rank=int, world_size=int, job=str, version=str, host=str, pid=int)
        who = f"rank {fields['rank']} ({fields['host']}, pid {fields['pid']})"
        if difference := self._difference(fields):
            # It has the secret, so one of the two was started wrongly: no use in waiting for it to change.
            self._refuse(stranger, difference, f"{who} was refused: {difference}")
            rank = fields["rank"] if 0 <= fields["rank"] < self._environment.world_size else 0
            self._fail(rank, "RendezvousError", f"rendezvous: {who} was refused: {difference}")
        elif (taken := self._members.get(fields["rank"])) and taken.left:
            self._drop(stranger)  # it comes to the next world, and tries again until all have left this one
        elif self._failed:
            self._refuse(stranger, "the group has already failed", f"{who} came after the failure")
        elif taken:
            self._refuse(
                stranger,
                f"rank {taken.rank} is already taken by pid {taken.pid} on {taken.host}; every process needs its own "
                "MLXDIST_RANK",
                f"a second rank {taken.rank} (pid {fields['pid']} on {fields['host']}) was refused",
            )
        else:
            self._admit(stranger, nonce, fields)

    def _difference(self, fields: dict) -> str | None:
        """Why this rank cannot be of this job, or None."""
        mine = self._environment
        for name, theirs, ours, agree in (
            ("MLXDIST_JOB", fields["job"], mine.job, same_job),
            ("MLXDIST_WORLD_SIZE", fields["world_size"], mine.world_size, operator.eq),
            ("the version of mlxdist", fields["version"], __version__, operator.eq),
        ):
            if not agree(theirs, ours):
                return f"{name} is {theirs} on rank {fields['rank']} and {ours} on rank 0; they must be equal"
        if not 1 <= fields["rank"] < mine.world_size:
            return f"MLXDIST_RANK is {fields['rank']}; the ranks beside 0 are 1 to {mine.world_size - 1}"
        return None

    # Members: the ranks of the job.

    def _admit(self, stranger: Stranger, nonce: bytes, fields: dict) -> None:
        self._strangers.remove(stranger)
        secret, connection = self._environment.secret, stranger.connection
        with contextlib.suppress(OSError):  # macOS, where the peer is gone already: reading will tell
            keep_alive(stranger.sock)
        now = time.monotonic()
        welcome = pack_json(
            host=socket.gethostname(), pid=os.getpid(), seconds=max(0.0, (self._forming_deadline or now) - now)
        )
        connection.send(Kind.WELCOME, proof(secret, "rank 0", nonce, stranger.nonce, welcome) + welcome)
        to_hub, from_hub = session_keys(secret, stranger.nonce, nonce)
        connection.framing.secure(send_key=from_hub, receive_key=to_hub)
        self._join(Member(fields["rank"], fields["host"], fields["pid"], connection))

    def _admit_own(self, sock: socket.socket) -> None:
        """Rank 0 itself: a socket pair within this process, nothing to prove."""
        connection = Connection(self._loop, sock, Framing())
        connection.framing.secure(b"own", b"own")
        self._join(Member(0, socket.gethostname(), os.getpid(), connection))

    def _join(self, member: Member) -> None:
        self._members[member.rank] = member
        logger.info("rendezvous", f"{member} has joined")
        member.connection.on_frame = lambda kind, payload: self._frame(member, kind, payload)
        member.connection.on_lost = lambda text: self._lose(member, text)
        if self._is_complete:
            self._forming_deadline = None
            members = [[m.host, m.pid] for _, m in sorted(self._members.items())]
            self._tell_all(Kind.FORMED, pack_json(members=members))

    def _tell_all(self, kind: Kind, payload: bytes, beside: Member | None = None) -> None:
        for member in self._members.values():
            if member is not beside and member.is_here:
                member.connection.send(kind, payload)

    def _fail(self, rank: int, error: str, text: str, beside: Member | None = None) -> None:
        """The first failure is everyone's; later ones are its consequences."""
        if not self._failed:
            self._failed = True
            self._forming_deadline = self._gather_deadline = None
            self._tell_all(Kind.FAILURE, pack_json(rank=rank, error=error, text=text), beside)

    def _lose(self, member: Member, text: str) -> None:
        member.lost = True
        if not member.left:
            when = " before the group was complete" if self._forming_deadline is not None else ""
            how = "has died or closed its connection" if not text.startswith("it sent") else f"was cut off: {text}"
            self._fail(member.rank, "PeerLost", located(f"{member} {how}{when}", member.rank, member.host))
        self._check_deserted()

    def _check_deserted(self) -> None:
        if not any(member.is_here for member in self._members.values()):
            self.deserted.set()

    def _frame(self, member: Member, kind: int, payload: bytes) -> None:
        if kind == Kind.GATHER:
            self._gather(member, payload)
        elif kind == Kind.ANNOUNCE:
            fields = unpack_json(payload, error=str, text=str)
            error, text = by_name(fields["error"]).__name__, fields["text"][:MAX_TEXT]
            self._fail(member.rank, error, text, beside=member)
            member.connection.send(Kind.TAKEN)
        elif kind == Kind.GOODBYE:
            member.left = True
            logger.info("rendezvous", f"{member} has left")
            self._tell_all(Kind.LEFT, pack_json(rank=member.rank, text=f"{member} has left the group (finalize)"))
            member.connection.send(Kind.TAKEN)
            self._check_deserted()
        elif kind == Kind.MESSAGE:
            self._relay(member, payload)
        elif kind == Kind.PULSE:
            member.position, member.heard = unpack_position(payload), time.monotonic()
            if self._next_news is None and not self._failed:
                self._next_news = member.heard + PULSE_SECONDS
        else:
            raise WireError(f"a frame of kind {kind}")

    def _relay(self, sender: Member, payload: bytes) -> None:
        rank, tag, data = unpack_message(payload)
        receiver = self._members.get(rank)
        if receiver is None or receiver is sender:
            raise WireError(f"a message for rank {rank}")
        if self._failed or not receiver.is_here:
            return  # the sender has been told
        receiver.connection.send(Kind.MESSAGE, pack_message(sender.rank, tag, data))
        blobs = self._environment.world_size * MAX_FRAME  # of one step
        if receiver.connection.unsent > blobs + MAX_WAITING:
            self._fail(
                rank,
                "RendezvousError",
                f"rendezvous: {receiver} has left {receiver.connection.unsent} bytes from other ranks unread; it is "
                "stopped, or its machine is overloaded",
            )

    def _gather(self, member: Member, payload: bytes) -> None:
        if self._failed:
            return
        if len(payload) < GATHER.size:
            raise WireError("a truncated blob")
        step, length = GATHER.unpack_from(payload)
        if step != self._step or member.rank in self._gathered:
            raise WireError(f"a blob for step {step} in step {self._step}")
        what = payload[GATHER.size : GATHER.size + length].decode(errors="replace")
        if not self._gathered:
            self._gather_deadline = time.monotonic() + self._environment.rendezvous_timeout
        self._gathered[member.rank] = (what, payload[GATHER.size + length :])
        if len(self._gathered) < self._environment.world_size:
            return
        self._gather_deadline = None
        first = self._gathered[0][0]
        for rank, (what, _) in sorted(self._gathered.items()):
            if what != first:
                self._fail(
                    rank,
                    "Mismatch",
                    f"rendezvous: rank 0 is at {first!r} while rank {rank} is at {what!r}; "
                    "all ranks must take the same steps in the same order",
                )
                return
        for rank, (_, blob) in self._gathered.items():
            self._tell_all(Kind.GATHERED, GATHERED.pack(self._step, rank) + blob)
        self._gathered = {}
        self._step += 1

    def _tell_news(self, now: float) -> None:
        """To those who watch; not to one that is silent, where they would pile up unread."""
        watching = [member for member in self._members.values() if member.is_here and member.heard is not None]
        news = pack_news([Pulse(member.rank, now - member.heard, member.position) for member in watching])
        for member in watching:
            if now - member.heard < SILENT_SECONDS and not member.connection.unsent:
                member.connection.send(Kind.NEWS, news)
        self._next_news = now + PULSE_SECONDS if watching and not self._failed else None

    # Deadlines.

    def _timer(self) -> float | None:
        now = time.monotonic()
        over = [stranger for stranger in self._strangers if now >= stranger.deadline or not stranger.connection.is_open]
        for stranger in over:
            self._drop(stranger)
        if self._accept_again and now >= self._accept_again:
            self._accept_again = 0.0
            self._loop.watch(self._listener, self._accept)
        if self._forming_deadline is not None and now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            self._fail_ended()
        if self._forming_deadline is not None and now >= self._forming_deadline:
            self._fail_missing()
        if self._gather_deadline is not None and now >= self._gather_deadline:
            self._fail_late()
        if self._next_news is not None and now >= self._next_news:
            self._tell_news(now)
        deadlines = [stranger.deadline for stranger in self._strangers[:1]]
        look_at = self._look_at if self._forming_deadline is not None else None
        others = (self._forming_deadline, look_at, self._gather_deadline, self._accept_again or None, self._next_news)
        deadlines += [deadline for deadline in others if deadline is not None]
        return max(0.0, min(deadlines) - now) if deadlines else None

    @property
    def _missing(self) -> list[int]:
        return [rank for rank in range(self._environment.world_size) if rank not in self._members]

    def _fail_ended(self) -> None:
        """A missing rank whose process has ended does not come any more."""
        for rank in self._missing:
            if status := status_noted(self._environment, rank):
                text = f"rendezvous: rank {rank} has ended with exit status {status} before it called mlxdist.init()"
                self._fail(rank, "RendezvousError", f"{text}; all ranks of the job must call it")
                return

    def _fail_missing(self) -> None:
        size = self._environment.world_size
        missing = self._missing
        have = "have" if len(missing) > 1 else "has"
        text = (
            f"rendezvous: {name_ranks(missing)} of {size} {have} not connected to "
            f"{format_address(*self._environment.rendezvous)} after {self._environment.rendezvous_timeout:g} s; "
            "see what they have printed, and where they are: they may not have called mlxdist.init()"
        )
        if self._refusals:
            text += f" (meanwhile {'; '.join(self._refusals)})"
        self._fail(missing[0], "RendezvousError", text)

    def _fail_late(self) -> None:
        late = [self._members[rank] for rank in range(self._environment.world_size) if rank not in self._gathered]
        here = next(iter(self._gathered))
        what = self._gathered[here][0]
        have = "have" if len(late) > 1 else "has"
        first = f", first {late[0]}" if len(late) > 1 else f" ({late[0].host}, pid {late[0].pid})"
        self._fail(
            late[0].rank,
            "Timeout",
            f"rendezvous: {name_ranks(m.rank for m in late)}{first} {have} not arrived at {what!r} "
            f"{self._environment.rendezvous_timeout:g} s after rank {here}; see what they are busy with, or raise "
            "MLXDIST_RENDEZVOUS_TIMEOUT",
        )


def status_noted(environment: Environment, rank: int) -> str | None:
    """The exit status of a rank whose process the launcher has seen ending; `LocalJob.note_end` notes it."""
    if environment.error_file is None:
        return None
    try:
        with open(f"{environment.error_file}.ended-{rank}", encoding="ascii") as file:
            return file.read()
    except OSError:  # it runs
        return None


def keep_alive(sock: socket.socket) -> None:
    """A host that lost power sends no farewell: give a connection up after 30 s without any answer of its kernel.

    A stopped process is no such case: its kernel answers.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle = getattr(socket, "TCP_KEEPIDLE", None) or socket.TCP_KEEPALIVE  # Linux; macOS
    sock.setsockopt(socket.IPPROTO_TCP, idle, 15)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    # While something is under way, as a heartbeat always is, there are no probes, but repetitions: for 15 minutes.
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)
    elif sys.platform == "darwin":
        sock.setsockopt(socket.IPPROTO_TCP, 0x80, 30)  # TCP_RXT_CONNDROPTIME of netinet/tcp.h
