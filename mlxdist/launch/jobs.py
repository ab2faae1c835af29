"""Which jobs of this user run on this host: a folder for each, made by its launcher.

    <runtime folder>/<job>/job.json    launcher, ranks, their temporary folder, command
    <runtime folder>/<job>/lock        locked as long as the launcher or its keeper runs
    <runtime folder>/<job>/flight/     what the ranks record when something goes wrong, unless MLXDIST_FLIGHT is set

The ranks' temporary folders lie elsewhere, in TMPDIR: XDG_RUNTIME_DIR is small, since it is memory, and often nothing
in it may be executed. Of a job on several hosts each host has such a folder for its own ranks, and the launcher's
machine one that says which hosts they are (job_hosts.py).

The lock says whether a job still has somebody who ends it. The kernel gives it back when both processes are gone,
however they ended, and no process number can be mistaken for another. What is left of a job without one is removed by
the next launcher (leftovers.py), but for the recordings.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InvalidArgument
from .processes import start_times
from .restarts import read_next
from .runtime_folder import OF_HOSTS, OF_RESTARTS, is_locked, runtime_folder, write_json

if TYPE_CHECKING:
    from .job_hosts import HostsRecord

__all__ = ["Job", "JobFolder", "Record", "find_job", "list_jobs", "read_record"]


@dataclass(frozen=True)
class Record:
    """What job.json says. A rank has its process and, to tell that from a later one, when it started."""

    launcher: int
    temporary: Path
    flight: str
    command: list[str]
    ranks: dict[int, tuple[int, str]]

    def living(self) -> dict[int, int]:
        """The processes of the ranks that still run."""
        started = start_times(pid for pid, _ in self.ranks.values())
        return {rank: pid for rank, (pid, when) in self.ranks.items() if started.get(pid) == when}


@dataclass(frozen=True)
class Job:
    """A job. ``pids`` has the process of every rank that runs here; it is empty for a job that has ended.

    ``flight_folder``: where its ranks write their flight recordings; None where MLXDIST_FLIGHT says that they do not.
    ``launcher``: the process that supervises it, 0 for a job that has ended; ``started``: when, in seconds since 1970.
    ``hosts``: of a job on several hosts that was started on this machine, who they are. On another host of such a job
    the launcher is the agent, which ends the ranks there, and with them the job.
    """

    name: str
    folder: Path
    flight_folder: Path | None
    pids: dict[int, int]
    command: list[str]
    launcher: int = 0
    started: float = 0.0
    hosts: HostsRecord | None = None


def list_jobs() -> list[Job]:
    """The jobs of this user that run on this machine or were started here, by name."""
    from .job_hosts import read_hosts_record  # a launcher needs none

    runtime = runtime_folder()
    jobs: dict[str, Job] = {}
    names = [name for name in sorted(os.listdir(runtime)) if not name.startswith(".")]
    for name in names:
        record = read_record(runtime / name)
        if record is not None and is_locked(runtime / name):
            flight = None if record.flight == "none" else Path(record.flight)
            with contextlib.suppress(FileNotFoundError):  # it has just ended
                started = (runtime / name / "lock").stat().st_mtime
                found = Job(name, runtime / name, flight, record.living(), record.command, record.launcher, started)
                jobs[name] = found
    for name in names:
        hosts = read_hosts_record(runtime / name) if name.endswith(OF_HOSTS) else None
        if hosts is not None:
            name = name.removesuffix(OF_HOSTS)
            here = jobs.get(name) or Job(name, runtime / name, None, {}, hosts.command)
            jobs[name] = replace(here, launcher=hosts.launcher, started=hosts.started, hosts=hosts)
    for name in names:
        coming = read_next(runtime / name) if name.endswith(OF_RESTARTS) else None
        if coming is not None and all(job.launcher != coming.launcher for job in jobs.values()):  # else it runs
            folder = runtime / coming.job
            jobs[coming.job] = Job(
                coming.job, folder, None, {}, coming.command, launcher=coming.launcher, started=coming.started
            )
    return [job for _, job in sorted(jobs.items())]


def find_job(name: str) -> Job:
    """The job of that name, or of a name that begins so if there is only one.

    A running one comes first; else one that has ended, whose flight recordings are still there.

    Raises:
        InvalidArgument: there is none, or more than one.
    """
    running = list_jobs()
    found = [job for job in running if job.name == name] or [job for job in running if job.name.startswith(name)]
    if len(found) == 1:
        return found[0]
    folder = runtime_folder() / name
    if not found and name and "/" not in name and not name.startswith(".") and (folder / "flight").is_dir():
        return Job(name, folder, folder / "flight", {}, [])
    which = "; ".join(f"{job.name} ({' '.join(job.command)[:60]})" for job in found or running) or "none"
    problem = f"job {name!r} could be any of" if found else f"there is no job {name!r} in {folder.parent}; running are"
    raise InvalidArgument(f"{problem}: {which}")


class JobFolder:
    """The folder of a job that is being started, locked until ``close``."""

    def __init__(self, name: str, temporary: Path, command: Sequence[str], flight: str | None = None) -> None:
        """``flight``: the MLXDIST_FLIGHT that the user has set.

        Raises OSError or ResourceError: the folder cannot be made.
        """
        runtime = runtime_folder()
        self.folder = runtime / name
        self._recordings = self.folder / "flight"
        if flight != "none":
            flight = os.path.abspath(flight or self._recordings)
        self.flight = flight  # for the ranks
        self._record = Record(os.getpid(), temporary, flight, list(command), {})
        # Under another name until it is complete: nobody sees it without its lock.
        new = runtime / f".new-{name}"
        new.mkdir(mode=0o700)
        try:
            self._lock = os.open(new / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with contextlib.suppress(OSError):  # no locks here: the folder is never cleaned up by another launcher
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._write(new)
            (new / "flight").mkdir(mode=0o700)
            new.rename(self.folder)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise

    def pass_on(self) -> tuple[int, ...]:
        """The descriptor that holds the lock: a process that inherits it holds the job as long as it runs."""
        return (self._lock,)

    def note_ranks(self, pids: dict[int, int]) -> None:
        """Which processes the ranks are. Best effort: without that only `mlxdist dump` does not find them."""
        started = start_times(pids.values())
        self._record.ranks.update({rank: (pid, started[pid]) for rank, pid in pids.items() if pid in started})
        with contextlib.suppress(OSError):
            self._write(self.folder)

    def recordings(self) -> Path | None:
        """The folder with what the ranks have recorded, or None. Not one that the user has named."""
        try:
            return self._recordings if os.listdir(self._recordings) else None
        except OSError:
            return None

    def remove_recordings(self) -> None:
        shutil.rmtree(self._recordings, ignore_errors=True)

    def close(self) -> None:
        os.close(self._lock)

    def _write(self, folder: Path) -> None:
        record = self._record
        fields = {
            "launcher": record.launcher,
            "temporary": str(record.temporary),
            "flight": record.flight,
            "command": record.command,
            "ranks": {str(rank): list(process) for rank, process in record.ranks.items()},
        }
        write_json(folder / "job.json", fields)


def read_record(folder: Path) -> Record | None:
    """What a job folder says, or None: the job has ended, or somebody has damaged it."""
    try:
        fields = json.loads((folder / "job.json").read_text())
        ranks = {int(rank): (int(pid), str(started)) for rank, (pid, started) in fields["ranks"].items()}
        command = [str(part) for part in fields["command"]]
        return Record(int(fields["launcher"]), Path(fields["temporary"]), str(fields["flight"]), command, ranks)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
