"""Collects the state of a job's ranks: first from rank 0's rendezvous, then from each rank by signal and file.

Rank 0 has the status of all ranks by their heartbeats, and gets a short flight record of each for an observer
(mlxdist/runtime/rendezvous/observer.py). That is all that `mlxdist top` needs. SIGUSR2 makes a rank write its full
record to the job's directory: for `mlxdist dump`, and where rank 0 does not respond.
"""

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mlxdist.base.environment import MAX_RANKS
from mlxdist.base.errors import InvalidArgument, ResourceError, name_ranks, ranks_have
from mlxdist.base.validation import checked, fields_of, flag, list_of, number, object_of, printable, text
from mlxdist.cluster.hostfile.options import HostSelection
from mlxdist.cluster.ssh.rpc_client import Connections
from mlxdist.launch.jobs import Job, exact_job, find_job, read_job
from mlxdist.launch.jobs_on_hosts import full_name_of, request_jobs
from mlxdist.runtime.diagnostics.flight_records import (
    FlightRecord,
    check_record,
    pid_file,
    read_flight_record,
    read_json,
    record_file_name,
    stack_file,
)
from mlxdist.runtime.diagnostics.stacks import STACKS, Stacks, read_stack_file
from mlxdist.runtime.rendezvous.heartbeat import PeerStatus
from mlxdist.runtime.rendezvous.observer import observe

from .py_spy import stacks_by_py_spy

__all__ = ["Collected", "JobRanks", "find_ranks", "respond", "wall_ns"]

_POLL_SECONDS = 0.01
_RENDEZVOUS_SECONDS = 1.0  # of `mlxdist dump`, which does not depend on it
_MARGIN_SECONDS = 30.0  # on top of the time that ranks have: for ssh
_MAX_BYTES = 48 << 20  # of all records of a host; rpc_server.py allows for more
_CLOCK_REPEATS = 5
_MAX_TEXT = 4096


@dataclass
class Collected:
    """Records of a job. ``members``: rank 0's status of each rank; empty if it does not respond. ``short``: the ranks
    that lack a full record. ``written``: the stacks that faulthandler has written of ranks that could not. ``notes``:
    the missing records, with reasons. ``ended``: whether the job has ended. ``unreachable``: whether a host has not
    responded."""

    records: dict[int, FlightRecord] = field(default_factory=dict)
    members: dict[int, PeerStatus] = field(default_factory=dict)
    short: set[int] = field(default_factory=set)
    written: dict[int, Stacks] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    ended: bool = True
    unreachable: bool = False

    @property
    def stacks(self) -> dict[int, Stacks]:
        """The stacks of each rank. Where faulthandler has written them, the record of that rank is an older one."""
        return {rank: record.stacks for rank, record in self.records.items() if record.stacks} | self.written


class JobRanks:
    """The ranks of a job, on this machine or on the hosts of ``connections``."""

    def __init__(self, job: str, connections: Connections | None = None) -> None:
        """``job``: the full name of the job. ``connections``: None for this machine."""
        self.job = job
        self._connections = connections
        self._ahead: list[int] | None = None  # of our clock that of each host, in nanoseconds

    def collect(self, full: bool, seconds: float) -> Collected:
        """Collects the records. ``seconds``: the time limit for ranks. Times of day are those of this machine's clock.

        ``full``: whether to get all operations of the flight recorders, instead of the last ones.
        """
        known = self._request("rendezvous", min(seconds, _RENDEZVOUS_SECONDS) if full else seconds)
        found = known
        if full or not (known.records or known.ended):
            found = self._request("signal", seconds)
            for rank, record in known.records.items():
                if rank not in found.records or found.records[rank].wall_ns < record.wall_ns:
                    found.records[rank] = record
                    found.short.add(rank)
            if found.short:
                rest = "no full record: the last operations are shown, by way of rank 0"
                found.notes.append(f"{ranks_have(found.short)} {rest}")
            found.records = dict(sorted(found.records.items()))
            found.members = known.members
        for rank, member in sorted(known.members.items()):
            if rank not in found.records:
                age = "" if member.age is None else f"{member.age:.1f} s ago: "
                found.notes.append(f"last heartbeat of rank {rank}: {age}{member.describe() or 'no operation'}")
        return found

    def _request(self, source: str, seconds: float) -> Collected:
        arguments = {"job": self.job, "source": source, "seconds": seconds}
        found = Collected()
        if self._connections is None:
            self._add(found, "", 0, respond(self.job, source, seconds))
            return found
        if self._ahead is None:
            self._ahead = _compare_clocks(self._connections)
        responses = self._connections.call("observe.respond", arguments, seconds + _MARGIN_SECONDS)
        for host, ahead, response in zip(self._connections.names, self._ahead, responses):
            if isinstance(response, Exception):
                found.ended, found.unreachable = False, True
                found.notes.append(f"{host} has not responded: {printable(str(response))}")
                continue
            try:
                self._add(found, host, ahead, response)
            except (ValueError, InvalidArgument) as error:
                found.notes.append(f"{host}: {error}")
        return found

    def _add(self, found: Collected, host: str, ahead: int, response: Any) -> None:
        fields = fields_of(_RESPONSE, response)
        prefix = f"{host}: " if host else ""
        found.ended = found.ended and fields["ended"]
        found.notes += [prefix + note for note in fields["notes"]]
        found.members |= {member.rank: member for member in fields["members"]}
        found.written |= {written.rank: written.threads for written in fields["stacks"]}
        for value in fields["records"]:
            try:
                record = check_record(value, host or "a rank")
            except InvalidArgument as error:
                found.notes.append(str(error))
                continue
            is_new = record.rank not in found.records and all(record.size == r.size for r in found.records.values())
            if record.job == self.job and is_new:
                found.records[record.rank] = replace(record, wall_ns=max(0, record.wall_ns - ahead))


@contextlib.contextmanager
def find_ranks(job: str | None, selection: HostSelection) -> Iterator[JobRanks]:
    """The ranks of the job with this name, or beginning: on the selected hosts, else where it was started from here.

    Raises:
        InvalidArgument: there is no such job, or more than one.
        ResourceError: no host responds.
    """
    found = find_job(job) if selection.hostfile is None else None
    if found is not None and not found.hosts:
        yield JobRanks(found.name)
        return
    hosts, config = (found.hosts, found.ssh_config) if found is not None else (selection.hosts(), selection.ssh_config)
    with Connections([host.name for host in hosts], config) as connections:
        name = found.name if found is not None else _full_name(connections, job)
        if job and name != job and True in connections.call("jobs.recorded", {"name": job}):
            name = job  # that one has failed and was restarted: the other begins so
        yield JobRanks(name, connections)


def _full_name(connections: Connections, job: str | None) -> str:
    """The full name of a job on these hosts; ``job`` itself where no running job begins with it.

    A job that has ended may have left its records, so each host searches for them.
    """
    jobs, problems = request_jobs(connections)
    if len(problems) == len(connections.names):
        raise ResourceError("; ".join(problems))
    if job and not any(listed["job"].startswith(job) for listed in jobs):
        return job
    return full_name_of(job, jobs)


def _compare_clocks(connections: Connections) -> list[int]:
    """The nanoseconds that each host's clock is ahead of ours, to within half of the fastest round trip."""
    count = len(connections.names)
    best, ahead = [float("inf")] * count, [0] * count
    for _ in range(_CLOCK_REPEATS):
        begin = time.time_ns()
        responses = connections.call("observe.time")
        end = time.time_ns()
        for i, theirs in enumerate(responses):
            if type(theirs) is int and end - begin < best[i]:
                best[i], ahead[i] = end - begin, theirs - (begin + end) // 2
    return ahead


# Functions that run on the hosts; see cluster/ssh/rpc_server.py.


def wall_ns() -> int:
    return time.time_ns()


def respond(job: str, source: str, seconds: float) -> dict[str, Any]:
    """The facts on this host, as JSON: from the "rendezvous" if rank 0 runs here, or from the ranks here by "signal".

    Also answers for a job that has ended here and left records; never for another job whose name begins with this one.
    """
    response: dict[str, Any] = {"records": [], "members": [], "stacks": [], "notes": [], "ended": True}
    found = exact_job(job)
    if found is None:
        text = f"there is no job {job!r} here, nor what it has recorded; `mlxdist ps` lists the jobs"
        return response | {"notes": [text]}
    # None: the job has ended, with its launcher and its reaper.
    record = read_job(found.directory) if found.launcher else None
    response["ended"] = record is None
    if source == "signal":
        response |= _by_signal(found, record, seconds)
    elif record is not None and "0" in record.ranks:
        observation = observe(record.directory_of(0), seconds)
        if observation is not None:
            response["records"] = list(observation.records.values())
            response["members"] = [asdict(member) for member in observation.members.values()]
            response["notes"] = observation.notes(seconds)
    return response


@dataclass(frozen=True)
class _RankStacks:
    """The stacks of a rank that could not read them itself."""

    rank: int = checked(number(0, MAX_RANKS - 1))
    threads: Stacks = checked(STACKS)


_RESPONSE = {
    "records": list_of(lambda name, value: value, MAX_RANKS),
    "members": list_of(object_of(PeerStatus), MAX_RANKS),
    "stacks": list_of(object_of(_RankStacks), MAX_RANKS),
    "notes": list_of(text(_MAX_TEXT), MAX_RANKS),
    "ended": flag,
}


def _by_signal(job: Job, record: Job | None, seconds: float) -> dict[str, Any]:
    """The full records of the ranks here, the stacks of those that cannot write one, and notes on those that are
    missing or old."""
    directory, notes, stacks = job.flight_directory, [], []
    if directory is None:
        return {"notes": [f"job {job.name} runs with MLXDIST_FLIGHT=none: its ranks write no records"]}
    if record is None:
        paths = sorted(directory.glob("flight-*.json"))
    else:
        begin = time.time_ns()
        signaled = {rank for rank, pid in job.pids.items() if _signal(record.directory_of(rank), pid)}
        absent = job.pids.keys() - signaled
        if absent:
            why = "not at mlxdist.init() yet, past finalize(), or SIGUSR2 is handled by the program"
            notes.append(f"{name_ranks(absent)} cannot be signaled: {why}")
        late = _wait(directory, signaled, begin, seconds)
        # By name, because a shared directory has the records of other hosts' ranks, too.
        paths = [directory / record_file_name(rank) for rank in sorted(map(int, record.ranks))]
        paths = [path for path in paths if path.exists()]
        written = {rank: read_stack_file(stack_file(record.directory_of(rank))) for rank in sorted(late)}
        silent = absent | {rank for rank, threads in written.items() if not threads}
        outside, why = stacks_by_py_spy({rank: job.pids[rank] for rank in sorted(silent)})
        notes += [why] if why else []
        for rank, threads in (written | outside).items():
            if threads:
                stacks.append({"rank": rank, "threads": {name: list(calls) for name, calls in threads.items()}})
        notes += _late(late, written, directory, seconds)
    records, trouble = _read_records(paths)
    return {"records": records, "stacks": stacks, "notes": notes + trouble}


def _late(late: Collection[int], written: Mapping[int, Stacks], directory: Path, seconds: float) -> list[str]:
    """Notes on the ranks that have not responded to the signal. ``written``: the stacks that faulthandler has."""
    notes = []
    for has_stacks, why in ((True, "blocked in a call that holds the GIL"), (False, "stopped")):
        ranks = {rank for rank in late if bool(written[rank]) == has_stacks}
        if ranks:
            older = any((directory / record_file_name(rank)).exists() for rank in ranks)
            notes.append(
                f"{ranks_have(ranks)} not responded to SIGUSR2 for {seconds:g} s: {why}"
                f"{'; what is shown of it is older' if older else ''}"
            )
    return notes


def _read_records(paths: Sequence[Path]) -> tuple[list[Any], list[str]]:
    """The records in these files, unchecked, and notes on those that cannot be read."""
    records, notes, size = [], [], 0
    for path in paths:
        try:
            size += path.stat().st_size
            if size > _MAX_BYTES:
                notes.append(f"{path.name} and what follows is left out: more than {_MAX_BYTES >> 20} MiB")
                break
            records.append(read_json(path))
        except (OSError, InvalidArgument) as error:  # of the others there are records
            notes.append(str(error))
    return records, notes


def _signal(directory: Path, launched: int) -> bool:
    """Sends SIGUSR2 to the process that the file names, which must be in the session that the launcher started."""
    with contextlib.suppress(OSError, ValueError):
        pid = int(pid_file(directory).read_bytes()[:20])
        if pid > 1 and os.getsid(pid) == launched:  # each rank leads a session
            os.truncate(stack_file(directory), 0)  # faulthandler appends
            os.kill(pid, signal.SIGUSR2)
            return True
    return False


def _wait(directory: Path, ranks: Collection[int], begin_ns: int, seconds: float) -> set[int]:
    """Waits until all ranks have written records since ``begin_ns``. Returns the ranks that have not."""
    late, deadline = set(ranks), time.monotonic() + seconds
    while late and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        late = {rank for rank in late if not _is_written(directory / record_file_name(rank), begin_ns)}
    return late


def _is_written(path: Path, begin_ns: int) -> bool:
    try:
        return path.stat().st_mtime_ns >= begin_ns - 10**9 and read_flight_record(path).wall_ns >= begin_ns
    except (OSError, InvalidArgument):
        return False
