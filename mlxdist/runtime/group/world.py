"""The world: the engine, the rendezvous and their threads, which all groups of this process share, and their end."""

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from mlxdist.base import errors, logger
from mlxdist.base.environment import Environment

from ..diagnostics.deadlock import TAG, DeadlockDetector
from ..diagnostics.flight_recorder import Recorder
from ..native import bridge, check, ffi, lib
from ..rendezvous import Rendezvous
from ..signals import Signals
from .handle import Pending
from .native_group import NativeGroup
from .registration import Registration

__all__ = ["World"]

# Seconds for rank 0 to forward the failure of this rank to all ranks.
_REPORT_TIMEOUT = 2.0

# Tag of the messages that make a connection on first use.
_CONNECT = "connect"


class Member(Protocol):
    """A group, as the world that it ends with sees it."""

    def shut(self) -> None: ...
    def is_idle(self, seconds: float) -> bool: ...
    def stats(self) -> dict[str, int]: ...


class World:
    """All ranks that the launcher started: the engine, the rendezvous, and what is still going on."""

    def __init__(self, environment: Environment, host: str, make_next: Callable[[], Any]) -> None:
        """``make_next()`` makes the group of the world that comes after this one, in an elastic job."""
        self.make_next = make_next
        self.rank = environment.rank
        self.size = environment.world_size
        self.host = host
        self.native_group = NativeGroup(environment, host)
        self.connection: Any = None  # the bridge's view of it
        self.recorder: Recorder | None = None
        # Each as the bridge's connection: drain(seconds) waits for what has been started and is False if that does not
        # end; close() waits for running operations and rejects later ones; error_reported: an error has been raised;
        # is_busy: something runs; defer_errors(): errors are raised only where something is evaluated from now on.
        self.mpi_shims: list[Any] = []
        self.pending = Pending()
        self.registrations: weakref.WeakSet[Registration] = weakref.WeakSet()
        self.closed = False
        self.ended = False  # finalize() has returned
        self.forked = False
        self._groups: weakref.WeakSet[Member] = weakref.WeakSet()
        self._lock = threading.Lock()  # guards closed and _groups
        self._left = False  # this rank calls nothing more but finalize
        # What only a world of several ranks has. The stack ends these in the reverse order of their start.
        self._rendezvous: Rendezvous | None = None
        self._signals: Signals | None = None
        self._deadlock_detector: DeadlockDetector | None = None
        self._services = contextlib.ExitStack()
        self._context = ffi.new_handle(self)  # for the engine, which hands it back
        _worlds.add(self)
        if self.size > 1:
            self._connect(environment)
        self.connection = bridge.connect(0 if self.native is None else int(ffi.cast("uintptr_t", self.native)))

    @property
    def native(self) -> Any:
        """``mlxdist_group *``; None in a world of one, and after its end."""
        return self.native_group.pointer

    def add(self, group: Member) -> None:
        """Makes ``group`` end with the world, at the latest."""
        with self._lock:
            if not self.closed:
                self._groups.add(group)
                return
        group.shut()

    def counters(self) -> dict[str, int]:
        """:meth:`mlxdist.Group.stats`, summed over the groups that there are now. Empty in a world of one."""
        with self._lock:
            stats = [group.stats() for group in self._groups if self.size > 1]
        return {name: sum(each[name] for each in stats) for name in (stats[0] if stats else ())}

    def finalize(self) -> None:
        """See :meth:`mlxdist.Group.finalize`."""
        if self.forked:
            return
        with self._lock:
            if self.closed:
                return
            self.closed = True
            groups = list(self._groups)
        for group in groups:
            group.shut()
        try:
            self._take_down(groups)
        finally:
            self.ended = True

    def _take_down(self, groups: list[Member]) -> None:
        if self._signals is None or self._rendezvous is None:
            self.connection.close()
            return
        reported = self._signals.terminates(_REPORT_TIMEOUT)  # by SystemExit
        reported |= self.pending.error_reported or self.connection.error_reported
        reported |= any(shim.error_reported for shim in self.mpi_shims)
        failed = lib.mlxdist_group_error(self.native) != lib.MLXDIST_OK
        idle = self._is_idle(groups, 10 if failed else self.native_group.timeout)  # aborted operations end at once
        if not idle and not failed:
            lib.mlxdist_group_abort(self.native, lib.MLXDIST_ABORTED, b"finalize() found operations that do not end")
            idle = self._is_idle(groups, 10)
        try:
            if idle:
                for registration in list(self.registrations):
                    registration.release()
                for shim in self.mpi_shims:
                    shim.close()
                self.connection.close()
                self._left = True
            if not reported:  # else the error has been raised where it happened
                check(lib.mlxdist_group_error(self.native))
                check(lib.mlxdist_group_finalize(self.native))
                self._rendezvous.barrier("finalize")  # no rank leaves while a last message may be lost
        finally:
            self._services.close()
            if idle:  # else its memory is in use: rather leave it to the end of the process
                self.native_group.destroy()

    def abandon(self) -> None:
        """Ends this rank's part of the world: the others have failed, or leave it likewise. Waits for none of them."""
        if self.native_group.failure() is None and not self.closed:
            self.fail(self._own(errors.Aborted, "has left the group for a smaller one (shrink)"))
        self.pending.error_reported = True
        self.finalize()

    def abort(self, reason: str) -> None:
        """Ends every operation of every group, on all ranks, and returns when they have the report."""
        self.fail(self._own(errors.Aborted, f"aborted the group: {reason}"))
        if self._rendezvous is not None:
            self._rendezvous.is_acked(_REPORT_TIMEOUT)

    def fail(self, error: errors.Error, consequence: bool = False) -> None:
        """Ends every operation of every group, on all ranks, with ``error``, which the program knows of.

        ``consequence``: it is there only because another rank has failed.
        """
        if self._rendezvous is not None:
            # First the others, who must not find this rank's operations broken before they know why; but if rank 0 is
            # stopped, this rank is not to wait for it.
            self._rendezvous.report_failure(error, consequence, seconds=0.05)
        self.pending.error_reported = True
        self.native_group.abort(error)

    def interrupt(self, error: errors.Error, raises: bool) -> None:
        """Ends every operation on a signal. ``raises``: its handler will raise an exception in the main thread."""
        if raises and self.connection is not None:
            for shim in (self.connection, *self.mpi_shims):
                shim.defer_errors()
        self.fail(error)

    def end_with(self, uncaught: BaseException) -> None:
        """Ends every operation: an exception ends this rank's program, or an exit with a status that is not 0."""
        if isinstance(uncaught, KeyboardInterrupt):
            self.fail(errors.interruption(uncaught, self.rank, self.host))
            return
        if isinstance(uncaught, SystemExit):
            # Where the group has failed before, the program exits for that reason.
            error = self.native_group.failure() or errors.interruption(uncaught, self.rank, self.host)
            self.fail(error, consequence=error.rank != self.rank)
            return
        lost = isinstance(uncaught, errors.PeerLost | errors.Aborted)
        elsewhere = isinstance(uncaught, errors.Error) and uncaught.rank not in (None, self.rank)
        error = self._own(errors.Aborted, f"aborted the group: {type(uncaught).__name__}: {uncaught}")
        self.fail(error, consequence=lost or elsewhere)

    def is_busy(self) -> bool:
        """Whether the program may be waiting for the engine: in a call, an evaluation, for a handle, at the end."""
        with self._lock:
            closed, groups = self.closed, list(self._groups)
        if self.connection is None:
            return False
        return (
            closed
            or self.pending.is_awaited()
            or not all(group.is_idle(0) for group in groups)
            or any(shim.is_busy for shim in (self.connection, *self.mpi_shims))
        )

    def close_in_child(self) -> None:
        """Closes the world in a forked child, without the lock: another thread of the parent may have held it."""
        self.forked = True
        if self.recorder is not None:
            self.recorder.renew_locks()
        if self._signals is not None:
            self._signals.close_in_child()
        for group in self._groups:
            group.shut()

    def send_to(self, rank: int, data: bytes) -> None:
        """Sends a message that makes a connection. The engine calls it, in any thread and perhaps with its lock."""
        rendezvous = self._connected
        try:
            rendezvous.send(rank, _CONNECT, data)
        except errors.Error as error:
            if self.closed and rendezvous.is_leaving:
                return  # all ranks have entered finalize: what a queue pair still carries has no receiver
            failure = self._own(type(error), f"could not connect to rank {rank}: {error}")
            threading.Thread(target=self.fail, args=(failure,)).start()

    # How the ranks come together.

    def _connect(self, environment: Environment) -> None:
        _open_debug(environment)
        self._signals = Signals(self.rank, self.host, self.interrupt, self.is_busy)
        self._services.callback(self._signals.stop)
        try:
            self._rendezvous = Rendezvous(environment)
            self._services.callback(self._rendezvous.close)
            self.native_group.connect(self._rendezvous, self._context)
            self.recorder = Recorder(environment, self.host, self.native, self._engine_failed, self._traffic)
            self._services.callback(
                self.recorder.close
            )  # before the signals: SIGUSR2 is handled as long as it may come
            self._deadlock_detector = DeadlockDetector(
                self.rank,
                self.host,
                self.native,
                environment.deadlock_grace,
                self._rendezvous.send,
                has_left=lambda: self._left,
                has_mpi_shim=lambda: bool(self.mpi_shims),
            )
            self._services.callback(self._deadlock_detector.close)
            self._rendezvous.watch(
                on_failure=self._peer_failed,
                on_leave=self._peer_left,
                on_message=self._message,
                on_peer_status=self._peer_status,
                position=self.recorder.position,
                status=self.recorder.status,
                signs_of_life=self._signs_of_life,
            )
        except BaseException as error:
            if self._rendezvous is not None:
                why = self._why(error)
                if why.rank in (None, self.rank):  # else all ranks have it already
                    self._rendezvous.report_failure(why)
            self._services.close()
            self.native_group.destroy()
            raise

    @property
    def _connected(self) -> Rendezvous:
        """The rendezvous, for what the services call: they run only with it."""
        assert self._rendezvous is not None
        return self._rendezvous

    def _traffic(self) -> tuple[int, int]:
        """How many bytes of the program's arrays this rank has sent, and received: in the world and its groups."""
        with self._lock:
            groups = list(self._groups)
        sent = received = 0
        for group in groups:
            with contextlib.suppress(errors.Error):  # it has just been closed
                counters = group.stats()
                sent += counters["payload_bytes_sent"]
                received += counters["payload_bytes_received"]
        return sent, received

    def _why(self, error: BaseException) -> errors.Error:
        """The report to the other ranks of an error that keeps this rank from connecting."""
        if not isinstance(error, errors.Error):
            return errors.interruption(error, self.rank, self.host)
        return error if error.rank is not None else self._own(type(error), f"could not connect: {error}")

    def _own(self, kind: type[errors.Error], what: str) -> errors.Error:
        """An error of this rank, which says so."""
        return kind(errors.located(f"rank {self.rank} on {self.host} {what}", self.rank, self.host))

    def _engine_failed(self, error: errors.Error) -> None:
        # The engine reports it to the other ranks, too, but after a failure it does not retransmit what is lost.
        if error.rank == self.rank:
            self._connected.report_failure(error, seconds=0)

    # Called by the rendezvous's own thread, which ends before finalize() destroys the native group.

    def _peer_failed(self, rank: int, text: str) -> None:
        # So come a rank's death and its abort(), and what has failed in its engine, should that news be lost there.
        if (failure := self._connected.failure) is not None:
            self.native_group.abort(failure)

    def _peer_left(self, rank: int, text: str) -> None:
        self._peer_status(rank, "gone: it has left the group (finalize)")

    def _peer_status(self, rank: int, text: str) -> None:
        lib.mlxdist_group_set_peer_status(self.native, rank, text.encode())

    def _signs_of_life(self, rank: int) -> int:
        return lib.mlxdist_group_signs_of_life(self.native, rank)

    def _message(self, rank: int, tag: str, data: bytes) -> None:
        if tag == TAG and self._deadlock_detector is not None:
            self._deadlock_detector.take(rank, data)
        if tag == _CONNECT:
            try:
                check(lib.mlxdist_group_side_channel_receive(self.native, rank, data, len(data)))
            except errors.Error as error:
                self._connected.report_failure(error)
                self.native_group.abort(error)

    def _is_idle(self, groups: list[Member], seconds: float) -> bool:
        """Waits until no operation of MLX, no call and no handle is going on; False after ``seconds``."""
        deadline = time.monotonic() + seconds
        return (
            all(shim.drain(seconds) for shim in (self.connection, *self.mpi_shims))
            and all(group.is_idle(max(deadline - time.monotonic(), 0)) for group in groups)
            and self.pending.wait(max(deadline - time.monotonic(), 0))
        )


def _open_debug(environment: Environment) -> None:
    """Opens the output for debugging: the writers of Python and of the engine write to the same place."""
    try:
        file = logger.open_output(environment)
    except OSError as error:
        raise errors.EnvironmentVariableError(
            f"MLXDIST_DEBUG_FILE={environment.debug_file}: {logger.file_of(environment)} cannot be written: "
            f"{error.strerror}"
        ) from None
    spec = ffi.new("char[]", os.fsencode(environment.debug)) if environment.debug else ffi.NULL
    check(lib.mlxdist_debug_open(spec, file, environment.rank))


@ffi.def_extern()
def send_through_side_channel(context: Any, to: int, data: Any, length: int) -> None:
    ffi.from_handle(context).send_to(to, bytes(ffi.buffer(data, length)))


_worlds: weakref.WeakSet[World] = weakref.WeakSet()


def _close_in_child() -> None:
    for world in _worlds:
        world.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)
