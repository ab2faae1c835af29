"""What the machine itself allows, measured by the ranks of a benchmark in turn with what they measure."""

from __future__ import annotations

from typing import Any

import numpy as np

import mlxdist
from mlxdist.runtime.native import check, ffi, lib

from .limits import LIMITS
from .timing import CORES, Work, asleep, interleave, quantiles, slowest

__all__ = ["Transfer", "copy_work", "limit_works", "measure_limits", "take_limits"]

SIZES, ROUNDS = (8 << 10, 1 << 20, 16 << 20), 5  # of `measure_limits`
TRANSFER_UP_TO = 64 << 20  # bytes; more goes no faster, and rank 0 holds five arrays of this size


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


def take_limits(times: dict[str, Any]) -> dict[str, Any]:
    """Takes those of `limit_works` out of what was measured; None for what was not."""
    return {name: times.pop(name, None) for name in LIMITS}


def measure_limits(world: mlxdist.Group) -> list[dict[str, Any]]:
    """The limits at a few sizes, for tables whose rows are no number of bytes that move."""
    found = []
    for size in SIZES:
        taken = interleave(limit_works(size, world), ROUNDS, world)
        times = {name: quantiles(slowest(samples, world)) for name, samples in taken.items()}
        found.append({"bytes": size} | take_limits(times))
    return found
