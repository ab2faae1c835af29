"""What all groups of this process share: how the ranks come together, and how they end."""

import contextlib
import functools
import hmac
import os
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlxdist.base import debug, errors
from mlxdist.base.environment import ALGORITHMS, Environment
from mlxdist.runtime.devices import device_selection

from . import tuning
from .deadlock import TAG, Standstill
from .devices.device_selection import DeviceSelection
from .devices.links import Choice
from .flight_recorder import Recorder
from .handle import Pending
from .native import bridge, check, ffi, lib
from .registration import Registration
from .rendezvous import Rendezvous
from .rendezvous.step import StepFailed, take_step
from .signals import Signals

if TYPE_CHECKING:
    from .group import Group

__all__ = ["World"]

# finalize() waits this long for peers where the user has set no timeout at all: a rank that works on for three
# years is taken for lost.
_FOR_EVER = 1e8

# Seconds for rank 0 to have passed on to all that this rank has failed.
_TO_BE_TOLD = 2.0

# Tag of the messages that make a connection on first use.
_CONNECT = "connect"


class World:
    """All ranks that the launcher started: the engine, the rendezvous, and what is still going on."""

    def __init__(self, environment: Environment, host: str) -> None:
        self.rank = environment.rank
        self.size = environment.world_size
        self.host = host
        self.run = environment.run
        self.native: Any = None  # mlxdist_group *; None in a world of one
        self.connection: Any = None  # the bridge's view of it
        self.provider_reason = "a group of one"
        self.recorder: Recorder | None = None
        # Other ways into the engine: drain(seconds) waits for what has been started and is False if that does not end;
        # close() waits for what is running and refuses all that comes later; told_error: the user knows of a failure;
        # is_busy: something runs; keep_errors(): raises none from now on but where something is evaluated.
        self.doors: list[Any] = []
        self.pending = Pending()
        self.registrations: weakref.WeakSet[Registration] = weakref.WeakSet()
        self.closed = False
        self.ended = False  # finalize() has returned
        self.forked = False
        self._groups: weakref.WeakSet[Group] = weakref.WeakSet()
        self._lock = threading.Lock()  # guards closed, _groups and the end of native
        self._timeout = _FOR_EVER
        self._left = False  # this rank calls nothing more but finalize
        self._rendezvous: Rendezvous | None = None
        self._signals: Signals | None = None
        self._standstill: Standstill | None = None
        self._context = ffi.new_handle(self)  # for the engine, which hands it back
        _worlds.add(self)
        if self.size > 1:
            self._connect(environment)
        self.connection = bridge.connect(0 if self.native is None else int(ffi.cast("uintptr_t", self.native)))

    def add(self, group: "Group") -> None:
        """From now on ``group`` ends with the world, at the latest."""
        with self._lock:
            if not self.closed:
                self._groups.add(group)
                return
        group.shut()

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

    def _take_down(self, groups: list["Group"]) -> None:
        if self.native is None:
            self.connection.close()
            return
        told_error = self._signals.terminates(_TO_BE_TOLD)  # by SystemExit
        told_error |= any(of.told_error for of in (self.pending, self.connection, *self.doors))
        failed = lib.mlxdist_group_error(self.native) != lib.MLXDIST_OK
        idle = self._is_idle(groups, 10 if failed else self._timeout)  # aborted operations end at once
        if not idle and not failed:
            lib.mlxdist_group_abort(self.native, lib.MLXDIST_ABORTED, b"finalize() found operations that do not end")
            idle = self._is_idle(groups, 10)
        try:
            if idle:
                for registration in list(self.registrations):
                    registration.release()
                for door in self.doors:
                    door.close()
                self.connection.close()
                self._left = True
            if not told_error:  # else the error has been raised where it happened
                check(lib.mlxdist_group_error(self.native))
                check(lib.mlxdist_group_finalize(self.native))
                self._rendezvous.barrier("finalize")  # nobody leaves while a last message to another may be lost
        finally:
            self._standstill.close()
            self.recorder.close()  # first: nobody sends SIGUSR1 to a rank that does not handle it any more
            self._rendezvous.close()
            self._signals.stop()
            if idle:  # else its memory is in use: rather leave it to the end of the process
                self._destroy()

    def abort(self, reason: str) -> None:
        """Ends every operation of every group, on all ranks, and returns when these have been told."""
        self.fail(self._own(errors.Aborted, f"aborted the group: {reason}"))
        if self._rendezvous is not None:
            self._rendezvous.is_passed_on(_TO_BE_TOLD)

    def fail(self, error: errors.Error, consequence: bool = False) -> None:
        """Ends every operation of every group, on all ranks, with ``error``, which the program knows of.

        ``consequence``: it is there only because another rank has failed.
        """
        if self._rendezvous is not None:
            # First the others, who must not find this rank's operations broken before they know why; but if rank 0 is
            # stopped, this rank is not to wait for it.
            self._rendezvous.announce(error, consequence, seconds=0.05)
        self.pending.told_error = True
        self._abort_native(error)

    def interrupt(self, error: errors.Error, raises: bool) -> None:
        """A signal ends every operation. ``raises``: its handler is about to raise an exception in the main thread."""
        if raises and self.connection is not None:
            for door in (self.connection, *self.doors):
                door.keep_errors()
        self.fail(error)

    def end_with(self, uncaught: BaseException) -> None:
        """An exception has ended this rank's program, or an exit with a status that is not 0."""
        if isinstance(uncaught, KeyboardInterrupt):
            self.fail(errors.interruption(uncaught, self.rank, self.host))
            return
        if isinstance(uncaught, SystemExit):
            # Where the group has failed before, the program exits for that reason.
            error = self._failure() or errors.interruption(uncaught, self.rank, self.host)
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
            or any(door.is_busy for door in (self.connection, *self.doors))
        )

    def close_in_child(self) -> None:
        """In a forked child, where another thread of the parent may have held the lock."""
        self.forked = True
        if self.recorder is not None:
            self.recorder.renew_locks()
        if self._signals is not None:
            self._signals.close_in_child()
        for group in self._groups:
            group.shut()

    def send_to(self, rank: int, data: bytes) -> None:
        """Called by the engine, in any of its threads, and perhaps with its lock."""
        try:
            self._rendezvous.send(rank, _CONNECT, data)
        except errors.Error as error:
            if self.closed and self._rendezvous.is_leaving:
                return  # all have met for the last time: what a queue pair still carries is of no use to anyone
            failure = self._own(type(error), f"could not connect to rank {rank}: {error}")
            threading.Thread(target=self.fail, args=(failure,)).start()

    # How the ranks come together.

    def _connect(self, environment: Environment) -> None:
        _open_debug(environment)
        self._signals = Signals(self.rank, self.host, self.interrupt, self.is_busy)
        try:
            self._rendezvous = Rendezvous(environment)
            self._connect_native(environment)
            self._standstill = Standstill(
                self.rank,
                self.host,
                self.native,
                self._rendezvous.send,
                has_left=lambda: self._left,
                has_doors=lambda: bool(self.doors),
            )
            self._rendezvous.watch(
                on_failure=self._peer_failed,
                on_leave=self._peer_left,
                on_message=self._message,
                on_news=self._peer_news,
                position=self.recorder.position,
            )
        except BaseException as error:
            if self._rendezvous is not None:
                why = self._why(error)
                if why.rank in (None, self.rank):  # else all ranks have it already
                    self._rendezvous.announce(why)
                self._rendezvous.close()
            if self._standstill is not None:
                self._standstill.close()
            if self.recorder is not None:
                self.recorder.close()
            self._signals.stop()
            self._destroy()
            raise

    def _connect_native(self, environment: Environment) -> None:
        agreed = device_selection.select_devices(self._rendezvous, environment, self.host)
        table = self._share_tuning(environment)
        try:
            choice = self._set_up(environment, agreed.choice, table)
        except StepFailed as failure:
            choice = self._fall_back(environment, agreed, failure, table)
        self._tell_provider(environment, choice)
        self.recorder = Recorder(environment, self.host, self.native, self._engine_failed, self._traffic)

    def _set_up(self, environment: Environment, choice: Choice | None, table: Any) -> Choice | None:
        """Opens the devices and connects the queue pairs. Where that fails on a rank, all ranks leave at that step."""
        providers = "soft" if choice is None else choice.summary
        step = functools.partial(take_step, self._rendezvous, host=self.host, providers=providers)
        try:
            addresses = step("addresses", action=lambda: self._create(environment, choice, table))
            # It is a barrier, too: no rank sends before every receive is posted.
            step("connect", action=lambda: self._join(b"".join(addresses)))
        except StepFailed:
            self._destroy()
            raise
        return choice

    def _fall_back(self, environment: Environment, agreed: DeviceSelection, failure: StepFailed, table: Any) -> Choice:
        """All ranks do without RDMA, where it was mlxdist that chose it."""
        of_device = failure.kind in (errors.ResourceError, errors.TransportError)
        if environment.provider != "auto" or failure.providers == "soft" or not of_device:
            raise failure.error() from None
        try:
            return self._set_up(environment, agreed.without_rdma(environment, str(failure)), table)
        except (StepFailed, errors.InvalidArgument) as second:
            raise failure.error(f"{failure}; without RDMA: {second}") from None

    def _create(self, environment: Environment, choice: Choice | None, table: Any) -> bytes:
        """Makes the engine, and returns the address by which the others reach it."""
        host = ffi.new("char[]", self.host.encode())
        options = _options(environment)
        options.host = host
        profile = options.soft_profile = ffi.new("char[]", environment.soft_profile.encode())
        self._timeout = options.entry_timeout or _FOR_EVER
        links = _links(choice)  # what has a name here lives until the engine has copied it
        options.links = links[0]
        wires = options.adjacency = _wires(environment, choice)
        native = ffi.new("mlxdist_group **")
        check(lib.mlxdist_group_create(self.rank, self.size, options, native))
        self.native = native[0]
        lib.mlxdist_group_set_side_channel(self.native, lib.send_through_side_channel, self._context)
        check(lib.mlxdist_group_set_tuning(self.native, table, len(table)))
        self._inject(environment.inject_faults)  # before connecting: a fault may concern that
        address = ffi.new("char[]", lib.mlxdist_group_address_size(self.native))
        check(lib.mlxdist_group_address(self.native, address))
        return bytes(ffi.buffer(address))

    def _join(self, addresses: bytes) -> bytes:
        """Connects the queue pairs."""
        check(lib.mlxdist_group_connect(self.native, addresses, len(addresses)))
        return b""

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
        """What the others are told of an error that keeps this rank from connecting."""
        if not isinstance(error, errors.Error):
            return errors.interruption(error, self.rank, self.host)
        return error if error.rank is not None else self._own(type(error), f"could not connect: {error}")

    def _failure(self) -> errors.Error | None:
        """What the engine has failed with."""
        try:
            if self.native is not None:
                check(lib.mlxdist_group_error(self.native))
        except errors.Error as error:
            return error
        return None

    def _own(self, kind: type[errors.Error], what: str) -> errors.Error:
        """An error of this rank, which says so."""
        return kind(errors.located(f"rank {self.rank} on {self.host} {what}", self.rank, self.host))

    def _abort_native(self, error: errors.Error) -> None:
        with self._lock:
            if self.native is not None:
                lib.mlxdist_group_abort(self.native, errors.to_status(error), str(error).encode())

    def _destroy(self) -> None:
        with self._lock:
            native, self.native = self.native, None
        if native is not None:
            lib.mlxdist_group_destroy(native)

    def _share_tuning(self, environment: Environment) -> Any:
        """All ranks use the table of rank 0: two that chose different algorithms would not understand each other.

        With it comes the name of the run: where no launcher has named the job, or one on each node has, names differ.
        """
        own = tuning.pack(tuning.load(environment.tuning_file)) if self.rank == 0 else b""
        of_rank_0 = self._rendezvous.all_gather(self.run.encode() + b"\0" + own, "tuning")[0]
        run, _, table = of_rank_0.partition(b"\0")
        self.run = run.decode()
        rows = [row.native() for row in tuning.unpack(table)]
        return ffi.new("mlxdist_tuning[]", rows)

    def _inject(self, faults: str | None) -> None:
        """The ranks draw different faults, unless the list itself says where the generator begins."""
        for text in () if faults is None else (f"seed={self.rank + 1}", faults):
            check(lib.mlxdist_group_inject_faults(self.native, text.encode()))

    def _tell_provider(self, environment: Environment, choice: Choice | None) -> None:
        """What was chosen, and why, is never a secret where there was something to choose."""
        self.provider_reason = device_selection.ONE_HOST if choice is None else choice.reason
        if choice is not None and environment.provider == "auto" and self.rank == 0:
            print(f"mlxdist: provider {choice.summary}: {choice.reason}", file=sys.stderr, flush=True)

    def _engine_failed(self, error: errors.Error) -> None:
        # The engine tells the other ranks, too, but what it sends may be lost, and is not sent again after a failure.
        if error.rank == self.rank:
            self._rendezvous.announce(error, seconds=0)

    # Called by the rendezvous's own thread, which ends before finalize() destroys the native group.

    def _peer_failed(self, rank: int, text: str) -> None:
        # So come a rank's death and its abort(), and what has failed in its engine, should that news be lost there.
        self._abort_native(self._rendezvous.failure)

    def _peer_left(self, rank: int, text: str) -> None:
        self._peer_news(rank, "gone: it has left the group (finalize)")

    def _peer_news(self, rank: int, text: str) -> None:
        lib.mlxdist_group_set_peer_status(self.native, rank, text.encode())

    def _message(self, rank: int, tag: str, data: bytes) -> None:
        if tag == TAG:
            self._standstill.take(rank, data)
        if tag == _CONNECT:
            try:
                check(lib.mlxdist_group_side_channel_receive(self.native, rank, data, len(data)))
            except errors.Error as error:
                self._rendezvous.announce(error)
                self._abort_native(error)

    def _is_idle(self, groups: list["Group"], seconds: float) -> bool:
        """Waits until no operation of MLX, no call and no handle is going on; False after ``seconds``."""
        deadline = time.monotonic() + seconds
        return (
            all(door.drain(seconds) for door in (self.connection, *self.doors))
            and all(group.is_idle(max(deadline - time.monotonic(), 0)) for group in groups)
            and self.pending.wait(max(deadline - time.monotonic(), 0))
        )


def _open_debug(environment: Environment) -> None:
    """Both writers, that of Python and that of the engine, write to the same place."""
    try:
        file = debug.open_output(environment)
    except OSError as error:
        raise errors.EnvironmentVariableError(
            f"MLXDIST_DEBUG_FILE={environment.debug_file}: {debug.file_of(environment)} cannot be written: "
            f"{error.strerror}"
        ) from None
    spec = ffi.new("char[]", os.fsencode(environment.debug)) if environment.debug else ffi.NULL
    check(lib.mlxdist_debug_open(spec, file, environment.rank))


# Options of mlxdist.h whose variable has another name.
FIELDS = {"notice": "stall_warning", "cables": "links_per_peer", "connect_at_start": "on_demand_threshold"}


def _options(environment: Environment) -> Any:
    """The engine's defaults, where the environment does not say something else."""
    options = ffi.new("mlxdist_options *")
    lib.mlxdist_default_options(options)
    for name, _ in ffi.typeof("mlxdist_options").fields:
        value = getattr(environment, FIELDS.get(name, name), None)
        if value is not None and name not in ("wires", "soft_profile"):
            setattr(options, name, ALGORITHMS.index(value) if name == "algo" else value)
    if environment.timeout is not None:
        options.entry_timeout = environment.timeout
    if environment.meet_after is None and not mx.metal.is_available():
        options.meet_after = 0  # there is no GPU work that macOS could end
    options.reliable = environment.qp_type == "rc"
    options.has_key = True
    ffi.memmove(options.key, hmac.digest(environment.secret, b"soft provider", "sha256"), len(options.key))
    return options


def _links(choice: Choice | None) -> list[Any]:
    """The engine's list of this rank's links, NULL for the engine's own choice; and the texts that it points to."""
    if choice is None:
        return [ffi.NULL]
    each = lib.MLXDIST_MAX_LINKS
    links = ffi.new("mlxdist_link[]", len(choice.links) * each)
    kept = [links]
    for rank, to_rank in enumerate(choice.links):
        for number, link in enumerate(to_rank):
            provider, device = (ffi.new("char[]", name.encode()) for name in (link.provider, link.device))
            links[rank * each + number] = {"provider": provider, "device": device, "gid_index": link.gid_index}
            kept += [provider, device]
    return kept


def _wires(environment: Environment, choice: Choice | None) -> Any:
    """The engine's matrix of the cables, row after row; NULL where every pair has one."""
    pairs = environment.topology if choice is None or choice.adjacency is None else choice.adjacency
    if pairs is None:
        return ffi.NULL
    ranks = range(environment.world_size)
    return ffi.new("uint8_t[]", [(a, b) in pairs for a in ranks for b in ranks])


@ffi.def_extern()
def send_through_side_channel(context: Any, to: int, data: Any, length: int) -> None:
    ffi.from_handle(context).send_to(to, bytes(ffi.buffer(data, length)))


_worlds: weakref.WeakSet[World] = weakref.WeakSet()


def _close_in_child() -> None:
    for world in _worlds:
        world.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)
