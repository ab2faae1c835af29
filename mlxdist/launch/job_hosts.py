"""Which jobs on several hosts this user has started on this machine: a directory for each, made by `mlxdist launch`.

    <runtime directory>/<job>@hosts/hosts.json    launcher, hosts with their ranks, how they are reached, command
    <runtime directory>/<job>@hosts/lock          locked as long as the launcher runs

The agents on the hosts have job directories of their own (jobs.py), one of them perhaps on this machine, too.
Nothing is to be cleaned up here but the directory itself: the agents notice by themselves that their launcher is gone.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mlxdist.base.environment import MAX_RANKS
from mlxdist.base.validation import as_text, fields_of, list_of, number, seconds, text

from .runtime_directory import OF_HOSTS, is_locked, make_locked, write_json

if TYPE_CHECKING:  # a job on this machine alone loads neither
    from mlxdist.cluster.hostfile import Hostfile
    from mlxdist.cluster.ssh.ssh import SshConfig

__all__ = ["HostOfJob", "HostsFolder", "HostsRecord", "read_hosts_record"]

_FILE = "hosts.json"
_MAX_BYTES = 4 << 20


@dataclass(frozen=True)
class HostOfJob:
    """A host, and which ranks run there."""

    name: str
    first: int
    slots: int


@dataclass(frozen=True)
class HostsRecord:
    """What hosts.json says. ``started``: in seconds since 1970."""

    launcher: int
    started: float
    command: list[str]
    ssh: tuple[str, ...]
    python: str
    hosts: tuple[HostOfJob, ...]

    @property
    def names(self) -> list[str]:
        return [host.name for host in self.hosts]

    @property
    def ssh_config(self) -> SshConfig:
        from mlxdist.cluster.ssh.ssh import SshConfig

        return SshConfig(self.ssh, self.python)


class HostsFolder:
    """The directory of a job that is being started on several hosts, locked until ``close``."""

    def __init__(
        self, name: str, started: float, hostfile: Hostfile, ssh_config: SshConfig, command: Sequence[str]
    ) -> None:
        """Raises ResourceError: it cannot be made."""
        firsts = [sum(host.slots for host in hostfile.hosts[:i]) for i in range(len(hostfile.hosts))]
        hosts = tuple(HostOfJob(host.name, first, host.slots) for host, first in zip(hostfile.hosts, firsts))
        record = HostsRecord(os.getpid(), started, list(command), tuple(ssh_config.ssh), ssh_config.python, hosts)
        self._folder, self._lock = make_locked(
            f"{name}{OF_HOSTS}", lambda folder: write_json(folder / _FILE, asdict(record))
        )

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)


def read_hosts_record(folder: Path) -> HostsRecord | None:
    """Of a job that still has its launcher; else None, also where somebody has damaged what it says."""
    if not is_locked(folder):
        return None
    try:
        with open(folder / _FILE, "rb") as file:
            found = fields_of(_RECORD, json.loads(file.read(_MAX_BYTES)))
    except (OSError, ValueError, RecursionError):
        return None
    found["hosts"] = tuple(HostOfJob(**host) for host in found["hosts"])
    return HostsRecord(**found | {"command": list(found["command"])})


_HOST = {"name": text(255), "first": number(0, MAX_RANKS - 1), "slots": number(1, MAX_RANKS)}
_WORDS = list_of(as_text, 1 << 16)
_RECORD = {
    "launcher": number(2, 2**31 - 1),  # a signal to it must reach nobody else
    "started": seconds,
    "command": _WORDS,
    "ssh": _WORDS,
    "python": as_text,
    "hosts": list_of(lambda name, value: fields_of(_HOST, value), MAX_RANKS),
}
