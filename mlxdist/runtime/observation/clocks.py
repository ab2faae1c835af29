"""Converts the times in the records of all ranks to one clock.

Ranks of a host share the monotonic clock, so their times compare to the nanosecond. Between hosts they compare as well
as the hosts' wall clocks agree.
"""

from collections.abc import Mapping
from dataclasses import replace

from ..diagnostics.flight_records import FlightRecord, Operation

__all__ = ["at_one_time", "wall_offsets"]

# Records of one host whose offsets differ by more are from different boots, each with a monotonic clock of its own.
_SAME_CLOCK_NS = 10**9


def wall_offsets(records: Mapping[int, FlightRecord]) -> dict[int, int]:
    """The nanoseconds to add to each rank's monotonic clock to get the time of day."""
    offsets: dict[int, int] = {}
    for rank, record in sorted(records.items()):
        own = record.wall_ns - record.monotonic_ns
        same_host = (offsets[r] for r in offsets if records[r].host == record.host)
        offsets[rank] = next((offset for offset in same_host if abs(offset - own) < _SAME_CLOCK_NS), own)
    return offsets


def at_one_time(records: Mapping[int, FlightRecord]) -> dict[int, FlightRecord]:
    """The records as of the time of the first one: a job that runs continues while its records are written."""
    offsets = wall_offsets(records)
    first = min(record.monotonic_ns + offsets[rank] for rank, record in records.items())
    return {rank: _until(record, first - offsets[rank]) for rank, record in records.items()}


def _until(record: FlightRecord, now_ns: int) -> FlightRecord:
    operations = tuple(_as_at(operation, now_ns) for operation in record.operations if operation.started_ns <= now_ns)
    if record.operations and not operations:
        return record  # it is from much later, and no longer knows what was then
    return replace(record, monotonic_ns=now_ns, operations=operations)


def _as_at(operation: Operation, now_ns: int) -> Operation:
    if operation.status or operation.ended_ns is None or operation.ended_ns <= now_ns:
        return operation
    return replace(operation, ended_ns=None)
