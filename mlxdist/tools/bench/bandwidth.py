"""What a bandwidth is, and how much of it memory allows.

The definitions are those of nccl-tests (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md), so that
numbers can be compared: the size S of an operation is its whole array, which for all_gather is the output of a rank
and for all others the input; algbw = S / time; busbw = algbw times a factor that makes it comparable with the
bandwidth of one rank's link whatever the number of ranks.
"""

from __future__ import annotations

__all__ = ["OPERATIONS", "algorithm_bandwidth", "bus_bandwidth", "impossible", "least_microseconds"]

# A plain copy may move three bytes per byte, read, read for ownership and written, where an operation in place moves
# two; so memory may serve an operation this much faster than a copy of as many bytes.
IN_PLACE = 1.5

# Name as in mlxdist: the factor of busbw, and the bytes that must be copied, whatever the algorithm, as a share of what
# a copy of S by every rank copies. Both for n ranks. send_recv is a message to and fro; its time is that of one way.
OPERATIONS = {
    "all_sum": (lambda n: 2 * (n - 1) / n, lambda n: 2 * (n - 1) / n),
    "all_gather": (lambda n: (n - 1) / n, lambda n: (n - 1) / n),
    "sum_scatter": (lambda n: (n - 1) / n, lambda n: (n - 1) / n),
    "broadcast": (lambda n: 1.0, lambda n: (n - 1) / n),
    "all_to_all": (lambda n: (n - 1) / n, lambda n: (n - 1) / n),
    "send_recv": (lambda n: 1.0, lambda n: (n // 2) / n),
}


def algorithm_bandwidth(size: int, microseconds: float) -> float:
    """GB/s (10^9 bytes) of an operation on ``size`` bytes."""
    return size / microseconds / 1e3


def bus_bandwidth(operation: str, ranks: int, size: int, microseconds: float) -> float:
    """GB/s that a rank's link carried, if ranks sent each other no more than they must."""
    factor, _ = OPERATIONS[operation]
    return factor(ranks) * algorithm_bandwidth(size, microseconds)


def least_microseconds(operation: str, ranks: int, memcpy: float) -> float:
    """The shortest time that can be true, where all ranks at once copied the same size in ``memcpy`` microseconds."""
    _, share = OPERATIONS[operation]
    return share(ranks) * memcpy / IN_PLACE


def impossible(operation: str, ranks: int, size: int, microseconds: float, memcpy: float) -> str | None:
    """Why this time cannot be true, or None if it can.

    Args:
        microseconds: the median of the operation.
        memcpy: the shortest time in which all ranks at once copied ``size`` bytes, in the same run.
    """
    least = least_microseconds(operation, ranks, memcpy)
    if microseconds >= least:
        return None
    claimed, most = (bus_bandwidth(operation, ranks, size, time) for time in (microseconds, least))
    return (
        f"{operation} of {size} bytes took {microseconds:.2f} us, a busbw of {claimed:.1f} GB/s, but copies in the "
        f"same run allow {most:.1f} GB/s at most; the clock or the work is wrong, so this is no result"
    )
