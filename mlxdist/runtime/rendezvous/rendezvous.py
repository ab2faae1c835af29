"""A rank's end of the side channel: all_gather of small data, messages, failures, leaving in order."""

import atexit
import collections
import contextlib
import operator
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable

from mlxdist.base import errors, logger
from mlxdist.base.environment import Environment
from mlxdist.runtime.internal_thread import InternalThread

from ..diagnostics.step import current_step
from . import protocol
from .connect import connect, listen, reconnect
from .event_loop import Connection, EventLoop
from .heartbeat import HEARTBEAT_SECONDS, Heartbeat, guarded
from .outage import SignsOfLife, how_lost, is_outage, outage_notice
from .protocol import Framing, Kind, ProtocolError, pack_json, unpack_json
from .server import MAX_QUEUED, RendezvousServer, why_lost

__all__ = ["Rendezvous"]

# Rank 0 gives up on missing ranks and reports it to the others; only without that report do they give up themselves.
MARGIN = 5.0
# For rank 0 to acknowledge GOODBYE or REPORT_FAILURE.
ACK_SECONDS = 2.0
# At the end of rank 0, for others to receive what it has sent. One that is stopped does not.
LAST_SECONDS = 1.0
# Bytes of messages that wait for an ``on_message``.
MAX_INBOX = 16 * 1024 * 1024

OnEvent = Callable[[int, str], None]
OnMessage = Callable[[int, str, bytes], None]

_instances: "weakref.WeakSet[Rendezvous]" = weakref.WeakSet()

# Files in which this process has written which rank failed first in a world.
_noted: set[str] = set()


class Rendezvous:
    """This rank's end. Its methods may be called from any thread, but only ``send`` from the callbacks of ``watch``."""

    def __init__(self, environment: Environment) -> None:
        """Returns when all ranks have come.

        Raises:
            RendezvousError: some are missing after ``environment.rendezvous_timeout`` seconds, or this one is refused.
            PeerLost: one died before all had come.
        """
        self._environment = environment
        self._changed = threading.Condition()
        self._calls = threading.Lock()  # one all_gather at a time
        self._formed = False
        self._failure: tuple[int, errors.Error] | None = None
        self._departed: dict[int, str] = {}
        self._step = 0
        self._gathered: dict[int, bytes] = {}
        self._sent = self._acked = 0  # GOODBYE and REPORT_FAILURE
        self._closed = False
        self._forked = False
        self._unsent = 0  # bytes of messages that are not with the connection yet
        self._inbox: collections.deque[tuple[int, str, bytes]] = collections.deque()  # not delivered yet
        self._inbox_bytes = 0
        self._on_failure: OnEvent | None = None
        self._on_leave: OnEvent | None = None
        self._on_message: OnMessage | None = None
        self._status: Callable[[], bytes] = bytes
        self._delivered_failure = False
        self._delivered_departed: set[int] = set()
        self._rank_0 = "rank 0"
        self._host_0 = environment.host_name
        self._server: RendezvousServer | None = None
        # Of the connection to rank 0, which an outage may cut.
        self._is_cut = False
        self._epoch = 0
        self._signs = SignsOfLife()
        self._count_signs: Callable[[int], int] = lambda rank: 0
        self._stopped = threading.Event()
        self._open()

    def all_gather(self, data: bytes, what: str) -> list[bytes]:
        """Every rank's ``data``, in rank order. ``what`` names the step in messages; all ranks must give the same.

        Raises:
            InvalidArgument: ``data`` has more than 1047552 bytes.
            Mismatch: another rank is at another step.
            Timeout: a rank has not arrived ``rendezvous_timeout`` seconds after the first one did.
            PeerLost, Aborted: a rank died, left or reported its failure.
        """
        if len(data) > protocol.MAX_GATHER_BYTES:
            raise errors.InvalidArgument(
                f"rendezvous: {what!r} has {len(data)} bytes, at most {protocol.MAX_GATHER_BYTES} are possible"
            )
        name, size = what.encode()[:256], self._environment.world_size
        with self._calls:
            self._check_usable()
            with self._changed:
                self._raise_end()
                self._gathered = {}
            self._send(Kind.GATHER, protocol.GATHER.pack(self._step, len(name)) + name + data)
            with self._changed:
                seconds = self._environment.rendezvous_timeout + MARGIN
                self._wait(lambda: len(self._gathered) == size, seconds, repr(what))
                self._step += 1
                return [self._gathered[rank] for rank in range(size)]

    def barrier(self, what: str) -> None:
        """Returns once every rank has entered. Raises what ``all_gather`` raises."""
        self.all_gather(b"", what)

    def send(self, rank: int, tag: str, data: bytes) -> None:
        """Calls ``on_message(this rank, tag, data)`` on ``rank``. Returns at once; rank 0 forwards the message.

        Messages from one rank to another arrive in order, and before ``on_leave`` of their sender. Messages that are in
        flight when the group fails, or to a rank that leaves, are lost.

        Raises:
            InvalidArgument: ``rank`` is no other rank of the group, ``tag`` has more than 256 bytes, or ``data`` has
                more than 65536.
            PeerLost, Aborted, ...: ``rank`` has left, or the group has failed.
            RendezvousError: 16 MiB of messages wait already, since rank 0 reads none.
        """
        rank = operator.index(rank)
        if not 0 <= rank < self._environment.world_size or rank == self._environment.rank:
            raise errors.InvalidArgument(
                f"rendezvous: rank {self._environment.rank} cannot send {tag[:64]!r} to rank {rank}; it can send to "
                f"the others of the {self._environment.world_size} ranks"
            )
        payload = protocol.pack_message(rank, tag, data)
        self._check_open()
        with self._changed:
            self._raise_failure()
            if rank in self._departed:
                raise errors.PeerLost(self._departed[rank])
            waiting = self._unsent + self._connection.unacknowledged
            if waiting + len(payload) > MAX_QUEUED:
                raise errors.RendezvousError(
                    f"rendezvous: {self._rank_0} has not read {waiting} bytes of messages from rank "
                    f"{self._environment.rank}; it is stopped, overloaded, or cut off"
                )
            self._unsent += len(payload)
        self._loop.call(lambda: self._send_message(payload))

    def watch(
        self,
        on_failure: OnEvent,
        on_leave: OnEvent | None = None,
        on_message: OnMessage | None = None,
        on_peer_status: OnEvent | None = None,
        position: Callable[[], str] | None = None,
        status: Callable[[], bytes] = bytes,
        signs_of_life: Callable[[int], int] = lambda rank: 0,
    ) -> None:
        """Starts to call, in the rendezvous' own thread:

        ``on_failure(rank, text)``, at most once, when the first rank of the group dies, breaks its connection or
        reports an error. ``on_leave(rank, text)`` when a rank leaves in order (``close``): no failure by itself, but
        operations that wait for that rank can stop waiting. ``on_message(rank, tag, data)`` for every ``send`` of
        ``rank`` to this one, until ``close``.

        With ``position``, until the group fails: once a second ``position()``, which says in at most 256 bytes what
        this rank is doing, and ``on_peer_status(rank, text)`` with the last position of each of the others.

        ``signs_of_life(rank)``, once a second, while a rank is silent here: how many the data path has brought. Where
        the network cuts the connection of a rank, it is lost only if that number does not change either.

        ``status()`` when an observer requests it: a flight record of this rank, as JSON.

        ``on_failure``, ``on_leave`` and ``on_message`` are also called for what has happened before. Messages wait for
        an ``on_message``, up to 16 MiB: more of them fail the group.
        """
        self._check_usable()

        def start() -> None:
            self._on_failure, self._on_leave, self._on_message = on_failure, on_leave, on_message
            self._status = status
            self._count_signs = signs_of_life
            if self._server is not None:
                self._server.signs_of_life = signs_of_life
            self._deliver()
            if position is not None:
                self._heartbeat.start(position, on_peer_status)

        self._loop.call(start)

    @property
    def failure(self) -> errors.Error | None:
        """The first failure of the group, as far as this rank knows."""
        return self._failure[1] if self._failure is not None else None

    @property
    def is_leaving(self) -> bool:
        """Whether a rank, this one or another, has left in order, and none has failed."""
        return self._failure is None and (self._closed or bool(self._departed))

    def report_failure(self, error: errors.Error, consequence: bool = False, seconds: float = ACK_SECONDS) -> bool:
        """Reports that this rank failed: all others get ``on_failure(this rank, text)``, and the error as ``failure``.

        Returns whether rank 0 has forwarded it, for which it waits at most ``seconds``, and not at all in a callback
        of ``watch``. True if there was nothing to report: after the first failure of the group, or after ``close``.
        ``consequence``: it failed only because another rank did or had left, so the launcher must not take it for the
        first.
        """
        if self._closed:
            return True
        self._check_open()
        with self._changed:
            if self._failure is not None:
                return True
            self._delivered_failure = True  # the caller has it
            self._fail(self._environment.rank, error, note=not consequence)
            self._changed.notify_all()
        self._send_for_ack(
            Kind.REPORT_FAILURE, pack_json(error=type(error).__name__, text=str(error)[: protocol.MAX_TEXT])
        )
        return not self._loop.is_own_thread() and self.is_acked(seconds)

    def is_acked(self, seconds: float) -> bool:
        """Whether rank 0 has forwarded all that this rank has reported, or is gone; waits at most ``seconds``."""
        with self._changed:
            wanted = self._sent
            return self._changed.wait_for(lambda: self._acked >= wanted or self._has_lost_rank_0(), seconds)

    def close(self, linger: float = 10.0) -> None:
        """Sends GOODBYE: that this rank's connection ends is no failure then.

        Rank 0 serves the others until they have left too, or died, but at most ``linger`` seconds; 1 second once the
        group has failed; and one second more where a rank does not receive what it was sent.
        """
        if self._forked or self._closed:
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._refuse_own_thread()
        self._heartbeat.stop()
        self._send_for_ack(Kind.GOODBYE, b"")
        self.is_acked(ACK_SECONDS)
        if self._server is not None:
            self._server.deserted.wait(linger if self._failure is None else min(linger, 1.0))
        self._stop()

    # Opening.

    def _open(self) -> None:
        environment = self._environment
        if environment.error_file in _noted:  # in the world before; before any rank can note one in this
            _noted.remove(environment.error_file)
            with contextlib.suppress(OSError):
                os.unlink(environment.error_file)
        if environment.rank == 0:
            listener, framing, seconds = listen(environment), None, environment.rendezvous_timeout
            self._loop = EventLoop(self._crash)
            sock, server_side = socket.socketpair()
            self._server = RendezvousServer(self._loop, listener, environment, server_side)
        else:
            sock, framing, welcome = connect(environment)
            self._loop = EventLoop(self._crash)
            self._host_0, seconds = welcome["host"], welcome["seconds"]
            self._rank_0 = f"rank 0 ({self._host_0}, pid {welcome['pid']})"
        self._attach(Connection(self._loop, sock, framing))
        self._heartbeat = Heartbeat(self._loop, self._connection, environment.rank, environment.world_size)
        self._loop.add_timer(self._check_outage)
        self._loop.call(self._connection.process)
        self._loop.start()
        _instances.add(self)
        # Not close(): a program that ends without finalize() has not left in order, and the others should know.
        atexit.register(self._stop)
        try:
            with self._changed:
                self._wait(lambda: self._formed, seconds + MARGIN, "the start")
        except BaseException as error:
            if not isinstance(error, errors.Error):  # Ctrl-C, which the others cannot know of
                self.report_failure(errors.interruption(error, environment.rank, environment.host_name))
            self._closed = True
            self._stop()
            raise

    def _stop(self) -> None:
        atexit.unregister(self._stop)
        self._stopped.set()
        if self._forked:
            return
        if self._server is not None:
            self._server.wait_acknowledged(LAST_SECONDS)
        self._loop.stop()
        if self._server is not None and self._server.published is not None:
            self._server.published.unlink(missing_ok=True)

    # Called by users' threads.

    def _check_usable(self) -> None:
        self._check_open()
        self._refuse_own_thread()

    def _check_open(self) -> None:
        if self._forked:
            raise errors.Error(
                f"rendezvous: process {os.getpid()} is a forked child of rank {self._environment.rank} and no rank "
                "itself; only the process that called mlxdist.init() can use the group"
            )
        if self._closed:
            raise errors.Error(self._has_left())

    def _has_left(self) -> str:
        return f"rendezvous: rank {self._environment.rank} has left the group already (finalize)"

    def _refuse_own_thread(self) -> None:
        if self._loop.is_own_thread():
            raise errors.Error(
                "rendezvous: a callback of watch() must not call the rendezvous; call it in another thread"
            )

    def _send(self, kind: Kind, payload: bytes) -> None:
        self._loop.call(lambda: self._connection.send(kind, payload))

    def _send_for_ack(self, kind: Kind, payload: bytes) -> None:
        with self._changed:
            self._sent += 1
        self._send(kind, payload)

    def _wait(self, done: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            self._raise_end()
            if self._closed:
                raise errors.Error(self._has_left())
            if self._is_cut:  # the response may come once it is connected again
                deadline = time.monotonic() + seconds
            if not self._changed.wait(deadline - time.monotonic()) and time.monotonic() >= deadline and not done():
                raise errors.Timeout(
                    f"rendezvous: {self._rank_0} has not responded to rank {self._environment.rank} at {what} for "
                    f"{seconds:g} s; it is stopped, or the network to it is away"
                )

    def _raise_failure(self) -> None:
        if self._failure is not None:
            error = self._failure[1]
            raise type(error)(*error.args)  # a new one: several threads may raise it

    def _raise_end(self) -> None:
        """Raises an error if the group has failed or a rank has left: for operations that need all ranks."""
        self._raise_failure()
        if self._departed:
            raise errors.PeerLost(next(iter(self._departed.values())))

    # Called in the loop's thread, but for _fail, which report_failure() calls too.

    def _attach(self, connection: Connection) -> None:
        self._connection = connection
        connection.on_frame = self._frame
        connection.on_lost = self._lose_rank_0

    def _frame(self, kind: int, payload: bytes) -> None:
        self._signs.heard()
        if kind == Kind.PEER_STATUS:
            self._heartbeat.receive(payload)
            return
        if kind == Kind.STATUS_REQUEST:
            status = guarded(self._status) or b""
            self._connection.send(Kind.STATUS, status if len(status) <= protocol.MAX_STATUS_BYTES else b"")
            return
        with self._changed:
            if kind == Kind.FORMED:
                self._formed = True
            elif kind == Kind.GATHERED and len(payload) >= protocol.GATHERED.size:
                _, rank = protocol.GATHERED.unpack_from(payload)
                self._check_rank(rank)
                self._gathered[rank] = payload[protocol.GATHERED.size :]
            elif kind == Kind.ACK:
                self._acked += 1
            elif kind == Kind.FAILURE:
                fields = unpack_json(payload, rank=int, error=str, text=str)
                self._check_rank(fields["rank"])
                self._fail(fields["rank"], errors.by_name(fields["error"])(fields["text"]))
            elif kind == Kind.DEPARTED:
                fields = unpack_json(payload, rank=int, text=str)
                self._check_rank(fields["rank"])
                self._departed[fields["rank"]] = fields["text"]
            elif kind == Kind.MESSAGE:
                sender, tag, data = protocol.unpack_message(payload)
                self._check_rank(sender)
                self._inbox.append((sender, tag, data))
                self._inbox_bytes += protocol.MAX_TAG + len(data)
                self._check_inbox()
            else:
                raise ProtocolError(f"a frame of kind {kind}")
            self._changed.notify_all()
        self._deliver()

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self._environment.world_size:
            raise ProtocolError(f"a frame about rank {rank} of {self._environment.world_size}")

    def _lose_rank_0(self, error: OSError | ProtocolError | None) -> None:
        if self._needs_rank_0() and is_outage(error, self._heartbeat.is_running and self._signs.is_silent):
            logger.warn("rendezvous", outage_notice(self._rank_0, self._signs))
            with self._changed:
                self._is_cut = True
                self._changed.notify_all()
            InternalThread(target=self._reconnect, name="mlxdist reconnect", daemon=True).start()
        else:
            self._give_up_rank_0(f"{self._rank_0} {how_lost(error)}")

    def _needs_rank_0(self) -> bool:
        return self._failure is None and 0 not in self._departed and not self._closed

    def _has_lost_rank_0(self) -> bool:
        return not self._connection.is_open and not self._is_cut

    def _give_up_rank_0(self, text: str) -> None:
        with self._changed:
            self._is_cut = False
            if self._needs_rank_0():
                when = "" if self._formed else " before the group was complete"
                self._fail(0, errors.PeerLost(errors.located(f"{text}{when}", 0, self._host_0)))
            self._changed.notify_all()
        self._stopped.set()
        self._deliver()

    def _check_outage(self) -> float | None:
        """Gives rank 0 up where it is cut off and lost. Returns the seconds until it is to be called again."""
        if self._server is not None or not self._needs_rank_0():
            return None
        if self._is_cut or (self._heartbeat.is_running and self._signs.is_silent):
            self._signs.probe(lambda: self._count_signs(0))
        if self._is_cut and (why := why_lost(self._environment, 0, self._signs)):
            self._give_up_rank_0(f"{self._rank_0} {why}")
        return HEARTBEAT_SECONDS if self._is_cut else None

    def _reconnect(self) -> None:
        """Connects again, in a thread of its own."""
        try:
            found = reconnect(self._environment, self._epoch, self._connection.received, self._stopped)
        except errors.RendezvousError as error:
            text = str(error)
            self._loop.call(lambda: self._give_up_rank_0(text))
            return
        if found is not None:
            self._loop.call(lambda: self._resume(*found))

    def _resume(self, sock: socket.socket, framing: Framing, welcome: dict) -> None:
        previous = self._connection
        if not self._is_cut:
            sock.close()
            return
        try:
            previous.acknowledge(welcome["received"])
        except ProtocolError as error:
            sock.close()
            self._give_up_rank_0(f"{self._rank_0} {how_lost(error)}")
            return
        logger.warn("rendezvous", f"{self._rank_0} is connected again, after {self._signs.control_silence:.0f} s")
        self._signs.heard()
        self._epoch = welcome["epoch"]
        connection = Connection(self._loop, sock, framing)
        self._attach(connection)
        self._heartbeat.connection = connection
        connection.replace(previous)
        with self._changed:
            self._is_cut = False
            self._changed.notify_all()
        connection.process()

    def _crash(self, error: BaseException) -> None:
        with self._changed:
            rank = self._environment.rank
            self._fail(rank, errors.Error(f"rendezvous: the thread of rank {rank} has failed: {error!r}"))
            self._changed.notify_all()
        self._deliver()

    def _fail(self, rank: int, error: errors.Error, note: bool = True) -> None:
        if self._failure is None:
            self._failure = (rank, error)
            logger.info("rendezvous", f"the group has failed, rank {rank} first: {type(error).__name__}: {error}")
            self._heartbeat.stop()
            if note:
                self._note_first_failure(rank)

    def _note_first_failure(self, rank: int) -> None:
        """Writes down the rank, for the launcher: processes do not end in the order of cause and consequence. Behind it
        is the step that this rank is at, where the program reports one."""
        if self._environment.error_file is None:
            return
        try:
            with open(self._environment.error_file, "x", encoding="ascii") as file:
                step, _ = current_step()
                file.write(str(rank) if step is None else f"{rank} {step}")
        except OSError:
            return  # another rank was first, or the launcher is gone
        _noted.add(self._environment.error_file)

    def _send_message(self, payload: bytes) -> None:
        with self._changed:
            self._unsent -= len(payload)
        self._connection.send(Kind.MESSAGE, payload)

    def _check_inbox(self) -> None:
        if self._inbox_bytes > MAX_INBOX and self._failure is None:
            text = (
                f"rendezvous: rank {self._environment.rank} was sent more than {MAX_INBOX} bytes of messages, and "
                "reads none; pass an on_message to watch()"
            )
            self._fail(self._environment.rank, errors.RendezvousError(text))
            self._send_for_ack(Kind.REPORT_FAILURE, pack_json(error="RendezvousError", text=text))

    def _deliver(self) -> None:
        """Calls the callbacks for what they have not got yet. Without the lock: they may take others."""
        while self._on_message is not None and not self._closed and self._inbox:
            message = self._inbox.popleft()
            self._inbox_bytes -= protocol.MAX_TAG + len(message[2])
            guarded(self._on_message, *message)
        with self._changed:
            failure, departed = self._failure, dict(self._departed)
        if self._on_failure is not None and failure is not None and not self._delivered_failure:
            self._delivered_failure = True
            guarded(self._on_failure, failure[0], str(failure[1]))
        if self._on_leave is not None:
            for rank in departed.keys() - self._delivered_departed:
                self._delivered_departed.add(rank)
                guarded(self._on_leave, rank, departed[rank])

    def close_in_child(self) -> None:
        """Closes this in a forked child, without the lock: a thread that the child does not have may hold it."""
        self._forked = True
        if not self._closed:
            self._loop.close_in_child()


def _close_in_child() -> None:
    for instance in list(_instances):
        instance.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)
