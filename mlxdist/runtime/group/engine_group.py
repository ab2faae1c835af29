"""A group as mlxdist's own modules use it: calls of the engine, and the one state that they share."""

import threading
import time
from collections.abc import Callable
from typing import Any, TypedDict

import mlx.core as mx

from mlxdist.base import errors
from mlxdist.base.opaque import create

from ..diagnostics import flight_recorder
from ..label import next_label
from ..native import bridge, ffi, last_error, lib
from .handle import Handle, Operation
from .world import World

__all__ = ["EngineGroup", "OperationStats"]

# What a blocking operation brings along (mlxdist_call), made once a thread: the engine copies it when it begins.
_calls = threading.local()


class OperationStats(TypedDict):
    """The calls of one operation in a group that have ended well; see :meth:`mlxdist.Group.stats_by_operation`."""

    calls: int
    payload_bytes_sent: int
    payload_bytes_received: int
    seconds: float


class EngineGroup:
    """The engine's side of a :class:`mlxdist.Group`, which has one; see ``engine_of``.

    Attributes:
        world: all ranks of the job.
        rank, size: of this process in the group, and how many ranks there are.
        native: ``mlxdist_group *``, not to be used once ``is_over``; None in a group of one.
        is_over: whether every operation is refused from now on: the world has been finalized, or was forked.
    """

    def __init__(self, world: World, connection: Any) -> None:
        self.world = world
        self._connection = connection
        self.rank: int = connection.rank
        self.size: int = connection.size
        self.is_over = False
        self.native = ffi.cast("mlxdist_group *", connection.group) if self.size > 1 else None
        # One entry for each thread that is in the engine. Appending and taking away are single steps of the
        # interpreter: a lock would cost as much as a small operation.
        self._running: list[None] = []
        world.add(self)

    @property
    def connection(self) -> Any:
        """The bridge's handle. Its ``mlx_group(timeout, structure, label)`` is for operations of MLX, which have none.

        A timeout of -1 is the group's. A ``structure`` of less than 63 bits must be equal on all ranks, as shapes must.
        """
        if self.is_over:
            self.require_open()
        return self._connection

    @property
    def is_world(self) -> bool:
        """Whether it is the group of all ranks, which ends the world."""
        return self._connection is self.world.connection

    @property
    def hosts(self) -> int:
        """The number of hosts of its ranks."""
        self.require_open()
        return 1 if self.native is None else int(lib.mlxdist_group_hosts(self.native))

    def located(self, text: str) -> str:
        """``text`` with this rank and its host appended, for other ranks: the error of this one."""
        return errors.located(text, self.rank, self.world.host)

    def mlx_group(self) -> mx.distributed.Group:
        """The group for MLX."""
        group: mx.distributed.Group = self._connection.mlx_group()
        return group

    def call(self, limit: float, function: Callable[..., int], *arguments: Any) -> None:
        """Calls an operation of the engine on this group and waits for it; nothing in a group of one.

        ``limit``: its deadline, from `native_timeout`.
        """
        try:  # around the first line too: Ctrl-C may come anywhere
            self._running.append(None)  # first: finalize() ends the group, then looks here
            if self.is_over:
                self.require_open()
            native = self.native
            if native is None:
                return
            if not (own := getattr(_calls, "own", None)):
                call = ffi.new("mlxdist_call *")
                own = _calls.own = call, int(ffi.cast("uintptr_t", call))
            call, address = own
            bridge.fill_call(address, limit, next_label())
            if status := function(native, *arguments, call):
                raise self._error(status)
        finally:
            self._running.pop()

    def start(
        self, name: str, limit: float, result: Any, memory: Any, function: Callable[..., int], *arguments: Any
    ) -> Handle:
        """Starts an operation of the engine. ``memory``: what it works on; ``result``: what its handle gives."""
        pending = self.world.pending
        pending.sweep()
        operation = Operation(name, (self, memory), pending)
        bridge.fill_call(int(ffi.cast("uintptr_t", operation.call)), limit, next_label())
        try:
            self._running.append(None)
            self.require_open()
            native = self.native
            if native is None:
                return create(Handle, None, pending, result)
            pending.running.add(operation)
            if status := function(native, *arguments, operation.call):
                raise self._error(status)
            return create(Handle, operation, pending, result)
        finally:
            if operation.call.handle == ffi.NULL:  # it has not started
                pending.running.discard(operation)
            self._running.pop()

    def split(self, color: int, key: int, label: int) -> "EngineGroup | None":
        """See :meth:`mlxdist.Group.split`; ``label``: of the operation, as of others."""
        try:
            self._running.append(None)
            self.require_open()
            connection = self._connection.split(color, key, label)
        finally:
            self._running.pop()
        return None if connection is None else EngineGroup(self.world, connection)

    def stats(self) -> dict[str, int]:
        """See :meth:`mlxdist.Group.stats`."""
        self.require_open()
        counters = ffi.new("mlxdist_stats *")
        if self.native is not None:
            lib.mlxdist_group_stats(self.native, counters)
        return {name: getattr(counters, name) for name, _ in ffi.typeof("mlxdist_stats").fields}

    def stats_by_operation(self) -> dict[str, OperationStats]:
        """See :meth:`mlxdist.Group.stats_by_operation`."""
        self.require_open()
        if self.native is None:
            return {}
        entries = ffi.new("mlxdist_operation_stats[]", lib.MLXDIST_OPERATION_NAMES)
        count = lib.mlxdist_group_operation_stats(self.native, entries, len(entries))
        return {
            ffi.string(entry.operation).decode(): OperationStats(
                calls=entry.calls,
                payload_bytes_sent=entry.payload_bytes_sent,
                payload_bytes_received=entry.payload_bytes_received,
                seconds=entry.ns / 1e9,
            )
            for entry in entries[0:count]
        }

    def add_mpi_shim(self, shim: Any) -> None:
        """MPI shim (mpi_shim.py), which ends with the world: see :attr:`World.mpi_shims`."""
        self.require_open()
        self.world.mpi_shims.append(shim)

    def shut(self) -> None:
        """From now on every operation is refused."""
        self.is_over = True

    def is_idle(self, seconds: float) -> bool:
        """Whether all calls have returned, after at most ``seconds``."""
        deadline = time.monotonic() + seconds
        while self._running and time.monotonic() < deadline:
            time.sleep(0.001)
        return not self._running

    def require_open(self) -> None:
        """Raises InvalidArgument: the group is over."""
        if not self.is_over:
            return
        if self.world.forked:
            raise errors.InvalidArgument(
                f"this process was forked from rank {self.rank}, and a group does not survive a fork; use it in the "
                "process that called mlxdist.init(), or start the child with subprocess or multiprocessing's spawn"
            )
        raise errors.InvalidArgument(
            f"the group of rank {self.rank} has been finalized; do this before finalize(), or in the group that "
            "mlxdist.init() makes when all ranks call it again"
        )

    def _error(self, status: int) -> errors.Error:
        error = errors.from_status(status, last_error())
        if status == lib.MLXDIST_INVALID_ARGUMENT:  # that has not failed the group
            return error
        self.world.pending.error_reported = True
        return flight_recorder.explain(error)
