"""A group of ranks: its properties, its subgroups and its end."""

import threading
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlxdist.base import errors
from mlxdist.base.environment import ALGORITHMS

from ..diagnostics import flight_recorder
from ..label import label_of, next_label
from ..native import bridge, ffi, last_error, layout, lib
from ..timeout import native_timeout
from . import at_exit
from .handle import Handle, Operation
from .process_bound import ProcessBound
from .registration import Registration
from .tuning import OPERATIONS
from .world import World

__all__ = ["Group", "GroupLike"]

# What a blocking operation brings along (mlxdist_call), made once a thread: the engine copies it when it begins.
_calls = threading.local()

# Operations that have more than one algorithm: those of mlxdist_operation, by the names of mlxdist's functions.
_OPERATIONS = {name: number for number, name in enumerate(OPERATIONS, 1)}
_OPERATIONS |= dict.fromkeys(("all_sum", "all_max", "all_min"), _OPERATIONS["all_reduce"])
_OPERATIONS["sum_scatter"] = _OPERATIONS["reduce_scatter"]


class GroupLike:
    """The type of every argument ``group``: a :class:`Group`, or a :class:`~mlxdist.Mesh` of one axis."""

    def _as_group(self) -> "Group":
        raise NotImplementedError


class Group(ProcessBound, GroupLike):  # a layer and its copies communicate in one group
    """Ranks that communicate with each other. Made by :func:`init`, and by :meth:`split` of a larger one.

    Use it with mlxdist's own operations, or hand ``group.mlx`` to anything that takes an ``mx.distributed.Group``:
    ``mx.distributed``, ``mlx.nn`` and mlx-lm then run on mlxdist's transport.
    """

    def __init__(self, world: World, connection: Any) -> None:
        self._world = world
        self._connection = connection  # the bridge's view of the native group
        self._rank: int = connection.rank
        self._size: int = connection.size
        self._closed = False
        # mlxdist_group *; None in a group of one, and when operations are over
        self._native = ffi.cast("mlxdist_group *", connection.group) if self._size > 1 else None
        self._mlx: mx.distributed.Group = connection.mlx_group()
        self._timeout: float | None = None
        # One entry for each thread that is in the engine. Appending and taking away are single steps of the
        # interpreter: a lock would cost as much as a small operation.
        self._running: list[None] = []
        self._lanes: dict[str, Group] = {}
        self._making_lanes = threading.Lock()
        world.add(self)

    def _as_group(self) -> "Group":
        return self

    def rank(self) -> int:
        """The number of this process in the group, from 0."""
        return self._rank

    def size(self) -> int:
        """The number of processes in the group."""
        return self._size

    @property
    def mlx(self) -> mx.distributed.Group:
        """The same group for MLX: ``mx.distributed.all_sum(x, group=group.mlx)``."""
        if self._closed:
            self._require_open()
        return self._mlx

    @property
    def provider(self) -> str:
        """The verbs provider that carries the messages ("soft"); "none" in a group of one."""
        return self._text(lib.mlxdist_group_provider, "none")

    @property
    def provider_reason(self) -> str:
        """Why that provider was chosen ("all ranks are on one host")."""
        return self._world.native_group.provider_reason

    @property
    def timeout(self) -> float | None:
        """Seconds that an operation of this group may go without progress before it fails, on all ranks; 0: no limit.

        ``None``, unless ``MLXDIST_TIMEOUT`` says something else: 30 s where the rank that is waited for has come to the
        operation too, 30 minutes where it has not but is alive. May be set, on all ranks alike. It holds for
        operations that begin later, also those of MLX; a ``timeout`` given with an operation goes before it. A group
        made by :meth:`split` begins with that of this one.
        """
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float | None) -> None:
        self._require_open()
        limit = native_timeout("Group.timeout", seconds)
        self._timeout = seconds
        if self._native is not None:
            lib.mlxdist_group_set_timeout(self._native, limit)

    def barrier(self, timeout: float | None = None) -> None:
        """Returns once every rank has called it. Arrays of MLX that are not evaluated yet do not take part.

        Args:
            timeout: seconds, as for :mod:`mlxdist.runtime.operations.collectives`; ``None`` for that of the group.

        Raises:
            Timeout, PeerLost, Aborted, TransportError: not all ranks came; the text names one that has not.
        """
        self.call(native_timeout("barrier", timeout), lib.mlxdist_barrier)

    def meet(self, timeout: float | None = None) -> None:
        """Returns once every rank has called it, and has done what it has submitted to MLX.

        Call it where one rank may need seconds longer than another: after loading or saving, before the first step.
        Ranks wait here, on the CPU, and not in GPU work, which macOS ends when it waits for about 5 s. The next 256
        operations with each rank meet, too: kernels that only one rank has to compile keep the others on the CPU.

        It waits for the default stream and all CPU streams of MLX. Other threads must synchronize their own streams on
        a GPU.

        Args:
            timeout: seconds, as for :meth:`barrier`.

        Raises:
            Timeout, PeerLost, Aborted, TransportError: not all ranks came; the text names one that has not.
        """
        mx.synchronize()
        bridge.wait_for_cpu_streams()
        self.barrier(timeout)
        if self._native is not None:
            lib.mlxdist_expect_late(self._native)

    def split(self, color: int, key: int = -1) -> "Group | None":
        """Makes a group of the ranks that pass the same ``color``, as ``mx.distributed.Group.split`` does.

        All ranks of this group must call it. The groups work side by side, on the same queue pairs. Each has an order
        of its own, in which all its ranks must call its operations: what one thread, or MLX, does in one group may
        come before or after what another does in a second one. A single thread does one after the other: where it
        waits in one group for a rank that waits for it in another, both get a :class:`Mismatch`. The groups end when
        they are no longer used, or with the world. Numbers of groups are not used again: after 32,766 splits in which
        a rank took part the next one raises, so make groups once and keep them.

        Args:
            color: from 0 to 2147483647; a negative number to be in no group.
            key: ranks are numbered in the order of their keys, and where these are equal in the order of this group.
                A negative key stands for the rank in this group.

        Returns:
            The group of this rank; ``None`` for a negative ``color``.

        Raises:
            InvalidArgument: a number has more than 32 bits.
            Mismatch, Timeout, PeerLost, Aborted: not all ranks took part.
        """
        for name, number in (("color", color), ("key", key)):
            if not -(2**31) <= number < 2**31:
                raise errors.InvalidArgument(f"split: {name} is {number}, which has more than 32 bits")
        return self._split(color, key, 0)

    def lane(self, name: str) -> "Group":
        """The same ranks as a group with an order of its own: for a thread that communicates next to others.

        The operations of a group have one order, which must be the same on all ranks. Several threads of Python have no
        such order among them, so each takes a lane: only the order within it counts. Streams of MLX need none: an
        operation has its place in the order when it is evaluated, whatever its stream.

        The first call with a name makes the lane, and waits for all ranks: make lanes before the threads start. Later
        ones return the same group.

        Args:
            name: the same on all ranks.

        Raises:
            Mismatch: a rank makes a lane of another name.
            Timeout, PeerLost, Aborted: not all ranks took part.
        """
        with self._making_lanes:
            if name not in self._lanes:
                lane = self._split(0, -1, label_of(f"lane {name}"))
                assert lane is not None
                self._lanes[name] = lane
            return self._lanes[name]

    def _split(self, color: int, key: int, label: int) -> "Group | None":
        try:
            self._running.append(None)
            self._require_open()
            connection = self._connection.split(color, key, label)
        finally:
            self._running.pop()
        if connection is None:
            return None
        group = Group(self._world, connection)
        if self._timeout is not None:
            group.timeout = self._timeout
        return group

    def register(self, buffer: Any) -> Registration:
        """Registers memory with the device, so that large messages leave from it without being copied into a slot.

        Worth its time for buffers that are sent often: registering costs more than copying once.

        Args:
            buffer: a NumPy array, an ``mx.array`` or anything with the buffer protocol, in one piece. It is kept, and
                must not be resized, until the registration is released. An ``mx.array`` is evaluated; MLX does not
                reuse its memory for results meanwhile.

        Raises:
            InvalidArgument: ``buffer`` is no buffer, or not contiguous.
            ResourceError: the device can register no more.
        """
        self._require_open()
        registration = Registration(buffer, self._native)
        self._world.registrations.add(registration)
        return registration

    def algorithm(self, operation: str, array: int | Any) -> str:
        """How ``operation`` moves its data: an algorithm of MLXDIST_ALGO; "none" in a group of one.

        Args:
            operation: the name of a function of mlxdist that has a choice, such as "all_sum".
            array: the input, or its number of bytes.

        Raises:
            InvalidArgument: there is no such operation, or it has no choice.
        """
        self._require_open()
        if operation not in _OPERATIONS:
            raise errors.InvalidArgument(
                f"algorithm: {operation!r} is no operation with a choice; those are {', '.join(_OPERATIONS)}"
            )
        if self._native is None:
            return "none"
        nbytes = array if isinstance(array, int) else array.nbytes
        if operation == "scatter":  # the engine goes by what arrives, since only the root has the whole
            nbytes //= self._size
        described = layout("uint8", (nbytes,))
        return ALGORITHMS[lib.mlxdist_group_algorithm(self._native, _OPERATIONS[operation], described)]

    def stats(self) -> dict[str, int]:
        """Counters since the group began: operations, bytes, work requests, times in nanoseconds.

        The keys are the fields of ``mlxdist_stats`` in ``mlxdist.h``, which explains them and says which are the
        group's own and which the process's. All are 0 in a group of one.
        """
        self._require_open()
        counters = ffi.new("mlxdist_stats *")
        if self._native is not None:
            lib.mlxdist_group_stats(self._native, counters)
        return {name: getattr(counters, name) for name, _ in ffi.typeof("mlxdist_stats").fields}

    def abort(self, reason: str) -> None:
        """Ends every operation of all groups, on all ranks, with an :class:`Aborted` that has ``reason`` in its text.

        Any thread may call it. Operations that are under way end at once, in evaluations of MLX too, and later ones
        raise the same error.
        """
        self._require_open()
        self._world.abort(reason)

    def finalize(self) -> None:
        """Waits until all ranks have come here, then takes the world down: this group and those split off.

        A rank that leaves while others still communicate with it is a mistake in the program: it fails on both sides
        with a :class:`Mismatch`. Operations that have been started (``async_op``, ``mx.async_eval``) are waited for.
        Runs by itself when the process exits. Operations afterwards raise; a second call does nothing.

        Raises:
            InvalidArgument: this group was made by :meth:`split`: it needs no end of its own.
            Mismatch, Timeout, PeerLost, Aborted: the other ranks did not come.
        """
        if self._connection is not self._world.connection:
            raise errors.InvalidArgument(
                "finalize: a group made by split() ends by itself, when it is no longer used or with the world; "
                "finalize the group of mlxdist.init()"
            )
        if not self._world.closed:
            at_exit.unregister()
            if leaving := at_exit.exit_in_progress():
                self._world.end_with(leaving)
        self._world.finalize()

    # For mlxdist's own modules.

    def call(self, limit: float, function: Callable[..., int], *arguments: Any) -> None:
        """Calls an operation of the engine on this group and waits for it; nothing in a group of one.

        ``limit``: its deadline, from `native_timeout`.
        """
        try:  # around the first line too: Ctrl-C may come anywhere
            self._running.append(None)  # first: finalize() closes the group, then looks here
            native = self._native
            if native is None:
                self._require_open()
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
        pending = self._world.pending
        pending.sweep()
        operation = Operation(name, (self, memory), pending)
        bridge.fill_call(int(ffi.cast("uintptr_t", operation.call)), limit, next_label())
        try:
            self._running.append(None)
            native = self._native
            if native is None:
                self._require_open()
                return Handle(None, pending, result)
            pending.running.add(operation)
            if status := function(native, *arguments, operation.call):
                raise self._error(status)
            return Handle(operation, pending, result)
        finally:
            if operation.call.handle == ffi.NULL:  # it has not started
                pending.running.discard(operation)
            self._running.pop()

    @property
    def connection(self) -> Any:
        """The bridge's handle. Its ``mlx_group(timeout, structure, label)`` is for operations of MLX, which have none.

        A timeout of -1 is the group's. A ``structure`` of less than 63 bits must be equal on all ranks, as shapes must.
        """
        if self._closed:
            self._require_open()
        return self._connection

    def add_mpi_shim(self, shim: Any) -> None:
        """Adds an MPI shim (mpi_shim.py), which ends with the world: see :attr:`World.mpi_shims`."""
        self._require_open()
        self._world.mpi_shims.append(shim)

    def shut(self) -> None:
        """Makes every later operation raise."""
        self._closed = True
        self._native = None

    def is_idle(self, seconds: float) -> bool:
        """Whether all calls have returned, after at most ``seconds``."""
        deadline = time.monotonic() + seconds
        while self._running and time.monotonic() < deadline:
            time.sleep(0.001)
        return not self._running

    def __repr__(self) -> str:
        return f"<mlxdist.Group rank {self._rank} of {self._size}{', finalized' if self._closed else ''}>"

    def _error(self, status: int) -> errors.Error:
        error = errors.from_status(status, last_error())
        if status == lib.MLXDIST_INVALID_ARGUMENT:  # that has not failed the group
            return error
        self._world.pending.error_reported = True
        return flight_recorder.explain(error)

    def _require_open(self) -> None:
        if not self._closed:
            return
        if self._world.forked:
            raise errors.InvalidArgument(
                f"this process was forked from rank {self._rank}, and a group does not survive a fork; use it in the "
                "process that called mlxdist.init(), or start the child with subprocess or multiprocessing's spawn"
            )
        raise errors.InvalidArgument(
            f"the group of rank {self._rank} has been finalized; do this before finalize(), or in the group that "
            "mlxdist.init() makes when all ranks call it again"
        )

    def _text(self, function: Callable[[Any], Any], alone: str) -> str:
        self._require_open()
        return alone if self._native is None else ffi.string(function(self._native)).decode()
