"""Finds events in the views of a job, for `mlxdist watch`: ranks that others wait for, or that stand still, do not
respond or have failed, hosts that are short of memory, and Macs that are slow."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from mlxdist.launch.event_hook import Event
from mlxdist.runtime.observation.stragglers import RankState
from mlxdist.runtime.observation.view import View

__all__ = ["Conditions", "ViewEvents", "Key"]


class Key(NamedTuple):
    """A condition: what it is, and the rank or the host that it is about."""

    event: str
    rank: int | None = None
    host: str = ""


_OVER = {
    "failed": "The job no longer shows an error.",
    "memory_pressure": "{host} has memory again.",
    "silent": "Rank {rank} responds again.",
    "slow": "{host} is no longer slowed.",
    "stalled": "Ranks go on again.",
    "straggler": "Others no longer wait for rank {rank}.",
}


class Conditions:
    """Conditions that have begun and not ended. One that is away for a short time has not ended.

    Args:
        quiet: the seconds without a condition after which it has ended.
    """

    def __init__(self, quiet: float) -> None:
        self._quiet = quiet
        self._seen: dict[Key, float] = {}

    def update(self, active: Mapping[Key, str], now: float) -> Iterator[tuple[Key, str, bool]]:
        """The conditions that begin, each with its text, and those that end.

        Args:
            active: those of now, each with a sentence.
            now: the time, in seconds.
        """
        for key, text in active.items():
            if key not in self._seen:
                yield key, text, False
            self._seen[key] = now
        for key, last in list(self._seen.items()):
            if now - last >= self._quiet:
                del self._seen[key]
                yield key, "", True


class ViewEvents:
    """Makes events of views of a job.

    Args:
        straggler: the seconds that ranks wait for one until it is a straggler.
        stall: the seconds without progress of all ranks until the job is stalled.
        quiet: see `Conditions`; a rank that has not responded for so long is silent.
    """

    def __init__(self, straggler: float, stall: float, quiet: float) -> None:
        self._straggler, self._stall, self._quiet = straggler, stall, quiet
        self._conditions = Conditions(quiet)
        self._responded: dict[int, float] = {}
        self._short: set[str] = set()  # hosts under memory pressure

    def update(self, view: View, without_progress: float, now: float) -> list[Event]:
        """The events since the view before.

        Args:
            view: of now.
            without_progress: the seconds for which no rank has gone on.
            now: the time, in seconds.
        """
        active: dict[Key, str] = {}
        for state in view.ranks:
            active |= self._of_rank(state, view, now)
        for host, power in view.power.items():
            for problem in power.problems():
                if problem.slows:
                    active[Key("slow", host=host)] = f"{host}: {problem.text}; {problem.remedy}."
        self._short = {host for host, memory in view.memory.items() if memory.is_short(host in self._short)}
        for host in self._short:
            memory = view.memory[host]
            active[Key("memory_pressure", host=host)] = f"{host}: {memory.text}; {memory.remedy}."
        if without_progress >= self._stall:
            found = " ".join(view.findings or view.notes)
            active[Key("stalled")] = f"No rank has gone on for {without_progress:.0f} s. {found}".rstrip()
        events = []
        for key, text, over in self._conditions.update(active, now):
            text = _OVER[key.event].format(**key._asdict()) if over else text
            events.append(Event(key.event, view.job, text, over, key.rank, key.host))
        return events

    def _of_rank(self, state: RankState, view: View, now: float) -> dict[Key, str]:
        rank, host = state.rank, state.host
        if state.has_responded:
            self._responded[rank] = now
        if state.error:
            return {Key("failed"): f"The job has failed: {state.error}"}
        silent = now - self._responded.setdefault(rank, now)
        if silent >= self._quiet and not state.is_gone:
            return {Key("silent", rank, host): f"Rank {rank} has not responded for {silent:.0f} s."}
        waited = max((other.elapsed for other in view.ranks if other.in_operation and other != state), default=0.0)
        if state.is_straggler and waited >= self._straggler:
            return {
                Key("straggler", rank, host): f"Others have waited {waited:.1f} s for rank {rank}. {view.findings[0]}"
            }
        return {}
