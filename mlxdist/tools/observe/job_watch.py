"""Watches a job and its restarts, for `mlxdist watch`."""

import time
from collections.abc import Iterator

from mlxdist.base.errors import InvalidArgument, ResourceError
from mlxdist.cluster.hostfile.options import HostSelection
from mlxdist.launch.event_hook import Event
from mlxdist.launch.restarts import beginning_of_restarts
from mlxdist.runtime.observation.progress import Progress
from mlxdist.runtime.observation.view import Viewer

from .collect import JobRanks, find_ranks
from .view_events import ViewEvents

__all__ = ["JobWatch"]

_RESPONSE_SECONDS = 2.0
_RESTART_SECONDS = 5.0  # in which a launcher says that a job will be restarted, with whatever pause


class JobWatch:
    """Events of a job, and of its restarts: these have its name with a number behind it.

    Args:
        job: the name of the job, or its beginning; None for the only one.
        selection: the hosts to look at.
        interval: seconds from one look to the next.
        straggler, stall, quiet: see `ViewEvents`.
    """

    def __init__(
        self, job: str | None, selection: HostSelection, interval: float, straggler: float, stall: float, quiet: float
    ) -> None:
        self._job, self._selection, self._interval = job, selection, interval
        self._limits = (straggler, stall, quiet)

    def events(self) -> Iterator[Event]:
        """The events, as they happen, until the job has ended and is not started again.

        Raises:
            InvalidArgument: there is no such job at first, or more than one.
            ResourceError: no host responds.
        """
        job, last, gives_up = self._job, "", 0.0
        while not last or time.monotonic() < gives_up:
            try:
                with find_ranks(job, self._selection) as ranks:
                    last = ranks.job
                    yield from self._of(ranks)
                gives_up = time.monotonic() + _RESTART_SECONDS  # it has run, or this is the pause before it
            except (InvalidArgument, ResourceError):
                if not last:
                    raise
            job = beginning_of_restarts(last)
            time.sleep(self._interval)

    def _of(self, ranks: JobRanks) -> Iterator[Event]:
        """The events of one start; none where it has ended already, or not begun."""
        found = ranks.collect(full=False, seconds=_RESPONSE_SECONDS)
        if found.ended:
            return
        yield Event("watched", ranks.job, f"Job {ranks.job} is watched.")
        viewer, found_events = Viewer(), ViewEvents(*self._limits)
        progress = Progress(time.monotonic())
        while not found.ended:
            now = time.monotonic()
            if found.unreachable:
                progress.excuse(now)
            view = viewer.view(ranks.job, found.records, found.members, found.notes)
            yield from found_events.update(view, progress.update(found.records, now), now)
            time.sleep(self._interval)
            found = ranks.collect(full=False, seconds=_RESPONSE_SECONDS)
        yield Event("ended", ranks.job, f"Job {ranks.job} has ended.")
