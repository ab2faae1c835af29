"""Analyzes the flight records of a job repeatedly, for `mlxdist top`."""

from dataclasses import dataclass, field, replace

from mlxdist.cluster.facts.power import Power
from mlxdist.runtime.diagnostics.flight_records import FlightRecord

from .collect import JobRanks
from .stragglers import RankState, analyze

__all__ = ["View", "Watch"]

# Running ranks overtake each other all the time. A rank is a straggler once another has waited for this many seconds.
STRAGGLER_SECONDS = 0.1


@dataclass(frozen=True)
class View:
    """The state of all ranks at one moment.

    ``findings``: stragglers where ranks wait or the group has failed; ``notes``: ranks that have not responded.
    """

    job: str
    ranks: list[RankState]
    findings: list[str]
    notes: list[str]
    ended: bool
    power: dict[str, Power] = field(default_factory=dict)  # of each Mac, by its name

    @property
    def warnings(self) -> list[str]:
        """Sentences on Macs that are slower than they could be."""
        found = [(host, problem) for host, power in self.power.items() for problem in power.problems()]
        return [f"{host}: {problem.text}; {problem.remedy}" for host, problem in found if problem.slows]


class Watch:
    def __init__(self, ranks: JobRanks) -> None:
        self._ranks = ranks
        self._last: dict[int, FlightRecord] = {}

    def refresh(self, seconds: float) -> View:
        """Collects and analyzes the records. ``seconds``: the time limit for the ranks."""
        found = self._ranks.collect(full=False, seconds=seconds)
        if not found.records:
            return View(self._ranks.job, [], [], found.notes, found.ended)
        analysis = analyze(found.records, found.members, self._last)
        states, findings = analysis.states, analysis.findings
        if not any(state.in_operation and state.elapsed >= STRAGGLER_SECONDS for state in states):
            states = [replace(state, is_straggler=False) for state in states]
            findings = findings if any(state.error for state in states) else []
        self._last |= found.records
        power = {record.host: record.power for record in found.records.values() if record.power is not None}
        return View(self._ranks.job, states, findings, found.notes, found.ended, power)
