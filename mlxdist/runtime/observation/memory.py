"""The memory that the ranks of a job take on each host."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mlxdist.base.errors import ranks_have
from mlxdist.base.tables import size

from ..diagnostics.flight_records import FlightRecord

__all__ = ["HostMemory", "host_memory"]

# A host with a larger part of its memory in use pages to disk, or ends a process, soon: it needs some itself.
_PRESSURE = 0.95
# Pressure that was there has not gone before less than this is in use.
_RELIEF = 0.90


@dataclass(frozen=True)
class HostMemory:
    """Bytes of a host. ``used``: what its ranks take together, each what no other shares with it."""

    used: int
    total: int
    ranks: tuple[int, ...]

    def is_short(self, before: bool = False) -> bool:
        """Whether the ranks take so much that the host is under memory pressure.

        Args:
            before: whether it has been.
        """
        return self.used >= (_RELIEF if before else _PRESSURE) * self.total

    @property
    def text(self) -> str:
        """The use in words: "ranks 0 and 1 have 15.5 GiB of its 16 GiB (97 %)"."""
        share = f"{self.used / self.total:.0%}".replace("%", " %")
        return f"{ranks_have(self.ranks)} {size(self.used)} of its {size(self.total)} of memory ({share})"

    remedy = "end other programs there, use more hosts, or a smaller batch, context or cache"


def host_memory(records: Iterable[FlightRecord]) -> dict[str, HostMemory]:
    """The memory of each host, by its name, as far as its system reports it.

    Args:
        records: the last record of each rank that has not left.
    """
    hosts: Mapping[str, list[FlightRecord]] = defaultdict(list)
    for record in records:
        hosts[record.host].append(record)
    found = {}
    for host, of_host in hosts.items():
        total = max((record.memory.total or 0 for record in of_host), default=0)
        used = [record.memory.private for record in of_host if record.memory.private is not None]
        if total and used:
            found[host] = HostMemory(sum(used), total, tuple(sorted(record.rank for record in of_host)))
    return found
