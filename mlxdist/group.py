"""The group of ranks: how it comes together, what it knows of itself, how it ends."""

import atexit
import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from . import errors
from .environment import Environment
from .native import bridge, check, ffi, last_error, lib
from .rendezvous import Rendezvous

__all__ = ["Group", "init"]

# finalize() waits this long for peers where the user has set no timeout at all: a rank that works on for three
# years is taken for lost.
_FOR_EVER = 1e8


class Group:
    """The ranks that communicate with each other. Made by :func:`init`.

    Use it with mlxdist's own operations, or hand ``group.mlx`` to anything that takes an ``mx.distributed.Group``:
    ``mx.distributed``, ``mlx.nn`` and mlx-lm then run on mlxdist's transport.
    """

    def __init__(self, rank: int, size: int, host: str) -> None:
        self._rank = rank
        self._size = size
        self._host = host
        self._process = os.getpid()
        self._native: Any = None  # mlxdist_group *; None in a group of one
        self._rendezvous: Rendezvous | None = None
        self._connection: Any = None  # the bridge's view of _native
        self._mlx: mx.distributed.Group | None = None
        self._timeout = _FOR_EVER
        self._state = threading.Condition()  # guards the two below
        self._closed = False
        self._running = 0  # operations on NumPy arrays

    def rank(self) -> int:
        """The number of this process in the group, from 0."""
        return self._rank

    def size(self) -> int:
        """The number of processes in the group."""
        return self._size

    @property
    def mlx(self) -> mx.distributed.Group:
        """The same group for MLX: ``mx.distributed.all_sum(x, group=group.mlx)``."""
        self._require_open()
        return self._mlx

    @property
    def provider(self) -> str:
        """The verbs provider that carries the messages ("soft"); "none" in a group of one."""
        return self._text(lib.mlxdist_group_provider, "none")

    @property
    def provider_reason(self) -> str:
        """Why that provider was chosen ("no RDMA device found")."""
        return self._text(lib.mlxdist_group_provider_reason, "a group of one")

    def barrier(self) -> None:
        """Returns once every rank has called it. Arrays of MLX that are not evaluated yet do not take part."""
        self.call(lib.mlxdist_barrier)

    def stats(self) -> dict[str, int]:
        """Counters since the group began: operations, bytes, work requests, times in nanoseconds.

        The keys are the fields of ``mlxdist_stats`` in ``mlxdist.h``, which explains them. All are 0 in a group of one.
        """
        self._require_open()
        counters = ffi.new("mlxdist_stats *")
        if self._native is not None:
            lib.mlxdist_group_stats(self._native, counters)
        return {name: getattr(counters, name) for name, _ in ffi.typeof("mlxdist_stats").fields}

    def abort(self, reason: str) -> None:
        """Ends every operation of the group, on all ranks, with an error that names this rank and the reason."""
        self._abort(reason, consequence=False)

    def finalize(self) -> None:
        """Waits until all ranks have come here, then takes the group down.

        A rank that leaves while others still communicate with it is a mistake in the program: it fails on both sides
        with a :class:`Mismatch`. Runs by itself when the process exits. Operations afterwards raise; a second call
        does nothing.

        Raises:
            Mismatch, Timeout, PeerLost, Aborted: the other ranks did not come.
        """
        if self._process != os.getpid():
            return
        with self._state:
            if self._closed:
                return
            self._closed = True
            idle = self._state.wait_for(lambda: self._running == 0, self._timeout)
        atexit.unregister(self._finalize_at_exit)
        if self._native is None:
            self._connection.close()
            return
        failed_before = lib.mlxdist_group_error(self._native) != lib.MLXDIST_OK
        if not (idle and self._connection.drain(self._timeout)):
            lib.mlxdist_group_abort(self._native, lib.MLXDIST_ABORTED, b"finalize() found operations that do not end")
        self._connection.close()
        try:
            if not failed_before:  # else the error has been raised where it happened
                check(lib.mlxdist_group_error(self._native))
                check(lib.mlxdist_group_finalize(self._native))
        finally:
            self._rendezvous.close()
            with self._state:
                idle = self._state.wait_for(lambda: self._running == 0, 10)  # aborted operations end at once
            if idle:  # else its memory is in use: rather leave it to the end of the process
                lib.mlxdist_group_destroy(self._native)
                self._native = None

    def call(self, function: Callable[..., int], *arguments: Any) -> None:
        """Calls an operation of the engine on this group; nothing in a group of one. For mlxdist's own modules."""
        with self._state:
            self._require_open()
            if self._native is None:
                return
            self._running += 1
        try:
            status = function(self._native, *arguments)
            if status != lib.MLXDIST_OK:
                raise errors.from_status(status, last_error())
        finally:
            with self._state:
                self._running -= 1
                self._state.notify_all()

    @property
    def connection(self) -> Any:
        """The bridge's handle. For mlxdist's own modules."""
        self._require_open()
        return self._connection

    def __repr__(self) -> str:
        return f"<mlxdist.Group rank {self._rank} of {self._size}{', finalized' if self._closed else ''}>"

    def _connect(self, environment: Environment) -> None:
        """Makes the connections to all other ranks."""
        self._rendezvous = Rendezvous(environment)
        try:
            options = ffi.new("mlxdist_options *")
            lib.mlxdist_default_options(options)
            for name, _ in ffi.typeof("mlxdist_options").fields:
                if getattr(environment, name) is not None:
                    setattr(options, name, getattr(environment, name))
            self._timeout = options.timeout or _FOR_EVER
            handle = ffi.new("mlxdist_group **")
            check(lib.mlxdist_group_create(self._rank, self._size, options, handle))
            self._native = handle[0]
            addresses = self._exchange_addresses()
            check(lib.mlxdist_group_connect(self._native, addresses, len(addresses)))
            self._rendezvous.barrier("connect")  # nobody sends before every receive is posted
            self._rendezvous.watch(on_failure=self._peer_failed)
        except BaseException as error:
            self._rendezvous.announce(f"rank {self._rank} on {self._host} could not connect: {error}")
            self._rendezvous.close()
            if self._native is not None:
                lib.mlxdist_group_destroy(self._native)
                self._native = None
            raise

    def _exchange_addresses(self) -> bytes:
        address = ffi.new("char[]", lib.mlxdist_group_address_size(self._native))
        check(lib.mlxdist_group_address(self._native, address))
        here = _host_identity()
        blobs = self._rendezvous.all_gather(here + b"\0" + bytes(ffi.buffer(address)), "addresses")
        hosts, addresses = zip(*(blob.split(b"\0", 1) for blob in blobs))
        if self.provider == "soft":
            for rank, host in enumerate(hosts):
                if host != hosts[0]:
                    raise errors.InvalidArgument(
                        f"ranks 0 and {rank} are on different hosts ({_host_name(hosts[0])} and {_host_name(host)}), "
                        f"but the provider is soft ({self.provider_reason}), which connects ranks of one host only; "
                        "start all ranks on one host"
                    )
        return b"".join(addresses)

    def _peer_failed(self, rank: int, text: str) -> None:
        # Called by the rendezvous's own thread, which ends before finalize() destroys the group. A rank whose operation
        # fails tells the others through the engine; this way come its death and its abort().
        status = errors.to_status(self._rendezvous.failure)
        lib.mlxdist_group_abort(self._native, status, text.encode())

    def _abort(self, reason: str, consequence: bool) -> None:
        self._require_open()
        text = f"rank {self._rank} on {self._host} aborted the group: {reason}"
        if self._native is not None:
            # First the others, who must not find this rank's operations broken before they know why.
            self._rendezvous.announce(text, consequence)
            lib.mlxdist_group_abort(self._native, lib.MLXDIST_ABORTED, text.encode())

    def _require_open(self) -> None:
        if self._process != os.getpid():
            raise errors.InvalidArgument(
                f"this process was forked from rank {self._rank}, and a group does not survive a fork; use it in the "
                "process that called mlxdist.init(), or start the child with subprocess or multiprocessing's spawn"
            )
        if self._closed:
            raise errors.InvalidArgument(
                f"the group of rank {self._rank} has been finalized; do this before finalize()"
            )

    def _text(self, function: Callable[[Any], Any], alone: str) -> str:
        self._require_open()
        return alone if self._native is None else ffi.string(function(self._native)).decode()

    def _finalize_at_exit(self) -> None:
        # Set by the interpreter when an exception has ended the main module: the others need not wait for more.
        uncaught = getattr(sys, "last_value", None)
        if uncaught is not None and not self._closed and self._process == os.getpid():
            consequence = isinstance(uncaught, errors.PeerLost | errors.Aborted)
            self._abort(f"{type(uncaught).__name__}: {uncaught}", consequence)
        try:
            self.finalize()
        except errors.Error as error:
            print(f"mlxdist: {type(error).__name__}: {error}", file=sys.stderr)
            _exit_status.append(1)


# The interpreter would end with status 0 whatever an exit handler raises, and a job that has failed must not.
_exit_status: list[int] = []


def _exit_with_status() -> None:
    if _exit_status:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_status[0])


# Handlers run in reverse order: this one after those of the program, which imports mlxdist before it registers them.
atexit.register(_exit_with_status)

_world: Group | None = None
_world_lock = threading.Lock()


def init(strict: bool = False, backend: str = "any") -> Group:
    """The group of all ranks that the launcher started; without a launcher, a group of one.

    All ranks must call it; the call returns once they are connected. Later calls return the same group. It is taken
    down at exit, or by :meth:`Group.finalize`.

    Args:
        strict: raise instead of making a group of one when there is no launcher.
        backend: "any" or "mlxdist", which are the same; for programs that pass what ``mx.distributed.init`` takes.

    Raises:
        InvalidArgument: another backend is asked for; there is no launcher and ``strict`` is set; the group of this
            process was finalized before; the ranks are on several hosts that no provider connects.
        EnvironmentVariableError: an ``MLXDIST_*`` variable is malformed or contradicts another one.
        RendezvousError: not all ranks came.
    """
    global _world
    if backend not in ("any", "mlxdist"):
        raise errors.InvalidArgument(
            f"mlxdist.init: there is no backend {backend!r}; use 'any', or mx.distributed.init"
        )
    with _world_lock:
        if _world is None:
            _world = _create(strict)
        elif _world.size() == 1 and _world._closed:
            _world = _create(strict)  # a group of one holds nothing that could not be made again
        _world._require_open()
        return _world


def _create(strict: bool) -> Group:
    environment = Environment.read()
    if strict and "MLXDIST_WORLD_SIZE" not in os.environ:
        raise errors.InvalidArgument(
            "mlxdist.init(strict=True): no launcher started this process; run it with "
            "`mlxdist launch -n 2 -- python ...`"
        )
    group = Group(environment.rank, environment.world_size, socket.gethostname())
    if group.size() > 1:
        group._connect(environment)
    group._connection = bridge.connect(0 if group._native is None else int(ffi.cast("uintptr_t", group._native)))
    group._mlx = group._connection.mlx_group()
    atexit.register(group._finalize_at_exit)
    return group


def _host_identity() -> bytes:
    """Equal for processes that share a kernel: containers and hosts may share a name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    identity = boot.read_text().strip() if boot.exists() else ""
    return f"{socket.gethostname()} {identity}".encode()


def _host_name(identity: bytes) -> str:
    return identity.split(b" ")[0].decode(errors="replace")


def _after_fork() -> None:
    global _world_lock
    _world_lock = threading.Lock()  # another thread of the parent may have held it


bridge.set_error_factory(errors.from_status)
os.register_at_fork(after_in_child=_after_fork)
