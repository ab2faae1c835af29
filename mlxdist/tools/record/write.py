"""Records of a job: a file for each of its hosts, written before the ranks start."""

import json
import socket
import sys
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from mlxdist.base.atomic_file import replace_file
from mlxdist.base.credentials import remove_from_words, secret_values
from mlxdist.base.errors import InvalidArgument, ResourceError
from mlxdist.cluster.hostfile.hosts import Host
from mlxdist.cluster.ssh.rpc_client import Connections, checked_call
from mlxdist.cluster.ssh.ssh import SshConfig

from .difference import OF_HOST, SCHEMA, Record

__all__ = ["write_records"]

_SECONDS = 90.0  # for a host: a Mac's system_profiler takes some


def write_records(
    directory: Path,
    hosts: Sequence[Host] | None,
    ssh_config: SshConfig,
    *,
    command: Sequence[str],
    ranks: int,
    variables: Mapping[str, str],
    working_directory: str,
    mpi_shim: bool,
) -> dict[str, Record]:
    """Asks all hosts, and writes DIRECTORY/HOST.json for each. Returns the records by the names of the hosts.

    Args:
        directory: made where it is missing.
        hosts: those of the job; None for this machine alone, which is recorded by the name that it has.
        ssh_config: the way to the hosts.
        command: of the ranks. ranks: how many there are.
        variables: what the launcher sets for all ranks.
        working_directory: where they run.
        mpi_shim: whether they get mlxdist's MPI shim.

    Raises:
        InvalidArgument: a record of that name is there already.
        ResourceError: a host does not respond, or a file cannot be written.
    """
    names = {socket.gethostname(): "localhost"} if hosts is None else {host.name: host.name for host in hosts}
    paths = {name: directory / f"{urllib.parse.quote(name, safe='@')}.json" for name in names}
    for path in paths.values():
        if path.exists():
            raise InvalidArgument(f"--record: {path} is there already, of another start; name a new directory")
    secrets = secret_values(variables)
    job = {
        "command": remove_from_words(command, secrets),
        "launcher": remove_from_words(sys.argv, secrets),
        "directory": working_directory,
        "ranks": ranks,
        "hosts": [asdict(host) for host in hosts or ()],
        "time": time.time(),
    }
    arguments = {"directory": working_directory, "variables": dict(variables), "mpi_shim": mpi_shim}
    with Connections(list(names.values()), ssh_config) as connections:
        found, problems = checked_call(connections, OF_HOST, "record.read", arguments, _SECONDS)
    if problems:
        raise ResourceError(f"--record: {'; '.join(problems)}")
    records = {name: {"schema": SCHEMA, **found[reached], "job": job} for name, reached in names.items()}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, record in records.items():
            replace_file(paths[name], json.dumps(record, indent=1) + "\n", 0o600)
    except OSError as error:
        raise ResourceError(f"--record: {error.filename or directory} cannot be written: {error.strerror}") from None
    return records
