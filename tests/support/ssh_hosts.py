"""Hosts that ssh reaches: the namespaces of hosts.py, each with processes and an OpenSSH server of its own."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import hosts
import pytest
from waiting import wait_for

__all__ = ["SshHosts", "ssh_hosts"]

_SSHD = "/usr/sbin/sshd"
_PORT = 2222
# A host has a name and processes of its own: those of the others are not to be seen, or ended, from there.
_APART = ["unshare", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc"]
_NAMED = ["sh", "-c", 'hostname "$0" && exec "$@"']
_SERVER = """
Port {port}
HostKey {directory}/host_key
AuthorizedKeysFile {directory}/key.pub
PidFile {directory}/{name}.pid
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
UsePAM no
SetEnv XDG_RUNTIME_DIR={directory}/{name} TMPDIR={directory}/{name} {variables}
"""
_CLIENT = """
Host {name}
  HostName {address}
  Port {port}
  User root
  IdentityFile {directory}/key
  IdentitiesOnly yes
  UserKnownHostsFile /dev/null
  StrictHostKeyChecking no
  LogLevel ERROR
"""


@dataclass(frozen=True)
class SshHosts:
    """``hosts``: the namespaces; ``names``: what ssh calls them; ``ssh``: the command that knows how; ``ends``: the
    interfaces that ssh reaches."""

    directory: Path
    hosts: tuple[hosts.Host, ...]
    ends: tuple[hosts.Host, ...]
    servers: list[subprocess.Popen]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"node{number}" for number in range(len(self.hosts)))

    @property
    def ssh(self) -> str:
        return f"ssh -F {self.directory}/config"

    def command(self, *words: object) -> list[str]:
        """To be run where the launcher is: on the first host, outside of what its server runs."""
        return self.hosts[0].command(*words)

    def processes(self, marker: str) -> list[str]:
        """The command lines of processes, on any host, that have ``marker`` in their environment."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if marker.encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        return found


@contextlib.contextmanager
def ssh_hosts(
    directory: Path, late: bool = False, count: int = 2, control: bool = False, variables: str = ""
) -> Iterator[SshHosts]:
    """``control``: ssh reaches the hosts over a network of its own. ``variables``: of what runs there, NAME=VALUE, with
    {directory} and {name} for those of the host."""
    if not shutil.which("ssh") or not os.path.exists(_SSHD):
        pytest.skip("there is no OpenSSH server: apt-get install openssh-server")
    apart = subprocess.run([*_APART, *_NAMED, "node0", "true"], capture_output=True, text=True)
    if apart.returncode:
        pytest.skip(f"this machine allows no namespaces of processes: {apart.stderr.strip()}")
    with hosts.several_hosts(count, late) as made, contextlib.ExitStack() as undo:
        for key in ("key", "host_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", directory / key], check=True)
        Path("/run/sshd").mkdir(exist_ok=True)
        servers: list[subprocess.Popen] = []
        ends = undo.enter_context(hosts.control_network(made)) if control else made
        nodes, client = SshHosts(directory, made, ends, servers), ""
        for name, host, end in zip(nodes.names, made, ends):
            values = {"name": name, "address": end.address, "directory": directory, "port": _PORT}
            values["variables"] = variables.format(**values)
            (directory / name).mkdir(mode=0o700)
            (directory / f"{name}.server").write_text(_SERVER.format(**values))
            client += _CLIENT.format(**values)
            words = [*_APART, *_NAMED, name, _SSHD, "-D", "-e", "-f", directory / f"{name}.server"]
            server = subprocess.Popen(host.command(*words))
            undo.callback(_stop, server)
            servers.append(server)
        (directory / "config").write_text(client)
        for host in made:
            _await_server(host)
        yield nodes


def _await_server(host: hosts.Host) -> None:
    probe = f"import socket; socket.create_connection(({host.address!r}, {_PORT}), 5).close()"
    command = host.command("python3", "-c", probe)
    answers = wait_for(lambda: subprocess.run(command, capture_output=True).returncode == 0)
    assert answers, f"no ssh server answers on {host.address}"


def _stop(server: subprocess.Popen) -> None:
    server.kill()
    server.wait()
