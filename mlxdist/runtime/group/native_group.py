"""The engine's group of all ranks: its options, its devices and queue pairs, and its end."""

import functools
import hmac
import sys
import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlxdist.base import errors
from mlxdist.base.environment import ALGORITHMS, Environment

from ..devices import device_selection
from ..devices.device_selection import DeviceSelection
from ..devices.links import Choice, Ports
from ..devices.paths import Path
from ..native import check, ffi, lib
from ..rendezvous import Rendezvous
from ..rendezvous.startup_step import StepFailed, take_step
from . import first_contact, tuning
from .native_links import native_links

__all__ = ["FOR_EVER", "NativeGroup"]

# The timeout of finalize() where the user has set none at all: a rank that works on for three years counts as lost.
FOR_EVER = 1e8


class NativeGroup:
    """``pointer`` is a ``mlxdist_group *`` from `connect` to `destroy`, else None."""

    def __init__(self, environment: Environment, host: str) -> None:
        self.pointer: Any = None
        self.timeout = FOR_EVER  # seconds that the engine waits for a rank that has not come
        self.run = environment.run
        self.tuning = tuning.Tuning()
        self.provider_reason = "a group of one"
        # to each rank
        self.paths = (Path.SHARED_MEMORY,) * environment.world_size
        self.ports = (Ports(),) * environment.world_size
        self.hosts: list[int] = []  # the number of each rank's host; empty where all ranks are on one
        self._environment = environment
        self._host = host
        self._largest_message = 0  # bytes; 0: as the devices say
        self._lock = threading.Lock()  # guards the end of the pointer

    def connect(self, rendezvous: Rendezvous, context: Any) -> None:
        """Chooses devices and connects them to those of the other ranks. ``context``: for the engine's callbacks."""
        environment = self._environment
        agreed = device_selection.select_devices(rendezvous, environment, self._host)
        self.hosts = agreed.hosts
        self._largest_message = first_contact.largest_message(rendezvous, environment, self._host, agreed)
        table = self._share_tuning(rendezvous)
        set_up = functools.partial(self._set_up, rendezvous, context, table)
        try:
            choice = set_up(agreed.choice)
        except StepFailed as failure:
            choice = self._fall_back(agreed, failure, set_up)
        if choice is None:
            self.provider_reason = device_selection.ONE_HOST
        else:
            self.provider_reason, self.paths, self.ports = choice.reason, choice.paths, choice.ports
        if environment.topology is not None:
            own = environment.rank
            linked = [rank == own or (own, rank) in environment.topology for rank in range(environment.world_size)]
            self.paths = tuple(path if is_linked else Path.NONE for path, is_linked in zip(self.paths, linked))
        # What was chosen, and why, is never a secret where there was something to choose.
        if choice is not None and environment.provider == "auto" and environment.rank == 0:
            print(f"mlxdist: provider {choice.summary}: {choice.reason}", file=sys.stderr, flush=True)

    def inject_faults(self, faults: str | None) -> None:
        """Injects faults, different ones on each rank, unless the list itself says where the generator begins."""
        for text in () if faults is None else (f"seed={self._environment.rank + 1}", faults):
            check(lib.mlxdist_group_inject_faults(self.pointer, text.encode()))

    def failure(self) -> errors.Error | None:
        """The error that the engine has failed with; None if it has not."""
        try:
            if self.pointer is not None:
                check(lib.mlxdist_group_error(self.pointer))
        except errors.Error as error:
            return error
        return None

    def abort(self, error: errors.Error) -> None:
        with self._lock:
            if self.pointer is not None:
                lib.mlxdist_group_abort(self.pointer, errors.to_status(error), str(error).encode())

    def destroy(self) -> None:
        with self._lock:
            pointer, self.pointer = self.pointer, None
        if pointer is not None:
            lib.mlxdist_group_destroy(pointer)

    def _share_tuning(self, rendezvous: Rendezvous) -> Any:
        """All ranks use the table of rank 0: two that chose different algorithms would not match.

        With it comes the name of the run: where no launcher has named the job, or one on each node has, names differ.
        """
        own = tuning.pack(tuning.load(self._environment.tuning_file)) if self._environment.rank == 0 else b""
        of_rank_0 = rendezvous.all_gather(self.run.encode() + b"\0" + own, "tuning")[0]
        run, _, table = of_rank_0.partition(b"\0")
        self.run = run.decode()
        self.tuning = tuning.unpack(table)
        return ffi.new("mlxdist_tuning[]", [row.native() for row in self.tuning.algorithms])

    def _set_up(self, rendezvous: Rendezvous, context: Any, table: Any, choice: Choice | None) -> Choice | None:
        """Opens the devices and connects the queue pairs. Where that fails on a rank, all ranks leave at that step."""
        providers = "soft" if choice is None else choice.summary
        step = functools.partial(take_step, rendezvous, host=self._host, providers=providers)
        try:
            addresses = step("addresses", action=lambda: self._create(context, choice, table))
            # It is a barrier, too: no rank sends before every receive is posted.
            step("connect", action=lambda: self._join(b"".join(addresses)))
        except StepFailed:
            self.destroy()
            raise
        return choice

    def _fall_back(
        self, agreed: DeviceSelection, failure: StepFailed, set_up: Callable[[Choice], Choice | None]
    ) -> Choice | None:
        """Sets up all ranks without RDMA, where it was mlxdist that chose RDMA."""
        # Other errors, such as a Mismatch, come again without RDMA.
        of_device = failure.kind in (errors.ResourceError, errors.TransportError)
        if self._environment.provider != "auto" or failure.providers == "soft" or not of_device:
            raise failure.error() from None
        self._largest_message = 0
        try:
            return set_up(agreed.without_rdma(self._environment, str(failure)))
        except (StepFailed, errors.InvalidArgument) as second:
            raise failure.error(f"{failure}; without RDMA: {second}") from None

    def _create(self, context: Any, choice: Choice | None, table: Any) -> bytes:
        """Makes the engine's group, and returns the address by which other ranks reach it."""
        environment = self._environment
        options = _options(environment)
        links = [ffi.NULL] if choice is None else native_links(choice.links)
        # The engine copies what these point to.
        host, profile = (ffi.new("char[]", text.encode()) for text in (self._host, environment.soft_profile))
        adjacency = _adjacency(environment, choice)
        options.host, options.soft_profile, options.links, options.adjacency = host, profile, links[0], adjacency
        hosts = ffi.new("int32_t[]", self.hosts) if self.hosts else ffi.NULL
        options.hosts, options.largest_message = hosts, self._largest_message
        self.timeout = options.entry_timeout or FOR_EVER
        made = ffi.new("mlxdist_group **")
        check(lib.mlxdist_group_create(environment.rank, environment.world_size, options, made))
        self.pointer = made[0]
        lib.mlxdist_group_set_side_channel(self.pointer, lib.send_through_side_channel, context)
        check(lib.mlxdist_group_set_tuning(self.pointer, table, len(table)))
        self.inject_faults(environment.inject_faults)  # before connecting: a fault may concern that
        address = ffi.new("char[]", lib.mlxdist_group_address_size(self.pointer))
        check(lib.mlxdist_group_address(self.pointer, address))
        return bytes(ffi.buffer(address))

    def _join(self, addresses: bytes) -> bytes:
        """Connects the queue pairs."""
        check(lib.mlxdist_group_connect(self.pointer, addresses, len(addresses)))
        return b""


def _options(environment: Environment) -> Any:
    """The engine's defaults, where the environment does not say something else."""
    options = ffi.new("mlxdist_options *")
    lib.mlxdist_default_options(options)
    for name, _ in ffi.typeof("mlxdist_options").fields:
        value = getattr(environment, name, None)
        if value is not None and name not in ("adjacency", "soft_profile"):
            setattr(options, name, ALGORITHMS.index(value) if name == "algo" else value)
    if environment.timeout is not None:
        options.entry_timeout = environment.timeout
    if environment.meet_after is None and not mx.metal.is_available():
        options.meet_after = 0  # there is no GPU work that macOS could end
    options.reliable = environment.qp_type == "rc"
    options.has_key = True
    ffi.memmove(options.key, hmac.digest(environment.secret, b"soft provider", "sha256"), len(options.key))
    return options


def _adjacency(environment: Environment, choice: Choice | None) -> Any:
    """The engine's matrix of the links between ranks, row after row; NULL where every pair has one."""
    pairs = environment.topology if choice is None or choice.adjacency is None else choice.adjacency
    if pairs is None:
        return ffi.NULL
    ranks = range(environment.world_size)
    return ffi.new("uint8_t[]", [(a, b) in pairs for a in ranks for b in ranks])
