"""The jobs of this user on several hosts: each lists those that run there, or ends them."""

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mlxdist.base.environment import MAX_RANKS
from mlxdist.base.errors import InvalidArgument, ResourceError
from mlxdist.base.validation import list_of, map_of, number, object_of, text
from mlxdist.base.validation import seconds as as_seconds
from mlxdist.cluster.hostfile.options import HostSelection
from mlxdist.cluster.ssh.rpc_client import Connections, checked_call

from .job_name import full_name
from .jobs import Job, list_jobs
from .stale_jobs import remove_stale_jobs

__all__ = [
    "Stopped",
    "as_json",
    "end_jobs",
    "full_name_of",
    "list_here",
    "list_on",
    "request_jobs",
    "stop_here",
    "stop_on",
]

_STEP = 0.05
_MAX_JOBS = 1024
_MAX_COMMAND = 1000  # characters; and as many words
_MARGIN_SECONDS = 30.0  # for what jobs have left to be removed


def as_json(job: Job) -> dict[str, Any]:
    """A job as the object that `mlxdist ps --json` prints."""
    return {
        "job": job.name,
        "launcher": job.launcher,
        "started": job.started,
        "seconds": max(0.0, time.time() - job.started),
        "pids": {str(rank): pid for rank, pid in job.pids.items()},
        "hosts": [asdict(host) for host in job.hosts],
        "command": list(job.command),
    }


def end_jobs(jobs: Sequence[Job], seconds: float) -> list[str]:
    """Ends jobs by SIGTERM to their launchers. Returns the names of jobs that still run after ``seconds``."""
    for job in jobs:
        with contextlib.suppress(ProcessLookupError):  # its reaper ends what is left
            os.kill(job.launcher, signal.SIGTERM)
    deadline = time.monotonic() + seconds
    running = {job.name for job in jobs}
    while running and time.monotonic() < deadline:
        running &= {job.name for job in list_jobs()}
        time.sleep(_STEP if running else 0)
    return [job.name for job in jobs if job.name in running]


# Functions that run on the hosts, through the table of mlxdist.cli.rpc_server.


def list_here() -> list[dict[str, Any]]:
    jobs = [as_json(job) for job in list_jobs()[:_MAX_JOBS]]
    return [job | {"command": [word[:_MAX_COMMAND] for word in job["command"][:_MAX_COMMAND]]} for job in jobs]


def stop_here(names: list[str], everything: bool, seconds: float) -> dict[str, list[str]]:
    """Ends jobs on this host. ``left`` in the result: messages about leftovers of other jobs that were cleaned up."""
    jobs = list_jobs()
    wanted = [job for job in jobs if everything or job.name in names]
    running = end_jobs(wanted, seconds)
    ended = [job.name for job in wanted if job.name not in running]
    return {"ended": ended, "running": running, "left": remove_stale_jobs()}


# Functions that call those above, in the user's command.


def list_on(selection: HostSelection) -> tuple[list[dict[str, Any]], list[str]]:
    """The jobs on all hosts, each with its "host", and messages about hosts that did not respond."""
    with _connect(selection) as connections:
        return request_jobs(connections)


def request_jobs(connections: Connections) -> tuple[list[dict[str, Any]], list[str]]:
    """The jobs on all hosts as in `list_on`, over existing connections."""
    results, problems = checked_call(connections, list_of(object_of(_JOB), _MAX_JOBS), "jobs.list")
    return [{"host": host} | job for host, jobs in results.items() for job in jobs], problems


def full_name_of(name: str | None, jobs: Sequence[dict[str, Any]]) -> str:
    """The name of a job among those that hosts have listed; see `full_name`."""
    return full_name(name, {job["job"]: job["command"] for job in jobs}, "on these hosts")


@dataclass
class Stopped:
    """Names of jobs that have ended and that still run, with their hosts. ``silent``: messages about silent hosts."""

    ended: dict[str, list[str]] = field(default_factory=dict)
    running: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)


def stop_on(selection: HostSelection, names: Sequence[str], everything: bool, seconds: float) -> Stopped:
    """Ends jobs. Raises InvalidArgument: a name matches no job, or several; ResourceError: and some host is silent."""
    stopped = Stopped()
    with _connect(selection) as connections:
        if not everything:
            jobs, problems = request_jobs(connections)
            try:
                names = [full_name_of(name, jobs) for name in names]
            except InvalidArgument as error:
                if not problems:
                    raise
                raise ResourceError("; ".join([*problems, str(error)])) from None
        arguments = {"names": list(names), "everything": everything, "seconds": seconds}
        check, limit = object_of(_STOPPED), seconds + _MARGIN_SECONDS
        results, stopped.silent = checked_call(connections, check, "jobs.stop", arguments, limit)
    for host, found in results.items():
        for name in found["ended"]:
            stopped.ended.setdefault(name, []).append(host)
        for name in found["running"]:
            stopped.running.setdefault(name, []).append(host)
        stopped.notes += [f"{host}: {said}" for said in found["left"]]
    return stopped


def _connect(selection: HostSelection) -> Connections:
    return Connections([host.name for host in selection.hosts()], selection.ssh_config)


_PID = number(0, 2**31 - 1)
_RANK = number(0, MAX_RANKS)
_JOB = {
    "job": text(),
    "launcher": _PID,
    "started": as_seconds,
    "seconds": as_seconds,
    "pids": map_of(_PID, MAX_RANKS),
    "hosts": list_of(object_of({"name": text(), "first": _RANK, "slots": _RANK}), MAX_RANKS),
    "command": list_of(text(_MAX_COMMAND), _MAX_COMMAND),
}
_TEXTS = list_of(text(1000), _MAX_JOBS)
_STOPPED = {"ended": _TEXTS, "running": _TEXTS, "left": _TEXTS}
