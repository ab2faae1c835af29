"""Exit statuses as shells have them: 128 + the signal for a process that a signal has ended, 124 for a late job."""

import contextlib
import signal
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["TOO_LATE", "Ending", "FirstFailure", "describe", "of_process"]

TOO_LATE = 124  # as of timeout(1)


class FirstFailure(NamedTuple):
    """The rank that failed first, and the step of `mlxdist.set_step` that the job was at, as a rank has noted it."""

    rank: int
    step: int | None = None

    @classmethod
    def parse(cls, note: str) -> "FirstFailure":
        """Raises ValueError: it is no note."""
        rank, *step = map(int, note.split())
        return cls(rank, *step[:1])


@dataclass(frozen=True)
class Ending:
    """The end of a job. ``failed``: the job failed by itself and no process of it is left, so a restart is possible."""

    status: int  # for the launcher to exit with
    text: str  # closing line, perhaps empty
    failed: bool
    cause: str = ""  # how the closing line begins: without the other ranks, and without paths of this machine
    rank: int | None = None  # that failed first
    step: int | None = None  # of the program, when it failed


def of_process(returncode: int | None) -> int | None:
    """The exit status for subprocess's return code, which is negative for a signal, and None while the process runs."""
    return 128 - returncode if returncode is not None and returncode < 0 else returncode


def describe(status: int) -> str:
    with contextlib.suppress(ValueError):  # no signal has that number
        name = signal.Signals(status - 128).name
        return f"killed by {name}" + (" (was memory short?)" if name == "SIGKILL" else "")
    return f"with exit status {status}"
