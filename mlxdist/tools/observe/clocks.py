"""One time for the records of all ranks.

Ranks of a host share the monotonic clock, so their times compare to the nanosecond. Between hosts they compare as well
as the hosts' wall clocks agree.
"""

from collections.abc import Mapping
from dataclasses import replace

from mlxdist.runtime.flight_records import Dump, Operation

__all__ = ["at_one_time", "wall_offsets"]

# A boot later, the monotonic clock is another one.
_SAME_CLOCK_NS = 10**9


def wall_offsets(dumps: Mapping[int, Dump]) -> dict[int, int]:
    """For each rank, what has to be added to its monotonic clock to get the time of day, in nanoseconds."""
    offsets: dict[int, int] = {}
    for rank, dump in sorted(dumps.items()):
        own = dump.wall_ns - dump.monotonic_ns
        same_host = (offsets[r] for r in offsets if dumps[r].host == dump.host)
        offsets[rank] = next((offset for offset in same_host if abs(offset - own) < _SAME_CLOCK_NS), own)
    return offsets


def at_one_time(dumps: Mapping[int, Dump]) -> dict[int, Dump]:
    """The records as if all had been written at the moment of the first: a job that runs goes on between them."""
    offsets = wall_offsets(dumps)
    first = min(dump.monotonic_ns + offsets[rank] for rank, dump in dumps.items())
    return {rank: _until(dump, first - offsets[rank]) for rank, dump in dumps.items()}


def _until(dump: Dump, now_ns: int) -> Dump:
    operations = tuple(_as_at(operation, now_ns) for operation in dump.operations if operation.started_ns <= now_ns)
    if dump.operations and not operations:
        return dump  # it is from much later, and no longer knows what was then
    return replace(dump, monotonic_ns=now_ns, operations=operations)


def _as_at(operation: Operation, now_ns: int) -> Operation:
    if operation.status or operation.ended_ns is None or operation.ended_ns <= now_ns:
        return operation
    return replace(operation, ended_ns=None)
