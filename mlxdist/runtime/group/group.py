"""A group of ranks: its properties, its subgroups and its end."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlxdist.base import errors
from mlxdist.base.environment import ALGORITHMS
from mlxdist.base.opaque import Opaque, create

from ..label import label_of
from ..native import bridge, ffi, layout, lib
from ..timeout import native_timeout
from . import at_exit, elastic
from .engine_group import EngineGroup, OperationStats
from .process_bound import ProcessBound
from .registration import Registration
from .tuning import OPERATIONS

__all__ = ["Group", "GroupLike", "engine_of"]

# Operations that have more than one algorithm: those of mlxdist_operation, by the names of mlxdist's functions.
_OPERATIONS = {name: number for number, name in enumerate(OPERATIONS, 1)}
_OPERATIONS |= dict.fromkeys(("all_sum", "all_max", "all_min"), _OPERATIONS["all_reduce"])
_OPERATIONS["sum_scatter"] = _OPERATIONS["reduce_scatter"]


class GroupLike:
    """The type of every argument ``group``: a :class:`Group`, or a :class:`~mlxdist.Mesh` of one axis."""

    def _as_group(self) -> "Group":
        """Returns the group that an object which is none stands for."""
        raise NotImplementedError


class Group(ProcessBound, GroupLike, metaclass=Opaque):  # a layer and its copies communicate in one group
    """Ranks that communicate with each other. Made by :func:`init`, and by :meth:`split` of a larger one.

    Use it with mlxdist's own operations, or hand ``group.mlx`` to anything that takes an ``mx.distributed.Group``:
    ``mx.distributed``, ``mlx.nn`` and mlx-lm then run on mlxdist's transport.
    """

    _made_by = "mlxdist.init and Group.split"

    def __init__(self, engine: EngineGroup) -> None:
        self._engine = engine
        self._rank, self._size = engine.rank, engine.size
        self._mlx = engine.mlx_group()
        self._timeout: float | None = None
        self._lanes: dict[str, Group] = {}
        self._making_lanes = threading.Lock()

    def rank(self) -> int:
        """The number of this process in the group, from 0."""
        return self._rank

    def size(self) -> int:
        """The number of processes in the group."""
        return self._size

    @property
    def mlx(self) -> mx.distributed.Group:
        """The same group for MLX: ``mx.distributed.all_sum(x, group=group.mlx)``."""
        if self._engine.is_over:
            self._engine.require_open()
        return self._mlx

    @property
    def provider(self) -> str:
        """The verbs provider that carries the messages ("soft"); "none" in a group of one."""
        return self._text(lib.mlxdist_group_provider, "none")

    @property
    def provider_reason(self) -> str:
        """Why that provider was chosen ("all ranks are on one host")."""
        return self._engine.world.native_group.provider_reason

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
        self._engine.require_open()
        limit = native_timeout("Group.timeout", seconds)
        self._timeout = seconds
        if self._engine.native is not None:
            lib.mlxdist_group_set_timeout(self._engine.native, limit)

    def barrier(self, timeout: float | None = None) -> None:
        """Returns once every rank has called it. Arrays of MLX that are not evaluated yet do not take part.

        Args:
            timeout: seconds, as for :mod:`mlxdist.runtime.operations.collectives`; ``None`` for that of the group.

        Raises:
            Timeout, PeerLost, Aborted, TransportError: not all ranks came; the text names one that has not.
        """
        self._engine.call(native_timeout("barrier", timeout), lib.mlxdist_barrier)

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
        if self._engine.native is not None and not self._engine.is_over:
            lib.mlxdist_expect_late(self._engine.native)

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
        engine = self._engine.split(color, key, label)
        if engine is None:
            return None
        group = create(Group, engine)
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
        self._engine.require_open()
        registration = create(Registration, buffer, self._engine.native)
        self._engine.world.registrations.add(registration)
        return registration

    def algorithm(self, operation: str, array: int | Any) -> str:
        """How ``operation`` moves its data: an algorithm of MLXDIST_ALGO; "none" in a group of one.

        Args:
            operation: the name of a function of mlxdist that has a choice, such as "all_sum".
            array: the input, or its number of bytes.

        Raises:
            InvalidArgument: there is no such operation, or it has no choice.
        """
        self._engine.require_open()
        if operation not in _OPERATIONS:
            raise errors.InvalidArgument(
                f"algorithm: {operation!r} is no operation with a choice; those are {', '.join(_OPERATIONS)}"
            )
        if self._engine.native is None:
            return "none"
        nbytes = array if isinstance(array, int) else array.nbytes
        if operation == "scatter":  # the engine goes by what arrives, since only the root has the whole
            nbytes //= self._size
        described = layout("uint8", (nbytes,))
        return ALGORITHMS[lib.mlxdist_group_algorithm(self._engine.native, _OPERATIONS[operation], described)]

    def stats(self) -> dict[str, int]:
        """Counters since the group began: operations, bytes, work requests, times in nanoseconds.

        The keys are the fields of ``mlxdist_stats`` in ``mlxdist.h``, which explains them and says which are the
        group's own and which the process's. All are 0 in a group of one.
        """
        return self._engine.stats()

    def stats_by_operation(self) -> dict[str, OperationStats]:
        """Counters since the group began, by operation: which ones take the time, and how fast they move their bytes.

        Only operations that have ended well count, by the names that errors and ``mlxdist top`` have for them:
        "all_sum", "sum_scatter", "reduce (max)", "sendrecv". Those that this rank has not called are left out, so the
        dictionary is empty in a group of one.

        Returns for each name a dictionary:
            calls: number of operations.
            payload_bytes_sent, payload_bytes_received: bytes of arrays between this rank and others, as the algorithm
                moves them: direct sends an array to each other rank. Over all operations they add up to the counters
                of these names in :meth:`stats`, once nothing is in progress.
            seconds: from the start of each operation to its end, waits for other ranks included. It starts when the
                engine gets it, for lazy operations in their evaluation. Operations at the same time count each.
        """
        return self._engine.stats_by_operation()

    def shrink(self) -> "Group":
        """Goes on without the ranks that have been lost: makes a group of all others, and takes this one down.

        Call it on all ranks that are left, after an operation has raised: :class:`PeerLost` on most of them, perhaps
        another error where a rank was between operations. It waits until all of them have called it, or ended; a rank
        that is lost meanwhile is left out, too. Ranks keep their order, and get new numbers. A rank that has not
        noticed the loss gets an :class:`Aborted` from its next operation, and is to call this, too. One that does not
        come for ``MLXDIST_RENDEZVOUS_TIMEOUT`` seconds is killed by the launcher.

        What was made of the old group raises: groups split off, meshes, registrations, arrays not evaluated, and those
        evaluated once and not read since. The data that the lost rank had is lost; bring the others to a state that
        they share, such as that of the last step that all have finished. The job must be started with ``mlxdist launch
        --elastic MIN``.

        Returns:
            The new group, which is :func:`init`'s from then on; the group itself if it has one rank.

        Raises:
            InvalidArgument: the job is not elastic; this group was made by :meth:`split`, or has ended.
            PeerLost: fewer than MIN ranks are left, or this one counts as lost.
            RendezvousError: the others do not come together, or the launcher is gone.
        """
        elastic.check("shrink", self._engine)
        if self._size == 1:
            return self
        at_exit.unregister()
        self._engine.world.abandon()
        return self._next("shrink")

    def grow(self) -> "Group":
        """Takes in the processes that wait to join: makes a group of all ranks and these, and takes this one down.

        All ranks must call it, at the same place: between steps, as often as they like. Where no process waits it
        returns this group, and costs a broadcast of one byte. ``mlxdist launch --elastic MIN --max-restarts K`` starts
        lost ranks again; their :func:`init` returns in the group that this makes. They come last in it, so rank 0 has
        the state that all need: let it broadcast that.

        What was made of the old group raises, as after :meth:`shrink`.

        Returns:
            The new group, which is :func:`init`'s from then on; the group itself if no process waits.

        Raises:
            InvalidArgument: the job is not elastic; this group was made by :meth:`split`, or has ended.
            Mismatch, Timeout, PeerLost, Aborted: not all ranks came.
            RendezvousError: the others do not come together, or the launcher is gone.
        """
        if not elastic.do_others_join(self._engine):
            return self
        with contextlib.suppress(errors.PeerLost, errors.Aborted):  # a rank has been lost just now: it is left out
            self.finalize()
        return self._next("grow")

    def _next(self, kind: str) -> "Group":
        group: Group = elastic.enter(kind, self._engine.world.make_next)
        if self._timeout is not None:
            group.timeout = self._timeout
        return group

    def abort(self, reason: str) -> None:
        """Ends every operation of all groups, on all ranks, with an :class:`Aborted` that has ``reason`` in its text.

        Any thread may call it. Operations that are under way end at once, in evaluations of MLX too, and later ones
        raise the same error.
        """
        self._engine.require_open()
        self._engine.world.abort(reason)

    def finalize(self) -> None:
        """Waits until all ranks have come here, then takes the world down: this group and those split off.

        A rank that leaves while others still communicate with it is a mistake in the program: it fails on both sides
        with a :class:`Mismatch`. Operations that have been started (``async_op``, ``mx.async_eval``) are waited for.
        Runs by itself when the process exits. Operations afterwards raise; a second call does nothing.

        Raises:
            InvalidArgument: this group was made by :meth:`split`: it needs no end of its own.
            Mismatch, Timeout, PeerLost, Aborted: the other ranks did not come.
        """
        world = self._engine.world
        if not self._engine.is_world:
            raise errors.InvalidArgument(
                "finalize: a group made by split() ends by itself, when it is no longer used or with the world; "
                "finalize the group of mlxdist.init()"
            )
        if not world.closed:
            at_exit.unregister()
            if leaving := at_exit.exit_in_progress():
                world.end_with(leaving)
        world.finalize()

    def __repr__(self) -> str:
        return f"<mlxdist.Group rank {self._rank} of {self._size}{', finalized' if self._engine.is_over else ''}>"

    def _text(self, function: Callable[[Any], Any], alone: str) -> str:
        self._engine.require_open()
        native = self._engine.native
        return alone if native is None else ffi.string(function(native)).decode()


def engine_of(group: Group) -> EngineGroup:
    """The group's engine side, which mlxdist's own modules call in place of the public methods."""
    return group._engine
