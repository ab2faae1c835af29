"""The links between the ranks of a group, and the measured costs of exchanges between some of these ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from mlxdist.runtime.devices.paths import Path
from mlxdist.runtime.group.group import Group, engine_of

from ..rank_checks import agree
from .policy import LinkCosts

__all__ = ["RankLinks"]

_RDMA = ("ibverbs", "librdma")  # providers of RDMA: a job has one of them


@dataclass(frozen=True)
class RankLinks:
    """The links between the ranks of a group, the same on all of them.

    Attributes:
        hosts: the number of each rank's host.
        providers: by ranks a < b, the provider that connects them; "" where they have no link of their own.
        known: what `mlxdist calibrate` has measured, of groups of any shape: ``expert_links`` of the tuning file.
    """

    hosts: tuple[int, ...]
    providers: Mapping[tuple[int, int], str]
    known: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def of(cls, *, group: Group) -> "RankLinks":
        """The links of ``group``. Collective: one all_gather, awaited."""
        world = engine_of(group).world
        names = group.provider.split("+")
        rdma = next((number for number, name in enumerate(_RDMA, 1) if name in names), 0)
        table = agree("links", group, None, {}, [world.rank, rdma, *world.native_group.paths])
        ranks = table[:, 0].tolist()
        by_rdma = _RDMA[max(int(table[:, 1].max()), 1) - 1]
        by_path = {Path.NONE: "", Path.TCP: "soft", Path.SHARED_MEMORY: "soft", Path.RDMA: by_rdma}
        pairs = combinations(range(len(ranks)), 2)
        providers = {(a, b): by_path[Path(min(table[a, 2 + ranks[b]], table[b, 2 + ranks[a]]))] for a, b in pairs}
        hosts = world.native_group.hosts or [0] * world.size
        return cls(tuple(hosts[rank] for rank in ranks), providers, world.native_group.tuning.expert_links)

    def shape(self, ranks: Sequence[int]) -> tuple[str, int, int]:
        """The provider, the number of ranks and of hosts of a group of ``ranks``, as :class:`LinkCosts` has them."""
        names = {self.providers[pair] for pair in combinations(sorted(ranks), 2)} - {""}
        return "+".join(sorted(names)) or "none", len(ranks), len({self.hosts[rank] for rank in ranks})

    def costs(self, ranks: Sequence[int]) -> LinkCosts | None:
        """The measured costs of exchanges in a group of ``ranks``; None where they are not measured."""
        return LinkCosts.known(self.known, *self.shape(ranks))
