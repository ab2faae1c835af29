"""Starts a job again when a rank of it has failed (`mlxdist launch --max-restarts`).

The whole group starts again: a rank that comes back alone would find peers in the middle of a collective whose data it
has lost. The job before has ended completely by then, and the next has another name, secret and address, so nothing of
the one reaches the other.

Any failure counts, as with torchrun: which exit status means a mistake in the command line is the program's business.

In the pause before a restart there is no job, but somebody may want to see or to stop what will be one:

    <runtime directory>/<first job>@restarts/next.json   launcher, command, and the name of the next start
    <runtime directory>/<first job>@restarts/lock        locked as long as the launcher runs
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .runtime_directory import OF_RESTARTS, is_locked, make_locked, write_json

if TYPE_CHECKING:
    from .exit_status import Ending
    from .wakeup import Wakeup

__all__ = ["Next", "RestartsFolder", "name_of_start", "read_next", "run_with_restarts"]

# Seconds before the first restart, and twice as long before each that follows: whatever has just killed a rank, a
# machine without memory or a full disk, often needs a moment to recover.
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0

_FILE = "next.json"


class Next(NamedTuple):  # a dataclass takes longer to be made, and few launchers need it
    """What next.json says. ``started``: the first start, in seconds since 1970."""

    job: str
    launcher: int
    started: float
    command: list[str]


class RestartsFolder:
    """The directory of a launcher that may start a job again. A context manager: there is none afterwards."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        """Raises ResourceError: it cannot be made."""
        self._name = name
        self._next = Next(name, os.getpid(), time.time(), list(command))
        self._folder, self._lock = make_locked(
            f"{name}{OF_RESTARTS}", lambda folder: write_json(folder / _FILE, self._next._asdict())
        )

    def __enter__(self) -> RestartsFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)

    def note_next(self, restart: int) -> None:
        """Best effort: without it the pause is shown under the name of an earlier start."""
        with contextlib.suppress(OSError):
            write_json(self._folder / _FILE, self._next._replace(job=name_of_start(self._name, restart))._asdict())


def name_of_start(name: str, restart: int) -> str:
    return f"{name}-{restart}" if restart else name


def read_next(folder: Path) -> Next | None:
    """Of a launcher that still runs; else None, also where somebody has damaged what it says."""
    from mlxdist.base.validation import as_text, fields_of, list_of, number, seconds  # a launcher reads none

    # A signal to the launcher must reach nobody else.
    launcher, words = number(2, 2**31 - 1), list_of(as_text, 1 << 16)
    checks = {"job": as_text, "launcher": launcher, "started": seconds, "command": words}
    if not is_locked(folder):
        return None
    try:
        found = fields_of(checks, json.loads((folder / _FILE).read_text()))
    except (OSError, ValueError, RecursionError):
        return None
    return Next(**found | {"command": list(found["command"])})


def run_with_restarts(
    name: str,
    command: Sequence[str],
    run_once: Callable[[int], Ending],
    most: int,
    wakeup: Wakeup,
    say: Callable[[str], None],
) -> int:
    """Calls ``run_once(number of this restart)`` until it succeeds, was interrupted, or ``most`` restarts have failed.

    ``name``: of the first start. Returns the exit status of the last one, or 128 + the signal that came in a pause.
    """
    with RestartsFolder(name, command) if most else contextlib.nullcontext() as folder:
        for restart in itertools.count():
            ending = run_once(restart)
            if not ending.failed or restart >= most:
                break
            folder.note_next(restart + 1)
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
