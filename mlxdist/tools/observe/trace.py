"""The records as a trace for chrome://tracing and Perfetto (ui.perfetto.dev): a process per rank, a row per group.

The format is the JSON of "Trace Event Format" (Google, 2016): complete events (X), and metadata (M) for the names.
"""

from collections.abc import Mapping
from typing import Any

from mlxdist.base.errors import name_ranks
from mlxdist.runtime.diagnostics.flight_records import FlightRecord, Operation, group_name
from mlxdist.runtime.observation.clocks import wall_offsets

__all__ = ["trace"]

_COMPUTED_ROW = 1 << 16  # behind those of groups


def trace(records: Mapping[int, FlightRecord]) -> dict[str, Any]:
    """The events of all ranks. Times are microseconds since the first operation began."""
    offsets = wall_offsets(records)
    starts = [o.started_ns + offsets[rank] for rank, record in records.items() for o in record.operations]
    origin = min(starts, default=0)
    events: list[dict[str, Any]] = []
    for rank, record in sorted(records.items()):
        events += _process(record)
        rows = _Rows(record)
        for operation in record.operations:
            events.append(_event(record, operation, rows.row_of(operation), offsets[rank] - origin))
        events += rows.names()
        events += _computed(record, offsets[rank] - origin)
    return {"displayTimeUnit": "ns", "traceEvents": events}


class _Rows:
    """The rows of a rank. Overlapping operations of a group, such as those with handles, need more than one."""

    def __init__(self, record: FlightRecord) -> None:
        self._record = record
        self._ends: dict[tuple[int, bool, int], int] = {}  # of each row, by group and number

    def row_of(self, operation: Operation) -> int:
        number = 0
        while self._ends.get((operation.group, operation.internal, number), -1) > operation.started_ns:
            number += 1
        row = (operation.group, operation.internal, number)
        self._ends[row] = _end(self._record, operation)
        return list(self._ends).index(row)

    def names(self) -> list[dict[str, Any]]:
        return [
            {"ph": "M", "name": "thread_name", "pid": self._record.rank, "tid": i, "args": {"name": self._name(*row)}}
            for i, row in enumerate(self._ends)
        ]

    def _name(self, group: int, internal: bool, number: int) -> str:
        members = self._record.groups.get(group, ())
        name = "all ranks" if group == 0 else group_name(group) + (f" ({name_ranks(members)})" if members else "")
        return f"{name}{' (internal)' if internal else ''}{f', {number + 1}' if number else ''}"


def _process(record: FlightRecord) -> list[dict[str, Any]]:
    name = f"rank {record.rank} ({record.host}, pid {record.pid})"
    return [
        {"ph": "M", "name": "process_name", "pid": record.rank, "args": {"name": name}},
        {"ph": "M", "name": "process_sort_index", "pid": record.rank, "args": {"sort_index": record.rank}},
    ]


def _event(record: FlightRecord, operation: Operation, row: int, offset: int) -> dict[str, Any]:
    arguments = {
        "sequence": operation.sequence,
        "dtype": operation.dtype,
        "shape": None if operation.shape is None else list(operation.shape),
        "bytes": operation.bytes,
        "call site": operation.call_site or None,
        "algorithm": operation.algorithm,
        "root": operation.root,
        "to": operation.destination,
        "from": operation.source,
        "waiting on": operation.waiting_on,
        "status": operation.status or None,
        "in progress": True if operation.ended_ns is None else None,
    }
    return {
        "ph": "X",
        "name": operation.name,
        "cat": "collective" if operation.collective else "point to point",
        "pid": record.rank,
        "tid": row,
        "ts": (operation.started_ns + offset) / 1e3,
        "dur": (_end(record, operation) - operation.started_ns) / 1e3,
        "args": {name: value for name, value in arguments.items() if value is not None},
    }


def _computed(record: FlightRecord, offset: int) -> list[dict[str, Any]]:
    """Events in a row of their own: the computation of a pipeline stage in its last step."""
    if not record.computed:
        return []
    args = {"name": f"computes, bubble {record.bubble or 0:.0%}"}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": record.rank, "tid": _COMPUTED_ROW, "args": args}
    ]
    for name, started, ended in record.computed:
        event = {"ph": "X", "name": name, "cat": "compute", "pid": record.rank, "tid": _COMPUTED_ROW}
        events.append(event | {"ts": (started + offset) / 1e3, "dur": (ended - started) / 1e3})
    return events


def _end(record: FlightRecord, operation: Operation) -> int:
    """The end of an operation; for one in progress, the time of the record."""
    return record.monotonic_ns if operation.ended_ns is None else operation.ended_ns
