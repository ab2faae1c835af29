"""Jobs of this user on this host: a directory for each, with one record.

    <runtime directory>/<job>/job.json             launcher, ranks, their temporary directory, command
    <runtime directory>/<job>/lock                 locked as long as the launcher or its reaper runs
    <runtime directory>/<job>/flight/              flight records of the ranks, unless MLXDIST_FLIGHT_DIR is set
    <runtime directory>/<first job>@launcher/      of a launcher that uses other hosts or restarts the job:
                                                   job.json has the job's current name and its hosts

The ranks' temporary directories lie elsewhere, in TMPDIR: XDG_RUNTIME_DIR is small, since it is memory, and often
nothing in it may be executed. Each host of a job has a directory for its own ranks.

The kernel releases the lock when launcher and reaper are gone, however they ended, and no process number can be
mistaken for another. stale_jobs.py removes what such a job has left, but for the recordings.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mlxdist.base.atomic_file import replace_file
from mlxdist.base.environment import MAX_RANKS
from mlxdist.base.json_reader import parse_json
from mlxdist.base.validation import as_text, build, checked, list_of, map_of, number, object_of, read_bounded, row_of
from mlxdist.base.validation import seconds as as_seconds

from .processes import start_times
from .runtime_directory import is_locked, make_locked, runtime_directory

if TYPE_CHECKING:
    from mlxdist.cluster.ssh.ssh import SshConfig

__all__ = [
    "LAUNCHER",
    "HostRanks",
    "Job",
    "JobDirectory",
    "exact_job",
    "find_job",
    "has_recordings",
    "list_jobs",
    "read_job",
    "running_job",
]

LAUNCHER = "@launcher"  # suffix of the first job's name
_MAX_BYTES = 4 << 20
_WORDS = list_of(as_text, 1 << 16)


@dataclass(frozen=True)
class HostRanks:
    """A host of a job, and which ranks run there."""

    name: str = checked(as_text)
    first: int = checked(number(0, MAX_RANKS - 1))
    slots: int = checked(number(1, MAX_RANKS))


@dataclass(frozen=True)
class Job:
    """A job, as job.json describes it.

    Attributes:
        launcher: the process that supervises it, 0 for a job that has ended. On another host of a job that is the
            agent, which ends the ranks there, and with them the job.
        started: in seconds since 1970.
        temporary: the directory of the ranks here.
        flight: where they write their flight records, or "none".
        members: for each rank its number at the start, where the job has shrunk.
        ranks: for each rank here its process and when that started, to tell it from a later process with that number.
        hosts, ssh, python: the hosts and how they are reached, for a job on several hosts started on this machine.
    """

    name: str = checked(as_text)
    launcher: int = checked(number(1, 2**31 - 1))  # a signal to 0 or -1 would reach other processes
    started: float = checked(as_seconds)
    command: list[str] = checked(lambda name, value: list(_WORDS(name, value)))
    temporary: str = checked(as_text, "")
    flight: str = checked(as_text, "none")
    members: Sequence[int] = checked(list_of(number(0, MAX_RANKS - 1), MAX_RANKS), ())
    ranks: dict[str, tuple[int, str]] = checked(map_of(row_of(number(1, 2**31 - 1), as_text), MAX_RANKS), {})
    hosts: Sequence[HostRanks] = checked(list_of(object_of(HostRanks), MAX_RANKS), ())
    ssh: Sequence[str] = checked(_WORDS, ())
    python: str = checked(as_text, "")

    @property
    def directory(self) -> Path:
        return runtime_directory() / self.name

    def directory_of(self, rank: int) -> Path:
        """The private directory of a rank here."""
        return Path(self.temporary, str(self.members[rank] if rank < len(self.members) else rank))

    @property
    def flight_directory(self) -> Path | None:
        return None if self.flight == "none" else Path(self.flight)

    @property
    def pids(self) -> dict[int, int]:
        """The processes of the ranks that run here."""
        started = start_times(pid for pid, _ in self.ranks.values())
        return {int(rank): pid for rank, (pid, when) in self.ranks.items() if started.get(pid) == when}

    @property
    def ssh_config(self) -> SshConfig:
        from mlxdist.cluster.ssh.ssh import SshConfig

        return SshConfig(tuple(self.ssh), self.python)


def list_jobs() -> list[Job]:
    """The jobs of this user that run on this machine or were started here, by name."""
    runtime = runtime_directory()
    jobs: dict[str, Job] = {}
    names = [name for name in os.listdir(runtime) if not name.startswith(".")]
    # Launchers last: a job that has ranks and its launcher here has two records, which are merged.
    for name in sorted(names, key=lambda name: name.endswith(LAUNCHER)):
        job = read_job(runtime / name)
        if job is None or not is_locked(runtime / name):
            continue
        if job.name in jobs:  # with ranks here, and its launcher
            ranks = jobs[job.name]
            job = replace(job, temporary=ranks.temporary, flight=ranks.flight, ranks=ranks.ranks)
        jobs[job.name] = job
    return [job for _, job in sorted(jobs.items())]


def running_job(name: str | None = None) -> Job:
    """The running job with that name, or the only one whose name begins with it. None: the only job at all.

    Raises:
        InvalidArgument: there is none, or more than one.
    """
    from .job_name import full_name  # a launcher needs none

    jobs = {job.name: job for job in list_jobs()}
    return jobs[full_name(name, {job.name: job.command for job in jobs.values()}, f"in {runtime_directory()}")]


def exact_job(name: str) -> Job | None:
    """The running job with that name, else the one that has ended and left flight recordings; None without one."""
    for job in list_jobs():
        if job.name == name:
            return job
    return Job(name, 0, 0.0, [], flight=str(runtime_directory() / name / "flight")) if has_recordings(name) else None


def find_job(name: str | None = None) -> Job:
    """The job with exactly that name, even if it has ended and left flight recordings; else as `running_job` selects.

    The name of a job that failed and was restarted is the beginning of its successor's; its recordings are its own.

    Raises:
        InvalidArgument: there is none, or more than one.
    """
    return (exact_job(name) if name else None) or running_job(name)


def has_recordings(name: str) -> bool:
    """Whether a job with that name has a directory for flight recordings here. ``name`` may be any text."""
    is_name = name and "/" not in name and "\0" not in name and not name.startswith(".")
    return bool(is_name) and (runtime_directory() / name / "flight").is_dir()


class JobDirectory:
    """The directory of a job that this process launches, locked until ``close``."""

    def __init__(self, job: Job, name: str) -> None:
        """Raises ResourceError: the directory cannot be made."""
        self.job = job
        self.path, self._lock = make_locked(name, self._fill)

    @classmethod
    def of_ranks(cls, name: str, temporary: Path, command: Sequence[str], flight: str | None = None) -> JobDirectory:
        """The directory of a job with ranks here. ``flight``: the MLXDIST_FLIGHT_DIR that the user has set."""
        if flight != "none":
            flight = os.path.abspath(os.path.expanduser(flight) if flight else runtime_directory() / name / "flight")
        return cls(Job(name, os.getpid(), time.time(), list(command), str(temporary), flight), name)

    def _fill(self, directory: Path) -> None:
        self._write(directory)
        if self.job.temporary:
            (directory / "flight").mkdir(mode=0o700)

    def pass_on(self) -> tuple[int, ...]:
        """The descriptor that holds the lock: the job counts as running while a process that inherits it runs."""
        return (self._lock,)

    def note_ranks(self, pids: dict[int, int], members: Sequence[int] | None = None) -> None:
        """Records the ranks that run here. ``members``: of all ranks, the numbers that ``pids`` has for them."""
        started = start_times(pids.values())
        ranks = pids if members is None else {r: pids[member] for r, member in enumerate(members) if member in pids}
        running = {str(rank): (pid, started[pid]) for rank, pid in ranks.items() if pid in started}
        self.update(replace(self.job, ranks=running, members=self.job.members if members is None else members))

    def update(self, job: Job) -> None:
        """Writes the record. A failure is ignored: then other commands show the previous state."""
        self.job = job
        with contextlib.suppress(OSError):
            self._write(self.path)

    def recordings(self) -> str | None:
        """The directory with the ranks' recordings, or None. A directory that the user has named is not returned."""
        try:
            return str(self.path / "flight") if os.listdir(self.path / "flight") else None
        except OSError:
            return None

    def remove_recordings(self) -> None:
        shutil.rmtree(self.path / "flight", ignore_errors=True)

    def close(self) -> None:
        os.close(self._lock)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self.close()

    def _write(self, directory: Path) -> None:
        replace_file(directory / "job.json", json.dumps(asdict(self.job)), 0o600)


def read_job(directory: Path) -> Job | None:
    """The job recorded in a directory, or None: it has ended, or the record is damaged."""
    try:
        job = build(Job, parse_json(read_bounded(directory / "job.json", _MAX_BYTES)))
        return job if all(rank.isdigit() for rank in job.ranks) else None
    except ValueError:
        return None
