"""Finds a job that stands still, wherever its ranks hang, for `mlxdist launch --stall-timeout`."""

import threading
import time
from collections.abc import Callable

from mlxdist.base.errors import Error
from mlxdist.cluster.hostfile.options import HostSelection
from mlxdist.runtime.observation.progress import Progress
from mlxdist.runtime.observation.stack_groups import group_stacks, odd_ones
from mlxdist.runtime.observation.stragglers import analyze

from .collect import Collected, JobRanks, find_ranks
from .stack_text import stack_text

__all__ = ["StallWatch"]

_RESPONSE_SECONDS = 2.0  # for the ranks, which are asked again soon
_STACK_SECONDS = 5.0
_MIN_PAUSE, _MAX_PAUSE = 0.2, 5.0


class StallWatch:
    """Watches a job from its start. A context manager, whose thread ends with it.

    Args:
        job: the full name of the job, which this process launches.
        seconds: without progress until the job stands still.
        say: called with what the ranks do then: findings, and their Python stacks.
        on_stall: called after that, once.
    """

    def __init__(self, job: str, seconds: float, say: Callable[[str], None], on_stall: Callable[[], None]) -> None:
        self._job, self._seconds, self._say, self._on_stall = job, seconds, say, on_stall
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mlxdist stall watch", daemon=True)

    def __enter__(self) -> "StallWatch":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join(_RESPONSE_SECONDS)

    def _run(self) -> None:
        try:
            with find_ranks(self._job, HostSelection()) as ranks:
                self._watch(ranks)
        except Error as error:
            if not self._ended.is_set():
                self._say(f"--stall-timeout has no effect from now on: {error}")

    def _watch(self, ranks: JobRanks) -> None:
        progress = Progress(time.monotonic())
        pause = min(max(self._seconds / 10, _MIN_PAUSE), _MAX_PAUSE)
        while not self._ended.wait(pause):
            found = ranks.collect(full=False, seconds=_RESPONSE_SECONDS)
            now = time.monotonic()
            if found.unreachable:  # a healthy job outlives an outage of the control network
                progress.excuse(now)
            elif progress.update(found.records, now) >= self._seconds:
                if not self._ended.is_set():
                    self._say(_report(ranks.collect(full=True, seconds=_STACK_SECONDS), self._seconds))
                    self._on_stall()
                return


def _report(found: Collected, seconds: float) -> str:
    """Says what the ranks do, and where their threads are."""
    groups = group_stacks(found.stacks)
    findings = analyze(found.records, found.members).findings if found.records else []
    lines = [f"no rank has gone on for {seconds:g} s.", *findings, *odd_ones(groups), *found.notes]
    if groups:
        lines.append(stack_text(groups).plain)
    return "\n".join(lines)
