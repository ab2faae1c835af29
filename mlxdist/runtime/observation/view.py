"""The state of all ranks of a job at one moment: for `mlxdist top`, and for the page of `mlxdist serve`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mlxdist.cluster.facts.power import Power

from ..diagnostics.flight_records import FlightRecord
from ..rendezvous.heartbeat import PeerStatus
from .memory import HostMemory, host_memory
from .stragglers import RankState, analyze

__all__ = ["View", "Viewer"]

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
    memory: dict[str, HostMemory] = field(default_factory=dict)  # of each host, by its name

    @property
    def warnings(self) -> list[str]:
        """Sentences on hosts that are short of memory, and on Macs that are slower than they could be."""
        found = [(host, problem) for host, power in self.power.items() for problem in power.problems()]
        short = [f"{host}: {m.text}: memory pressure; {m.remedy}" for host, m in self.memory.items() if m.is_short()]
        return short + [f"{host}: {problem.text}; {problem.remedy}" for host, problem in found if problem.slows]


class Viewer:
    """Makes views of a job. It keeps the last record of each rank, from which speeds follow."""

    def __init__(self) -> None:
        self._last: dict[int, FlightRecord] = {}

    def view(
        self,
        job: str,
        records: Mapping[int, FlightRecord],
        members: Mapping[int, PeerStatus],
        notes: list[str],
        ended: bool = False,
    ) -> View:
        """The view that follows from new records.

        Args:
            job: the name of the job.
            records: the records of the ranks that have responded.
            members: rank 0's status of each rank.
            notes: sentences on the ranks that have not responded.
            ended: whether the job has ended.
        """
        if not records:
            return View(job, [], [], notes, ended)
        analysis = analyze(records, members, self._last)
        states, findings = analysis.states, analysis.findings
        if not any(state.in_operation and state.elapsed >= STRAGGLER_SECONDS for state in states):
            states = [replace(state, is_straggler=False) for state in states]
            findings = findings if any(state.error for state in states) else []
        self._last |= records
        power = {record.host: record.power for record in records.values() if record.power is not None}
        # Of ranks that do not respond, too: those of a host that pages may not.
        present = (record for rank, record in self._last.items() if not (rank in members and members[rank].is_gone))
        return View(job, states, findings, notes, ended, power, host_memory(present))
