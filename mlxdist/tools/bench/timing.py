"""Timing on the ranks of a benchmark: blocks of several works in turn, and the limits of the machine itself."""

from __future__ import annotations

import json
import os
import random
import resource
import socket
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import mlxdist
from mlxdist.base.host_identity import boot_identity
from mlxdist.base.json_reader import parse_json
from mlxdist.runtime.native import check, ffi, lib

from .limits import LIMITS

__all__ = [
    "CORES",
    "ForeignLoad",
    "Transfer",
    "Work",
    "asleep",
    "copy_work",
    "exchange",
    "interleave",
    "limit_works",
    "measure_limits",
    "pin",
    "quantiles",
    "slowest",
]

BLOCK_PAUSE = 0.002  # seconds; lets the helper threads of one work fall asleep before the next is timed
CALL_PAUSE = 0.0005  # the same for single calls
BLOCK_TIME = 5e3  # microseconds that a block should take
MAX_CALLS = 200  # in a block
WARM_UP = 2  # blocks that do not count
LIMIT_SIZES, LIMIT_REPEATS = (8 << 10, 1 << 20, 16 << 20), 5  # of `measure_limits`
TRANSFER_UP_TO = 64 << 20  # bytes; more goes no faster, and rank 0 holds five arrays of this size
# Of this machine, for this process before `pin`.
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


@dataclass(frozen=True)
class Work:
    """Something to time: a call that carries out ``operations`` of them."""

    call: Callable[[], object]
    operations: int = 1
    before: Callable[[], object] = lambda: None  # not timed, once before each block
    after: Callable[[], object] = lambda: None  # not timed, after each block
    # Instead of timing the call here: given a number of calls, the microseconds of each.
    elsewhere: Callable[[int], list[float]] | None = None
    # Elements of this rank's results that are not what they must be: known already, or asked at the end.
    wrong: int | Callable[[], int] = 0
    # The least time that can be true, as a multiple of that of the copy by all ranks; 0 where none is known.
    copies: float = 0

    def block(self, calls: int) -> list[float]:
        """Microseconds per operation, one number per call."""
        if self.elsewhere is not None:
            return self.elsewhere(calls)
        clock = time.perf_counter_ns
        times = [clock()]
        for _ in range(calls):
            self.call()
            times.append(clock())
        return [(end - begin) / 1e3 / self.operations for begin, end in zip(times, times[1:])]


def pin(rank: int) -> bool:
    """Keeps this process on a core of its own, as far as there are cores; False where the system cannot do that."""
    if not hasattr(os, "sched_setaffinity"):
        return False
    os.sched_setaffinity(0, {CORES[rank % len(CORES)]})
    return True


def asleep(calls: int) -> list[float]:
    """Returns times of 0: a value of `Work.elsewhere` for ranks that take no part in the timed work."""
    return [0.0] * calls


def interleave(
    works: Mapping[str, Work], world: mlxdist.Group, repeats: int, *, warm_up: int = WARM_UP, calls: int | None = None
) -> dict[str, np.ndarray]:
    """Runs a block of every work ``repeats`` times, in turn, a barrier before each. All ranks call it with the same
    names.

    Args:
        warm_up: blocks of each work before those that count.
        calls: in a block; by default as many as take 5 ms.

    Returns, by name, this rank's microseconds per operation: an array of shape (repeats, calls in a block).
    """
    counts = {name: calls or _calls(work, world) for name, work in works.items()}
    blocks: dict[str, list[list[float]]] = {name: [] for name in works}
    for turn in range(warm_up + repeats):
        # Shuffled, and not turned around: then each would always follow the same other one. Alike on all ranks.
        for name in random.Random(turn).sample(list(works), len(works)):
            time.sleep(CALL_PAUSE if calls == 1 else BLOCK_PAUSE)
            works[name].before()
            world.barrier()
            blocks[name].append(works[name].block(counts[name]))
            works[name].after()
    return {name: np.array(taken[warm_up:]) for name, taken in blocks.items()}


def _calls(work: Work, world: mlxdist.Group) -> int:
    """How many calls make a block, the same on all ranks. The first call of all is slow and does not count."""
    work.before()
    world.barrier()
    took = float(mlxdist.all_max(np.array([min(work.block(2))]), group=world)[0]) * work.operations
    return max(1, min(MAX_CALLS, int(BLOCK_TIME / took)))


def slowest(samples: np.ndarray, world: mlxdist.Group) -> np.ndarray:
    """Each sample as the slowest rank saw it: a rank that only sends may end long before those that receive."""
    return mlxdist.all_max(np.ascontiguousarray(samples, np.float64), group=world)


def quantiles(samples: np.ndarray) -> dict[str, float]:
    """The quantiles of all samples, and the number of samples as "count"."""
    percents = {"median": 50, "p10": 10, "p90": 90, "p95": 95, "p99": 99, "min": 0, "max": 100}
    found = np.percentile(samples, list(percents.values())).tolist()
    return dict(zip(percents, found)) | {"count": samples.size}


class Transfer:
    """``size`` bytes from one core of this machine to another: two threads, an array that both see, and a flag.

    Attributes:
        sent: what each of the two sides sends.
        received: what has arrived at each; 0 before a block.
    """

    def __init__(self, size: int) -> None:
        moved = min(size, TRANSFER_UP_TO)
        self._scale = size / moved
        self.sent = [np.resize(np.arange(1, prime, dtype=np.uint8), moved) for prime in (251, 241)]
        self.received = [np.zeros(moved, np.uint8) for _ in self.sent]
        shared, *arrays = (ffi.from_buffer(a) for a in (np.zeros(moved, np.uint8), *self.sent, *self.received))
        self._described = {"bytes": moved, "cores": CORES[:2], "shared": shared}
        self._described |= {"sent": arrays[:2], "received": arrays[2:]}

    def block(self, calls: int) -> list[float]:
        """Microseconds of each transfer, half a round trip.

        Raises:
            RuntimeError: a byte that arrived is not what was sent.
        """
        for array in self.received:
            array.fill(0)
        times = np.zeros(calls)
        described = ffi.new("mlxdist_core_transfer *", self._described | {"count": calls})
        check(lib.mlxdist_time_core_transfers(described, ffi.from_buffer("double[]", times)))
        if not all(map(np.array_equal, self.received, reversed(self.sent))):
            raise RuntimeError("a transfer from core to core delivered wrong bytes; check this machine's memory")
        return [float(time) / 1e3 * self._scale for time in times]


def copy_work(size: int) -> Work:
    """A plain copy of ``size`` bytes, by all ranks at once."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    return Work(lambda: np.copyto(target, source))


def limit_works(size: int, world: mlxdist.Group) -> dict[str, Work]:
    """The works of `LIMITS`, for ``size`` bytes; without a transfer where rank 0 has one core. Collective."""
    works = {"memcpy": copy_work(size)}
    if mlxdist.broadcast(np.array([len(CORES)]), group=world)[0] > 1:
        works["transfer"] = Work(lambda: None, elsewhere=Transfer(size).block if world.rank() == 0 else asleep)
    return works


def measure_limits(world: mlxdist.Group) -> list[dict[str, Any]]:
    """The limits at a few sizes, for tables whose rows are no number of bytes that move."""
    found = []
    for size in LIMIT_SIZES:
        taken = interleave(limit_works(size, world), world, LIMIT_REPEATS)
        times = {name: quantiles(slowest(samples, world)) for name, samples in taken.items()}
        found.append({"bytes": size} | {name: times.get(name) for name in LIMITS})
    return found


def exchange(value: Any, world: mlxdist.Group) -> list[Any]:
    """The values of all ranks, in their order. Each must be JSON. Collective."""
    text = json.dumps(value).encode()
    longest = int(mlxdist.all_max(np.array([len(text)], np.int64), group=world)[0])
    everyone = mlxdist.all_gather(np.frombuffer(text.ljust(longest), np.uint8), group=world)
    return [parse_json(bytes(row)) for row in everyone.reshape(world.size(), -1)]


class ForeignLoad:
    """The share of a machine that processes other than the ranks used meanwhile: it disturbs more than all else.

    The children of a rank count as the rank's once they have ended. Among several hosts, the most disturbed one counts.
    Without a ``world`` this process is the only rank.
    """

    def __init__(self, world: mlxdist.Group | None) -> None:
        self._world = world
        self._machine = zlib.crc32((boot_identity() or socket.gethostname()).encode())
        self._begin = self._read()

    def _read(self) -> np.ndarray:
        """Seconds of this machine's CPU: in all, idle or busy; busy; and used by ranks. Zeros where not known."""
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        own = sum(usage.ru_utime + usage.ru_stime for usage in used)
        everyone = np.array([[self._machine, own]])
        if self._world is not None:
            everyone = mlxdist.all_gather(everyone, group=self._world)
        ranks = everyone[everyone[:, 0] == self._machine, 1].sum()
        try:
            with open("/proc/stat") as file:
                ticks = [int(field) for field in file.readline().split()[1:9]]
        except FileNotFoundError:  # macOS
            return np.zeros(3)
        seconds = np.array([sum(ticks), sum(ticks) - ticks[3] - ticks[4]]) / os.sysconf("SC_CLK_TCK")
        return np.array([*seconds, ranks])

    def share(self) -> float | None:
        """Returns the share since construction, 0 to 1; None where no system counts CPU time. Collective."""
        total, busy, ranks = self._read() - self._begin
        share = max(0.0, float((busy - ranks) / total)) if total > 0 else -1.0
        if self._world is not None:
            share = float(mlxdist.all_max(np.array([share]), group=self._world)[0])
        return share if share >= 0 else None
