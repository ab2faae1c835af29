"""Looks at a job again and again: what each rank does, and how much it has sent and received since the last look."""

from dataclasses import asdict, dataclass
from typing import Any

from mlxdist.runtime.flight_records import Dump

from .analysis import RankState, analyse
from .ask import HostRanks, LocalRanks

__all__ = ["Row", "View", "Watch"]

# Between two looks ranks overtake each other all the time. One is late once another has waited for so long.
LATE_SECONDS = 0.1


@dataclass(frozen=True)
class Row:
    """One rank. Where it has not answered, host and process are those that it had before."""

    rank: int
    host: str
    pid: int | None
    step: int | None  # as the program has said
    steps: int | None
    operations: int  # collectives of all ranks that this one has begun
    operation: str  # "all_sum #412", in progress or the last one
    in_operation: bool
    place: str
    seconds: float  # since the operation began or ended
    gbps: float | None  # sent and received since the last look; None at the first
    waits_for: int | None
    is_late: bool  # others wait for it
    has_answered: bool


@dataclass(frozen=True)
class View:
    """All ranks at one moment.

    ``sentences``: who is behind whom, where somebody waits or the group has failed; ``notes``: who has not answered.
    """

    job: str
    rows: list[Row]
    sentences: list[str]
    notes: list[str]
    ended: bool

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Watch:
    def __init__(self, ranks: LocalRanks | HostRanks) -> None:
        self._ranks = ranks
        self._last: dict[int, Dump] = {}

    def look(self, seconds: float) -> View:
        """Ranks have so many seconds to answer.

        Raises:
            InvalidArgument: there is no such job any more.
        """
        found = self._ranks.ask("status", seconds)
        known = self._last | found.dumps
        sentences: list[str] = []
        rows: list[Row] = []
        if found.dumps:
            analysis = analyse(found.dumps)
            waits = any(_seconds_in(state) >= LATE_SECONDS for state in analysis.states)
            rows = [self._row(state, known.get(state.rank), waits) for state in analysis.states]
            if waits or any(dump.error for dump in found.dumps.values()):
                sentences = analysis.sentences
        self._last = known
        return View(self._ranks.job, rows, sentences, found.notes, found.ended)

    def _row(self, state: RankState, known: Dump | None, waits: bool) -> Row:
        now, operation = state.dump, state.operation
        return Row(
            rank=state.rank,
            host=known.host if known else "",
            pid=known.pid if known else None,
            step=known.step if known else None,
            steps=known.steps if known else None,
            operations=_operations(known),
            operation=str(operation) if operation else "",
            in_operation=bool(operation and operation.is_open),
            place=operation.place if operation else "",
            seconds=max(0.0, state.seconds),
            gbps=None if now is None else _speed(self._last.get(state.rank), now),
            waits_for=operation.waits_for if operation and operation.is_open else None,
            is_late=state.is_behind and waits,
            has_answered=now is not None,
        )


def _seconds_in(state: RankState) -> float:
    """For so long the rank has been in an operation."""
    return state.seconds if state.operation is not None and state.operation.is_open else 0.0


def _operations(dump: Dump | None) -> int:
    of_all = [o.sequence for o in dump.operations if o.group == 0 and o.collective and not o.hidden] if dump else []
    return max(of_all, default=0)


def _speed(before: Dump | None, now: Dump) -> float | None:
    """In GB/s. Counters of a group that has been closed are gone: they never count backwards here."""
    if before is None or before.pid != now.pid or now.monotonic_ns <= before.monotonic_ns:
        return None
    moved = now.bytes_sent + now.bytes_received - before.bytes_sent - before.bytes_received
    return max(0, moved) / (now.monotonic_ns - before.monotonic_ns)
