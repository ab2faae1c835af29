"""Restarts a job when a rank of it has failed (`mlxdist launch --max-restarts`).

The whole group restarts: a rank that comes back alone would find peers in the middle of a collective whose data it
has lost. The job before has ended completely by then, and the next has another name, secret and address, so nothing of
the one reaches the other.

Any failure counts, as with torchrun: which exit status means a mistake in the command line is the program's business.
But where the same rank fails twice in a row with the same status at the same step of the program (`mlxdist.set_step`),
it would fail there again, and no restart follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from mlxdist.base.environment import MAX_RESTARTS

if TYPE_CHECKING:
    from .exit_status import Ending
    from .jobs import JobDirectory
    from .wakeup import Wakeup

__all__ = ["Follower", "beginning_of_restarts", "name_of_start", "run_with_restarts"]

# Seconds before the first restart, and twice as long before each that follows: whatever has just killed a rank, a
# machine without memory or a full disk, often needs a moment to recover.
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0
# A start that was ready for this many seconds resets the count of restarts; Kubernetes uses the same time.
LASTING = 600.0


class Follower(Protocol):
    """A context manager that outlives the restarts of a serving job, and ends with it.

    The launcher's thread calls its methods.
    """

    def starting(self, place: Path | tuple[str, int], secret: str = "") -> None:
        """Called when the ranks are started.

        ``place``: the temporary directory of rank 0, if it is on this machine; else the address and port of its host
        where it listens for who has ``secret``, that of the job.
        """

    def seconds_ready(self) -> float:
        """Seconds for which the last start has been ready; 0 if it never was."""

    def failed(self, reason: str, pause: float | None, rank: int | None = None) -> None:
        """Called after a start has failed and ended. The next follows after ``pause`` seconds, or never (None).

        ``rank``: the one that failed first, if it was a rank.
        """

    def __enter__(self) -> Follower: ...

    def __exit__(self, *exception: object) -> None: ...


def name_of_start(name: str, restart: int) -> str:
    return f"{name}-{restart}" if restart else name


def beginning_of_restarts(name: str) -> str:
    """The beginning that the names of a job's restarts have, whichever of its starts has ``name``."""
    return f"{name.partition('-')[0]}-"


def run_with_restarts(
    name: str,
    run_once: Callable[[int], Ending],
    most: int,
    wakeup: Wakeup,
    say: Callable[[str], None],
    directory: JobDirectory | None,
    follower: Follower | None = None,
) -> int:
    """Calls ``run_once(number of this restart)`` until it succeeds, was interrupted, or ``most`` restarts have failed.

    ``name``: the name of the first start. ``directory`` shows the next start, if there may be one. With a ``follower``,
    a job that fails before it was ever ready is not restarted. A start that was ready resets the pause and, once it was
    ready for LASTING seconds, also the count of restarts. Returns the exit status of the last start, or 128 + the
    signal that came in a pause.
    """
    used, pause, is_worth_it, before = 0, FIRST_PAUSE, follower is None, None
    for restart in range(MAX_RESTARTS + 1):
        ending = run_once(restart)
        if follower is not None and (seconds := follower.seconds_ready()):
            used, pause, is_worth_it = 0 if seconds >= LASTING else used, FIRST_PAUSE, True
        is_repeated = _is_repeated(ending, before)
        if not ending.failed or used == most or restart == MAX_RESTARTS or not is_worth_it or is_repeated:
            break
        before = ending
        used += 1
        if directory is not None:
            directory.update(replace(directory.job, name=name_of_start(name, restart + 1)))
        following = f"restart {used} of {most}"
        if follower is not None:
            follower.failed(f"{ending.cause}; {following}", pause, ending.rank)
        say(f"{ending.text}; {following} in {pause:g} s.")
        interrupt = wakeup.wait(pause)
        if interrupt is not None:
            say(f"interrupted by {interrupt.name} before {following}.")
            return 128 + interrupt
        pause = min(2 * pause, LONGEST_PAUSE)
    last = ""
    if ending.failed and used:
        repeats = f"; it failed like that at step {ending.step} before, so it is not started again"
        last = repeats if is_repeated and used < most else f"; it was the last of {most} restarts"
    if follower is not None and ending.failed:
        follower.failed(f"{ending.cause}{last}", None, ending.rank)
    if ending.text:
        say(f"{ending.text}{last}.")
    return ending.status


def _is_repeated(ending: Ending, before: Ending | None) -> bool:
    """Whether the start before has failed likewise, at the same step. At step 0 it may be what the job connects to."""
    if before is None or not ending.failed or not ending.step:
        return False
    return (ending.rank, ending.status, ending.step) == (before.rank, before.status, before.step)
