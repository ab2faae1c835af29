"""The plan of a launch: the ranks that a launcher starts, their command and settings, and their hosts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .backends import Backend

if TYPE_CHECKING:  # a job on this machine alone does not load what reaches others
    from mlxdist.cluster.hostfile.hosts import Hostfile
    from mlxdist.cluster.ssh.ssh import SshConfig

    from .nodes import Nodes
    from .options import Options

__all__ = ["LaunchPlan"]


@dataclass(frozen=True)
class LaunchPlan:
    """A launch: the ranks to start, and where. Without a hostfile they run on this machine, and ``directory`` and
    ``ssh_config`` have no effect.

    ``ranks`` is the number of ranks that this launcher starts: all of the job's, except those of other ``nodes``. It is
    1 with mpirun, which starts the ranks.
    """

    ranks: int
    command: list[str]
    variables: dict[str, str]
    options: Options
    hostfile: Hostfile | None = None
    directory: str = ""
    ssh_config: SshConfig | None = None
    backend: Backend = Backend()
    nodes: Nodes | None = None
    logs: Path | None = None  # a directory, which is made
    splits_output: bool = True  # with mpirun: that of the ranks here comes to the launcher without it

    @property
    def numbers(self) -> range:
        """The ranks that this launcher starts."""
        return range(self.ranks) if self.nodes is None else self.nodes.ranks(self.ranks)

    @property
    def size(self) -> int:
        return self.ranks * (1 if self.nodes is None else self.nodes.count)

    def hosts_of_ranks(self) -> list[int]:
        """The number of each rank's host."""
        hosts = [self.ranks] if self.hostfile is None else [host.slots for host in self.hostfile.hosts]
        return [number for number, slots in enumerate(hosts) for _ in range(slots)]

    def emulated_node(self, rank: int) -> int | None:
        """The virtual host of a rank (--emulate-nodes). Neighbors share one; hosts differ by one rank at most."""
        nodes = self.options.emulate_nodes
        return None if nodes is None else rank * nodes // self.size

    @property
    def by_mpirun(self) -> bool:
        return self.backend.name == "mpi"

    def labels(self) -> list[str]:
        """The label in front of each rank's lines. With mpirun: the label of mpirun, then one for each rank."""
        if self.by_mpirun:
            ranks = sum(host.slots for host in self.backend.hosts) if self.splits_output else 0
            width = max(len("mpi"), len(str(ranks - 1)))
            return [f"{name:>{width}}" for name in ("mpi", *range(ranks))]
        numbers = [f"{rank:>{len(str(self.size - 1))}}" for rank in range(self.size)]
        if self.options.emulate_nodes is not None:
            return [f"{number} node{self.emulated_node(rank)}" for rank, number in enumerate(numbers)]
        if self.hostfile is None:
            return numbers
        names = [host.name.rpartition("@")[2] for host in self.hostfile.hosts for _ in range(host.slots)]
        width = max(map(len, names))
        return [f"{number} {name:<{width}}" for number, name in zip(numbers, names)]
