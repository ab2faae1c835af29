"""Who is behind whom, from the records of all ranks.

Collectives of a group are numbered alike on all its ranks, so the numbers say how far each has got: a rank that is in
collective #412, or computes before it, holds up those that are in #413. What is between two ranks is told one by one.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from mlxdist.base.errors import name_ranks
from mlxdist.runtime.flight_records import Dump, Operation

from .clocks import at_one_time

__all__ = ["Analysis", "RankState", "analyse"]


@dataclass(frozen=True)
class RankState:
    """What one rank does. ``dump`` is None where it has left no record."""

    rank: int
    dump: Dump | None
    operation: Operation | None  # the oldest that it is in, or the last that it was in
    seconds: float  # since that began or ended
    is_behind: bool  # others wait for it

    @property
    def doing(self) -> str:
        if self.dump is None:
            return "no record"
        if self.operation is None:
            return "has not been in an operation"
        return str(self.operation) if self.operation.is_open else f"computes since {self.operation}"


@dataclass(frozen=True)
class Analysis:
    states: list[RankState]  # of all ranks, in their order
    sentences: list[str]


def analyse(dumps: Mapping[int, Dump]) -> Analysis:
    """``dumps``: those of one job, by rank; some may be missing."""
    size = next(iter(dumps.values())).size
    dumps = at_one_time(dumps)
    groups = [_Standing(dumps, *key) for key in sorted(_groups(dumps))]
    groups = [group for group in groups if group.is_waiting]
    behind = {rank for group in groups for rank in group.behind}
    states = [_state(rank, dumps.get(rank), rank in behind) for rank in range(size)]
    sentences = []
    if errors := {dump.error for dump in dumps.values() if dump.error}:
        sentences.append(f"The group has failed: {min(errors, key=len)}")
    if missing := [rank for rank in range(size) if rank not in dumps]:
        have = "have" if len(missing) > 1 else "has"
        sentences.append(f"{name_ranks(missing)} {have} left no record: dead, stopped, or not at mlxdist.init() yet")
    for group in groups:
        sentences += group.sentences()
    sentences += _between_two(dumps, states)
    if not any(operation.is_open for dump in dumps.values() for operation in dump.operations):
        sentences.append("no rank is in an operation: all compute, or have come to their end")
    return Analysis(states, [_capital(sentence) for sentence in sentences])


def _groups(dumps: Mapping[int, Dump]) -> set[tuple[int, tuple[int, ...], bool]]:
    """Those in which something is under way: id, members, and whether it is the hidden one beside the group.

    Groups without a common rank may share an id.
    """
    return {
        (operation.group, dump.groups[operation.group], operation.hidden)
        for dump in dumps.values()
        for operation in dump.operations
        if operation.is_open and operation.collective and dump.groups.get(operation.group)
    }


class _Standing:
    """How far the members of a group have got with its collectives."""

    def __init__(self, dumps: Mapping[int, Dump], id: int, members: tuple[int, ...], hidden: bool) -> None:
        self._dumps = dumps
        self._id, self._members, self._hidden = id, members, hidden
        # The next collective that each has to complete, and whether it has begun with it.
        self._at: dict[int, tuple[int, bool]] = {}
        self._last: dict[int, Operation | None] = {}
        for rank in members:
            if rank not in dumps:
                continue
            mine = [o for o in dumps[rank].operations if self._is_mine(o)]
            waiting = [o for o in mine if o.is_open]
            self._last[rank] = min(waiting, key=_sequence) if waiting else max(mine, key=_sequence, default=None)
            last = self._last[rank]
            self._at[rank] = (last.sequence, True) if waiting else (last.sequence + 1 if last else 1, False)

    @property
    def is_waiting(self) -> bool:
        return any(begun for _, begun in self._at.values())

    @property
    def behind(self) -> list[int]:
        """Those that have got least far, unless all are equally far."""
        least = min(self._at.values())
        return [rank for rank, at in self._at.items() if at == least] if len(set(self._at.values())) > 1 else []

    def sentences(self) -> list[str]:
        clusters: dict[tuple, list[int]] = defaultdict(list)
        for rank, at in sorted(self._at.items()):
            last = self._last[rank]
            # Those that are in no operation are told of one by one.
            clusters[at, _signature(last), last.at if last and at[1] else str(rank)].append(rank)
        parts = []
        in_order = [ranks for _, ranks in sorted(clusters.items(), key=_order)]
        for ranks in in_order:
            waits = ranks is not in_order[0] or not self.behind
            are_all_others = waits and len(in_order) == 2 and len(ranks) > 1 and len(self._at) == len(self._members)
            parts.append(self._part("the others" if are_all_others else name_ranks(ranks), ranks, waits))
        return [self._name() + ", ".join(parts), *self._disagreements()]

    def _is_mine(self, operation: Operation) -> bool:
        return operation.collective and (operation.group, operation.hidden) == (self._id, self._hidden)

    def _name(self) -> str:
        if self._id == 0 and not self._hidden:
            return ""
        beside = "beside " if self._hidden else "in "
        which = "the group of all ranks" if self._id == 0 else f"group {self._id} ({name_ranks(self._members)})"
        return f"{beside}{which}: "

    def _part(self, who: str, ranks: list[int], waits: bool) -> str:
        last, several = self._last[ranks[0]], len(ranks) > 1
        if not self._at[ranks[0]][1]:
            return f"{who} {self._elsewhere(ranks[0], last)}"
        verb = ("wait in" if several else "waits in") if waits else ("are in" if several else "is in")
        seconds = max(_seconds(self._dumps[rank], self._last[rank]) for rank in ranks)
        return f"{who} {verb} {last}{last.at} for {_duration(seconds)}{self._main(ranks, last)}"

    def _elsewhere(self, rank: int, last: Operation | None) -> str:
        """What a rank does that has not come to the group's next collective."""
        dump = self._dumps[rank]
        other = _oldest_open(dump)
        if other is not None:
            group = "" if other.group == self._id else f" of group {other.group}"
            return f"is in {other}{group}{other.at} for {_duration(_seconds(dump, other))}"
        latest = _latest(dump)
        if latest is None:
            return f"has not been in an operation yet{self._main([rank], None)}"
        ended = f"{latest}{latest.at} ended {_duration(_seconds(dump, latest))} ago"
        return f"computes since {ended}{self._main([rank], latest)}"

    def _main(self, ranks: list[int], last: Operation | None) -> str:
        """Where the program is meanwhile, if that is another line."""
        places = {next(iter(self._dumps[rank].threads.items()), ("", "")) for rank in ranks}
        if len(places) != 1:
            return ""
        _, place = places.pop()  # of the main thread, if it has any
        return f" (the program is at {place})" if place and (last is None or place != last.place) else ""

    def _disagreements(self) -> list[str]:
        """Ranks that are in the same collective by its number, but in another one by what it is."""
        calls: dict[int, dict[tuple, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank, (sequence, begun) in sorted(self._at.items()):
            if begun:
                calls[sequence][_signature(self._last[rank])].append(rank)
        sentences = []
        for sequence, kinds in calls.items():
            if len(kinds) > 1:
                said = [f"{name_ranks(ranks)} {_call(self._last[ranks[0]], len(ranks))}" for ranks in kinds.values()]
                sentences.append(f"the ranks disagree on #{sequence}: {', '.join(said)}")
        return sentences


def _between_two(dumps: Mapping[int, Dump], states: list[RankState]) -> list[str]:
    """send, recv and sendrecv that wait for the other side."""
    sentences = []
    for rank, dump in sorted(dumps.items()):
        for operation in dump.operations:
            if not operation.is_open or operation.collective:
                continue
            other = operation.waits_for
            text = f"rank {rank} waits in {operation}{operation.at} for {_duration(_seconds(dump, operation))}"
            if other is not None and other < len(states):
                state = states[other]
                doing = f"is in {state.doing}" if state.operation and state.operation.is_open else state.doing
                at = state.operation.at if state.operation is not None else ""
                text += f"; rank {other} {'has left no record' if state.dump is None else doing + at}"
            sentences.append(text)
    return sentences


def _state(rank: int, dump: Dump | None, is_behind: bool) -> RankState:
    operation = None if dump is None else _oldest_open(dump) or _latest(dump)
    return RankState(rank, dump, operation, 0.0 if operation is None else _seconds(dump, operation), is_behind)


def _oldest_open(dump: Dump) -> Operation | None:
    return next((operation for operation in dump.operations if operation.is_open), None)


def _latest(dump: Dump) -> Operation | None:
    return max(dump.operations, key=lambda operation: operation.ended_ns or 0, default=None)


def _seconds(dump: Dump, operation: Operation) -> float:
    """Since it began if it is open, until the record was written or the group failed; else since it ended."""
    if operation.ended_ns is not None and operation.is_open:
        return (operation.ended_ns - operation.started_ns) / 1e9
    return (dump.monotonic_ns - (operation.ended_ns or operation.started_ns)) / 1e9


def _signature(operation: Operation | None) -> tuple:
    """Equal on all ranks that are in the same call."""
    return () if operation is None else (operation.name, operation.array, str(operation.root))


def _call(operation: Operation, ranks: int) -> str:
    root = f" with root {operation.root}" if operation.root is not None else ""
    array = f" of {operation.array}" if operation.array else ""
    return f"{'call' if ranks > 1 else 'calls'} {operation.name}{root}{array}{operation.at}"


def _sequence(operation: Operation) -> int:
    return operation.sequence


def _order(item: tuple[tuple, list[int]]) -> tuple:
    return item[0][0], item[1]


def _duration(seconds: float) -> str:
    return f"{max(seconds, 0):.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _capital(sentence: str) -> str:
    return f"{sentence[0].upper()}{sentence[1:]}."
