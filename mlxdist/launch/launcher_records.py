"""Records of a launcher besides the directories of its jobs (jobs.py): which hosts a job has, and what it starts next.

    <runtime directory>/<job>@hosts/record.json            launcher, hosts with their ranks, way to them, command
    <runtime directory>/<first job>@restarts/record.json   launcher, command, and the name of the next start
    <runtime directory>/.../lock                           locked as long as the launcher runs

Of a job on several hosts, the agents have job directories of their own, one of them perhaps on this machine, too. In
the pause before a restart there is no job, but a user may want to see or to stop what will be one. Both need no
cleaning up but for the directory itself: agents notice by themselves that their launcher is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxdist.base.environment import MAX_RANKS
from mlxdist.base.validation import as_text, fields_of, list_of, number, seconds, text

from .runtime_directory import OF_HOSTS, OF_RESTARTS, is_locked, make_locked, write_json

if TYPE_CHECKING:
    from mlxdist.cluster.ssh.ssh import SshConfig

__all__ = ["HostOfJob", "HostsRecord", "LauncherRecord", "NextStart", "read_hosts_record", "read_next_start"]

FILE = "record.json"
_MAX_BYTES = 4 << 20


class LauncherRecord:
    """A directory with one file. A context manager: it is locked meanwhile, and gone afterwards."""

    def __init__(self, job: str, suffix: str, fields: Mapping[str, Any]) -> None:
        """Adds the launcher's number to the fields. Raises ResourceError: it cannot be made."""
        self._fields = {"launcher": os.getpid(), **fields}
        self._directory, self._lock = make_locked(f"{job}{suffix}", self._write)

    def __enter__(self) -> LauncherRecord:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def update(self, **fields: Any) -> None:
        """Best effort: without it commands show what was true before."""
        self._fields |= fields
        with contextlib.suppress(OSError):
            self._write(self._directory)

    def close(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
        os.close(self._lock)

    def _write(self, directory: Path) -> None:
        write_json(directory / FILE, self._fields)


@dataclass(frozen=True)
class HostOfJob:
    """A host, and which ranks run there."""

    name: str
    first: int
    slots: int


@dataclass(frozen=True)
class HostsRecord:
    """The hosts of a job. ``started``: in seconds since 1970."""

    launcher: int
    started: float
    command: list[str]
    ssh: list[str]
    python: str
    hosts: list[HostOfJob]

    @property
    def names(self) -> list[str]:
        return [host.name for host in self.hosts]

    @property
    def ssh_config(self) -> SshConfig:
        from mlxdist.cluster.ssh.ssh import SshConfig

        return SshConfig(tuple(self.ssh), self.python)


@dataclass(frozen=True)
class NextStart:
    """What a launcher starts next. ``started``: its first start, in seconds since 1970."""

    launcher: int
    started: float
    command: list[str]
    job: str


def read_hosts_record(directory: Path) -> HostsRecord | None:
    """Of a launcher that still runs; else None, also where the record is damaged."""
    return _read(directory, OF_HOSTS, lambda found: HostsRecord(**found), _COMMON | _HOSTS)


def read_next_start(directory: Path) -> NextStart | None:
    """As `read_hosts_record`."""
    return _read(directory, OF_RESTARTS, lambda found: NextStart(**found), _COMMON | {"job": as_text})


def _read(directory: Path, suffix: str, make: Callable[[dict[str, Any]], Any], checks: Mapping[str, Any]) -> Any:
    if not directory.name.endswith(suffix) or not is_locked(directory):
        return None
    try:
        with open(directory / FILE, "rb") as file:
            found = fields_of(checks, json.loads(file.read(_MAX_BYTES)))
    except (OSError, ValueError, RecursionError):
        return None
    return make({name: list(value) if isinstance(value, tuple) else value for name, value in found.items()})


_WORDS = list_of(as_text, 1 << 16)
_HOST = {"name": text(255), "first": number(0, MAX_RANKS - 1), "slots": number(1, MAX_RANKS)}
_COMMON = {
    "launcher": number(2, 2**31 - 1),  # a signal to any other number would reach other processes
    "started": seconds,
    "command": _WORDS,
}
_HOSTS = {
    "ssh": _WORDS,
    "python": as_text,
    "hosts": list_of(lambda name, value: HostOfJob(**fields_of(_HOST, value)), MAX_RANKS),
}
