"""Asks the ranks of a job that runs for their records: those of this machine, or of all hosts of the job.

A rank is asked by SIGUSR1 and a file in its temporary folder that says what for: a "dump" has all that its flight
recorder knows, and stays in the job's folder; a "status" has the last operations only, and may be asked for again and
again.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxdist.base.environment import MAX_RANKS
from mlxdist.base.errors import InvalidArgument, name_ranks
from mlxdist.base.validation import fields_of, flag, list_of, printable, text
from mlxdist.cluster.hostfile.options import HostSelection
from mlxdist.runtime.flight_records import (
    Dump,
    check_dump,
    dump_name,
    marker_of,
    read_dump,
    read_folder,
    read_json,
    request_of,
    status_of,
)

if TYPE_CHECKING:
    from mlxdist.cluster.ssh.rpc_client import Connections
    from mlxdist.cluster.ssh.ssh import SshConfig
    from mlxdist.launch.jobs import Job, Record

__all__ = ["Answers", "Asked", "HostRanks", "LocalRanks", "answer", "find_ranks", "wall_ns"]

_STEP = 0.01
_MARGIN_SECONDS = {"dump": 30.0, "status": 10.0}  # on top of the time that ranks have: for the way here
_MAX_ANSWER = 48 << 20  # bytes of all records of a host; remote/answers.py allows for more
_CLOCK_ROUNDS = 5
_MAX_TEXT = 4096


@dataclass
class Answers:
    """What the ranks have said. ``notes``: what is missing and why. ``ended``: the job has, and left its records."""

    dumps: dict[int, Dump] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    ended: bool = False


class LocalRanks:
    """The ranks of a job that run on this machine."""

    def __init__(self, job: str) -> None:
        """``job``: its whole name."""
        self.job = job

    def __enter__(self) -> "LocalRanks":
        return self

    def __exit__(self, *exception: object) -> None:
        return

    def ask(self, what: str, seconds: float) -> Answers:
        """``what``: "dump" or "status". Ranks have so many seconds to answer.

        Raises:
            InvalidArgument: there is no such job any more, or it writes no records at all.
        """
        asked = Asked(_exact_job(self.job), what)
        asked.wait(seconds)
        if what == "dump":
            try:
                dumps, problems = read_folder(asked.folder)
            except InvalidArgument as error:
                dumps, problems = {}, [str(error)]
            return Answers(dumps, [*asked.notes, *problems], asked.record is None)
        dumps = {rank: dump for rank in asked.answered if (dump := asked.read(rank)) is not None}
        return Answers(dumps, asked.notes, asked.record is None)


class HostRanks:
    """The ranks of a job on several hosts. A context manager: they are asked over one connection each."""

    def __init__(self, connections: "Connections", job: str) -> None:
        """``job``: its whole name."""
        self.job = job
        self._connections = connections
        self._ahead: list[int] | None = None  # of our clock that of each host, in nanoseconds

    def __enter__(self) -> "HostRanks":
        return self

    def __exit__(self, *exception: object) -> None:
        self._connections.__exit__(*exception)

    def ask(self, what: str, seconds: float) -> Answers:
        """As `LocalRanks.ask`. A host that does not answer is a note. Times of day are those of this machine."""
        if self._ahead is None:
            self._ahead = self._compare_clocks()
        found = Answers(ended=True)
        arguments = {"job": self.job, "what": what, "seconds": seconds}
        answers = self._connections.call("dump.ask", arguments, seconds + _MARGIN_SECONDS[what])
        for host, ahead, said in zip(self._connections.names, self._ahead, answers):
            if isinstance(said, Exception):
                found.ended = False
                found.notes.append(f"{host} has not answered: {printable(str(said))}")
                continue
            try:
                self._take(found, host, ahead, said)
            except (ValueError, InvalidArgument) as error:
                found.notes.append(f"{host}: {error}")
        found.dumps = dict(sorted(found.dumps.items()))
        return found

    def _take(self, found: Answers, host: str, ahead: int, said: Any) -> None:
        fields = fields_of(_ANSWER, said)
        found.ended = found.ended and fields["ended"]
        found.notes += [f"{host}: {note}" for note in fields["notes"]]
        for record in fields["records"]:
            dump = check_dump(record, host)
            is_new = dump.rank not in found.dumps and all(dump.size == other.size for other in found.dumps.values())
            if dump.job == self.job and is_new:
                found.dumps[dump.rank] = replace(dump, wall_ns=max(0, dump.wall_ns - ahead))

    def _compare_clocks(self) -> list[int]:
        """To within half the time of the fastest question and answer."""
        names = self._connections.names
        best, ahead = [float("inf")] * len(names), [0] * len(names)
        for _ in range(_CLOCK_ROUNDS):
            begin = time.time_ns()
            answers = self._connections.call("dump.time")
            end = time.time_ns()
            for i, theirs in enumerate(answers):
                if type(theirs) is int and end - begin < best[i]:
                    best[i], ahead[i] = end - begin, theirs - (begin + end) // 2
        return ahead


def find_ranks(job: str | None, chosen: HostSelection) -> LocalRanks | HostRanks:
    """Of the job whose name begins so: on the hosts chosen, else on those that it was started on from here.

    Raises:
        InvalidArgument: there is no such job, or more than one.
    """
    from mlxdist.launch.jobs import find_job

    found = find_job(job) if chosen.hostfile is None else None
    if found is not None and found.hosts is None:
        return LocalRanks(found.name)
    with contextlib.ExitStack() as undo:
        if found is not None:
            connections, name = undo.enter_context(_connect(found.hosts.names, found.hosts.ssh_config)), found.name
        else:
            names = [host.name for host in chosen.hosts()]
            connections = undo.enter_context(_connect(names, chosen.ssh_config))
            name = _listed(connections, job)
        if job and name != job and True in connections.call("jobs.recorded", {"name": job}):
            name = job  # that one has failed and was started again: the other begins so
        undo.pop_all()
        return HostRanks(connections, name)


def _listed(connections: "Connections", job: str | None) -> str:
    """The whole name of a job on these hosts; what it was called where none that runs is called so.

    A job that has ended may have left its records: each host looks for them.
    """
    from mlxdist.launch.jobs_on_hosts import ask_for_jobs, full_name_of

    jobs, problems = ask_for_jobs(connections)
    if len(problems) == len(connections.names):
        raise InvalidArgument("; ".join(problems))
    if job and not any(listed["job"].startswith(job) for listed in jobs):
        return job
    return full_name_of(job, jobs)


def _connect(names: Sequence[str], ssh_config: "SshConfig") -> "Connections":
    from mlxdist.cluster.ssh.rpc_client import Connections

    return Connections(names, ssh_config)


def _exact_job(name: str) -> "Job":
    """Raises InvalidArgument: it has ended, and left nothing; never another one whose name begins so."""
    from mlxdist.launch.jobs import exact_job

    job = exact_job(name)
    if job is None:
        raise InvalidArgument(f"there is no job {name!r} here, nor what it has recorded; `mlxdist ps` lists the jobs")
    return job


# What runs on the hosts; see remote/answers.py.


def wall_ns() -> int:
    return time.time_ns()


def answer(job: str, what: str, seconds: float) -> dict[str, Any]:
    """The records of the ranks here, as JSON; also of a job that has ended here and left some."""
    try:
        asked = Asked(_exact_job(job), what)
    except InvalidArgument as error:
        return {"records": [], "notes": [str(error)], "ended": True}
    asked.wait(seconds)
    records, size = [], 0
    for path in asked.paths():
        try:
            size += path.stat().st_size
            if size > _MAX_ANSWER:
                asked.notes.append(f"{path.name} and what follows is left out: more than {_MAX_ANSWER >> 20} MiB")
                break
            records.append(read_json(path))
        except (OSError, InvalidArgument) as error:  # of the others there are records
            asked.notes.append(str(error))
    return {"records": records, "notes": asked.notes, "ended": asked.record is None}


_ANSWER = {
    "records": list_of(lambda name, value: value, MAX_RANKS),
    "notes": list_of(text(_MAX_TEXT), MAX_RANKS),
    "ended": flag,
}


# What runs where the ranks are.


class Asked:
    """Ranks of this machine that have been asked."""

    def __init__(self, job: "Job", what: str) -> None:
        """Raises InvalidArgument: the job writes no records."""
        from mlxdist.launch.jobs import read_record  # a folder of files needs no launcher

        self._what = what
        # None: it has ended. What a launcher and a reaper that were both killed have left says nothing.
        self.record: Record | None = read_record(job.folder) if job.launcher else None
        self.folder = job.flight_folder
        if what == "dump" and self.folder is None:
            raise InvalidArgument(f"job {job.name} runs with MLXDIST_FLIGHT_DIR=none: its ranks write no records")
        self.notes: list[str] = []
        self._begin = time.time_ns()
        self._asked: set[int] = set()
        if self.record is not None:
            self._asked = {rank for rank, pid in job.pids.items() if self._signal(rank, pid)}
            if absent := job.pids.keys() - self._asked:
                why = "not at mlxdist.init() yet, or past finalize()"
                self.notes.append(f"{name_ranks(absent)} cannot be asked: {why}")
        self._late = set(self._asked)

    @property
    def answered(self) -> set[int]:
        return self._asked - self._late

    def wait(self, seconds: float) -> None:
        """Until all have answered. Those that have not by then are in the notes."""
        deadline = time.monotonic() + seconds
        while self._late and time.monotonic() < deadline:
            time.sleep(_STEP)
            self._late = {rank for rank in self._late if not self._is_written(rank)}
        if self._late:
            one = len(self._late) == 1
            self.notes.append(
                f"{name_ranks(self._late)} {'has' if one else 'have'} not answered for {seconds:g} s: stopped, or in a "
                f"call that keeps Python to itself{self._known_from(self._late)}"
            )

    def paths(self) -> list[Path]:
        """The files that there are now: dumps from before, too, but not those of other hosts in a shared folder."""
        if self._what == "status":
            return [self._path(rank) for rank in sorted(self.answered)]
        if self.record is None:
            return sorted(self.folder.glob("flight-*.json"))
        return [path for rank in sorted(self.record.ranks) if (path := self._path(rank)).exists()]

    def read(self, rank: int) -> Dump | None:
        try:
            return read_dump(self._path(rank))
        except InvalidArgument:
            return None

    def _path(self, rank: int) -> Path:
        return self.folder / dump_name(rank) if self._what == "dump" else status_of(self._temporary(rank))

    def _temporary(self, rank: int) -> Path:
        return self.record.temporary / str(rank)

    def _signal(self, rank: int, launched: int) -> bool:
        """Asks the process named in the marker, which must be what the launcher started or a child of it."""
        with contextlib.suppress(OSError, ValueError):
            pid = int(marker_of(self._temporary(rank)).read_bytes()[:20])
            if pid > 1 and os.getsid(pid) == launched:  # each rank leads a session
                request_of(self._temporary(rank), self._what).touch()
                os.kill(pid, signal.SIGUSR1)
                return True
        return False

    def _is_written(self, rank: int) -> bool:
        try:
            return self._path(rank).stat().st_mtime_ns >= self._begin - 10**9 and self.read(rank).wall_ns >= self._begin
        except (OSError, AttributeError):
            return False

    def _known_from(self, ranks: Iterable[int]) -> str:
        is_older = self._what == "dump" and any(self._path(rank).exists() for rank in ranks)
        return "; what is shown of it is older" if is_older else ""
