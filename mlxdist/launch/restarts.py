"""Restarts a job when a rank of it has failed (`mlxdist launch --max-restarts`).

The whole group restarts: a rank that comes back alone would find peers in the middle of a collective whose data it
has lost. The job before has ended completely by then, and the next has another name, secret and address, so nothing of
the one reaches the other.

Any failure counts, as with torchrun: which exit status means a mistake in the command line is the program's business.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .exit_status import Ending
    from .jobs import JobDirectory
    from .wakeup import Wakeup

__all__ = ["name_of_start", "run_with_restarts"]

# Seconds before the first restart, and twice as long before each that follows: whatever has just killed a rank, a
# machine without memory or a full disk, often needs a moment to recover.
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0


def name_of_start(name: str, restart: int) -> str:
    return f"{name}-{restart}" if restart else name


def run_with_restarts(
    name: str,
    run_once: Callable[[int], Ending],
    most: int,
    wakeup: Wakeup,
    say: Callable[[str], None],
    directory: JobDirectory | None,
) -> int:
    """Calls ``run_once(number of this restart)`` until it succeeds, was interrupted, or ``most`` restarts have failed.

    ``name``: of the first start; ``directory`` shows the next one, if there may be one. Returns the exit status of the
    last one, or 128 + the signal that came in a pause.
    """
    for restart in itertools.count():
        ending = run_once(restart)
        if not ending.failed or restart >= most:
            break
        if directory is not None:
            directory.update(replace(directory.job, name=name_of_start(name, restart + 1)))
        pause = min(FIRST_PAUSE * 2.0**restart, LONGEST_PAUSE)
        say(f"{ending.text}; restart {restart + 1} of {most} in {pause:g} s.")
        interrupt = wakeup.wait(pause)
        if interrupt is not None:
            say(f"interrupted by {interrupt.name} before restart {restart + 1} of {most}.")
            return 128 + interrupt
    if ending.text:
        last = f"; it was the last of {most} restarts" if ending.failed and most else ""
        say(f"{ending.text}{last}.")
    return ending.status
