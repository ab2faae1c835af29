"""There is a core for each rank, and nothing else that keeps them busy."""

from __future__ import annotations

from ..cluster import Cluster
from ..findings import Finding, note, ok, warn

__all__ = ["check_cores"]


def check_cores(cluster: Cluster) -> list[Finding]:
    found = []
    for name, facts in cluster.each("facts"):
        (host,) = cluster.only([name])
        cores, load = facts["cores"], facts["load"]
        ranks = f"{host.slots} rank{'s' * (host.slots > 1)}, {cores} core{'s' * (cores > 1)}"
        if host.slots > cores:
            remedy = f"ask for {cores} there: slots of the hostfile, or -n"
            found.append(note(name, f"{ranks}: they take turns, which costs time", remedy))
        elif load > cores:
            what = f"{load:.1f} processes want its {cores} cores already"
            found.append(warn(name, what, "end them, or wait; they are shown by: ps -axo pcpu,pid,comm | sort -n"))
        else:
            found.append(ok(name, ranks))
    return found
