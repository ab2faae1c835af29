"""Analyzes the flight records of a job repeatedly, for `mlxdist top`."""

from mlxdist.runtime.observation.view import View, Viewer

from .collect import JobRanks

__all__ = ["Watch"]


class Watch:
    def __init__(self, ranks: JobRanks) -> None:
        self._ranks, self._viewer = ranks, Viewer()

    def refresh(self, seconds: float) -> View:
        """Collects and analyzes the records. ``seconds``: the time limit for the ranks."""
        found = self._ranks.collect(full=False, seconds=seconds)
        return self._viewer.view(self._ranks.job, found.records, found.members, found.notes, found.ended)
