"""Finds the stragglers of a job, from the flight records of all ranks.

Collectives of a group are numbered alike on all its ranks, so the numbers say how far each has got: a rank that is in
collective #412, or computes before it, is a straggler for those that are in #413. Point-to-point operations are listed
one by one.
"""

import operator
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mlxdist.base.errors import name_ranks, ranks_have

from ..diagnostics.flight_records import FlightRecord, Operation, group_name
from ..diagnostics.memory import RankMemory
from ..rendezvous.heartbeat import PeerStatus
from .clocks import at_one_time

__all__ = ["Analysis", "RankState", "analyze"]


@dataclass(frozen=True)
class RankState:
    """The state of one rank. Without a response, host, process, step and memory are the last known ones."""

    rank: int
    host: str = ""
    pid: int | None = None
    error: str | None = None  # the first error of the group, once it has failed
    step: int | None = None  # of mlxdist.set_step
    total_steps: int | None = None
    bubble: float | None = None  # of the last step of a stage of a pipeline
    memory: RankMemory | None = None
    operations: int = 0  # collectives of all ranks that this one has begun
    operation: str = ""  # "all_sum #412": the oldest in progress, else the last one
    in_operation: bool = False
    array: str = ""
    group: int | None = None
    sequence: int | None = None
    call_site: str = ""
    elapsed: float = 0.0  # seconds since the operation began or ended
    waiting_on: int | None = None
    is_straggler: bool = False  # others wait for it
    has_responded: bool = False
    is_gone: bool = False  # has left the group, or died
    gbps: float | None = None  # sent and received since the record before
    threads: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Analysis:
    states: list[RankState]  # of all ranks, in their order
    findings: list[str]  # sentences


def analyze(
    records: Mapping[int, FlightRecord], peers: Mapping[int, PeerStatus] = {}, before: Mapping[int, FlightRecord] = {}
) -> Analysis:
    """Analyzes a job. ``records``: its records, by rank; some, or all, may be missing. ``before``: earlier records."""
    if not records:
        return Analysis([], [])
    size = next(iter(records.values())).size
    speeds = {rank: _speed(before.get(rank), record) for rank, record in records.items()}
    records = at_one_time(records)
    groups = [_GroupProgress(records, *key) for key in sorted(_groups(records))]
    groups = [group for group in groups if group.is_waiting]
    stragglers = {rank for group in groups for rank in group.stragglers}
    states = [
        _state(rank, records.get(rank), before.get(rank) or peers.get(rank), rank in stragglers, speeds.get(rank))
        for rank in range(size)
    ]
    states = [replace(state, is_gone=state.rank in peers and peers[state.rank].is_gone) for state in states]
    findings = []
    if errors := {record.error for record in records.values() if record.error}:
        findings.append(f"The group has failed: {min(errors, key=len)}")
    if missing := [rank for rank in range(size) if rank not in records]:
        findings.append(f"{ranks_have(missing)} left no record: dead, stopped, or not at mlxdist.init() yet")
    for group in groups:
        findings += group.findings()
    findings += _point_to_point(records)
    if not any(operation.is_open for record in records.values() for operation in record.operations):
        findings.append("no rank is in an operation: all compute, or have ended")
    return Analysis(states, [f"{finding[0].upper()}{finding[1:]}." for finding in findings])


def _groups(records: Mapping[int, FlightRecord]) -> set[tuple[int, tuple[int, ...], bool]]:
    """The groups with an operation in progress: id, members, and whether the group is internal.

    Groups without a common rank may share an id.
    """
    return {
        (operation.group, record.groups[operation.group], operation.internal)
        for record in records.values()
        for operation in record.operations
        if operation.is_open and operation.collective and record.groups.get(operation.group)
    }


class _GroupProgress:
    """The progress of a group's members with its collectives."""

    def __init__(self, records: Mapping[int, FlightRecord], id: int, members: tuple[int, ...], internal: bool) -> None:
        self._records = records
        self._id, self._members, self._internal = id, members, internal
        # For each member, the next collective to complete, and whether the member has begun it.
        self._at: dict[int, tuple[int, bool]] = {}
        self._last: dict[int, Operation | None] = {}
        for rank in members:
            if rank not in records:
                continue
            mine = [
                o
                for o in records[rank].operations
                if o.collective and (o.group, o.internal) == (self._id, self._internal)
            ]
            waiting = [o for o in mine if o.is_open]
            by_sequence = operator.attrgetter("sequence")
            last = min(waiting, key=by_sequence) if waiting else max(mine, key=by_sequence, default=None)
            self._last[rank] = last
            self._at[rank] = (last.sequence + (not waiting), bool(waiting)) if last else (1, False)

    @property
    def is_waiting(self) -> bool:
        return any(begun for _, begun in self._at.values())

    @property
    def stragglers(self) -> list[int]:
        """The members with the least progress, unless all have the same."""
        least = min(self._at.values())
        return [rank for rank, at in self._at.items() if at == least] if len(set(self._at.values())) > 1 else []

    def findings(self) -> list[str]:
        clusters: dict[tuple, list[int]] = defaultdict(list)
        for rank, at in sorted(self._at.items()):
            last = self._last[rank]
            # Ranks outside of an operation share no call site, so each is listed by itself.
            clusters[at, _signature(last), last.at if last and at[1] else str(rank)].append(rank)
        parts = []
        in_order = [ranks for _, ranks in sorted(clusters.items(), key=lambda item: (item[0][0], item[1]))]
        for ranks in in_order:
            waits = ranks is not in_order[0] or not self.stragglers
            are_all_others = waits and len(in_order) == 2 and len(ranks) > 1 and len(self._at) == len(self._members)
            parts.append(self._part("the others" if are_all_others else name_ranks(ranks), ranks, waits))
        return [self._name() + ", ".join(parts), *self._disagreements()]

    def _name(self) -> str:
        if self._id == 0 and not self._internal:
            return ""
        where = "in internal operations of " if self._internal else "in "
        which = "the group of all ranks" if self._id == 0 else f"{group_name(self._id)} ({name_ranks(self._members)})"
        return f"{where}{which}: "

    def _part(self, who: str, ranks: list[int], waits: bool) -> str:
        last, several = self._last[ranks[0]], len(ranks) > 1
        if last is None or not self._at[ranks[0]][1]:
            return f"{who} {_activity(self._records[ranks[0]], self._id)}"
        verb = ("wait in" if several else "waits in") if waits else ("are in" if several else "is in")
        seconds = max(_seconds(self._records[rank], self._last[rank] or last) for rank in ranks)
        program = _program([self._records[rank] for rank in ranks], last)
        return f"{who} {verb} {last}{last.at} for {_duration(seconds)}{program}"

    def _disagreements(self) -> list[str]:
        """Findings about ranks whose collectives have the same number, but are different calls."""
        calls: dict[int, dict[tuple, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank, (sequence, begun) in sorted(self._at.items()):
            if begun:
                calls[sequence][_signature(self._last[rank])].append(rank)
        findings = []
        for sequence, kinds in calls.items():
            if len(kinds) > 1:
                calls_of = [
                    f"{name_ranks(ranks)} {_call(self._last[ranks[0]], len(ranks))}" for ranks in kinds.values()
                ]
                findings.append(f"the ranks disagree on #{sequence}: {', '.join(calls_of)}")
        return findings


def _activity(record: FlightRecord, group: int) -> str:
    """The activity of a rank that has not reached the next collective of ``group``."""
    other = _oldest_open(record)
    if other is not None:
        of_group = "" if other.group == group else f" of {group_name(other.group)}"
        return f"is in {other}{of_group}{other.at} for {_duration(_seconds(record, other))}"
    latest = _latest(record)
    if latest is None:
        return f"has not been in an operation yet{_program([record], None)}"
    ended = f"{latest}{latest.at} ended {_duration(_seconds(record, latest))} ago"
    return f"computes since {ended}{_program([record], latest)}"


def _program(records: list[FlightRecord], last: Operation | None) -> str:
    """The line that the program executes, if all of these ranks are at the same one, and it is not the operation's."""
    call_sites = {next(iter(record.threads.values()), "") for record in records}  # of the main thread, if it has any
    at = call_sites.pop()
    return f" (the program is at {at})" if at and not call_sites and (last is None or at != last.call_site) else ""


def _point_to_point(records: Mapping[int, FlightRecord]) -> list[str]:
    """Findings about send, recv and sendrecv that wait for the other side."""
    findings = []
    for rank, record in sorted(records.items()):
        for operation in record.operations:
            if operation.is_open and not operation.collective:
                text = f"rank {rank} waits in {operation}{operation.at} for {_duration(_seconds(record, operation))}"
                if (other := operation.waiting_on) is not None:
                    activity = _activity(records[other], operation.group) if other in records else "has left no record"
                    text += f"; rank {other} {activity}"
                findings.append(text)
    return findings


def _state(
    rank: int,
    record: FlightRecord | None,
    known: FlightRecord | PeerStatus | None,
    is_straggler: bool,
    gbps: float | None,
) -> RankState:
    """The state of a rank. ``known``: the last known facts, for a rank without a record."""
    names = ("host", "pid", "error", "step", "total_steps", "bubble", "memory", "threads")
    fields = {name: getattr(record or known, name) for name in names if hasattr(record or known, name)}
    if record is None:
        return RankState(rank, is_straggler=is_straggler, **fields)
    of_all = (o.sequence for o in record.operations if o.group == 0 and o.collective and not o.internal)
    fields |= {"has_responded": True, "operations": max(of_all, default=0), "gbps": gbps}
    if (operation := _oldest_open(record) or _latest(record)) is not None:
        fields |= {name: getattr(operation, name) for name in ("array", "group", "sequence", "call_site")}
        fields |= {"operation": str(operation), "in_operation": operation.is_open}
        fields |= {"elapsed": max(0.0, _seconds(record, operation))}
        fields |= {"waiting_on": operation.waiting_on if operation.is_open else None}
    return RankState(rank, is_straggler=is_straggler, **fields)


def _speed(before: FlightRecord | None, now: FlightRecord) -> float | None:
    """The speed in GB/s. Counters of a closed group are gone, so a decrease counts as 0."""
    if before is None or before.pid != now.pid or now.monotonic_ns <= before.monotonic_ns:
        return None
    moved = now.bytes_sent + now.bytes_received - before.bytes_sent - before.bytes_received
    return max(0, moved) / (now.monotonic_ns - before.monotonic_ns)


def _oldest_open(record: FlightRecord) -> Operation | None:
    return next((operation for operation in record.operations if operation.is_open), None)


def _latest(record: FlightRecord) -> Operation | None:
    return max(record.operations, key=lambda operation: operation.ended_ns or 0, default=None)


def _seconds(record: FlightRecord, operation: Operation) -> float:
    """Seconds since an open operation began, until the record was written or the group failed; else since its end."""
    if operation.ended_ns is not None and operation.is_open:
        return (operation.ended_ns - operation.started_ns) / 1e9
    return (record.monotonic_ns - (operation.ended_ns or operation.started_ns)) / 1e9


def _signature(operation: Operation | None) -> tuple:
    """A value that is equal on all ranks that are in the same call."""
    return () if operation is None else (operation.name, operation.array, str(operation.root))


def _call(operation: Operation | None, ranks: int) -> str:
    assert operation is not None  # it has begun
    root = f" with root {operation.root}" if operation.root is not None else ""
    array = f" of {operation.array}" if operation.array else ""
    return f"{'call' if ranks > 1 else 'calls'} {operation.name}{root}{array}{operation.at}"


def _duration(seconds: float) -> str:
    return f"{max(seconds, 0):.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
