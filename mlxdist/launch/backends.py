"""Backends that ranks communicate through, and the variables and files that MLX's own backends read.

MLX's launcher exports the same (mlx/_distributed_utils/launch.py). The backend mlxdist needs none of it.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlxdist.base.environment import format_address
from mlxdist.base.errors import InvalidArgument

if TYPE_CHECKING:
    from mlxdist.cluster.hostfile.hosts import Host, Hostfile

__all__ = ["BACKENDS", "DEFAULT_PORT", "Backend", "Exports", "choose", "free_ports"]

BACKENDS = ("auto", "mlxdist", "ring", "jaccl", "jaccl-ring", "mpi", "nccl")
# The port of rank 0 where no process can search for a free one first. It is below the range of ephemeral ports (from
# 32768 on Linux, 49152 on macOS), so that no outgoing connection takes it.
DEFAULT_PORT = 27183
_LOOPBACK = ("127.0.0.1", "::1")
_MAX_PORT = 65535
_MAX_NAMED = 3


@dataclass(frozen=True)
class Exports:
    """Settings that all ranks of a job get for a backend.

    Attributes:
        variables: names of variables with their values.
        files: names of variables with the content of a file; the value becomes the name of that file of the rank.
        by_local_rank: names of variables whose value is the rank's number on its host.
    """

    variables: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    by_local_rank: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Backend:
    """A backend, mlxdist or one of MLX's, for a job on ``hosts``. `choose` makes it and checks that they fit together.

    Attributes:
        hosts: in the order of their ranks; not needed by mlxdist.
        starting_port: the first of the ports that ranks listen at; None for free ones.
        nccl_port: the port of NCCL's rank 0.
        connections: the number of connections per address, for the ring.
    """

    name: str = "mlxdist"
    hosts: tuple[Host, ...] = ()
    starting_port: int | None = None
    nccl_port: int | None = None
    connections: int = 1
    verbose: bool = False

    @property
    def rendezvous_port(self) -> int:
        """The port where rank 0 of mlxdist listens; 0 for any free one."""
        return (self.starting_port or 0) if self.name == "mlxdist" else 0

    def mpi_address(self) -> str:
        """The address of rank 0, on the first host, where mpirun starts the ranks and they use mlxdist."""
        from mlxdist.cluster.ssh.ssh import is_this_machine

        first = self.hosts[0]
        is_here = is_this_machine(first.name)
        address = next(iter(_addresses(first)), first.name.rpartition("@")[2])
        if address in _LOOPBACK and not all(is_this_machine(host.name) for host in self.hosts):
            address = socket.gethostname()
        return format_address(address, self.starting_port or (free_ports(1)[0] if is_here else DEFAULT_PORT))

    def ports(self) -> list[int]:
        """The number of free ports that each host has to find."""
        wanted = [0] * len(self.hosts)
        if self.name == "ring" and self.starting_port is None:
            wanted = [host.slots * len(_addresses(host)) * self.connections for host in self.hosts]
        elif self.name.startswith("jaccl") and self.starting_port is None:
            wanted[0] = 1
        elif self.name == "nccl" and self.nccl_port is None:
            wanted[0] = 1
        return wanted

    def exports(self, ports: Sequence[Sequence[int]]) -> Exports:
        """The settings of the ranks. ``ports``: the free ports of each host, as many as `ports` returns."""
        if self.name == "ring":
            verbose = {"MLX_RING_VERBOSE": "1"} if self.verbose else {}
            # MLX cannot read a ring of one; without this variable it makes a group of one.
            alone = sum(host.slots for host in self.hosts) == 1
            return Exports(verbose, {} if alone else {"MLX_HOSTFILE": self._ring(ports)})
        if self.name.startswith("jaccl"):
            port = ports[0][0] if ports[0] else self.starting_port
            variables = {"MLX_JACCL_COORDINATOR": f"{_addresses(self.hosts[0])[0]}:{port}"}
            variables |= {"MLX_JACCL_RING": "1"} if self.name == "jaccl-ring" else {}
            return Exports(variables, {"MLX_IBV_DEVICES": json.dumps(self._devices())})
        if self.name == "nccl":
            port = ports[0][0] if ports[0] else self.nccl_port
            variables = {"NCCL_HOST_IP": _addresses(self.hosts[0])[0], "NCCL_PORT": str(port)}
            variables |= {"NCCL_DEBUG": "INFO"} if self.verbose else {}
            return Exports(variables, by_local_rank=["CUDA_VISIBLE_DEVICES"])
        return Exports()

    def _ring(self, ports: Sequence[Sequence[int]]) -> str:
        """The JSON text of the addresses that each rank of the ring listens at."""
        if self.starting_port is None:
            given = [iter(found) for found in ports]
        else:  # of all hosts together
            given = [iter(range(self.starting_port, _MAX_PORT + 1))] * len(self.hosts)
        listed = [
            [f"{address}:{next(found)}" for address in _addresses(host) for _ in range(self.connections)]
            for host, found in zip(self.hosts, given)
            for _ in range(host.slots)
        ]
        return json.dumps(listed)

    def _devices(self) -> list[list[str | list[str] | None]]:
        cells = [[list(devices) or None for devices in host.rdma] for host in self.hosts]
        return [[cell[0] if cell is not None and len(cell) == 1 else cell for cell in row] for row in cells]


def choose(
    name: str,
    hostfile: Hostfile | None,
    ranks: int | None,
    starting_port: int | None = None,
    nccl_port: int | None = None,
    connections: int = 1,
    verbose: bool = False,
) -> Backend:
    """Selects a backend by name for the hosts, or for ``ranks`` here. "auto" takes the hostfile's, else mlxdist.

    Raises:
        InvalidArgument: the backend does not work with these hosts.
    """
    if name == "auto":
        name = hostfile.backend if hostfile is not None else ""
        name = name if name in BACKENDS[1:] else "mlxdist"
    hosts: tuple[Host, ...] = ()
    if hostfile is not None:
        hosts = hostfile.hosts
    elif name != "mlxdist":
        from mlxdist.cluster.hostfile.hosts import Host

        hosts = (Host("localhost", ranks or 1, ("127.0.0.1",)),)
    backend = Backend(name, hosts, starting_port, nccl_port, connections, verbose)
    if name == "ring":
        _check_ring(backend)
    elif name.startswith("jaccl"):
        _check_jaccl(backend)
    elif name == "nccl":
        _require_address(backend, hosts[0], "rank 0")
    elif name == "mpi" and (users := [host.name for host in hosts if "@" in host.name]):
        raise InvalidArgument(f"--backend mpi: mpirun knows no users in names such as {users[0]}; see ssh_config")
    return backend


def free_ports(count: int) -> list[int]:
    """Ports that are free at all addresses of this machine, now."""
    sockets = []
    try:
        # All stay bound until the last is found: a port that is released could be found twice.
        for _ in range(count):
            sockets.append(socket.socket())
            sockets[-1].bind(("", 0))
        return [found.getsockname()[1] for found in sockets]
    finally:
        for found in sockets:
            found.close()


def _addresses(host: Host) -> tuple[str, ...]:
    from mlxdist.cluster.hostfile.hosts import check_address

    if host.ips:
        return host.ips
    name = host.name.rpartition("@")[2]
    if name == "localhost":
        return ("127.0.0.1",)
    return () if check_address(name) else (name,)


def _require_address(backend: Backend, host: Host, who: str) -> None:
    from mlxdist.cluster.ssh.ssh import is_this_machine

    found = _addresses(host)
    if not found:
        raise InvalidArgument(
            f"--backend {backend.name}: {who} needs an IP address that the others reach it at, and {host.name} is a "
            f'name; write it in a hostfile: {{"ssh": "{host.name}", "ips": ["192.168.0.1"]}}'
        )
    others = [other.name for other in backend.hosts if other != host and not is_this_machine(other.name)]
    loopback = [address for address in found if address in _LOOPBACK]
    if others and loopback:
        raise InvalidArgument(
            f"--backend {backend.name}: {others[0]} cannot reach {host.name} at {loopback[0]}; give it an address on "
            'their network: "ips" in a hostfile'
        )
    used = found if backend.name == "ring" else found[:1]
    if sixes := [address for address in used if ":" in address]:
        raise InvalidArgument(f"--backend {backend.name}: MLX speaks IPv4 only here, and {host.name} has {sixes[0]}")


def _check_ring(backend: Backend) -> None:
    counts: dict[int, str] = {}
    for host in backend.hosts:
        _require_address(backend, host, "every rank")
        counts.setdefault(len(_addresses(host)), host.name)
    if len(counts) > 1:
        listed = " and ".join(f"{name} has {number}" for number, name in counts.items())
        raise InvalidArgument(f'--backend ring: every host needs as many addresses ("ips") as the others; {listed}')
    if backend.starting_port is not None:
        last = backend.starting_port - 1
        last += sum(host.slots * len(_addresses(host)) * backend.connections for host in backend.hosts)
        if last > _MAX_PORT:
            raise InvalidArgument(f"--starting-port {backend.starting_port}: the last port would be {last}")


def _check_jaccl(backend: Backend) -> None:
    name, hosts = backend.name, backend.hosts
    _require_address(backend, hosts[0], "rank 0")
    for host in hosts:
        if host.slots != 1:
            raise InvalidArgument(
                f"--backend {name} runs one rank on each host, and {host.name} would have {host.slots}; leave -n out, "
                "or use --backend mlxdist"
            )
    if not all(host.rdma for host in hosts):
        raise InvalidArgument(
            f'--backend {name} needs a hostfile that says which device leads to which host ("rdma"); docs/hostfiles.md '
            "has an example, and `mlxdist hostfile check` checks it"
        )
    size = len(hosts)
    missing = []
    for i in range(size):
        for j in sorted({(i - 1) % size, (i + 1) % size}) if name == "jaccl-ring" else range(size):
            if i != j and not hosts[i].rdma[j]:
                missing.append(f"{hosts[i].name} to {hosts[j].name}")
    if missing:
        more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
        needs = "a ring in the order of the hosts" if name == "jaccl-ring" else "a cable between every two hosts"
        instead = "" if name == "jaccl-ring" else ", or try --backend jaccl-ring"
        raise InvalidArgument(
            f"--backend {name} needs {needs}, and the hostfile has no device for "
            f"{', '.join(missing[:_MAX_NAMED])}{more}; add them{instead}, or use --backend mlxdist"
        )
