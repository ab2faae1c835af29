"""Which jobs of this user run on this host: a directory for each, made by its launcher.

    <runtime directory>/<job>/job.json    launcher, ranks, their temporary directory, command
    <runtime directory>/<job>/lock        locked as long as the launcher or its reaper runs
    <runtime directory>/<job>/flight/     flight records of the ranks, unless MLXDIST_FLIGHT_DIR is set

The ranks' temporary directories lie elsewhere, in TMPDIR: XDG_RUNTIME_DIR is small, since it is memory, and often
nothing in it may be executed. Of a job on several hosts each host has such a directory for its own ranks, and the
launcher's machine a record of which hosts they are (launcher_records.py).

The lock shows whether a process still supervises the job. The kernel releases it when both processes are gone,
however they ended, and no process number can be mistaken for another. What is left of a job without one is removed by
the next launcher (stale_jobs.py), but for the recordings.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from .processes import start_times
from .runtime_directory import OF_HOSTS, is_locked, make_locked, runtime_folder, write_json

if TYPE_CHECKING:
    from .launcher_records import HostsRecord

__all__ = [
    "Job",
    "JobFolder",
    "Record",
    "exact_job",
    "find_job",
    "has_recordings",
    "list_jobs",
    "read_record",
    "running_job",
]


@dataclass(frozen=True)
class Record:
    """The content of job.json. A rank has its process and, to tell that from a later one, when it started."""

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

    ``flight_folder``: where its ranks write their flight records; None with MLXDIST_FLIGHT_DIR=none.
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
    from .launcher_records import read_hosts_record, read_next_start  # a launcher needs none

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
        if (hosts := read_hosts_record(runtime / name)) is not None:
            name = name.removesuffix(OF_HOSTS)
            here = jobs.get(name) or Job(name, runtime / name, None, {}, hosts.command)
            jobs[name] = replace(here, launcher=hosts.launcher, started=hosts.started, hosts=hosts)
    for name in names:
        coming = read_next_start(runtime / name)
        if coming is not None and all(job.launcher != coming.launcher for job in jobs.values()):  # else it runs
            waiting = Job(coming.job, runtime / coming.job, None, {}, coming.command, coming.launcher, coming.started)
            jobs[coming.job] = waiting
    return [job for _, job in sorted(jobs.items())]


def running_job(name: str | None = None) -> Job:
    """The running job of that name, or of a name that begins so if there is only one; None: the only one at all.

    Raises:
        InvalidArgument: there is none, or more than one.
    """
    from .job_name import full_name  # a launcher needs none

    jobs = {job.name: job for job in list_jobs()}
    return jobs[full_name(name, {job.name: job.command for job in jobs.values()}, f"in {runtime_folder()}")]


def exact_job(name: str) -> Job | None:
    """The running job of that name, else the one that has ended and left flight recordings."""
    for job in list_jobs():
        if job.name == name:
            return job
    folder = runtime_folder() / name
    return Job(name, folder, folder / "flight", {}, []) if has_recordings(name) else None


def find_job(name: str | None = None) -> Job:
    """As `running_job`, but one of just that name comes first that has ended and left flight recordings.

    A job that failed and was started again is the beginning of its successor's name; its recordings are its own.

    Raises:
        InvalidArgument: there is none, or more than one.
    """
    return (exact_job(name) if name else None) or running_job(name)


def has_recordings(name: str) -> bool:
    """Whether a job of that name has a directory for flight recordings here. ``name`` may be any text."""
    is_name = name and "/" not in name and "\0" not in name and not name.startswith(".")
    return bool(is_name) and (runtime_folder() / name / "flight").is_dir()


class JobFolder:
    """The directory of a job that is being started, locked until ``close``."""

    def __init__(self, name: str, temporary: Path, command: Sequence[str], flight: str | None = None) -> None:
        """``flight``: the MLXDIST_FLIGHT_DIR that the user has set.

        Raises ResourceError: the directory cannot be made.
        """
        self._recordings = runtime_folder() / name / "flight"
        if flight != "none":
            flight = os.path.abspath(flight or self._recordings)
        self.flight = flight  # for the ranks
        self._record = Record(os.getpid(), temporary, flight, list(command), {})
        self.folder, self._lock = make_locked(name, self._fill)

    def _fill(self, folder: Path) -> None:
        self._write(folder)
        (folder / "flight").mkdir(mode=0o700)

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
        """The directory with what the ranks have recorded, or None. Not one that the user has named."""
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
    """The record in a job directory, or None: the job has ended, or the record is damaged."""
    try:
        fields = json.loads((folder / "job.json").read_text())
        ranks = {int(rank): (int(pid), str(started)) for rank, (pid, started) in fields["ranks"].items()}
        command = [str(part) for part in fields["command"]]
        launcher = int(fields["launcher"])
        if launcher < 1:
            return None  # a signal to it would reach others
        return Record(launcher, Path(fields["temporary"]), str(fields["flight"]), command, ranks)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
