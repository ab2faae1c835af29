"""Bandwidths of operations, and how much bandwidth memory allows.

The definitions are those of nccl-tests (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md), so that
numbers can be compared: the size S of an operation is its whole array, which for all_gather is the output of a rank,
for gather that of the root and for all others the input; algbw = S / time; busbw = algbw times a factor that makes it
comparable with the bandwidth of one rank's link whatever the number of ranks.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "IN_PLACE",
    "OPERATIONS",
    "READ_ONLY",
    "algorithm_bandwidth",
    "bandwidths",
    "bus_bandwidth",
    "impossible",
    "least_copies",
]

# A plain copy may move three bytes per byte, read, read for ownership and written, where an operation in place moves
# two; so memory may serve an operation this much faster than a copy of as many bytes.
IN_PLACE = 1.5
# Reading moves one byte per byte, and caches and prefetching help it: weights are read at most this much faster.
READ_ONLY = 4

# Name as in mlxdist: the factor of busbw, and the bytes that must be copied, whatever the algorithm, as a share of what
# a copy of S by every rank copies. Both for n ranks. send_recv is a message to and fro; its time is that of one way.
OPERATIONS = {
    "all_sum": (lambda n: 2 * (n - 1) / n, lambda n: 2 * (n - 1) / n),
    "all_max": (lambda n: 2 * (n - 1) / n, lambda n: 2 * (n - 1) / n),
    "all_gather": (lambda n: (n - 1) / n, lambda n: (n - 1) / n),
    "sum_scatter": (lambda n: (n - 1) / n, lambda n: (n - 1) / n),
    "broadcast": (lambda n: 1.0, lambda n: (n - 1) / n),
    "reduce": (lambda n: 1.0, lambda n: (n - 1) / n),
    "gather": (lambda n: (n - 1) / n, lambda n: (n - 1) / n**2),
    "scatter": (lambda n: (n - 1) / n, lambda n: (n - 1) / n**2),
    "all_to_all": (lambda n: (n - 1) / n, lambda n: (n - 1) / n),
    "all_to_all_v": (lambda n: (n - 1) / n, lambda n: (n - 1) / n),
    "send_recv": (lambda n: 1.0, lambda n: (n // 2) / n),
}


def algorithm_bandwidth(size: int, microseconds: float) -> float:
    """GB/s (10^9 bytes) of an operation on ``size`` bytes."""
    return size / microseconds / 1e3


def bus_bandwidth(operation: str, ranks: int, size: int, microseconds: float) -> float:
    """GB/s that a rank's link carried, if ranks sent each other no more than they must."""
    factor, _ = OPERATIONS[operation]
    return factor(ranks) * algorithm_bandwidth(size, microseconds)


def bandwidths(result: dict[str, Any], ranks: int, operation: str | None = None) -> dict[str, float | None]:
    """algbw and busbw of a result; ``operation``: its name in `OPERATIONS`, where that is another one."""
    size, times = result["case"]["bytes"], result["microseconds"]
    if not times:
        return {"algbw": None, "busbw": None}
    bus = bus_bandwidth(operation or result["case"]["operation"], ranks, size, times["median"])
    return {"algbw": algorithm_bandwidth(size, times["median"]), "busbw": bus}


def least_copies(operation: str, ranks: int) -> float:
    """The least time that an operation can take, as a multiple of the time in which all ranks copy its size."""
    _, share = OPERATIONS[operation]
    return share(ranks) / IN_PLACE


def impossible(microseconds: float, least: float) -> str | None:
    """Why this time cannot be true, or None if it can.

    Args:
        least: the least time that can be true, computed from copies by all ranks at once in the same run.
    """
    if microseconds >= least:
        return None
    return (
        f"it took {microseconds:.2f} us, but copies in the same run say that it takes {least:.2f} us at least; the "
        "clock or the work is wrong, so this is no result"
    )
