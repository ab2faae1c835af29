"""Rank 0's side of the rendezvous: admits ranks, forwards their data, and reports to all what happens to one."""

import collections
import contextlib
import functools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from mlxdist.base import logger
from mlxdist.base.environment import Environment, format_address, same_job
from mlxdist.base.errors import by_name, located, name_ranks
from mlxdist.version import __version__

from . import protocol
from .authentication import ServerHandshake, observer_secret
from .event_loop import Connection, EventLoop
from .heartbeat import HEARTBEAT_SECONDS, pack_peer_status, unpack_position
from .member import Member
from .observer import Observers, publish
from .outage import LOST_SECONDS, SignsOfLife, how_lost, is_outage, outage_notice
from .protocol import Framing, Kind, ProtocolError, pack_json, unpack_json

__all__ = ["RendezvousServer", "exit_status_of", "keep_alive", "why_lost"]

# Bytes of messages that wait at one place. They are meant to be few and small.
MAX_QUEUED = 16 * 1024 * 1024

# A rank responds to the challenge at once. A slower client is no rank, or a stopped one that will retry.
HANDSHAKE_SECONDS = 10.0
# Connections that have not authenticated yet, beyond one per rank.
MAX_UNAUTHENTICATED = 128
# The same once the group is complete and no rank is cut off: none of them can become a rank then.
MAX_UNAUTHENTICATED_LATE = 8
# New connections between two passes over the others.
MAX_ACCEPTS = 64
# In the same state, between one new connection and the next: rank 0's thread shares an interpreter with the
# program, and a flood of them must not take its time.
ACCEPT_SECONDS = 0.1

# While ranks are missing, between two checks which of them the launcher has seen exiting.
EXIT_CHECK_SECONDS = 0.25
# Between two looks at acknowledgements, when rank 0 ends.
STEP_SECONDS = 0.001


@dataclass
class PendingConnection:
    """A connection that has not authenticated yet."""

    connection: Connection
    address: str
    handshake: ServerHandshake
    deadline: float
    has_knocked: bool = False  # with a secret of the job


class RendezvousServer:
    """All methods but the constructor belong to the loop's thread. ``deserted`` is set once all ranks have gone."""

    def __init__(
        self, loop: EventLoop, listener: socket.socket, environment: Environment, own_side: socket.socket
    ) -> None:
        """``own_side``: of a socket pair with rank 0's own end."""
        self.signs_of_life: Callable[[int], int] = lambda rank: 0  # how many the data path has brought
        self.deserted = threading.Event()
        self._loop = loop
        self._listener = listener
        self._environment = environment
        self._secrets = {"rank": environment.secret, "observer": observer_secret(environment.secret)}
        self._forming_deadline: float | None = time.monotonic() + environment.rendezvous_timeout
        self._exit_check_at = 0.0
        self._accept_again = 0.0
        self._pending: list[PendingConnection] = []
        self._members: dict[int, Member] = {}
        self._observers = Observers()
        self._refusals: collections.deque[str] = collections.deque(maxlen=4)
        self._failure: str | None = None  # the text of the first
        self._step = 0
        self._gathered: dict[int, tuple[str, bytes]] = {}
        self._gather_deadline: float | None = None
        self._next_peer_status: float | None = None

        listener.setblocking(False)
        loop.add_timer(self._timer)
        loop.watch(listener, self._accept)
        self._join(Member(0, environment.host_name, os.getpid(), Connection(loop, own_side)))
        self.published = publish(environment, listener)

    @property
    def _is_complete(self) -> bool:
        return len(self._members) == self._environment.world_size

    @property
    def _expects_ranks(self) -> bool:
        return not self._is_complete or any(member.is_cut for member in self._members.values())

    # Connections that have not authenticated yet.

    def _accept(self, events: int) -> None:
        if not self._expects_ranks:
            self._accept_one()
            self._pause_accepting()
            return
        for _ in range(MAX_ACCEPTS):
            if not self._accept_one():
                return

    def _accept_one(self) -> bool:
        """Accepts a connection. Returns whether more may be waiting."""
        try:
            sock, address = self._listener.accept()
        except BlockingIOError:
            return False
        except ConnectionAbortedError:
            return True
        except OSError:
            # No descriptor left, most likely, and the listener stays readable.
            if self._pending:
                self._evict()
            else:
                self._pause_accepting()
            return False
        many = MAX_UNAUTHENTICATED + self._environment.world_size
        limit = many if self._expects_ranks else MAX_UNAUTHENTICATED_LATE
        while len(self._pending) >= limit:
            self._evict()
        connection, deadline = Connection(self._loop, sock, Framing()), time.monotonic() + HANDSHAKE_SECONDS
        self._challenge(
            PendingConnection(connection, format_address(*address[:2]), ServerHandshake(self._secrets), deadline)
        )
        return True

    def _pause_accepting(self) -> None:
        self._accept_again = time.monotonic() + ACCEPT_SECONDS
        self._loop.pause(self._listener)

    def _evict(self) -> None:
        """Drops the oldest; one that has knocked only when all have: other connections do not displace a rank."""
        self._drop(next((one for one in self._pending if not one.has_knocked), self._pending[0]))

    def _challenge(self, pending: PendingConnection) -> None:
        connection = pending.connection
        connection.on_frame = lambda kind, payload: self._authenticate(pending, kind, payload)
        connection.on_lost = lambda error: self._lose_pending(pending, error)
        self._pending.append(pending)
        connection.send(Kind.CHALLENGE, pending.handshake.challenge())
        connection.read()  # a rank has knocked by now, unless its machine is slow

    def _drop(self, pending: PendingConnection) -> None:
        pending.connection.close()
        self._pending.remove(pending)

    def _lose_pending(self, pending: PendingConnection, error: OSError | ProtocolError | None) -> None:
        self._pending.remove(pending)
        if isinstance(error, ProtocolError):
            self._note(f"a connection from {pending.address} was closed: it sent {error}")

    def _note(self, text: str) -> None:
        """Keeps ``text`` for the message about missing ranks: a refusal may be the reason."""
        logger.info("rendezvous", text)
        if text not in self._refusals:
            self._refusals.append(text)

    def _refuse(self, pending: PendingConnection, text: str, note: str) -> None:
        """Refuses a client. It stays in the list until the text is sent or its time is over."""
        self._note(note)
        pending.connection.send(Kind.REFUSED, text.encode()[:2048])
        pending.connection.close(when_sent=True)

    def _authenticate(self, pending: PendingConnection, kind: int, payload: bytes) -> None:
        handshake = pending.handshake
        if kind == Kind.KNOCK:  # a wrong one is no error: HELLO will say why
            pending.has_knocked = handshake.is_knock(payload)
            return
        if kind != Kind.HELLO:
            raise ProtocolError("something else than a rank's greeting")
        greeting = handshake.verify(payload)
        if greeting is None:
            self._refuse(
                pending,
                "its MLXDIST_SECRET is not this job's; give every rank of a job the same one",
                f"a process at {pending.address} was refused: its MLXDIST_SECRET is not this job's",
            )
        elif handshake.role == "rank":
            self._check_rank(pending, greeting)
        elif self._observers.is_full:
            self._refuse(pending, "there are too many observers", f"an observer at {pending.address} was refused")
        else:
            connection = self._welcome(pending)
            self._observers.admit(connection, self._environment.world_size, self._members.values())

    def _check_rank(self, pending: PendingConnection, greeting: bytes) -> None:
        fields = unpack_json(greeting, rank=int, world_size=int, job=str, version=str, host=str, pid=int)
        who = f"rank {fields['rank']} ({fields['host']}, pid {fields['pid']})"
        if difference := self._difference(fields):
            # It has the secret, so one of the two was started wrongly: retrying cannot help.
            self._refuse(pending, difference, f"{who} was refused: {difference}")
            rank = fields["rank"] if 0 <= fields["rank"] < self._environment.world_size else 0
            self._fail(rank, "RendezvousError", f"rendezvous: {who} was refused: {difference}")
        elif unpack_json(greeting, epoch=int, received=int)["epoch"] > 0:  # the version is the same from here on
            self._resume(pending, fields, who)
        elif (taken := self._members.get(fields["rank"])) and taken.left:
            self._drop(pending)  # it comes to the next world, and retries until all have left this one
        elif self._failure is not None:
            self._refuse(pending, f"the group has already failed: {self._failure}", f"{who} came after the failure")
        elif taken:
            self._refuse(
                pending,
                f"rank {taken.rank} is already taken by pid {taken.pid} on {taken.host}; every process needs its own "
                "MLXDIST_RANK",
                f"a second rank {taken.rank} (pid {fields['pid']} on {fields['host']}) was refused",
            )
        else:
            self._join(Member(fields["rank"], fields["host"], fields["pid"], self._welcome(pending)))

    def _resume(self, pending: PendingConnection, fields: dict, who: str) -> None:
        """Accepts a rank again that an outage has cut off. Both sides then send again what the other has not had."""
        member = self._members.get(fields["rank"])
        if member is None or not member.is_here or (member.host, member.pid) != (fields["host"], fields["pid"]):
            reason = f"the group has failed: {self._failure}" if self._failure else "it is not of this group any more"
            self._refuse(pending, reason, f"{who} came again, and was refused: {reason}")
        elif fields["epoch"] <= member.epoch:
            self._drop(pending)  # it has given this attempt up
        else:
            previous = member.connection
            previous.acknowledge(fields["received"])
            member.epoch, member.connection = fields["epoch"], self._welcome(pending, previous.received)
            member.connection.replace(previous)
            member.has_request = False
            self._attach(member)
            logger.warn("rendezvous", f"{member} is connected again, after {member.signs.control_silence:.0f} s")
            member.signs.heard()

    def _difference(self, fields: dict) -> str | None:
        """Why this rank cannot be of this job, or None."""
        mine = self._environment
        for name, theirs, ours in (
            ("MLXDIST_JOB", fields["job"], mine.job),
            ("MLXDIST_WORLD_SIZE", fields["world_size"], mine.world_size),
            ("the version of mlxdist", fields["version"], __version__),
        ):
            if theirs != ours and not (name == "MLXDIST_JOB" and same_job(fields["job"], mine.job)):
                return f"{name} is {theirs} on rank {fields['rank']} and {ours} on rank 0; they must be equal"
        if not 1 <= fields["rank"] < mine.world_size:
            return f"MLXDIST_RANK is {fields['rank']}; the ranks beside 0 are 1 to {mine.world_size - 1}"
        return None

    # Members: the ranks of the job.

    def _welcome(self, pending: PendingConnection, received: int = 0) -> Connection:
        """Welcomes a client: from then on its connection is authenticated. ``received``: reliable frames from it."""
        self._pending.remove(pending)
        connection, handshake = pending.connection, pending.handshake
        with contextlib.suppress(OSError):  # macOS, where the peer is gone already: reading will fail
            keep_alive(connection.sock)
        now = time.monotonic()
        seconds = max(0.0, (self._forming_deadline or now) - now)
        fields = pack_json(host=self._environment.host_name, pid=os.getpid(), seconds=seconds, received=received)
        connection.send(Kind.WELCOME, handshake.welcome(fields))
        to_server, from_server = handshake.session_keys()
        connection.framing.secure(send_key=from_server, receive_key=to_server)
        return connection

    def _join(self, member: Member) -> None:
        self._members[member.rank] = member
        logger.info("rendezvous", f"{member} has joined")
        self._attach(member)
        if self._is_complete:
            self._forming_deadline = None
            self._broadcast(Kind.FORMED)

    def _attach(self, member: Member) -> None:
        member.connection.on_frame = lambda kind, payload: self._frame(member, kind, payload)
        member.connection.on_lost = lambda error: self._lose(member, error)

    def _broadcast(self, kind: Kind, payload: bytes = b"", exclude: Member | None = None) -> None:
        for member in self._members.values():
            if member is not exclude and member.is_here:
                member.connection.send(kind, payload)

    def _fail(self, rank: int, error: str, text: str, exclude: Member | None = None) -> None:
        """Sends the first failure to all ranks; later ones are its consequences."""
        if self._failure is None:
            self._failure = text
            self._forming_deadline = self._gather_deadline = None
            self._broadcast(Kind.FAILURE, pack_json(rank=rank, error=error, text=text), exclude)

    def _lose(self, member: Member, error: OSError | ProtocolError | None) -> None:
        if not member.left and self._failure is None and is_outage(error, member.was_silent):
            logger.warn("rendezvous", outage_notice(member, member.signs))
            return
        self._give_up(member, how_lost(error))

    def _give_up(self, member: Member, how: str) -> None:
        member.lost = True
        if not member.left:
            when = " before the group was complete" if self._forming_deadline is not None else ""
            self._fail(member.rank, "PeerLost", located(f"{member} {how}{when}", member.rank, member.host))
        self._check_deserted(member)

    def _check_outages(self) -> float | None:
        """Gives up ranks that are cut off and lost. Returns the seconds until it is to be called again."""
        here = [member for member in self._members.values() if member.is_here] if self._failure is None else []
        for member in here:
            if member.is_cut or member.was_silent:
                member.signs.probe(functools.partial(self.signs_of_life, member.rank))
            if member.is_cut and (why := why_lost(self._environment, member.rank, member.signs)):
                self._give_up(member, why)
        return HEARTBEAT_SECONDS if any(member.is_cut for member in here) else None

    def wait_acknowledged(self, seconds: float) -> None:
        """Waits until the ranks that are connected have what was sent to them. Any other thread may call it.

        A socket that is closed while something in it is unread, such as an acknowledgement, resets its connection: what
        the peer has not received by then is lost.
        """
        deadline = time.monotonic() + seconds
        while self._loop.is_running and time.monotonic() < deadline:
            open_ones = [member.connection for member in list(self._members.values()) if member.connection.is_open]
            if all(connection.is_acknowledged for connection in open_ones):
                return
            time.sleep(STEP_SECONDS)

    def _check_deserted(self, gone: Member) -> None:
        self._observers.forward(gone.rank, b"")
        if not any(member.is_here for member in self._members.values()):
            self.deserted.set()

    def _frame(self, member: Member, kind: int, payload: bytes) -> None:
        member.signs.heard()
        if kind == Kind.GATHER:
            self._gather(member, payload)
        elif kind == Kind.REPORT_FAILURE:
            fields = unpack_json(payload, error=str, text=str)
            error, text = by_name(fields["error"]).__name__, fields["text"][: protocol.MAX_TEXT]
            self._fail(member.rank, error, text, exclude=member)
            member.connection.send(Kind.ACK)
        elif kind == Kind.GOODBYE:
            member.left = True
            logger.info("rendezvous", f"{member} has left")
            self._broadcast(Kind.DEPARTED, pack_json(rank=member.rank, text=f"{member} has left the group (finalize)"))
            member.connection.send(Kind.ACK)
            self._check_deserted(member)
        elif kind == Kind.MESSAGE:
            self._forward(member, payload)
        elif kind == Kind.HEARTBEAT:
            member.position, member.last_heartbeat = unpack_position(payload), time.monotonic()
            if self._next_peer_status is None and self._failure is None:
                self._next_peer_status = member.last_heartbeat + HEARTBEAT_SECONDS
        elif kind == Kind.STATUS and len(payload) <= protocol.MAX_STATUS_BYTES:
            member.has_request = False
            self._observers.forward(member.rank, payload)
        else:
            raise ProtocolError(f"a frame of kind {kind}")

    def _forward(self, sender: Member, payload: bytes) -> None:
        rank, tag, data = protocol.unpack_message(payload)
        receiver = self._members.get(rank)
        if receiver is None or receiver is sender:
            raise ProtocolError(f"a message for rank {rank}")
        if self._failure is not None or not receiver.is_here:
            return  # the sender knows the reason
        receiver.connection.send(Kind.MESSAGE, protocol.pack_message(sender.rank, tag, data))
        gathered = self._environment.world_size * protocol.MAX_FRAME  # of one step
        if receiver.connection.unacknowledged > gathered + MAX_QUEUED:
            unread = f"{receiver.connection.unacknowledged} bytes from other ranks unread"
            why = "it is stopped, overloaded, or cut off from rank 0"
            self._fail(rank, "RendezvousError", f"rendezvous: {receiver} has left {unread}; {why}")

    def _gather(self, member: Member, payload: bytes) -> None:
        if self._failure is not None:
            return
        if len(payload) < protocol.GATHER.size:
            raise ProtocolError("a truncated GATHER")
        step, length = protocol.GATHER.unpack_from(payload)
        if step != self._step or member.rank in self._gathered:
            raise ProtocolError(f"data for step {step} in step {self._step}")
        what = payload[protocol.GATHER.size : protocol.GATHER.size + length].decode(errors="replace")
        if not self._gathered:
            self._gather_deadline = time.monotonic() + self._environment.rendezvous_timeout
        self._gathered[member.rank] = (what, payload[protocol.GATHER.size + length :])
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
        for rank, (_, data) in self._gathered.items():
            self._broadcast(Kind.GATHERED, protocol.GATHERED.pack(self._step, rank) + data)
        self._gathered = {}
        self._step += 1

    def _send_peer_status(self, now: float) -> None:
        """Sends the status to ranks that send heartbeats; not to a silent one, where frames would pile up unread."""
        peers = [member.status() for member in self._members.values()]
        payload = pack_peer_status(peers, self._environment.world_size)
        for member, peer in zip(self._members.values(), peers):
            if member.is_here and not peer.is_silent and not member.connection.unsent:
                member.connection.send(Kind.PEER_STATUS, payload)
        beats = any(member.is_here and member.last_heartbeat is not None for member in self._members.values())
        self._next_peer_status = now + HEARTBEAT_SECONDS if beats and self._failure is None else None

    # Deadlines.

    def _timer(self) -> float | None:
        now = time.monotonic()
        for pending in [one for one in self._pending if now >= one.deadline or not one.connection.is_open]:
            self._drop(pending)
        if self._accept_again and now >= self._accept_again:
            self._accept_again = 0.0
            self._loop.watch(self._listener, self._accept)
        if self._forming_deadline is not None and now >= self._exit_check_at:
            self._exit_check_at = now + EXIT_CHECK_SECONDS
            self._fail_exited()
        if self._forming_deadline is not None and now >= self._forming_deadline:
            self._fail_missing()
        if self._gather_deadline is not None and now >= self._gather_deadline:
            self._end_gather(now)
        outage_check = self._check_outages()
        if self._next_peer_status is not None and now >= self._next_peer_status:
            self._send_peer_status(now)
        deadlines = [pending.deadline for pending in self._pending[:1]]
        exit_check = self._exit_check_at if self._forming_deadline is not None else None
        forming = (self._forming_deadline, exit_check, self._gather_deadline)
        outages = None if outage_check is None else now + outage_check
        others = (*forming, self._accept_again or None, self._next_peer_status, self._observers.expire(now), outages)
        deadlines += [deadline for deadline in others if deadline is not None]
        return max(0.0, min(deadlines) - now) if deadlines else None

    @property
    def _missing(self) -> list[int]:
        return [rank for rank in range(self._environment.world_size) if rank not in self._members]

    def _fail_exited(self) -> None:
        """Fails the group where a missing rank's process has ended: that rank cannot join any more."""
        for rank in self._missing:
            if status := exit_status_of(self._environment, rank):
                text = f"rendezvous: rank {rank} has ended with exit status {status} before it called mlxdist.init()"
                self._fail(rank, "RendezvousError", f"{text}; all ranks of the job must call it")
                return

    def _fail_missing(self) -> None:
        size = self._environment.world_size
        missing = self._missing
        have = "have" if len(missing) > 1 else "has"
        text = (
            f"rendezvous: {name_ranks(missing)} of {size} {have} not connected to "
            f"{format_address(*self._environment.address)} after {self._environment.rendezvous_timeout:g} s; "
            "see what they have printed, and where they are: they may not have called mlxdist.init()"
        )
        if self._refusals:
            text += f" (meanwhile {'; '.join(self._refusals)})"
        self._fail(missing[0], "RendezvousError", text)

    def _end_gather(self, now: float) -> None:
        late = [self._members[rank] for rank in range(self._environment.world_size) if rank not in self._gathered]
        if any(member.is_cut for member in late):  # what they have sent may be on its way
            self._gather_deadline = now + self._environment.rendezvous_timeout
            return
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


def exit_status_of(environment: Environment, rank: int) -> str | None:
    """The exit status of a rank that the launcher has seen exiting, or None; `LocalJob.note_end` writes the file."""
    if environment.error_file is None:
        return None
    try:
        with open(f"{environment.error_file}.ended-{rank}", encoding="ascii") as file:
            return file.read()
    except OSError:  # it runs
        return None


def why_lost(environment: Environment, rank: int, signs: SignsOfLife) -> str | None:
    """Says why a rank that is cut off will not come back, in words that follow its name; None: it may."""
    if status := exit_status_of(environment, rank):
        return f"has ended with exit status {status}"
    return str(signs) if signs.is_lost else None


def keep_alive(sock: socket.socket) -> None:
    """Makes ``sock`` give up its peer after 30 s without a response of its kernel: a host without power closes nothing.

    A stopped process is no such case: its kernel responds.
    """
    # While data is in flight, as a heartbeat always is, the kernel retransmits it for 15 minutes, without probes.
    seconds = int(LOST_SECONDS)
    if sys.platform == "darwin":
        idle, in_flight = socket.TCP_KEEPALIVE, (0x80, seconds)  # TCP_RXT_CONNDROPTIME of netinet/tcp.h
    else:
        idle, in_flight = socket.TCP_KEEPIDLE, (socket.TCP_USER_TIMEOUT, 1000 * seconds)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in ((socket.TCP_NODELAY, 1), (idle, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3), in_flight):
        sock.setsockopt(socket.IPPROTO_TCP, *option)
